"""The files that turn text into ids, for a model that came as a directory or as a GGUF file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmtp_jax.tokenizer import load_tokenizer

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}


def write_tokenizer(folder: Path, source: Path | Mapping[str, Any]) -> None:
    """Copy the tokenizer's files of a directory, or write those that GGUF metadata stands for;
    nothing if the model carries no tokenizer."""
    if isinstance(source, Path):
        for name in _FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        return
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        return
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in _SPECIAL.items():
        token_id = source.get(f"tokenizer.ggml.{key}")
        if token_id is not None:
            settings[name] = tokenizer.id_to_token(token_id)
    template = source.get("tokenizer.chat_template")
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
