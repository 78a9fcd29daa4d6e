"""Writing tensors as *.safetensors, in one file or, with an index, in several."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

Shapes = Mapping[str, tuple[int, ...]]

# Bytes of one file; so much is in the host's memory at a time.
LARGEST_FILE = 4 << 30


def write_tensors(
    folder: Path,
    shapes: Shapes,
    dtype: np.dtype,
    read: Callable[[str], np.ndarray],
    *,
    largest_file: int = LARGEST_FILE,
) -> int:
    """Write every tensor, as `read(name)` gives it; the bytes of all of them."""
    files = _divided(shapes, dtype.itemsize, largest_file)
    placed: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        several = f"model-{number:05}-of-{len(files):05}.safetensors"
        file = "model.safetensors" if len(files) == 1 else several
        tensors = {name: np.ascontiguousarray(read(name)) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        # safetensors gives a file to its owner only; the folder says who may read.
        (folder / file).chmod(folder.stat().st_mode & 0o666)
        placed |= dict.fromkeys(names, file)
    total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return total


def _divided(shapes: Shapes, itemsize: int, largest_file: int) -> list[list[str]]:
    """The names file by file, in their order; a tensor that is larger has a file of its own."""
    files: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * itemsize
        if not files or size > room:
            files.append([])
            room = largest_file
        files[-1].append(name)
        room -= size
    return files
