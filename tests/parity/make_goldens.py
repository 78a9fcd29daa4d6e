"""Write the goldens: `python tests/parity/make_goldens.py [family ...]`, all families by default.

A family is the ending of a file `golden_<family>.py` of this folder. Running twice gives the same
bytes. The environment is one of its own, never that of mmtp_jax, whose tests read the results
without it:

    python3.11 -m venv oracle
    oracle/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    oracle/bin/python tests/parity/make_goldens.py
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
from golden import write

HERE = Path(__file__).resolve().parent
GOLDENS = HERE / "goldens"
MAX_FILE_BYTES = 900_000
MAX_BYTES = 4_000_000


def main(families: list[str]) -> None:
    torch.set_num_threads(1)
    known = sorted(path.stem.removeprefix("golden_") for path in HERE.glob("golden_*.py"))
    if unknown := set(families) - set(known):
        sys.exit(f"no family {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    for family in families or known:
        for golden in importlib.import_module(f"golden_{family}").build():
            print(f"{folder_bytes(write(golden, GOLDENS)):>9,}  {golden.family}", flush=True)
    total = folder_bytes(GOLDENS)
    print(f"{total:>9,}  in all")
    large = [path for path in GOLDENS.rglob("*") if path.stat().st_size > MAX_FILE_BYTES]
    if large or total > MAX_BYTES:
        names = ", ".join(str(path.relative_to(GOLDENS)) for path in large)
        sys.exit(f"too large: {names or 'all of them together'}")


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main(sys.argv[1:])
