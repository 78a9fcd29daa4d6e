"""What differs between versions of Pallas's Triton lowering, in one place."""

from __future__ import annotations

import struct
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton

accumulate = jax.ref.addupdate
dot = triton.dot
load = triton.load
store = triton.store


def compiler_params(*, num_warps: int, num_stages: int) -> triton.CompilerParams:
    """Explicit parameters: without them jax 0.10 lowers through Mosaic and jax 0.11 through
    Triton."""
    return triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)


def interpreted() -> bool:
    """Whether kernels run in Pallas's interpreter: where there is no GPU."""
    return jax.default_backend() == "cpu"


def device_kind() -> str:
    """The kind of device that is compiled for: the mesh's, or else the first one's here."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def scaled_exp2(x: Array, factor: float, shift: Array) -> Array:
    """2 to the power of x * factor - shift (float32, shapes equal or broadcast), results below
    2**-126 flushed to zero.

    Two instructions. Triton does not contract the product and the difference, and the compiler's
    own power keeps subnormal numbers with three more.
    """
    if interpreted():
        return jnp.exp2(x * factor - shift)
    literal = "0f" + struct.pack(">f", factor).hex()
    (y,) = triton.elementwise_inline_asm(
        f"{{ .reg .f32 t; fma.rn.f32 t, $1, {literal}, $2; ex2.approx.ftz.f32 $0, t; }}",
        args=[x, jnp.broadcast_to(-shift, x.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return y


def barrier() -> None:
    """Wait for all threads of this program: what it wrote before is read after. The interpreter
    needs none."""
    if not interpreted():
        triton.debug_barrier()


def take_ticket(ref: Any, index: tuple[Array, ...]) -> Array:
    """Increment a counter that all programs of a kernel share; its value before.

    Everything that this program wrote is seen by those that take a later ticket (the increment has
    acquire-release order). The interpreter runs programs one after the other and has no rule for
    barriers.
    """
    if interpreted():
        ticket = ref[index]
        ref[index] = ticket + 1
        return ticket
    barrier()  # the increment is done by one thread, after the writes of all
    return triton.atomic_add(ref, index, 1)
