"""/v1/completions with the openai client and raw HTTP, streaming and not."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from server.running import NAME, Server, sse

TEXT = "the quick brown fox"


def create(server: Server, **options: Any) -> Any:
    options = {"model": NAME, "prompt": TEXT, "max_tokens": 12, "seed": 5} | options
    return server.openai().completions.create(**options)


def test_speculation_does_not_change_the_text(server: Server, plain_server: Server) -> None:
    for temperature in (0.0, 1.0):
        texts = set()
        for one in (server, plain_server):
            answer = create(one, temperature=temperature)
            chunks = list(create(one, temperature=temperature, stream=True))
            texts.add(answer.choices[0].text)
            texts.add("".join(chunk.choices[0].text for chunk in chunks))
        assert len(texts) == 1


def test_shape_of_an_answer(server: Server) -> None:
    answer = create(server, temperature=0.0)
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    assert answer.model == NAME
    assert [choice.index for choice in answer.choices] == [0]
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(TEXT), 12)
    assert usage.total_tokens == len(TEXT) + 12


def test_cached_prompt_tokens_are_reported(server: Server) -> None:
    prompt = "a prompt that no other test has, of some length"
    counts = [
        create(server, prompt=prompt).usage.prompt_tokens_details.cached_tokens for _ in range(2)
    ]
    assert counts[0] == 0
    assert 0 < counts[1] < len(prompt)


def test_several_prompts_and_samples(server: Server) -> None:
    prompts = [TEXT, "jumps over", [10, 11, 12]]
    answer = create(server, prompt=prompts[:2], n=2, temperature=1.0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = create(server, prompt=prompts[1], n=2, temperature=1.0)
    assert [c.text for c in answer.choices[2:]] == [c.text for c in alone.choices]
    assert answer.choices[0].text != answer.choices[1].text
    assert answer.usage.prompt_tokens == len(TEXT) + len("jumps over")
    ids = create(server, prompt=[[10, 11, 12], [13]])
    assert len(ids.choices) == 2
    assert create(server, prompt=[10, 11, 12]).choices[0].text == ids.choices[0].text


def test_a_stream_is_what_the_client_expects(server: Server) -> None:
    body = {
        "model": NAME,
        "prompt": [TEXT, "jumps"],
        "max_tokens": 7,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with server.http() as client, client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events: list[Any] = sse(list(response.iter_lines()))
    assert len({event["id"] for event in events}) == 1
    *chunks, last = events
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 14
    assert all(chunk["usage"] is None for chunk in chunks)
    for index in range(2):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1]["text"] == ""
        assert all(c["text"] for c in mine[:-1])


def test_continuous_usage(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(create(server, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 12
    assert chunks[-1].choices == []


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_and_ids(server: Server, stream: bool) -> None:
    def run(**options: Any) -> tuple[str, str, Any]:
        answer = create(server, temperature=0.0, max_tokens=30, stream=stream, **options)
        chunks = list(answer) if stream else [answer]
        choices = [chunk.choices[0] for chunk in chunks]
        last = choices[-1]
        return "".join(c.text for c in choices), last.finish_reason, last.stop_reason

    text, reason, _ = run(extra_body={"ignore_eos": True})
    assert (len(text), reason) == (30, "length")
    stop = text[4:6]
    end = text.index(stop)
    assert run(stop=stop) == (text[:end], "stop", stop)
    included = run(stop=[stop], extra_body={"include_stop_str_in_output": True})
    assert included == (text[: end + 2], "stop", stop)
    (token,) = server.http().post("/tokenize", json={"prompt": text[3]}).json()["tokens"]
    ended = run(extra_body={"stop_token_ids": [token]})
    assert ended == (text[: text.index(text[3])], "stop", token)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_logprobs_spell_the_text(server: Server, stream: bool, echo: bool) -> None:
    answer = create(server, logprobs=2, echo=echo, stream=stream, temperature=1.0, stop="e")
    chunks = list(answer) if stream else [answer]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    text = "".join(choice.text for choice in choices)
    parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for part in parts for token in part.tokens]
    assert "".join(tokens) == text
    assert text.startswith(TEXT) == echo
    offsets = [offset for part in parts for offset in part.text_offset]
    assert [text[o : o + len(t)] for o, t in zip(offsets, tokens, strict=True)] == tokens
    values = [value for part in parts for value in part.token_logprobs]
    tops = [top for part in parts for top in part.top_logprobs]
    assert len(values) == len(tops) == len(tokens)
    if echo:
        assert (values.pop(0), tops.pop(0)) == (None, None)
        tokens.pop(0)
    for token, value, top in zip(tokens, values, tops, strict=True):
        assert value <= 0 and top[token] == pytest.approx(value)
        assert 2 <= len(top) <= 3


def test_prompt_logprobs_score_a_prompt_without_completing_it(server: Server) -> None:
    answer = create(server, echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer.choices
    assert choice.text == TEXT and choice.finish_reason == "length"
    assert "".join(choice.logprobs.tokens) == TEXT
    assert answer.usage.completion_tokens == 0
    shown = create(server, max_tokens=1, extra_body={"prompt_logprobs": 1}).choices[0]
    assert shown.prompt_logprobs[0] is None
    ids = server.http().post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
    for token, entry, value in zip(
        ids[1:], shown.prompt_logprobs[1:], choice.logprobs.token_logprobs[1:], strict=True
    ):
        assert entry[str(token)]["logprob"] == pytest.approx(value, abs=1e-4)


def test_logit_bias_decides(server: Server) -> None:
    (token,) = server.http().post("/tokenize", json={"prompt": "x"}).json()["tokens"]
    answer = create(server, logit_bias={str(token): 100}, max_tokens=4, temperature=0.0)
    assert answer.choices[0].text == "xxxx"


def test_tokens_as_ids(server: Server) -> None:
    answer = create(server, logprobs=1, extra_body={"return_tokens_as_token_ids": True})
    assert all(token.startswith("token_id:") for token in answer.choices[0].logprobs.tokens)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [64]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": "a\ud800"}, "prompt"),
    ({"prompt": "a" * 96}, "prompt"),
    ({"prompt": "a" * 90, "max_tokens": 7}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 128, "prompt": ["a"] * 9}, "prompt"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"stop": [1]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop_token_ids": [64]}, "stop_token_ids"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"64": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"seed": 2**64}, "seed"),
    ({"min_tokens": 13}, "min_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": 1}, "stream_options"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_json": {"type": "nothing"}}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "start: missing"}, "guided_grammar"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    import json

    body = {"model": NAME, "prompt": TEXT, "max_tokens": 12} | fields
    with server.http() as client:
        response = client.post(
            "/v1/completions",
            content=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and param in error["message"], error
    assert error["type"] == "invalid_request_error"


def test_the_limit_is_in_the_message(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="max_model_len=96") as caught:
        create(server, prompt="a" * 96)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'"x"', b"null", b"\xff", b"[" * 100_000, b'{"prompt": ' * 5000]
)
def test_bodies_that_are_no_object(server: Server, content: bytes) -> None:
    with server.http() as client:
        headers = {"content-type": "application/json"}
        response = client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_another_model_is_not_found(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        create(server, model="gpt-4")
    assert caught.value.code == "model_not_found"


def test_unknown_fields_are_ignored(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1, "user": "me", "no_such_field": {"a": [1]}}
    with server.http() as client:
        assert client.post("/v1/completions", json=body).status_code == 200
