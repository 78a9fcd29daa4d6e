"""Traces of `jax.profiler`, for TensorBoard or Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from mmtp_jax.config import ConfigError


@contextmanager
def trace(directory: Path) -> Iterator[None]:
    """Trace what runs inside. The step's named scopes are target, verify, sample, mtp_*, draft."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--profile must name a directory to write to: {error}") from None
    with jax.profiler.trace(str(directory)):
        yield
