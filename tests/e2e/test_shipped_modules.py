"""The modules in `checkpoints/`: what they promise, and that the default model uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.test_smollm2 import ANSWER_IDS, PROMPTS, QUESTION
from models_for_tests import smollm2_path

from mmtp_jax import LLM, SamplingParams
from mmtp_jax.modules.checkpoint import open_modules
from mmtp_jax.modules.default import DEFAULT_MODULES, default_modules
from mmtp_jax.weights.resolve import DEFAULT_MODEL

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
MOST_BYTES = 34_000_000
SECTIONS = ("## Data", "## Recipe", "## Acceptance", "## Cost", "## Licence")
MORE_PROMPTS = tuple(
    f"Tell me {count} facts about {topic}."
    for count in (2, 3, 5)
    for topic in ("rain", "Rome", "iron", "bees", "chess", "music", "tea", "Mars", "bread", "maps")
)


@pytest.mark.parametrize("name", DEFAULT_MODULES.values())
def test_are_small_and_have_a_card(name: str) -> None:
    folder = CHECKPOINTS / name
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES
    card = (folder / "README.md").read_text()
    assert all(section in card for section in SECTIONS)
    assert open_modules(folder).num_speculative_tokens >= 1


def engine(**speculative: Any) -> LLM:
    """The default model as the name has it, with the shape in which bits are equal."""
    return LLM(
        dtype="float32",
        max_model_len=256,
        max_num_seqs=7,
        max_num_batched_tokens=64,
        row_multiple=64,
        speculative_config=speculative or None,
        progress=False,
    )


def test_the_default_model_speculates_and_gives_the_known_answer() -> None:
    smollm2_path()  # where the name is looked up
    assert default_modules(DEFAULT_MODEL) == CHECKPOINTS / DEFAULT_MODULES[DEFAULT_MODEL]
    with engine() as llm:
        assert llm.model_config.num_drafts >= 1
        (output,) = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=len(ANSWER_IDS)))
        assert llm.core.stats.tokens_per_step >= 1.5
    assert list(output.token_ids) == ANSWER_IDS


@pytest.mark.slow
def test_fifty_prompts_have_the_text_of_plain_decoding() -> None:
    """Greedy and sampled."""
    params = [SamplingParams(temperature=t, seed=1, max_tokens=48) for t in (0.0, 1.0)]
    prompts = (*PROMPTS, *MORE_PROMPTS)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts for _ in params]
    each = params * len(prompts)
    smollm2_path()
    with engine() as llm:
        speculative = llm.chat(chats, each)
        assert llm.core.stats.tokens_per_step >= 1.5
    with engine(method=None) as llm:
        plain = llm.chat(chats, each)
    for ours, theirs in zip(speculative, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
