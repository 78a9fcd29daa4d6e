"""`POST /v1/chat/completions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mmtp_jax.outputs import Increment
from mmtp_jax.server.answer import Answer
from mmtp_jax.server.chat_prompt import chat_prompt
from mmtp_jax.server.errors import bad_request
from mmtp_jax.server.generation import Choice
from mmtp_jax.server.logprobs import LogprobFormat
from mmtp_jax.server.protocol import ChatBody
from mmtp_jax.server.responses import STREAMED, ChatCompletion
from mmtp_jax.server.sampling import sampling_params, structured_outputs
from mmtp_jax.server.service import Service, new_id, service_of
from mmtp_jax.server.tool_parsers import ToolCall, ToolParser
from mmtp_jax.server.tools import constraint, parser_for

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    return await _Answer.of(body, service_of(request)).respond(request)


@dataclass
class _Message:
    """One choice's message as it grows."""

    parser: ToolParser | None
    called: bool = False
    begun: bool = False


@dataclass(kw_only=True)
class _Answer(Answer[ChatBody]):
    """With the message of every choice."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    messages: dict[int, _Message]

    @classmethod
    def of(cls, body: ChatBody, service: Service) -> _Answer:
        """Check a request. Raises `APIError`."""
        service.model()
        model = service.model_name(body)
        tools = [tool.function for tool in body.tools or ()]
        choice = body.tool_choice
        structured = constraint(tools, choice, parallel=body.parallel_tool_calls is not False)
        if structured is not None and structured_outputs(body) is not None:
            raise bad_request(
                "tool_choice cannot be combined with another structured output", "tool_choice"
            )
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        prompt = chat_prompt(body, service)
        asked = body.max_tokens
        if body.max_completion_tokens is not None:
            asked = body.max_completion_tokens
        params = sampling_params(
            body,
            max_tokens=service.default_max_tokens(prompt) if asked is None else asked,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured=structured,
        )
        generation = service.generation(body, [prompt], params, "messages")
        return cls(
            body=body,
            model=model,
            generation=generation,
            format=LogprobFormat(service.tokenizer, bool(body.return_tokens_as_token_ids)),
            id=new_id("chatcmpl"),
            messages={one.index: _Message(parser_for(tools, choice)) for one in generation.choices},
        )

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(choice) for choice in self.generation.choices]
        return self.titled(self.kind, choices) | {
            "usage": self.usage(),
            "prompt_logprobs": self.prompt_logprobs(self.generation.choices[0]),
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        increment = choice.sample.increment()
        content, calls = self._read(choice, increment)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [_whole_call(call) for call in calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(increment),
            **self._end(choice),
        }

    def parts(self, choice: Choice) -> list[dict[str, Any]]:
        message = self.messages[choice.index]
        parts = []
        if not message.begun:
            message.begun = True
            parts.append(_part(choice, {"role": "assistant", "content": ""}))
        increment = choice.sample.increment()
        content, calls = self._read(choice, increment)
        logprobs = self._logprobs(increment)
        if content or (logprobs is not None and logprobs["content"]):
            parts.append(_part(choice, {"content": content}, logprobs))
        for call in calls:
            parts.append(_part(choice, {"tool_calls": [_streamed_call(call)]}))
        if choice.finished:
            parts.append(_part(choice, {}) | self._end(choice))
        return parts

    def _read(self, choice: Choice, increment: Increment) -> tuple[str, list[ToolCall]]:
        """The content and the tool calls in an increment of the text."""
        message = self.messages[choice.index]
        if message.parser is None:
            return increment.text, []
        pieces = message.parser.push(increment.text)
        if choice.finished:
            pieces += message.parser.finish()
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        message.called |= bool(calls)
        return "".join(piece for piece in pieces if isinstance(piece, str)), calls

    def _logprobs(self, increment: Increment) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {"content": self.format.chat(increment, self.body.top_logprobs or 0)}

    def _end(self, choice: Choice) -> dict[str, Any]:
        sample = choice.sample
        reason: str | None = sample.finish_reason
        # A call that the request named is an ordinary stop in OpenAI's API.
        named = self.body.tool_choice is not None and not isinstance(self.body.tool_choice, str)
        if reason == "stop" and self.messages[choice.index].called and not named:
            reason = "tool_calls"
        return {"finish_reason": reason, "stop_reason": sample.stop_reason}


def _part(
    choice: Choice, delta: dict[str, Any], logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _whole_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _streamed_call(call: ToolCall) -> dict[str, Any]:
    return {"index": call.index} | _whole_call(call)
