"""Structured output: which tokens a grammar allows next, for every row that a step verifies.

llguidance computes the masks (https://github.com/guidance-ai/llguidance). The engine reads a step's
drafts, and before the next step gives each row the mask that holds if the drafts before it are
accepted. Imports no jax.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property

import llguidance
import llguidance.numpy
import numpy as np

from mmtp_jax.config import ConfigError, require
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.sampling.structured import StructuredOutputs
from mmtp_jax.tokenizer import Tokenizer


class Grammar:
    """Where one sample stands in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher

    @property
    def error(self) -> str | None:
        """Why the grammar cannot go on, e.g. because it became too complex; None if it can."""
        if not self.matcher.is_error():
            return None
        return " ".join(self.matcher.get_error().removesuffix("<non-verbose/>").split())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take over tokens that were emitted; `error` tells whether they fit."""
        # One by one: a list is refused if it begins with the token that ends a complete text.
        for token in token_ids:
            self.matcher.consume_token(token)

    def copy(self) -> Grammar:
        """The same place, for another sample of the same prompt."""
        return type(self)(self.matcher.deep_copy())


class Grammars:
    """Compiles grammars for one vocabulary. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._lock = threading.Lock()

    def compile(self, params: SamplingParams) -> Grammar:
        """The grammar of `params.structured_outputs`, at its beginning. May take a second, and
        releases the interpreter's lock. Raises `ConfigError` if the model cannot follow it.
        """
        structured = params.structured_outputs
        assert isinstance(structured, StructuredOutputs)
        with self._lock:
            tokenizer = self._tokenizer
        matcher = llguidance.LLMatcher(
            tokenizer, structured.compiled(), log_level=0, limits=self._limits
        )
        grammar = Grammar(matcher)
        require(grammar.error is None, f"structured_outputs is not usable: {grammar.error}")
        return grammar

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        require(
            len(self._eos_token_ids) > 0,
            "structured_outputs need an end-of-sequence token, and this model has none",
        )
        require(
            self._source.vocab_size <= self._vocab_size,
            f"structured_outputs need a tokenizer of at most {self._vocab_size} tokens (the model's"
            f" vocabulary), this one has {self._source.vocab_size}",
        )
        try:
            return llguidance.LLTokenizer(
                self._source.to_json(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
            )
        except Exception as error:
            # The library raises plain exceptions for tokenizers it cannot read.
            raise ConfigError(
                f"structured_outputs are not possible with this model's tokenizer: {error}"
            ) from error


def fill_masks(masks: np.ndarray, sequences: Sequence[tuple[Grammar, Sequence[int]]]) -> None:
    """Write masks int32 [M, W, words] for up to M (grammar, up to W-1 drafts): row j of each holds
    what may follow its first j drafts. All are computed at once, on several cores.

    Rows after a draft that is not allowed keep what they hold: such a draft is rejected, and what
    follows it with it. A grammar that fails here allows the end of the text, and has an `error`.
    """
    size, width, words = masks.shape
    flat = masks.reshape(size * width, words)
    plain, drafted = [], []
    for index, (grammar, drafts) in enumerate(sequences):
        if drafts:
            drafted.append((grammar.matcher, index * width, list(drafts)))
        else:
            plain.append((grammar.matcher, index * width))
    if plain:
        llguidance.numpy.fill_next_token_bitmask_par(_executor(), plain, flat)
    if drafted:
        llguidance.numpy.fill_next_token_bitmask_par_with_draft_tokens(_executor(), drafted, flat)


@functools.cache
def _executor() -> llguidance.LLExecutor:
    return llguidance.LLExecutor()
