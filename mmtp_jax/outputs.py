"""What users get: text, tokens, log-probabilities, why it ended, and how speculation did.

Tokens are taken one by one, so a stop string inside a run of accepted drafts ends the output at the
same token as without speculation.
"""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mmtp_jax.engine.delta import TokenDelta, TokenLogprobs
from mmtp_jax.engine.request import FinishReason
from mmtp_jax.engine.stats import Acceptance
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.tokenizer import IncrementalDecoder, Tokenizer


@dataclass(frozen=True)
class CompletionOutput:
    """One sample. `text` and `token_ids` are cumulative, `new_text`/`new_token_ids` what came since
    the previous output of the same stream. A stop token is in `token_ids` but not in `text`.
    `stop_reason` is the stop string or stop token id that ended it (None for the model's own
    end-of-sequence token). Drafts at and past the token that ended it do not count in `acceptance`.
    `step_sizes` are the tokens that each step emitted: of n tokens the first n - 1 are accepted
    drafts of the modules 0 to n - 2, and the last is the target's own.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    acceptance: Acceptance
    step_sizes: tuple[int, ...]
    new_text: str = ""
    new_token_ids: tuple[int, ...] = ()

    @property
    def num_steps(self) -> int:
        """Verifications that it took."""
        return len(self.step_sizes)

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per verification; 1.0 without speculation."""
        return len(self.token_ids) / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True)
class RequestOutput:
    """All samples of one prompt. The properties are those of the first sample. `prompt_logprobs`
    has an entry for every prompt token but the first."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

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


class Increment(NamedTuple):
    """What a sample released since the previous increment, of `token_ids`. If log-probabilities
    were asked for (otherwise empty), `text` is the join of `pieces`, one for every token. Several
    tokens may share a character: it is in the last one's piece.
    """

    text: str
    token_ids: Sequence[int]
    pieces: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass
class Sample:
    """Accumulates the deltas of one sample.

    Tokens become text when somebody asks for it, all that came since at once: decoding eight costs
    little more than decoding one (4 and 2 us). Where stop strings or log-probabilities need to know
    which token a character is from, they do one by one and at once.
    """

    index: int
    params: SamplingParams
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    num_drafts: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    step_sizes: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    def __post_init__(self) -> None:
        self.acceptance = Acceptance(self.num_drafts)
        self._decoder: IncrementalDecoder | None = None
        if self.tokenizer is not None:
            self._decoder = IncrementalDecoder(self.tokenizer, self.params.skip_special_tokens)
        self._stop = tuple(self.params.stop or ())
        self._one_by_one = bool(self._stop) or self.params.logprobs is not None
        self._text = ""
        self._unread: list[int] = []  # the latest tokens, which are not in the text yet
        self._released = 0  # characters handed out so far
        self._searchable = 0  # a stop string may not begin before this character
        self._num_reported = 0  # tokens handed out so far
        self._ends: list[int] = []  # where in the text each token's text ends
        self._num_pieces = 0  # tokens handed out in increments
        self.verified = (0, 0)  # drafts of the latest step that count, and those accepted

    @property
    def text(self) -> str:
        """The text of the tokens so far, without characters that are not complete."""
        self._read()
        return self._text

    def take(self, delta: TokenDelta) -> bool:
        """Add a step's tokens; True if a stop string ended the sample, which the engine cannot
        know.
        """
        self.num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        tokens, reason, by_string = delta.token_ids, delta.finish_reason, False
        by_token = reason == "stop"
        spelled = tokens[:-1] if by_token else tokens
        taken = len(tokens)
        if not self._one_by_one:
            self.token_ids += spelled
            self._unread += spelled
        else:
            for count, token in enumerate(spelled, 1):
                self.token_ids.append(token)
                self._unread.append(token)
                if self._ends_text():
                    reason, by_token, by_string, taken = "stop", False, True, count
                    break
            if delta.logprobs is not None:
                self.logprobs += delta.logprobs[:taken]
        if by_token:
            self.token_ids.append(tokens[-1])
            self._end_at_stop_token(tokens[-1])
        self.step_sizes.append(taken)
        self.finish_reason = reason
        if reason is not None:
            self._read()
            if reason == "length" and self._decoder is not None:
                self._text += self._decoder.finish()
            self._close_pieces(cut=by_string)
        kept = min(delta.accepted, taken - 1)
        self.verified = (min(delta.drafted, kept) if by_string else delta.drafted, kept)
        self.acceptance.count(*self.verified)
        return by_string and delta.finish_reason is None

    def increment(self) -> Increment:
        """What can be handed out now. While the sample runs, text that may become a stop string is
        held back."""
        self._read()
        start, first, ends = self._released, self._num_pieces, self._ends
        last = bisect.bisect_right(ends, self._releasable(), first)
        if last > first:
            self._released, self._num_pieces = ends[last - 1], last
        text, token_ids = self._text[start : self._released], self.token_ids[first:last]
        if self.params.logprobs is None:
            return Increment(text, token_ids)
        bounds = itertools.pairwise([start, *ends[first:last]])
        pieces = tuple(self._text[a:b] for a, b in bounds)
        return Increment(text, token_ids, pieces, tuple(self.logprobs[first:last]))

    def output(self) -> CompletionOutput:
        """A snapshot, with the text of `increment`."""
        self._read()
        end = self._releasable()
        new_text, self._released = self._text[self._released : end], end
        new_tokens, self._num_reported = self.token_ids[self._num_reported :], len(self.token_ids)
        return CompletionOutput(
            index=self.index,
            text=self._text[:end],
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs) if self.params.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            acceptance=copy.deepcopy(self.acceptance),
            step_sizes=tuple(self.step_sizes),
            new_text=new_text,
            new_token_ids=tuple(new_tokens),
        )

    def _read(self) -> None:
        """Add the text of the tokens that are not in it yet."""
        if not self._unread:
            return
        if self._decoder is not None:
            self._text += self._decoder.push(self._unread)
        self._ends += [len(self._text)] * len(self._unread)
        self._unread = []

    def _releasable(self) -> int:
        end = len(self._text)
        if self.finish_reason is None and self._stop:
            end = max(self._released, end - self._held_back())
        return end

    def _close_pieces(self, cut: bool) -> None:
        """The text is complete: its last characters belong to the last token that is in it. Tokens
        of a stop string that was cut off are in no piece."""
        size = len(self._text)
        self._ends = [min(end, size) for end in self._ends]
        while cut and self._ends and (self._ends[-2] if len(self._ends) > 1 else 0) == size:
            self._ends.pop()
        if self._ends:
            self._ends[-1] = size

    def _end_at_stop_token(self, token: int) -> None:
        """Add what was held back, and the stop token's own text if it is wanted."""
        models_own = token in self.eos_token_ids and not self.params.ignore_eos
        if not models_own:
            self.stop_reason = token
        if self._decoder is None:
            return
        if self.params.include_stop_str_in_output and not models_own:
            self._unread.append(token)
        self._read()
        self._text += self._decoder.finish()

    def _ends_text(self) -> bool:
        """Read on; True (and the text is cut) if a stop string is complete."""
        self._read()
        if len(self.token_ids) <= self.params.min_tokens:
            self._searchable = len(self._text)
            return False
        found = [(self._text.find(stop, self._searchable), stop) for stop in self._stop]
        hits = [(at + len(stop), at, stop) for at, stop in found if at >= 0]
        if not hits:
            return False
        end, start, stop = min(hits)
        self._text = self._text[: end if self.params.include_stop_str_in_output else start]
        self.stop_reason = stop
        return True

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins some stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
