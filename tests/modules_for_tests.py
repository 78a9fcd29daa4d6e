"""A tiny target with modules of its own, its trunk alone, and the modules stored apart.

All numbers are bfloat16's, so that storing them so loses nothing, and engines run in float32.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from llm_for_tests import MODULES, OPTIONS
from models_for_tests import write_tiny_llama

from mmtp_jax.config import engine_config
from mmtp_jax.loader import LoadedModel, load_model
from mmtp_jax.modules.checkpoint import save_modules
from mmtp_jax.modules.storage import Storage

RECOMMENDED = 2


def write_whole(folder: Path, modules: int = MODULES, **changes: Any) -> Path:
    """The tiny model of family "mimo" with modules in its checkpoint."""
    return write_tiny_llama(folder, family="mimo", modules=modules, dtype="bfloat16", **changes)


def write_trunk(folder: Path, **changes: Any) -> Path:
    """The same target without any."""
    return write_whole(folder, modules=0, **changes)


def load(model: Path, speculative: dict | None = None, **options: Any) -> LoadedModel:
    options = OPTIONS | {"dtype": "float32"} | options
    return load_model(engine_config(str(model), speculative, **options))


def store(loaded: LoadedModel, folder: Path, storage: Storage = "bfloat16", **changes: Any) -> Path:
    """The modules of a loaded model in a folder of their own."""
    shutil.rmtree(folder, ignore_errors=True)
    settings = {"num_speculative_tokens": RECOMMENDED, "facts": {}} | changes
    save_modules(folder, loaded.graph, loaded.params, storage=storage, **settings)
    return folder
