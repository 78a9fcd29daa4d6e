"""/v1/chat/completions with the openai client and raw HTTP, streaming and not."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from server.running import NAME, Server, sse

MESSAGES = [{"role": "user", "content": "what is it?"}]


def create(server: Server, **options: Any) -> Any:
    options = {"model": NAME, "messages": MESSAGES, "max_tokens": 12, "seed": 5} | options
    return server.openai().chat.completions.create(**options)


def test_speculation_and_streaming_do_not_change_the_text(
    server: Server, plain_server: Server
) -> None:
    for temperature in (0.0, 1.0):
        texts = set()
        for one in (server, plain_server):
            texts.add(create(one, temperature=temperature).choices[0].message.content)
            chunks = list(create(one, temperature=temperature, stream=True))
            texts.add("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
        assert len(texts) == 1


def test_a_stream_is_what_the_client_expects(server: Server) -> None:
    body = {
        "model": NAME,
        "messages": MESSAGES,
        "max_completion_tokens": 9,
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with (
        server.http() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        assert response.status_code == 200
        events: list[Any] = sse(list(response.iter_lines()))
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    *chunks, last = events
    assert last["choices"] == []
    assert 2 <= last["usage"]["completion_tokens"] <= 18
    for index in range(2):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in c["delta"] for c in mine[1:])
        assert mine[-1]["delta"] == {} and mine[-1]["finish_reason"] in ("length", "stop")
        assert all(c["finish_reason"] is None for c in mine[:-1])
        assert all(c["delta"]["content"] for c in mine[1:-1])


def test_logprobs_spell_the_message(server: Server) -> None:
    for stream in (False, True):
        answer = create(server, logprobs=True, top_logprobs=3, stream=stream, temperature=1.0)
        choices = [c.choices[0] for c in (list(answer) if stream else [answer])]
        entries = [e for c in choices if c.logprobs for e in c.logprobs.content]
        if stream:
            text = "".join(c.delta.content or "" for c in choices)
        else:
            text = choices[0].message.content
        assert "".join(entry.token for entry in entries) == text
        assert bytes(b for entry in entries for b in entry.bytes) == text.encode()
        for entry in entries:
            assert len(entry.top_logprobs) == 3
            assert entry.logprob <= entry.top_logprobs[0].logprob + 1e-6


def test_content_may_be_parts(server: Server) -> None:
    parts = [{"type": "text", "text": "what is"}, {"type": "text", "text": " it?"}]
    whole = create(server, temperature=0.0).choices[0].message.content
    split = create(server, temperature=0.0, messages=[{"role": "user", "content": parts}])
    assert split.choices[0].message.content == whole


def test_default_length_is_the_context(server: Server) -> None:
    answer = create(server, max_tokens=None, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 96
    assert answer.choices[0].finish_reason == "length"


def test_continue_the_last_message(server: Server) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "it is"}]
    extra = {"add_generation_prompt": False, "continue_final_message": True}
    answer = create(server, messages=messages, extra_body=extra, temperature=0.0)
    rendered = "<|im_start|>user\nwhat is it?<|im_end|>\n<|im_start|>assistant\nit is"
    plain = server.openai().completions.create(
        model=NAME, prompt=rendered, max_tokens=12, temperature=0.0
    )
    assert answer.choices[0].message.content == plain.choices[0].text


def test_tokenize_knows_the_template(server: Server) -> None:
    with server.http() as client:
        tokens = client.post("/tokenize", json={"messages": MESSAGES}).json()
        text = client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nwhat is it?<|im_end|>\n<|im_start|>assistant\n"
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 96)
    answer = create(server)
    assert answer.usage.prompt_tokens == tokens["count"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "messages",
        ),
        ({"messages": [{"role": "user", "content": "a" * 90}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_tokens"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_a_bad_field_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    body = {"model": NAME, "messages": MESSAGES} | fields
    with server.http() as client:
        response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_errors_reach_the_client_as_its_exceptions(server: Server) -> None:
    with pytest.raises(openai.BadRequestError):
        create(server, temperature=3e9)
    with pytest.raises(openai.NotFoundError):
        create(server, model="other", stream=True)
