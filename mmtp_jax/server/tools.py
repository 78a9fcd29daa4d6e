"""Tools for models of the ChatML family, in the form that Hermes and Qwen2.5 were trained on:
signatures in `<tools>` of the system message, each call as JSON in a `<tool_call>` block (model
cards of Hermes-2-Pro and Qwen2.5).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mmtp_jax.sampling.structured import StructuredOutputs
from mmtp_jax.server.errors import bad_request
from mmtp_jax.server.protocol import FunctionDefinition, ToolChoice
from mmtp_jax.server.tool_parsers import CallList, NamedCall, TaggedCalls, ToolParser

Message = dict[str, Any]
Choice = str | ToolChoice | None

_INSTRUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def prepare(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    template_knows_tools: bool,
) -> list[Message]:
    """Messages as the chat template takes them: contents are texts, and where the template does not
    read `tools` itself, tools, calls and their results are part of the texts.
    """
    prepared = [dict(message) | {"content": _text(message)} for message in messages]
    if template_knows_tools:
        return [_with_arguments_read(message) for message in prepared]
    prepared = _with_results([_with_calls(message) for message in prepared])
    if not tools:
        return prepared
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instruction = _INSTRUCTION.format(signatures=signatures)
    if prepared and prepared[0].get("role") == "system":
        content = f"{prepared[0]['content']}\n\n{instruction}"
        return [prepared[0] | {"content": content}, *prepared[1:]]
    return [{"role": "system", "content": instruction}, *prepared]


def constraint(
    tools: Sequence[FunctionDefinition], choice: Choice, *, parallel: bool
) -> StructuredOutputs | None:
    """What the text has to be so that the wanted tool is called; None if the model may choose.

    Raises `APIError` if the choice does not fit the tools.
    """
    if isinstance(choice, ToolChoice):
        function = _named(tools, choice.function.name)
        return _schema(_parameters(function))
    if choice == "required":
        if not tools:
            raise bad_request("tool_choice is required, but there are no tools", "tool_choice")
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function.name},
                    "arguments": _parameters(function),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for function in tools
        ]
        limit = {} if parallel else {"maxItems": 1}
        return _schema({"type": "array", "minItems": 1, "items": {"anyOf": calls}} | limit)
    return None


def parser_for(tools: Sequence[FunctionDefinition], choice: Choice) -> ToolParser | None:
    """What reads the calls from a text; None if there can be none."""
    if isinstance(choice, ToolChoice):
        return NamedCall(choice.function.name)
    if not tools or choice == "none":
        return None
    return CallList() if choice == "required" else TaggedCalls()


def _named(tools: Sequence[FunctionDefinition], name: str) -> FunctionDefinition:
    for function in tools:
        if function.name == name:
            return function
    raise bad_request(f"tool_choice names {name!r}, which is none of the tools", "tool_choice")


def _parameters(function: FunctionDefinition) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}}


def _schema(schema: dict[str, Any]) -> StructuredOutputs:
    try:
        return StructuredOutputs(json=schema)
    except ValueError as error:
        raise bad_request(f"tools: the parameters of a function: {error}", "tools") from None


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _with_arguments_read(message: Message) -> Message:
    """Templates print the arguments of earlier calls as JSON, so they take them as data."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        function["arguments"] = _arguments(function)
        calls.append(dict(call) | {"function": function})
    return message | {"tool_calls": calls} if calls else message


def _arguments(function: Mapping[str, Any]) -> Any:
    try:
        return json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        raise bad_request(
            f"messages: the arguments of a call of {function['name']!r} are not JSON", "messages"
        ) from None


def _with_calls(message: Message) -> Message:
    calls = message.pop("tool_calls", None)
    if not calls:
        return message
    blocks = [message["content"]] if message["content"] else []
    for call in calls:
        function = call["function"]
        body = {"name": function["name"], "arguments": _arguments(function)}
        blocks.append(f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>")
    return message | {"content": "\n".join(blocks)}


def _with_results(messages: Sequence[Message]) -> list[Message]:
    """Results of tools become a user's turn, those that follow each other the same one."""
    merged: list[Message] = []
    previous = None
    for message in messages:
        role = message.get("role")
        if role == "tool":
            block = f"<tool_response>\n{message['content']}\n</tool_response>"
            if previous == "tool":
                merged[-1]["content"] += f"\n{block}"
            else:
                merged.append({"role": "user", "content": block})
        else:
            merged.append(message)
        previous = role
    return merged
