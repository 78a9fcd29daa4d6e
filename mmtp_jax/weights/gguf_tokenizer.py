"""The byte-level BPE tokenizer that a GGUF file carries in its metadata.

GGUF names the pre-tokenizer (`tokenizer.ggml.pre`) instead of storing it; the ones below are those
of the models' own tokenizer.json files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from mmtp_jax.weights.errors import ModelError

_PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe", "qwen2")

# Llama 3 and Qwen2 split alike but for how many digits stay together, which goes in the middle.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of a GGUF file, None if it carries none.

    Raises `ModelError` naming a model or a pre-tokenizer that is not supported.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        return None
    if model != "gpt2":
        raise ModelError(f"GGUF tokenizer model {model!r} is not supported; supported: gpt2")
    name = metadata.get("tokenizer.ggml.pre", "(none named)")
    if name not in _PRE_TOKENIZERS:
        raise ModelError(
            f"GGUF pre-tokenizer {name!r} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}"
        )
    try:
        return _byte_level_bpe(name, metadata)
    except KeyError as error:
        raise ModelError(f"the GGUF tokenizer lacks the key {error.args[0]}") from None
    except Exception as error:
        # The library raises plain Exception, for instance for a merge of unknown tokens.
        raise ModelError(f"the GGUF tokenizer is damaged: {error}") from error


def _byte_level_bpe(name: str, metadata: Mapping[str, Any]) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
            # Llama 3's vocabulary has words that its merges do not reach.
            ignore_merges=name == "llama-bpe",
        )
    )
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, metadata["tokenizer.ggml.token_type"])
    if metadata.get("tokenizer.ggml.add_bos_token", name == "llama-bpe"):
        bos = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return gpt2
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    split = Regex(_SPLIT % (r"\p{N}{1,3}" if name == "llama-bpe" else r"\p{N}"))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Split control and user-defined tokens out of the text before anything else."""
    kinds = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in kinds
            if kind in (_UNKNOWN, _CONTROL)
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == _USER_DEFINED]
    )
