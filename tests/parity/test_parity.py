"""Every family against an independent implementation (see make_goldens.py), in float32.

Scores, module by module, and a greedy continuation that speculation must not change.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmtp_jax import LLM, SamplingParams
from mmtp_jax.engine.buckets import Bucket
from mmtp_jax.engine.programs import Programs

GOLDENS = Path(__file__).parent / "goldens"
NAMES = sorted(path.name for path in GOLDENS.iterdir())
TOLERANCE = 5e-5  # of the largest logit


def load(name: str, **options: object) -> LLM:
    """An engine of one small program; every window and chunk size is another."""
    return LLM(
        str(GOLDENS / name),
        dtype="float32",
        progress=False,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        row_multiple=32,
        page_size=4,
        num_pages=65,
        **options,
    )


@pytest.fixture
def one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that also return logits, for scores, run all requests: half as much is compiled."""
    compile_step = Programs._compile_step

    def collecting(self: Programs, bucket: Bucket, collect: bool = True) -> object:
        return compile_step(self, bucket, collect=True)

    def step(self: Programs, bucket: Bucket, *, collect: bool = False) -> object:
        return self._steps[bucket]

    monkeypatch.setattr(Programs, "_compile_step", collecting)
    monkeypatch.setattr(Programs, "step", step)


def check_close(got: np.ndarray, want: np.ndarray) -> None:
    known = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), known)
    error = np.abs(got - want)[known].max()
    assert error <= TOLERANCE * np.abs(want[known]).max()


def greedy(llm: LLM, golden: dict[str, np.ndarray]) -> list[int]:
    """As many tokens as the golden continuation has."""
    params = SamplingParams(
        temperature=0.0, max_tokens=len(golden["continuation"]), ignore_eos=True
    )
    (output,) = llm.generate([golden["prompt"].tolist()], params)
    return list(output.outputs[0].token_ids)


# What other goldens cover too: compiling takes most of a test's time.
COVERED = ("llama_tied", "mimo")
# Its text is that of a program of its own, as in use.
APART = "inkling_chain_norm"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in COVERED else ()) for name in NAMES],
)
def test_scores_and_greedy_text(name: str, request: pytest.FixtureRequest) -> None:
    if name != APART:
        request.getfixturevalue("one_program")
    golden = dict(np.load(GOLDENS / name / "golden.npz"))
    with load(name) as llm:
        scores = llm.score(golden["tokens"].tolist())
        check_close(scores["logits"], golden["logits"])
        assert len(scores["mtp_logits"]) == len(golden["module_logits"])
        for got, want in zip(scores["mtp_logits"], golden["module_logits"], strict=True):
            check_close(got, want)
        assert greedy(llm, golden) == golden["continuation"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("inkling", {"mtp_embed_norm": False}, "module_logits_raw_embed"),
        (
            "step3p5",
            {"mtp_target_hidden": "post", "mtp_feed": "chain_post"},
            "module_logits_post",
        ),
    ],
)
def test_wirings_that_engines_disagree_about(
    name: str, overrides: dict[str, object], expected: str
) -> None:
    golden = dict(np.load(GOLDENS / name / "golden.npz"))
    with load(name, hf_overrides=overrides) as llm:
        scores = llm.score(golden["tokens"].tolist())
    for got, want in zip(scores["mtp_logits"], golden[expected], strict=True):
        check_close(got, want)
