"""Directories that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmtp_jax.checks import ConfigError, require


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `path` when the block ends without an exception.

    Until then it lies beside `path`, on the same file system. Raises `ConfigError` if `path` exists
    and is not an empty directory, or cannot be written.
    """
    try:
        free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
        require(free, f"{path} exists already and is not an empty directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as outer:
            inner = Path(outer) / path.name
            inner.mkdir()
            yield inner
            os.replace(inner, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
