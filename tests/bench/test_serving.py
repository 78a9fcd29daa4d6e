"""`bench serving` from the command line, against a fake server."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.fake_server import Fake, faking

from mmtp_jax.bench.__main__ import main
from mmtp_jax.bench.serving.bodies import TextBodies
from mmtp_jax.bench.serving.plot import read_line
from mmtp_jax.bench.serving.processes import processes
from mmtp_jax.bench.serving.target import Target
from mmtp_jax.bench.serving.worker import Worker
from mmtp_jax.config import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent
# A run without jax: importing it would fail.
WITHOUT_JAX = (
    "import sys; sys.modules['jax'] = None;"
    " from mmtp_jax.bench.__main__ import main; sys.exit(main())"
)
DISTRIBUTION = {"mean", "p50", "p90", "p99"}


def serving(fake: Fake, *arguments: str) -> tuple[str, ...]:
    return ("serving", f"--base-url={fake.url}", "--processes=1", *arguments)


def test_closed_loops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    spec = [
        f'vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}\n'
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {accepted}\n'
        for drafts, accepted in ((1, 1), (11, 6), (11, 6), (31, 21))
    ]
    with faking(metrics=spec) as fake:
        arguments = ["--concurrency", "1", "3", "--num-prompts=6", "--warm-up=2"]
        arguments += ["--goodput", "ttft:5000", "tpot:0.000001", "--processes=2", "--label=mine"]
        arguments += [f"--json={file}", "--api-key=secret"]
        assert main(serving(fake, *arguments)) == 0
        # One connection for each GET, and for each of those open at once in a run or a warm-up.
        assert fake.most_open == 3 and fake.connections <= 1 + 4 + 2 * (1 + 3)
        assert all(b"\r\nAuthorization: Bearer secret\r\n" in head for head in fake.heads)
    report = json.loads(file.read_text())
    output = capsys.readouterr()
    assert json.loads(output.out) == report
    assert "mine" in output.err and "load 3: 6 of 6 requests answered" in output.err
    assert "secret" not in output.out + output.err
    assert report["server"] == {"url": fake.url, "model": "fake"}
    assert report["client"]["processes"] == 2 and report["options"]["endpoint"] == "completions"
    assert [one["concurrency"] for one in report["results"]] == [1, 3]
    for one in report["results"]:
        assert one["requests"] == one["succeeded"] == 6 and one["failures"] == {}
        assert (one["input_tokens"], one["output_tokens"]) == (6 * 7, 6 * 12)
        assert one["output_tokens_per_second"] == pytest.approx(6 * 12 / one["seconds"])
        assert one["requests_per_second"] == pytest.approx(6 / one["seconds"])
        assert one["goodput"] == 0 and one["tokens_per_chunk"] == "usage"
        for name in ("ttft", "tpot", "itl", "chunk_gap", "e2e"):
            times = one[f"{name}_ms"]
            assert set(times) == DISTRIBUTION
            assert 0 < times["p50"] <= times["p90"] <= times["p99"]
        # The fake waits for 2 ms before each chunk of 3 tokens.
        assert one["ttft_ms"]["p50"] > 1 and one["chunk_gap_ms"]["mean"] > 1
        assert one["e2e_ms"]["p50"] > 4 and one["itl_ms"]["mean"] < one["chunk_gap_ms"]["mean"]
        assert not one["interrupted"] and one["unfinished"] == 0
    assert [one["acceptance"]["rate"] for one in report["results"]] == [[0.5], [0.75]]


def test_what_is_asked_for() -> None:
    with faking(interval=0.0) as fake:
        arguments = ["--concurrency", "2", "1", "--num-prompts=3", "--random-input-len", "2", "9"]
        arguments += ["--random-ids", "5", "40", "--max-tokens=9", "--ignore-eos"]
        assert main(serving(fake, *arguments)) == 0
    assert fake.paths == ["/v1/completions"] * 6
    prompts = [tuple(body.pop("prompt")) for body in fake.bodies]
    assert len(set(prompts)) == 6
    for prompt, body in zip(prompts, fake.bodies, strict=True):
        assert 2 <= len(prompt) <= 9 and all(5 <= token <= 40 for token in prompt)
        assert body == {
            "model": "fake",
            "max_tokens": 9,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }


def test_an_open_loop_over_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n\nthree\n")
    with faking(usage="last") as fake:
        arguments = ["--request-rate", "200", "--duration=0.2", f"--dataset={file}", "--model=m"]
        arguments += ['--extra-body={"top_p": 0.5, "temperature": null}', "--burstiness=0.5"]
        assert main(serving(fake, *arguments)) == 0
    assert set(fake.paths) == {"/v1/chat/completions"}
    asked = [body["messages"][0]["content"] for body in fake.bodies]
    assert set(asked) == {"one", "two", "three"}
    assert all((body["top_p"], body["temperature"]) == (0.5, None) for body in fake.bodies)
    output = capsys.readouterr()
    (one,) = json.loads(output.out)["results"]
    assert one["request_rate"] == 200 and one["concurrency"] is None
    assert one["requests"] == one["succeeded"] == len(asked) and 10 < len(asked) < 100
    # What waits is read at once.
    assert one["tokens_per_chunk"] == "averaged" and one["mean_tokens_per_chunk"] >= 3
    assert one["acceptance"] is None and one["goodput"] is None
    assert "load 200/s: the server does not say how many tokens a chunk has" in output.err


def test_failures_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with faking(failure="status") as fake:
        assert main(serving(fake, "--concurrency=2", "--num-prompts=4")) == 1
    output = capsys.readouterr()
    (one,) = json.loads(output.out)["results"]
    assert one["succeeded"] == 0 and one["failures"] == {"HTTP 503: not today": 4}
    assert one["ttft_ms"] is None and one["tokens_per_chunk"] is None
    assert "load 2: 4 failed: HTTP 503: not today" in output.err


def test_ctrl_c_reports_what_was_measured_without_jax() -> None:
    with faking(interval=0.01) as fake:
        arguments = ["--duration=60", "--concurrency", "4", "8", "--processes=2"]
        process = subprocess.Popen(
            [sys.executable, "-c", WITHOUT_JAX, *serving(fake, *arguments)],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert fake.asked.wait(30)
            while len(fake.bodies) < 9:
                assert process.poll() is None
            # To all of its processes, as a terminal does.
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, err
    (one,) = json.loads(out)["results"]
    assert one["interrupted"] and one["succeeded"] >= 5 and one["unfinished"] == 4
    assert one["failures"] == {} and "Traceback" not in err


def test_ctrl_c_while_processes_start_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def worker(*arguments: Any) -> Worker:
        os.kill(os.getpid(), signal.SIGINT)
        return Worker(*arguments)

    monkeypatch.setattr("mmtp_jax.bench.serving.processes.Worker", worker)
    target = Target.of("http://127.0.0.1:9", None)
    with (
        pytest.raises(KeyboardInterrupt),
        processes(1, target, "/", TextBodies([b"{}"]), 1.0) as started,
    ):
        assert started is None, "it was lost"
    assert multiprocessing.active_children() == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_https(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", str(key), "-out", str(certificate), "-subj", "/CN=fake"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with faking(tls=context) as fake:
        assert main(serving(fake)) == 2
        assert "self-signed certificate" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert main(serving(fake, "--num-prompts=3", "--concurrency=2")) == 0
    (one,) = json.loads(capsys.readouterr().out)["results"]
    assert one["succeeded"] == 3


def test_a_server_that_cannot_be_reached(capsys: pytest.CaptureFixture[str]) -> None:
    with faking() as fake:
        pass
    assert main(serving(fake)) == 2
    assert capsys.readouterr().err == f"error: cannot reach {fake.url}: Connection refused\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--concurrency", "4", "0"), "--concurrency must be >= 1, got 0"),
        (("--concurrency=200",), "--num-prompts must be >= 200, the largest --concurrency, got"),
        (("--request-rate", "2", "-1"), "--request-rate must be > 0, got -1"),
        (("--request-rate=inf",), "--request-rate must be > 0 and finite, got inf"),
        (("--burstiness=0",), "--burstiness must be > 0, got 0"),
        (("--duration=-3",), "--duration must be > 0, got -3"),
        (("--num-prompts=0",), "--num-prompts must be >= 1, got 0"),
        (("--warm-up=-1",), "--warm-up must be >= 0, got -1"),
        (("--max-tokens=0",), "--max-tokens must be >= 1, got 0"),
        (("--temperature=-1",), "--temperature must be >= 0, got -1"),
        (("--processes=0",), "--processes must be >= 1, got 0"),
        (("--random-input-len", "9", "2"), "--random-input-len: the second number must be >="),
        (("--random-ids", "1", "2", "3"), "--random-ids takes one number or two, got 3"),
        (("--goodput", "tpot:0"), "--goodput tpot must be > 0, got 0"),
        (("--endpoint=chat",), "--endpoint chat needs --dataset"),
        (("--base-url=localhost:8000",), "--base-url must be http://HOST:PORT or https://"),
        (("--base-url=http://x:port",), "--base-url must be an address, got http://x:port"),
        (("--api-key=a\nb",), "--api-key must hold printable ASCII"),
        (("--compare=x.json",), "--compare needs --plot"),
        (("--compare=pyproject.toml", "--plot=x.png"), "--compare must name reports of `serving`"),
        (("--plot=x.pdf",), "--plot must name a .png file, got x.pdf"),
        (("--plot=no/x.png",), "--plot must name a file to write to"),
        (("--json=no/x.json",), "--json must name a file to write to"),
    ],
)
def test_wrong_values_are_one_line_and_exit_code_2(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("serving", *arguments)) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith(f"error: {said}")
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--goodput", "speed:1"), "must be a name of ttft, tpot, e2e, a colon and milliseconds"),
        (("--extra-body=[]",), "must be a JSON object, got []"),
        (("--concurrency=1", "--request-rate=1"), "not allowed with argument --concurrency"),
        (("--duration=1", "--num-prompts=1"), "not allowed with argument"),
    ],
)
def test_wrong_options_are_refused(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(("serving", *arguments))
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_wrong_datasets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    empty, long = tmp_path / "empty.jsonl", tmp_path / "long.jsonl"
    empty.write_text("\n")
    long.write_text(json.dumps({"messages": turns}))
    with faking() as fake:
        for file, said in (
            (tmp_path / "none.jsonl", "cannot read the prompts of"),
            (empty, f"{empty} holds no prompts"),
            (long, "--endpoint completions takes prompts of one message"),
        ):
            assert main(serving(fake, f"--dataset={file}", "--endpoint=completions")) == 2
            output = capsys.readouterr()
            assert output.err.startswith(f"error: {said}") and output.err.count("\n") == 1
    assert fake.bodies == []


@pytest.mark.parametrize("text", ["{", "[1]", '{"results": 3}', "[" * 10_000 + "]" * 10_000])
def test_a_report_that_is_none(text: str, tmp_path: Path) -> None:
    file = tmp_path / "earlier.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--compare must name reports of `serving`"):
        read_line(file)


def test_a_plot_compares_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report: dict[str, Any] = {
        "label": "earlier",
        "results": [
            {
                "concurrency": concurrency,
                "request_rate": None if concurrency else 2.5,
                "output_tokens_per_second": 100.0,
                "itl_ms": itl,
            }
            for concurrency, itl in ((1, {"p99": 3.0}), (None, {"p99": 9.0}), (4, None))
        ],
    }
    earlier, plot = tmp_path / "earlier.json", tmp_path / "plot.png"
    earlier.write_text(json.dumps(report))
    with faking(interval=0.0) as fake:
        options = [f"--plot={plot}", "--compare", str(earlier), str(earlier), "--num-prompts=8"]
        assert main(serving(fake, *options)) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
