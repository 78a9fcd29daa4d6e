"""Reading config.json strictly: every key is typed, and every key has to be understood."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from mmtp_jax.weights.errors import ModelError

# What libraries write into a config that says nothing about the model's mathematics in inference:
# book-keeping, training, and defaults of sampling (which generation_config.json and requests set).
_BOOKKEEPING = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _experts_implementation _name_or_path
    add_cross_attention architectures attention_dropout attention_probs_dropout_prob
    attn_implementation auto_map aux_loss_alpha bad_words_ids begin_suppress_tokens
    chunk_size_feed_forward cls_token_id cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size
    ep_size exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing hidden_dropout hidden_dropout_prob id2label
    initializer_range is_decoder is_encoder_decoder is_llama_config label2id length_penalty
    max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams
    num_labels num_return_sequences output_attentions output_hidden_states
    output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type
    pruned_heads remove_invalid_values repetition_penalty resid_pdrop return_dict
    return_dict_in_generate router_aux_loss_coef sep_token_id seq_aux suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k
    top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()
)

_REQUIRED = object()
# No model has as many layers; the limit keeps a wrong number from filling the memory.
_MOST_LAYERS = 10_000
_KINDS: dict[str, tuple[type, ...]] = {
    "an integer": (int,),
    "a number": (int, float),
    "true or false": (bool,),
    "a string": (str,),
    "a list": (list,),
    "an object": (dict,),
}


class Settings:
    """A JSON object whose keys are read one by one; null counts as absent.

    `tensor_names` are those of the checkpoint, where a family counts its modules by them; None
    without weight files. Every method raises `ModelError` for a value it cannot take.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        tensor_names: Collection[str] | None = None,
        where: str = "config.json",
    ) -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self._read: set[str] = set()
        self._parts: list[Settings] = []
        self.tensor_names = tensor_names
        self._where = where

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def peek(self, key: str) -> Any:
        """The value whatever its type, None if it is absent; the key stays unread."""
        return self._values.get(key)

    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._typed(key, "an integer", default)

    def count(self, key: str, default: Any = _REQUIRED) -> Any:
        """How many layers or modules there are."""
        value = self.integer(key, default)
        if not 0 <= value <= _MOST_LAYERS:
            raise self.error(f"{key} must lie in [0, {_MOST_LAYERS}], got {value}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._typed(key, "a number", default)
        return float(value) if isinstance(value, int) else value

    def flag(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._typed(key, "true or false", default)

    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._typed(key, "a string", default)

    def listing(
        self,
        key: str,
        *,
        length: int | None = None,
        of: type | None = None,
        default: Any = _REQUIRED,
    ) -> Any:
        """A list of `length` entries, each of type `of`."""
        value = self._typed(key, "a list", default)
        if value is default:
            return value
        if length is not None and len(value) != length:
            raise self.error(f"{key} must have {length} entries, got {len(value)}")
        for one in value:
            if of is not None and (not isinstance(one, of) or isinstance(one, bool)):
                raise self.error(f"{key} holds {one!r}, which is no {of.__name__}")
        return value

    def table(self, key: str) -> Settings | None:
        """A nested object; None if it is absent or empty."""
        value = self._typed(key, "an object", {})
        if not value:
            return None
        part = Settings(value, self.tensor_names, f"{key} of {self._where}")
        self._parts.append(part)
        return part

    def only(self, key: str, *values: object) -> None:
        """Refuse `key` unless it is absent or one of `values`, the only ones implemented."""
        self._read.add(key)
        value = self._values.get(key)
        if value is not None and not any(
            type(value) is type(one) and value == one for one in values
        ):
            only = f" (only {', '.join(map(repr, values))} is)" if values else ""
            raise ModelError(f"{self._sets(key)}, which is not implemented{only}")

    def ignore(self, *keys: str) -> None:
        """Keys that a family's configs hold and that say nothing new."""
        self._read.update(keys)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """The ids under `key`, an integer or a list of them, without repeats."""
        self._read.add(key)
        value = self._values.get(key)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(one, bool) or not isinstance(one, int) for one in found):
            raise ModelError(f"{self._sets(key)}, which is neither a token id nor a list of them")
        return tuple(dict.fromkeys(found))

    def finish(self) -> None:
        """Refuse keys that nobody read."""
        for key in self._values:
            if key not in self._read and key not in _BOOKKEEPING:
                raise ModelError(f"{self._sets(key)}, which is not implemented")
        for part in self._parts:
            part.finish()

    def error(self, message: str) -> ModelError:
        """An error about this object."""
        return ModelError(f"{self._where}: {message}")

    def _typed(self, key: str, kind: str, default: Any) -> Any:
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise ModelError(f"{self._where} lacks the key {key!r}")
            return default
        types = _KINDS[kind]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ModelError(f"{self._sets(key)}, which is not {kind}")
        return value

    def _sets(self, key: str) -> str:
        return f"{self._where} sets {key}={reprlib.repr(self._values[key])}"


def overridden(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the keys of `overrides` replaced; objects in both are merged key by key."""
    merged = dict(values)
    for key, value in overrides.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = overridden(old, value)
        merged[key] = value
    return merged
