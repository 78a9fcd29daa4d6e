"""What differs between versions of Pallas's Triton lowering, in one place."""

from __future__ import annotations

from jax.experimental.pallas import triton

dot = triton.dot
load = triton.load
store = triton.store


def compiler_params(*, num_warps: int, num_stages: int) -> triton.CompilerParams:
    """Explicit parameters: without them jax 0.10 lowers through Mosaic and jax 0.11 through
    Triton."""
    return triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)
