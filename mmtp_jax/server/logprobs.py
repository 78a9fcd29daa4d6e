"""Log-probabilities as completions, chat completions and `prompt_logprobs` show them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmtp_jax.engine.delta import TokenLogprobs
from mmtp_jax.outputs import Increment
from mmtp_jax.tokenizer import IncrementalDecoder, Tokenizer

# JSON has no -inf; this is what OpenAI's API shows for tokens that are out of the question.
LEAST = -9999.0


@dataclass(frozen=True)
class LogprobFormat:
    """How tokens are spelled: by their text, or as `token_id:7`."""

    tokenizer: Tokenizer | None
    as_ids: bool

    def spell(self, token_id: int, piece: str | None = None) -> str:
        """A token's text: `piece` if its part of the answer is known."""
        if self.as_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        if piece is not None:
            return piece
        return self.tokenizer.text_of(token_id, skip_special_tokens=False)

    def _top(self, one: TokenLogprobs, count: int) -> list[tuple[int, float]]:
        pairs = zip(one.top_ids[:count], one.top_values, strict=False)
        return [(token, value) for token, value in pairs if token >= 0]

    def completion(
        self,
        pieces: Sequence[str],
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        *,
        top: int,
        offset: int,
    ) -> dict[str, Any]:
        """The `logprobs` of a completion's choice; None stands for a first prompt token. `offset`
        is where the first piece begins in the text."""
        offsets = list(itertools.accumulate((len(piece) for piece in pieces), initial=offset))[:-1]
        tops: list[dict[str, float] | None] = []
        for piece, token, one in zip(pieces, token_ids, logprobs, strict=True):
            if one is None:
                tops.append(None)
                continue
            found: dict[str, float] = {}
            for alternative, value in self._top(one, top):
                found.setdefault(self.spell(alternative), _finite(value))
            # The chosen token is always among them, as it is in OpenAI's API.
            found.setdefault(self.spell(token, piece), _finite(one.chosen))
            tops.append(found)
        return {
            "tokens": [self.spell(t, p) for t, p in zip(token_ids, pieces, strict=True)],
            "token_logprobs": [None if one is None else _finite(one.chosen) for one in logprobs],
            "top_logprobs": tops if top else None,
            "text_offset": offsets,
        }

    def chat(self, increment: Increment, top: int) -> list[dict[str, Any]]:
        """The `logprobs.content` of a chat choice."""
        entries = []
        for piece, token, one in zip(
            increment.pieces, increment.token_ids, increment.logprobs, strict=True
        ):
            entry = self._chat_entry(self.spell(token, piece), one.chosen)
            entry["top_logprobs"] = [
                self._chat_entry(self.spell(alternative), value)
                for alternative, value in self._top(one, top)
            ]
            entries.append(entry)
        return entries

    def _chat_entry(self, token: str, value: float) -> dict[str, Any]:
        return {"token": token, "logprob": _finite(value), "bytes": list(token.encode())}

    def prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int
    ) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: nothing for the first token, then a mapping from token ids. The
        rank of a token that is not among the best is not known (null)."""
        shown: list[dict[str, Any] | None] = [None]
        for token, one in zip(token_ids[1:], logprobs, strict=True):
            best = self._top(one, top)
            entries = {
                str(other): self._prompt_entry(other, value, rank + 1)
                for rank, (other, value) in enumerate(best)
            }
            entries.setdefault(str(token), self._prompt_entry(token, one.chosen, None))
            shown.append(entries)
        return shown

    def _prompt_entry(self, token: int, value: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": _finite(value), "rank": rank, "decoded_token": self.spell(token)}


def pieces_of(tokenizer: Tokenizer | None, token_ids: Sequence[int]) -> list[str]:
    """The text of every token, special tokens too; they join to the text of all."""
    if tokenizer is None:
        return [""] * len(token_ids)
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
    pieces = [decoder.push([token]) for token in token_ids]
    if pieces:
        pieces[-1] += decoder.finish()
    return pieces


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST
