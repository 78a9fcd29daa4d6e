"""Which implementation of a kernel a call gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_DIFFERENTIABLE = ContextVar("differentiable", default=False)


@contextmanager
def differentiable() -> Iterator[None]:
    """What is traced within gets implementations that jax can differentiate, whatever the device.

    Attention then takes requests of equally many query rows only: whole sequences, as in training.
    jax does not see the difference: a function traced in here must not be one that is also called
    outside.
    """
    token = _DIFFERENTIABLE.set(True)
    try:
        yield
    finally:
        _DIFFERENTIABLE.reset(token)


def implementation_of[T](
    implementations: Mapping[str, T], name: str | None, *, fits: bool = True
) -> T:
    """The one of this name; by default "triton" on a GPU, if the call `fits` it, and else "xla"
    ("differentiable" within `differentiable()`).

    Raises:
        ValueError: there is none of this name.
    """
    if name is None:
        name = "triton" if fits and jax.default_backend() == "gpu" else "xla"
        if _DIFFERENTIABLE.get():
            name = "differentiable"
    if name not in implementations:
        raise ValueError(
            f"implementation must be one of {', '.join(implementations)}, got {name!r}"
        )
    return implementations[name]
