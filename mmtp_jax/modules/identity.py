"""Which target modules were trained for, and whether another one is the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace

import numpy as np
from jaxtyping import Float

from mmtp_jax.specs import ModelConfig
from mmtp_jax.weights.errors import ModelError

# Files of one target differ in the rounding of its norm: bfloat16 keeps 3 digits, float16 keeps
# its small values to 3e-8.
_RELATIVE, _ABSOLUTE = 1e-2, 1e-6


@dataclass(frozen=True, eq=False)
class TargetIdentity:
    """A target's architecture and the scale [H] of its final norm, in float32.

    The architecture is that of the specs. Its family's name (a Llama checkpoint may be published in
    another layout), the longest context and the tokens that begin and end a text say nothing about
    hidden states, so they may differ.
    """

    config: ModelConfig
    final_norm: Float[np.ndarray, " H"]

    def check_architecture(self, config: ModelConfig) -> None:
        """`ModelError` naming the first field in which `config` differs."""
        found = difference(_seen_by_modules(self.config), _seen_by_modules(config))
        if found is not None:
            raise ModelError(f"the modules were trained for another target: {found}")

    def check_final_norm(self, scale: Float[np.ndarray, " H"]) -> None:
        """`ModelError` unless `scale` [H] is the same but for rounding."""
        wide = scale.astype(np.float32)
        if not np.allclose(wide, self.final_norm, rtol=_RELATIVE, atol=_ABSOLUTE):
            raise ModelError(
                "the modules were trained for another target of this architecture: its final norm"
                f" differs by up to {np.abs(wide - self.final_norm).max():.2g}"
            )


def difference(one: object, other: object, path: str = "") -> str | None:
    """The first difference of two specs in words ("layers.3.mlp.size 48, not 64"), None if they
    are equal. Floats count as equal within 1e-6 of each other: GGUF files hold float32."""
    if isinstance(one, float) and isinstance(other, float):
        return None if math.isclose(one, other, rel_tol=1e-6) else f"{path} {one:g}, not {other:g}"
    if type(one) is not type(other):
        return f"{path} {_in_words(one)}, not {_in_words(other)}"
    if is_dataclass(one):
        names = [field.name for field in fields(one)]
        pairs = [(name, getattr(one, name), getattr(other, name)) for name in names]
    elif isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        if len(one) != len(other):
            return f"{len(one)} {path}, not {len(other)}"
        pairs = [(str(index), *pair) for index, pair in enumerate(zip(one, other, strict=True))]
    else:
        return None if one == other else f"{path} {_in_words(one)}, not {_in_words(other)}"
    found = (
        difference(mine, theirs, f"{path}.{name}" if path else name) for name, mine, theirs in pairs
    )
    return next((text for text in found if text is not None), None)


def _in_words(value: object) -> str:
    return type(value).__name__ if is_dataclass(value) else str(value)


def _seen_by_modules(config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        family="",
        max_position=1,
        padded_vocab_size=config.embedding_size,
        bos_token_id=None,
        eos_token_ids=(),
        mtp=None,
    )
