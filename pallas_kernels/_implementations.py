"""Which implementation of a kernel a call gets."""

from __future__ import annotations

from collections.abc import Mapping

import jax


def implementation_of[T](
    implementations: Mapping[str, T], name: str | None, *, fits: bool = True
) -> T:
    """The one of this name; by default "triton" on a GPU, if the call `fits` it, and else "xla".

    Raises:
        ValueError: there is none of this name.
    """
    if name is None:
        name = "triton" if fits and jax.default_backend() == "gpu" else "xla"
    if name not in implementations:
        raise ValueError(
            f"implementation must be one of {', '.join(implementations)}, got {name!r}"
        )
    return implementations[name]
