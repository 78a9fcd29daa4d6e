"""What users get: text, tokens, log-probabilities, why it ended, and how speculation did.

Tokens are taken one by one, so a stop string inside a run of accepted drafts ends the output at the
same token as without speculation.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Literal

from mmtp_jax.engine.delta import TokenDelta, TokenLogprobs
from mmtp_jax.engine.stats import Acceptance
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.tokenizer import IncrementalDecoder, Tokenizer


@dataclass(frozen=True)
class CompletionOutput:
    """One sample. `text` and `token_ids` are cumulative, `new_text`/`new_token_ids` what came since
    the previous output of the same stream. A stop token is in `token_ids` but not in `text`.
    `stop_reason` is the stop string or stop token id that ended it (None for the model's own
    end-of-sequence token). Drafts at and past the token that ended it do not count in `acceptance`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: str | int | None
    acceptance: Acceptance
    num_steps: int
    new_text: str = ""
    new_token_ids: tuple[int, ...] = ()

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per verification; 1.0 without speculation."""
        return len(self.token_ids) / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True)
class RequestOutput:
    """All samples of one prompt. The properties are those of the first sample."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def acceptance(self) -> Acceptance:
        return self.outputs[0].acceptance

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass
class Sample:
    """Accumulates the deltas of one sample."""

    index: int
    params: SamplingParams
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    num_modules: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: str | int | None = None
    num_steps: int = 0
    num_cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.acceptance = Acceptance(self.num_modules)
        self._decoder: IncrementalDecoder | None = None
        if self.tokenizer is not None:
            self._decoder = IncrementalDecoder(self.tokenizer, self.params.skip_special_tokens)
        self._stop = tuple(self.params.stop or ())
        self._released = 0  # characters handed out so far
        self._searchable = 0  # a stop string may not begin before this character
        self._num_reported = 0  # tokens handed out so far

    def take(self, delta: TokenDelta) -> bool:
        """Add a step's tokens; True if a stop string ended the sample, which the engine cannot
        know.
        """
        self.num_steps += 1
        self.num_cached_tokens = delta.num_cached_tokens
        reason, taken, by_string = delta.finish_reason, 0, False
        for token in delta.token_ids:
            if delta.logprobs is not None:
                self.logprobs.append(delta.logprobs[taken])
            self.token_ids.append(token)
            taken += 1
            if delta.finish_reason == "stop" and taken == len(delta.token_ids):
                self._end_at_stop_token(token)
            elif self._push(token):
                reason, by_string = "stop", True
                break
        self.finish_reason = reason
        if reason == "length" and self._decoder is not None:
            self.text += self._decoder.finish()
        kept = min(delta.accepted, taken - 1)
        self.acceptance.count(min(delta.drafted, kept) if by_string else delta.drafted, kept)
        return by_string and delta.finish_reason is None

    def output(self) -> CompletionOutput:
        """A snapshot. While the sample runs, text that may become a stop string is held back."""
        end = len(self.text)
        if self.finish_reason is None and self._stop:
            end = max(self._released, end - self._held_back())
        new_text, self._released = self.text[self._released : end], end
        new_tokens, self._num_reported = self.token_ids[self._num_reported :], len(self.token_ids)
        return CompletionOutput(
            index=self.index,
            text=self.text[:end],
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs) if self.params.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            acceptance=copy.deepcopy(self.acceptance),
            num_steps=self.num_steps,
            new_text=new_text,
            new_token_ids=tuple(new_tokens),
        )

    def _end_at_stop_token(self, token: int) -> None:
        models_own = token in self.eos_token_ids and not self.params.ignore_eos
        if not models_own:
            self.stop_reason = token
        if self._decoder is None:
            return
        if self.params.include_stop_str_in_output and not models_own:
            self.text += self._decoder.push([token])
        self.text += self._decoder.finish()

    def _push(self, token: int) -> bool:
        """Add a token's text; True (and the text is cut) if a stop string is complete."""
        if self._decoder is None:
            return False
        self.text += self._decoder.push([token])
        if len(self.token_ids) <= self.params.min_tokens:
            self._searchable = len(self.text)
            return False
        found = [(self.text.find(stop, self._searchable), stop) for stop in self._stop]
        hits = [(at + len(stop), at, stop) for at, stop in found if at >= 0]
        if not hits:
            return False
        end, start, stop = min(hits)
        self.text = self.text[: end if self.params.include_stop_str_in_output else start]
        self.stop_reason = stop
        return True

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins some stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
