"""Tools: what goes into the prompt, what is read from the text, and the answers of the server."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.running import NAME, Server

from mmtp_jax.server.errors import APIError
from mmtp_jax.server.protocol import FunctionDefinition, ToolChoice
from mmtp_jax.server.tool_parsers import CallList, NamedCall, TaggedCalls, ToolCall, ToolParser
from mmtp_jax.server.tools import constraint, prepare

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"day": {"enum": ["mon", "tue"]}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": '{"a": 1}'}}


# --- into the prompt ---


def test_tools_go_into_the_system_message() -> None:
    user = {"role": "user", "content": "hi"}
    first, second = prepare([user], [WEATHER], template_knows_tools=False)
    assert first["role"] == "system" and json.dumps(WEATHER) in first["content"]
    assert second == user
    system = {"role": "system", "content": "Be kind."}
    merged = prepare([system, user], [WEATHER], template_knows_tools=False)
    assert len(merged) == 2 and merged[0]["content"].startswith("Be kind.\n\n# Tools")
    assert prepare([user], None, template_knows_tools=False) == [user]


def test_calls_and_results_become_text() -> None:
    history = [
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "12:00", "tool_call_id": "c1"},
        {"role": "tool", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "3"}]},
    ]
    assistant, results = prepare(history, None, template_knows_tools=False)
    block = '<tool_call>\n{"name": "time", "arguments": {"a": 1}}\n</tool_call>'
    assert assistant == {"role": "assistant", "content": f"{block}\n{block}"}
    assert results == {
        "role": "user",
        "content": "<tool_response>\n12:00\n</tool_response>\n"
        "<tool_response>\n13\n</tool_response>",
    }


def test_templates_that_know_tools_get_data() -> None:
    history = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    (message,) = prepare(history, [TIME], template_knows_tools=True)
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert message["content"] == ""


@pytest.mark.parametrize("knows", [False, True])
def test_arguments_must_be_json(knows: bool) -> None:
    bad = {"function": {"name": "time", "arguments": "{"}}
    with pytest.raises(APIError, match="not JSON"):
        prepare([{"role": "assistant", "tool_calls": [bad]}], None, template_knows_tools=knows)


# --- out of the text ---


def read(parser: ToolParser, text: str, cuts: list[int]) -> tuple[str, list[ToolCall]]:
    """Content and calls of a text that comes in pieces."""
    pieces: list[str | ToolCall] = []
    start = 0
    for cut in sorted(cuts):
        pieces += parser.push(text[start:cut])
        start = max(start, cut)
    pieces += parser.push(text[start:])
    pieces += parser.finish()
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return content, [piece for piece in pieces if isinstance(piece, ToolCall)]


def block(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TAGGED = [
    ("no call", "no call", []),
    (f"Let me see.\n{block('f', {'x': 1})}", "Let me see.", [("f", '{"x": 1}')]),
    (f"{block('f', {})}\n{block('g', {'y': 'é'})}\n", "", [("f", "{}"), ("g", '{"y": "é"}')]),
    ("a <tool_call>no json</tool_call> b", "a <tool_call>no json</tool_call> b", []),
    ('a <tool_call>{"name": 1}</tool_call>', 'a <tool_call>{"name": 1}</tool_call>', []),
    ("cut off <tool_call>{", "cut off <tool_call>{", []),
    ("a < b <tool", "a < b <tool", []),
    ("a  \n b  ", "a  \n b  ", []),
    (f"x {block('f', {})} y", "x y", [("f", "{}")]),
    (block("f", {"x": "</tool_call>"}), "", [("f", '{"x": "</tool_call>"}')]),
    (f'<tool_call>{{"a</tool_call>{block("f", {})}', '<tool_call>{"a</tool_call>', [("f", "{}")]),
    ('<tool_call>{"a</tool_call> b', '<tool_call>{"a</tool_call> b', []),
    (block("f", {"x": "\ud800é😀"}), "", [("f", '{"x": "\\ud800é😀"}')]),
    (block("\ud800", {}), block("\ud800", {}), []),
    (block("f", {"x": float("nan")}), block("f", {"x": float("nan")}), []),
    ('<tool_call>{"name": "f"} 1</tool_call>', '<tool_call>{"name": "f"} 1</tool_call>', []),
]


@pytest.mark.parametrize(("text", "content", "calls"), TAGGED)
@given(cuts=st.lists(st.integers(0, 100), max_size=6))
def test_tagged_calls_do_not_depend_on_the_cuts(
    text: str, content: str, calls: list[tuple[str, str]], cuts: list[int]
) -> None:
    found_content, found = read(TaggedCalls(), text, cuts)
    assert [(call.name, call.arguments) for call in found] == calls
    assert [call.index for call in found] == list(range(len(calls)))
    assert found_content == content


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool", "_call>", "<", " ", "\n", "a", "[", "]", ",", "{"),
    *('"', '{"a', '{"name": "f"}', '{"name": "f", "arguments": {"x": "</tool_call>"}}', "\\"),
]


@pytest.mark.parametrize("parser", [TaggedCalls, CallList])
@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
def test_no_text_depends_on_the_cuts(parser: type[ToolParser], text: str, cuts: list[int]) -> None:
    whole = read(parser(), text, [])
    assert read(parser(), text, cuts) == whole
    assert read(parser(), text, list(range(len(text)))) == whole
    if parser is TaggedCalls and not whole[1]:
        assert whole[0] == text, "what is no call is content"


@pytest.mark.parametrize("parser", [TaggedCalls, CallList])
def test_arguments_nested_too_deeply_are_content(parser: type[ToolParser]) -> None:
    nested = "[" * 100_000 + "]" * 100_000
    text = f'{{"name": "f", "arguments": {{"x": {nested}}}}}'
    text = f"[{text}]" if parser is CallList else f"<tool_call>{text}</tool_call>"
    assert read(parser(), text, []) == (text, [])


def test_a_repeated_tag_takes_no_time() -> None:
    """Every one of these tags might end the block, if it were not in a string."""
    parser = TaggedCalls()
    parser.push('<tool_call>{"name": "')
    begin = time.perf_counter()
    for _ in range(2000):
        assert parser.push("</tool_call>") == []
    assert time.perf_counter() - begin < 5
    assert "".join(str(piece) for piece in parser.finish()).count("</tool_call>") == 2000


@given(data=st.data())
def test_a_list_of_calls(data: st.DataObject) -> None:
    calls = data.draw(
        st.lists(
            st.tuples(st.sampled_from(["f", "g"]), st.dictionaries(st.text(), st.text())),
            min_size=1,
            max_size=3,
        )
    )
    indent = data.draw(st.sampled_from([None, 2]))
    text = json.dumps([{"name": n, "arguments": a} for n, a in calls], indent=indent)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    content, found = read(CallList(), text, cuts)
    assert content == ""
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls


def test_a_cut_off_list_keeps_what_is_complete() -> None:
    text = '[{"name": "f", "arguments": {}}, {"name": "g", "arg'
    content, (call,) = read(CallList(), text, [10, 33])
    assert call.name == "f" and content.endswith('{"name": "g", "arg')


def test_the_named_call_is_the_whole_text() -> None:
    content, (call,) = read(NamedCall("f"), '{"a": 1}', [3])
    assert (content, call.name, call.arguments) == ("", "f", '{"a": 1}')


def test_choices_that_do_not_fit() -> None:
    tools = [FunctionDefinition(name="f")]
    named = ToolChoice.model_validate({"type": "function", "function": {"name": "g"}})
    with pytest.raises(APIError, match="'g'"):
        constraint(tools, named, parallel=True)
    with pytest.raises(APIError, match="no tools"):
        constraint([], "required", parallel=True)
    wrong = [FunctionDefinition(name="f", parameters={"type": "nothing"})]
    with pytest.raises(APIError, match="parameters"):
        constraint(wrong, "required", parallel=True)
    assert constraint(tools, "auto", parallel=True) is None


# --- answers ---


def create(server: Server, **options: Any) -> Any:
    options = {
        "model": NAME,
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 60,
        "seed": 5,
        "logit_bias": {"27": 1.0},
    } | options
    return server.openai().chat.completions.create(**options)


# Prompts of tools do not fit the tiny context, so the template leaves the system message out.
TEMPLATE = {"chat_template_kwargs": {"short": True}}


@pytest.mark.parametrize("speculate", [True, False])
def test_a_named_tool_is_called(server: Server, plain_server: Server, speculate: bool) -> None:
    one = server if speculate else plain_server
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = create(one, tools=[WEATHER], tool_choice=choice, extra_body=TEMPLATE)
    (choice_,) = answer.choices
    assert choice_.finish_reason == "stop" and choice_.message.content is None
    (call,) = choice_.message.tool_calls
    assert call.id.startswith("call_") and call.function.name == "weather"
    assert json.loads(call.function.arguments)["day"] in ("mon", "tue")


def test_required_calls_stream(server: Server) -> None:
    options = {
        "tools": [WEATHER, TIME],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "extra_body": TEMPLATE,
        "temperature": 0.0,
    }
    whole = create(server, **options).choices[0]
    chunks = [chunk.choices[0] for chunk in create(server, stream=True, **options)]
    assert chunks[0].delta.role == "assistant"
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert chunks[-1].finish_reason == whole.finish_reason
    if whole.finish_reason == "tool_calls":
        (call,) = calls
        assert call.index == 0
        assert call.function == whole.message.tool_calls[0].function
        assert call.function.name in ("weather", "time")
        assert isinstance(json.loads(call.function.arguments), dict)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("speculate", [True, False])
def test_json_is_valid(server: Server, plain_server: Server, speculate: bool, stream: bool) -> None:
    one = server if speculate else plain_server
    schema = WEATHER["function"]["parameters"]  # type: ignore[index]
    response_format = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}
    for seed in range(5):
        options = {"seed": seed, "temperature": 1.0, "stream": stream}
        answer = create(one, response_format=response_format, **options)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            text = answer.choices[0].message.content
        assert json.loads(text)["day"] in ("mon", "tue")


def test_guided_fields(server: Server) -> None:
    for extra, pattern in (
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"guided_regex": "[ab]"}, ("a", "b")),
        ({"guided_grammar": 'start: "x" | "y"'}, ("x", "y")),
        ({"structured_outputs": {"choice": ["up"]}}, ("up",)),
    ):
        assert create(server, extra_body=extra).choices[0].message.content in pattern
