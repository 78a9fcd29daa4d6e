"""The command: answers on stdout, all else on stderr, one line and exit code 2 for user errors."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from models_for_tests import write_tiny_llama

from mmtp_jax.chat import main

ROOT = Path(__file__).resolve().parent.parent
# One program: compiling takes most of a run's time.
SMALL = ("--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--row-multiple", "16")


class Result(NamedTuple):
    code: int
    out: str
    err: str


Chat = Callable[..., Result]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMTP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders: `plain` and `modules` (two of them) chat, `base` has no template, `mute` no text."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_llama(folder / "plain", tokenizer=True)
    write_tiny_llama(folder / "modules", family="mimo", modules=2, tokenizer=True)
    write_tiny_llama(folder / "base", tokenizer=True)
    settings = folder / "base" / "tokenizer_config.json"
    without = json.loads(settings.read_text())
    del without["chat_template"]
    settings.write_text(json.dumps(without))
    write_tiny_llama(folder / "mute")
    return folder


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Run `main` in this process with piped input."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)

    def run(*arguments: str | Path, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            assert isinstance(end.code, int)
            code = end.code
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "mmtp_jax.chat", *map(str, arguments)]


def test_help_shows_groups_and_defaults(chat: Chat) -> None:
    result = chat("--help")
    assert result.code == 0
    text = " ".join(result.out.split())
    for group in ("model:", "engine:", "cache:", "speculation:", "answers:"):
        assert group in text
    assert "--model MODEL known name, directory, .gguf file or hub id (default: smollm2" in text
    assert "--max-num-seqs N requests that run at once (default: 8 on a CPU, else 256)" in text
    assert "None" not in text


def test_arguments_are_parsed_without_jax() -> None:
    program = "import sys, mmtp_jax.chat; print(*({'jax', 'flax'} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
        ("--max-tok 3", "unrecognized arguments: --max-tok 3"),
        ("--max-tokens many", "argument --max-tokens: invalid int value: 'many'"),
        ("--dtype int3", "argument --dtype: invalid choice: 'int3'"),
        ("--max-tokens 0", "max_tokens must be an integer in [1, "),
        ("--temperature nan", "temperature must be a number in [0, "),
        ("--top-p 0", "top_p must be in (0, 1], got 0"),
        ("--page-size 0", "page_size must be in [1, 256], got 0"),
        ("--gpu-memory-utilization 1.5", "memory_fraction must be in (0, 1], got 1.5"),
        ("--speculative-config {", "argument --speculative-config: not valid JSON: "),
        ("--speculative-config [3]", "argument --speculative-config: must be a JSON object"),
        ('--speculative-config {"depth":3}', "there is no speculative_config field 'depth'"),
        ('--speculative-config {"method":"eagle"}', "method must be 'mtp' or null, got 'eagle'"),
        ("--num-speculative-tokens 33", "num_speculative_tokens must be in [0, 32], got 33"),
        ("--system hello --no-chat-template", "--system needs the chat template"),
        ("--model no-such-model", "unknown model 'no-such-model'"),
    ],
)
def test_errors_are_one_line(chat: Chat, arguments: str, message: str) -> None:
    result = chat(*arguments.split())
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith(f"error: {message}")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "count", "other"),
    [
        ('{"num_speculative_tokens":3}', 2, 3),
        ('{"num_speculative_tokens":3}', 0, 3),
        ('{"method":null}', 2, 0),
    ],
)
def test_contradictory_speculation_is_refused(
    chat: Chat, config: str, count: int, other: int
) -> None:
    result = chat("--speculative-config", config, "--num-speculative-tokens", str(count))
    assert result.code == 2
    expected = f"error: --num-speculative-tokens {count} contradicts the {other} of"
    assert result.err == f"{expected} --speculative-config\n"


def test_errors_of_the_process(models: Path) -> None:
    """A model without a tokenizer: exit code 2 and one sentence, from the real command."""
    run = subprocess.run(
        command("--model", models / "mute"), cwd=ROOT, capture_output=True, text=True, input=""
    )
    assert (run.returncode, run.stdout) == (2, "")
    expected = f"error: {models / 'mute'} has no tokenizer, so it cannot answer text\n"
    assert run.stderr == expected


def test_more_speculative_tokens_than_modules(chat: Chat, models: Path) -> None:
    result = chat("--model", models / "modules", "--num-speculative-tokens", "3")
    assert result.code == 2
    assert result.err.startswith("error: num_speculative_tokens=3 exceeds the 2 MTP module(s)")
    assert result.err.count("\n") == 1


def test_prompt_with_and_without_speculation(chat: Chat, models: Path) -> None:
    """The same text; the notice and the statistics say what ran."""
    prompt = ("--prompt", "hello there", "--max-tokens", "40", *SMALL)
    results = {
        modules: chat("--model", models / "modules", "--num-speculative-tokens", modules, *prompt)
        for modules in ("2", "0")
    }
    assert results["2"].code == results["0"].code == 0
    assert results["2"].out == results["0"].out
    assert len(results["0"].out) > 20
    notice, statistics = results["2"].err.splitlines()
    assert re.fullmatch(
        f"model {models / 'modules'}, dtype float32, device cpu, MTP modules 2,"
        r" speculative tokens 2, context 512, pages \d+ of 16",
        notice,
    )
    assert re.fullmatch(
        r"40 tokens, [\d.]+ tokens/s, 1\.\d\d tokens per step,"
        r" acceptance by position [01]\.\d\d [01]\.\d\d, token limit reached",
        statistics,
    )
    notice, statistics = results["0"].err.splitlines()
    assert "MTP modules 2, speculative tokens 0" in notice
    assert re.fullmatch(r"40 tokens, [\d.]+ tokens/s, token limit reached", statistics)


def test_a_base_model_completes_prompts_as_they_are(chat: Chat, models: Path) -> None:
    """The fallback says so, and equals --no-chat-template; bytes that are no UTF-8 do no harm."""
    arguments = ("--max-tokens", "8", "--max-model-len", "64", *SMALL)
    lines = b"abc\n\xff\xfe\n\n" + b"too long " * 10 + b"\nabc\n"
    base = chat("--model", models / "base", *arguments, stdin=lines)
    assert base.code == 0
    notes = base.err.splitlines()
    assert notes[0].startswith("this model has no chat template")
    assert notes[0].endswith("prompts are completed as they are")
    assert (
        "error: the prompt has 90 tokens, but the context of 64 leaves room for at most 63" in notes
    )
    raw = chat("--model", models / "plain", "--no-chat-template", *arguments, stdin=lines)
    assert raw.out == base.out
    assert "no chat template" not in raw.err
    assert base.out.endswith("\n")
    assert sum("8 tokens" in note for note in notes) == 3
    assert base.out[:6] in base.out[-9:], "every prompt stands alone"

    result = chat("--model", models / "base", "--system", "be brief", *arguments)
    assert result.code == 2
    assert result.err.startswith("error: this model has no chat template")


def test_a_conversation_forgets_its_oldest_turns(chat: Chat, models: Path) -> None:
    """Turns count against the context until it is full, or until /reset."""
    arguments = ("--model", models / "plain", "--max-tokens", "20", "--max-model-len", "110")
    turns = ["hi", "hi", "hi", "/reset", "hi", "a" * 120, "/nope", "/quit", "never read"]
    result = chat(*arguments, *SMALL, stdin="\n".join(turns).encode())
    assert result.code == 0
    notes = result.err.splitlines()[1:]
    answered = "20 tokens"
    assert [note[: len(answered)] for note in notes[:2]] == [answered] * 2
    assert notes[2] == "dropped the oldest 1 turn(s): the context holds 110 tokens"
    assert notes[3].startswith(answered)
    assert notes[4] == "the conversation starts anew"
    assert notes[5].startswith(answered)
    assert re.match(r"error: the prompt has 1\d\d tokens, but the context of 110", notes[6])
    assert notes[7].startswith("there is no command /nope: /reset")
    assert len(notes) == 8
    # An answer is at most 20 characters and a newline.
    assert result.out[:10] in result.out[-21:], "after /reset the first question gets its answer"


def test_a_chat_template_of_ones_own(chat: Chat, models: Path, tmp_path: Path) -> None:
    """It stands in for a missing one too; a wrong one is refused before anything compiles."""
    arguments = ("--max-tokens", "8", "--max-model-len", "64", *SMALL)
    raw = chat("--model", models / "plain", "--no-chat-template", "--prompt", "<abc>", *arguments)
    template = tmp_path / "template.jinja"
    template.write_text("<{{ messages[-1].content }}>")
    own = chat("--model", models / "base", "--chat-template", template, "--prompt=abc", *arguments)
    assert own.code == 0 and "no chat template" not in own.err
    assert own.out == raw.out
    for wrong in ("{{", "{% nothing %}"):
        result = chat("--model", models / "plain", "--chat-template", wrong, *arguments)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("error: the chat template is not valid jinja: ")
        assert result.err.count("\n") == 1
    result = chat("--model", models / "mute", "--chat-template", template, *arguments)
    assert result.code == 2
    assert result.err == "error: a chat template needs a tokenizer, and this model has none\n"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Children start with SIGINT as on a terminal, also where this process ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_answer_and_not_the_conversation(models: Path) -> None:
    arguments = ("--model", models / "modules", "--max-tokens", "400", *SMALL)
    with subprocess.Popen(
        command(*arguments),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin and process.stdout
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert os.read(process.stdout.fileno(), 1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(b"/stats\nhello\n", timeout=120)
    notes = err.decode().splitlines()
    assert process.returncode == 0, notes
    assert re.match(r"\d{1,3} tokens, .*, interrupted$", notes[1])
    assert {"requests_running: 0", "requests_waiting: 0"} <= set(notes)
    assert "'referenced': 0" in next(note for note in notes if note.startswith("pages: "))
    assert re.match(r"\d+ tokens, .*, token limit reached$", notes[-1])
