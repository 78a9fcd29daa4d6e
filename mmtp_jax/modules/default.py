"""The modules that come with this package, for known models that ship none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mmtp_jax.config import EngineConfig
from mmtp_jax.weights.resolve import DEFAULT_MODEL

DEFAULT_MODULES = {DEFAULT_MODEL: "smollm2-135m-mtp8"}

_PACKAGE = Path(__file__).resolve().parents[1]
# Inside an installed package, and beside the packages of a working copy.
PLACES = (_PACKAGE / "checkpoints", _PACKAGE.parent / "checkpoints")


def default_modules(model: str) -> Path | None:
    """The folder of the modules for the known name `model`, None if there are none."""
    name = DEFAULT_MODULES.get(model)
    folders = [] if name is None else [place / name for place in PLACES]
    return next((folder for folder in folders if folder.is_dir()), None)


def with_default_modules(config: EngineConfig) -> EngineConfig:
    """`config` with the known model's modules, unless it names others, wants random weights, or
    turns speculation off."""
    speculative = config.speculative
    off = speculative.method is None or speculative.num_speculative_tokens == 0
    random = "dummy" in (config.load_format, speculative.load_format)
    folder = default_modules(config.model)
    if folder is None or speculative.model is not None or off or random:
        return config
    return replace(config, speculative=replace(speculative, model=str(folder)))
