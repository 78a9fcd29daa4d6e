"""`bench serving` measures our own server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from server.running import NAME, Server

from mmtp_jax.bench.__main__ import main


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_our_own_server(
    server: Server, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"question": "number {number}"}}\n' for number in range(3)))
    prompts = [f"--dataset={file}"] if endpoint == "chat" else ["--random-ids", "5", "40"]
    arguments = [f"--base-url={server.url}/v1", "--concurrency", "1", "3", "--max-tokens=9"]
    arguments += ["--num-prompts=5", "--warm-up=1", "--random-input-len=4", "--ignore-eos"]
    assert main(["serving", *arguments, *prompts, "--processes=1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["server"]["model"] == NAME
    for one in report["results"]:
        assert one["failures"] == {} and one["succeeded"] == 5
        assert one["tokens_per_chunk"] == "usage" and one["output_tokens"] == 5 * 9
        assert one["input_tokens"] > 5 * 3 and one["cached_input_tokens"] is not None
        assert one["ttft_ms"]["p50"] > 0 and one["itl_ms"]["p99"] > 0
        accepted = one["acceptance"]
        assert len(accepted["rate"]) == 3 and 1 <= accepted["mean_length"] <= 4
        assert accepted["drafted"][0] == accepted["drafts"] > 0
        assert all(0 <= rate <= 1 for rate in accepted["rate"])
