"""Greedy text does not depend on speculation, chunks, prefix hits or preemption: bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from parity.test_parity import GOLDENS, NAMES

from mmtp_jax import LLM, SamplingParams

WITH_MODULES = [
    name for name in NAMES if len(np.load(GOLDENS / name / "golden.npz")["module_logits"])
]


def texts(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    found = []
    for output in llm.generate(prompts, params):
        sample = output.outputs[0]
        assert sample.logprobs is not None
        chosen = [entry.chosen for entry in sample.logprobs]
        found.append((list(sample.token_ids), chosen))
    return found


def run(name: str, drafts: int, **options: object) -> list[tuple[list[int], list[float]]]:
    golden = np.load(GOLDENS / name / "golden.npz")
    tokens = golden["tokens"].tolist()
    # Common beginnings (prefix hits) and different lengths, several waves of them.
    prompts = [tokens[: 9 + 3 * (index % 5)] + tokens[: index % 3] for index in range(7)]
    with LLM(
        str(GOLDENS / name),
        dtype="float32",
        progress=False,
        row_multiple=64,
        speculative_config={"num_speculative_tokens": drafts},
        **options,
    ) as llm:
        first = texts(llm, prompts)
        assert texts(llm, prompts) == first, "a second run over cached prefixes differs"
        if options.get("num_pages"):
            assert llm.core.scheduler.num_preemptions > 0
        return first


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_MODULES)
def test_any_number_of_drafts(name: str) -> None:
    """Three requests in steps that hold just their windows, pages of 2 positions, pools that
    preempt."""
    modules = len(np.load(GOLDENS / name / "golden.npz")["module_logits"])
    plain = run(name, 0, max_num_batched_tokens=64)  # one program of 64 rows, as all others here
    tight = {"max_num_seqs": 3, "page_size": 2, "max_model_len": 64, "num_pages": 34}
    counts = [*range(1, modules + 1)] if modules > 1 else [1, 2, 4]
    for drafts in [0, *counts]:
        got = run(name, drafts, max_num_batched_tokens=max(7, 3 * (drafts + 1)), **tight)
        assert got == plain
