"""Files of prompts: every form that is read, and how the others are refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from mmtp_jax.config import ConfigError
from mmtp_jax.prompt_files import read_prompts

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye"},
]


def write(path: Path, *rows: Any) -> Path:
    """A file with the rows as JSON, bytes as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    content = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def texts(path: Path, limit: int | None = None) -> list[str]:
    """The prompts, each of which must be one user message."""
    conversations = read_prompts(path, limit)
    for conversation in conversations:
        assert [message.keys() for message in conversation] == [{"role", "content"}]
        assert conversation[0]["role"] == "user"
    return [conversation[0]["content"] for conversation in conversations]


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    path = write(
        tmp_path / name,
        {"id": 7, "prompt": "def f():\n    "},
        {"question": "How many?\u2028", "answer": "3"},
        b"",
        {"text": "Write a function.", "code": "pass"},
        {"question_id": 81, "turns": ["First é", "Second"]},
    )
    expected = ["def f():\n    ", "How many?\u2028", "Write a function.", "First é"]
    assert texts(path) == expected
    assert texts(path, 2) == expected[:2]
    assert texts(path, 9) == expected


def test_messages_are_taken_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", {"messages": CHAT, "prompt": "not this"})
    assert read_prompts(path) == [CHAT]


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.txt.gz"])
def test_lines_of_text(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, b"Hello", b"  ", '{"prompt": "é"} \r'.encode())
    assert texts(path) == ["Hello", '{"prompt": "é"}']


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"instruction": "Do"}, "has none of the fields messages, turns, prompt, question, text"),
        ({"prompt": 5}, "has a field 'prompt' that must hold text, got 5"),
        ({"prompt": "  "}, "has a field 'prompt' that must hold text"),
        ({"text": "\ud800"}, "has a field 'text' that must be valid Unicode"),
        ({"turns": []}, "has a field 'turns' that must be a list of texts, got []"),
        ({"turns": [None]}, "has a field 'turns' that must hold text, got None"),
        ({"messages": ["Hello"]}, "has a field 'messages' that must be a list of messages"),
        ({"messages": []}, "has a field 'messages' that must be a list of messages"),
        ({"messages": [{"content": "Hello"}]}, "must say the role of every message"),
        ({"messages": [{"role": "user", "content": None}]}, "must hold text, got None"),
        ({"messages": CHAT[:3]}, "has a field 'messages' that must not end with an answer"),
        ([1, 2], "must be a JSON object, got [1, 2]"),
        (b"{", "is not JSON: "),
        (b"[" * 100_000, "is not JSON: "),
        (b'{"prompt": "\xff"}', "is not UTF-8: "),
    ],
)
def test_rows_that_are_refused(tmp_path: Path, row: Any, said: str) -> None:
    path = write(tmp_path / "prompts.jsonl", {"prompt": "Hello"}, b"", row)
    with pytest.raises(ConfigError) as refusal:
        read_prompts(path)
    assert str(refusal.value).startswith(f"row 3 of {path} ")
    assert said in str(refusal.value)
    assert texts(path, 1) == ["Hello"]


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the prompts of .*No such file"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match=r"must end in \.jsonl, \.jsonl\.gz, \.txt, \.txt\.gz"):
        read_prompts(tmp_path / "prompts.csv")
    with pytest.raises(ConfigError, match=r"empty\.txt holds no prompts"):
        read_prompts(write(tmp_path / "empty.txt", b" "))
    with pytest.raises(ConfigError, match="limit of prompts must be >= 1, got 0"):
        read_prompts(write(tmp_path / "one.txt", b"Hello"), 0)
    whole = write(tmp_path / "cut.txt.gz", *[b"Hello"] * 9)
    whole.write_bytes(whole.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"cannot read the prompts of .*cut\.txt\.gz"):
        read_prompts(whole)
    whole.write_bytes(b"not compressed")
    with pytest.raises(ConfigError, match=r"cannot read the prompts of .*cut\.txt\.gz"):
        read_prompts(whole)
