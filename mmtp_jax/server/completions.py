"""`POST /v1/completions`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from mmtp_jax.outputs import Increment
from mmtp_jax.server.answer import Answer
from mmtp_jax.server.errors import bad_request
from mmtp_jax.server.generation import Choice, Prompt
from mmtp_jax.server.logprobs import LogprobFormat, pieces_of
from mmtp_jax.server.protocol import CompletionBody
from mmtp_jax.server.responses import STREAMED, Completion, usage
from mmtp_jax.server.sampling import sampling_params
from mmtp_jax.server.service import Service, new_id, service_of

router = APIRouter()

# OpenAI's default for completions.
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", response_model=Completion, responses=STREAMED)
async def completions(body: CompletionBody, request: Request) -> Response:
    """Complete prompts: texts or token ids, one or several."""
    return await _Answer.of(body, service_of(request)).respond(request)


@dataclass(kw_only=True)
class _Answer(Answer[CompletionBody]):
    """`offsets`: where in the text each choice that has begun goes on."""

    kind = chunk_kind = "text_completion"

    only_prompt: bool
    offsets: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, body: CompletionBody, service: Service) -> _Answer:
        """Check a request. Raises `APIError`."""
        service.model()
        model = service.model_name(body)
        asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        # Only the prompt and its log-probabilities: a token has to be drawn all the same.
        only_prompt = bool(body.echo) and asked == 0
        params = sampling_params(
            body, max_tokens=1 if only_prompt else asked, logprobs=body.logprobs, structured=None
        )
        if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
            params = dataclasses.replace(params, prompt_logprobs=body.logprobs)
        prompts = _prompts(body, service)
        return cls(
            body=body,
            model=model,
            generation=service.generation(body, prompts, params, "prompt"),
            format=LogprobFormat(service.tokenizer, bool(body.return_tokens_as_token_ids)),
            id=new_id("cmpl"),
            only_prompt=only_prompt,
        )

    def whole(self) -> dict[str, Any]:
        choices = []
        for choice in self.generation.choices:
            parts = self._released(choice)
            logprobs = [part["logprobs"] for part in parts if part["logprobs"] is not None]
            choices.append(
                {
                    "index": choice.index,
                    "text": "".join(part["text"] for part in parts),
                    "logprobs": _joined(logprobs),
                    **self._end(choice),
                    "prompt_logprobs": self.prompt_logprobs(choice),
                }
            )
        return self.titled(self.kind, choices) | {"usage": self.usage()}

    def parts(self, choice: Choice) -> list[dict[str, Any]]:
        parts = self._released(choice)
        if choice.finished:
            end = {"index": choice.index, "text": "", "logprobs": None}
            parts.append(end | self._end(choice))
        return parts

    def usage(self) -> dict[str, Any]:
        return usage(self.generation.choices, only_prompt=self.only_prompt)

    def _released(self, choice: Choice) -> list[dict[str, Any]]:
        """What was released since the last call, the echoed prompt first."""
        first = None
        if choice.index not in self.offsets:
            self.offsets[choice.index] = 0
            first = self._first(choice)
        return [part for part in (first, self._next(choice)) if part is not None]

    def _first(self, choice: Choice) -> dict[str, Any] | None:
        """The echoed prompt, if it was asked for."""
        if not self.body.echo:
            return None
        prompt = choice.prompt
        logprobs = None
        if self.body.logprobs is not None:
            pieces = pieces_of(self.format.tokenizer, prompt.token_ids)
            known = choice.sample.prompt_logprobs or ()
            logprobs = self.format.completion(
                pieces, prompt.token_ids, [None, *known], top=self.body.logprobs, offset=0
            )
        self.offsets[choice.index] = len(prompt.text)
        return self._part(choice, prompt.text, logprobs)

    def _next(self, choice: Choice) -> dict[str, Any] | None:
        """What was released since the last call; None if nothing was."""
        increment = choice.sample.increment()
        if self.only_prompt or not (increment.text or increment.token_ids):
            return None
        return self._part(choice, increment.text, self._logprobs(choice, increment))

    def _part(self, choice: Choice, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, choice: Choice, increment: Increment) -> dict[str, Any] | None:
        offset = self.offsets[choice.index]
        self.offsets[choice.index] = offset + len(increment.text)
        if self.body.logprobs is None:
            return None
        return self.format.completion(
            increment.pieces,
            increment.token_ids,
            increment.logprobs,
            top=self.body.logprobs,
            offset=offset,
        )

    def _end(self, choice: Choice) -> dict[str, Any]:
        sample = choice.sample
        if self.only_prompt:
            return {"finish_reason": "length", "stop_reason": None}
        return {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}


def _prompts(body: CompletionBody, service: Service) -> list[Prompt]:
    """The prompts of a request as token ids with their text. Raises `APIError`."""
    given = body.prompt
    several: list[str] | list[list[int]]
    if isinstance(given, str):
        several = [given]
    elif given and isinstance(given[0], int):
        several = [given]
    else:
        several = cast(list[str] | list[list[int]], given)
    if not several:
        raise bad_request("prompt must hold at least one prompt, got none", "prompt")
    special = body.add_special_tokens is not False
    return [
        Prompt(one, service.encode(one, "prompt", special))
        if isinstance(one, str)
        else Prompt("".join(pieces_of(service.tokenizer, one)) if body.echo else "", one)
        for one in several
    ]


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    if not parts:
        return None
    joined: dict[str, Any] = {}
    for name in parts[0]:
        lists = [part[name] for part in parts]
        joined[name] = None if lists[0] is None else [entry for one in lists for entry in one]
    return joined
