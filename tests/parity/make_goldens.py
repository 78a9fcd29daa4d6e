"""Write the goldens: `python tests/parity/make_goldens.py [family ...]`, all families by default.

A golden is a tiny random checkpoint in the layout of a release, goldens/<name>/, and the logits and
greedy ids that another implementation computes from it, golden.npz beside it. mmtp_jax has to
reproduce them. A family is the ending of a file `golden_<family>.py` of this folder, which says
what its goldens cover and where transformers differs from other descriptions. Tests read the
results only, so torch and transformers live in an environment of their own (Python 3.11):

    python3.11 -m venv oracle
    oracle/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors==0.8.0 numpy==2.4.6
    oracle/bin/python tests/parity/make_goldens.py

Everything runs in float32 on one thread with eager attention. Seeds are the first for which greedy
ids and choices of experts are clear, so that rounding cannot turn them; running twice on a machine
gives the same bytes.

golden.npz: `tokens` [T] and `logits` [T, V]; `module_logits` [N, T, V], where row t of module m
consumed token t+1+m and rows without a known token are NaN; `prompt`, and `continuation`, the
trunk's greedy ids after it; for some families variants of `module_logits`. config.json is in the
dialect of the release and config_hf.json, where it exists, describes the same model as transformers
would save it.

All trunks are computed by transformers. So are the modules of DeepSeek-V3, GLM-4.5 and Inkling,
with these changes: module layers are found behind fewer trunk layers than the released ones
(hf_oracle.py), and Inkling's modules get their windows and the backbone's norm of embeddings
(golden_inkling.py). The other families' modules are written down in their files around the trunk's
decoder layers, with their sources: MiMo-7B, MiMo-V2-Flash, Step-3.5-Flash.
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
