"""What is drawn: distributions, independence, and lossless speculation through shared noise.

131072 draws a case, over (seed, index) pairs, against exact probabilities by a chi-square test at
the 0.9999 quantile.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling.reference import make_state, probabilities, processed

from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.sampling.sampler import sample
from mmtp_jax.sampling.state import SamplingState

V = 12
SEEDS, INDICES = 1024, 128
FIRST = 8  # indices are FIRST .. FIRST + INDICES - 1
LOGITS = np.random.default_rng(7).normal(scale=1.5, size=V).astype(np.float32)
PROMPT_LEN = 3
HISTORY = [0, 5, 5, 1, 1, 1, 5, 9]

run = jax.jit(sample)


def limit(degrees: int) -> float:
    """The 0.9999 quantile of the chi-square distribution, by Wilson and Hilferty."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.719 * spread**0.5) ** 3


def assert_drawn_from(counts: np.ndarray, distribution: np.ndarray) -> None:
    """Chi-square; the rarest outcomes are pooled until at least ten of them are expected."""
    expected = counts.sum() * distribution
    assert counts[expected == 0].sum() == 0, "an impossible outcome was drawn"
    order = np.argsort(expected)
    pooled = int(np.searchsorted(np.cumsum(expected[order]), 10.0))
    starts = [0, *range(pooled + 1, len(order))]
    expected = np.add.reduceat(expected[order], starts)
    counts = np.add.reduceat(counts[order], starts)
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert len(starts) > 1
    assert statistic < limit(len(starts) - 1)


def slots(params: SamplingParams) -> SamplingState:
    """SEEDS slots with the same parameters and seeds 0, 1, 2, ..."""
    one = make_state([params], V, prompt_lens=PROMPT_LEN)
    state = jax.tree.map(lambda leaf: jnp.repeat(leaf, SEEDS, axis=0), one)
    seeds = make_state([SamplingParams(seed=s) for s in (0, 1)], V).rows
    column = int(np.flatnonzero(np.asarray(seeds[0] != seeds[1]))[0])
    return dataclasses.replace(state, rows=state.rows.at[:, column].set(jnp.arange(SEEDS)))


def draw(params: SamplingParams, logits: np.ndarray) -> np.ndarray:
    """Tokens [SEEDS, INDICES], all drawn from the logits [V].

    Ids outside the vocabulary, which count for nothing, fill the history behind HISTORY.
    """
    rows = np.broadcast_to(logits, (SEEDS * INDICES, V))
    slot, index = np.divmod(np.arange(SEEDS * INDICES), INDICES)
    history = np.full((SEEDS, FIRST + 4), V, np.int32)
    history[:, :FIRST] = HISTORY
    tokens = run(
        jnp.asarray(rows, jnp.float32),
        slots(params),
        jnp.asarray(slot, jnp.int32),
        jnp.asarray(FIRST + index, jnp.int32),
        jnp.asarray(history),
    )
    return np.asarray(tokens).reshape(SEEDS, INDICES)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.3},
        {"temperature": 1.0},
        {"temperature": 2.0},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 2.0, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.9},
        {"repetition_penalty": 1.8},
        {"temperature": 0.7, "presence_penalty": -0.5, "frequency_penalty": 0.5, "top_p": 0.9},
        {"logit_bias": {2: 2.0, 4: -1.0}},
        {"banned_token_ids": [0, 1], "top_k": 5},
        {"min_tokens": 15, "max_tokens": None, "stop_token_ids": [1]},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(options: dict[str, object]) -> None:
    params = SamplingParams(**options)
    tokens = draw(params, LOGITS)
    if params.min_tokens:
        tokens = tokens[:, : PROMPT_LEN + params.min_tokens - FIRST]
    scores = processed(LOGITS, params, HISTORY, PROMPT_LEN)
    distribution = probabilities(scores, params)
    assert_drawn_from(np.bincount(tokens.ravel(), minlength=V), distribution)


@pytest.fixture(scope="module")
def plain() -> np.ndarray:
    return draw(SamplingParams(), LOGITS)


@pytest.mark.parametrize("across", ["indices", "seeds", "both", "opposite"])
def test_draws_are_independent(plain: np.ndarray, across: str) -> None:
    first, second = {
        "indices": (plain[:, :-1], plain[:, 1:]),
        "seeds": (plain[:-1], plain[1:]),
        "both": (plain[:-1, :-1], plain[1:, 1:]),
        "opposite": (plain[:-1, 1:], plain[1:, :-1]),
    }[across]
    pairs = np.bincount(first.ravel() * V + second.ravel(), minlength=V * V)
    distribution = probabilities(np.float64(LOGITS), SamplingParams())
    likely = np.argsort(-distribution)[:8]  # rare pairs are too few for the test
    table = pairs.reshape(V, V)[np.ix_(likely, likely)]
    joint = np.outer(distribution[likely], distribution[likely])
    assert_drawn_from(table.ravel(), (joint / joint.sum()).ravel())


def test_seeds_that_differ_by_little_give_other_texts(plain: np.ndarray) -> None:
    assert len({text.tobytes() for text in plain}) == SEEDS


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_acceptance_of_coupled_drafts(temperature: float) -> None:
    """Drafts from q with the noise of p agree with p's tokens about as often as can be.

    Bounds: (1 - TV) / (1 + TV) from below (Daliri et al., arXiv 2408.07978), 1 - TV from above.
    """
    params = SamplingParams(temperature=temperature)
    draft_logits = LOGITS + np.random.default_rng(8).normal(scale=0.5, size=V).astype(np.float32)
    tokens, drafts = draw(params, LOGITS), draw(params, draft_logits)
    p = probabilities(processed(LOGITS, params, HISTORY, PROMPT_LEN), params)
    q = probabilities(processed(draft_logits, params, HISTORY, PROMPT_LEN), params)
    distance = np.abs(p - q).sum() / 2
    accepted = (tokens == drafts).mean()
    error = 4 * 0.5 / np.sqrt(tokens.size)
    assert (1 - distance) / (1 + distance) - error < accepted < 1 - distance + error
    assert accepted > p[np.argmax(q)] + error, "one-hot drafts would do as well"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_speculation_does_not_change_the_text(options: dict[str, float], num_drafts: int) -> None:
    """A first-order model and a worse drafter: propose, verify, emit; the text is the plain one."""
    random = np.random.default_rng(9)
    target = random.normal(scale=2, size=(V, V)).astype(np.float32)
    drafter = (target + random.normal(scale=0.7, size=(V, V))).astype(np.float32)
    params = SamplingParams(**options)
    state = make_state([params] * 2, V, prompt_lens=1)
    length = 60

    def choose(table: np.ndarray, text: list[int], index: list[int]) -> list[int]:
        """The tokens at `index`, each from the token before it; padded to four rows of slot 0."""
        padded = np.array(index + [1] * (4 - len(index)))
        history = np.zeros((2, length + 8), np.int32)
        history[0, : len(text)] = text
        slot = np.where(np.arange(4) < len(index), 0, 2)
        tokens = run(
            jnp.asarray(table[history[0, padded - 1]]),
            state,
            jnp.asarray(slot, jnp.int32),
            jnp.asarray(padded, jnp.int32),
            jnp.asarray(history),
        )
        return np.asarray(tokens)[: len(index)].tolist()

    plain = [0]
    while len(plain) < length:
        plain += choose(target, plain, [len(plain)])

    text, steps = [0], 0
    while len(text) < length:
        window = list(text)
        for _ in range(num_drafts):
            window += choose(drafter, window, [len(window)])
        own = choose(target, window, list(range(len(text), len(window) + 1)))
        drafts = window[len(text) :]
        accepted = 0
        while accepted < num_drafts and own[accepted] == drafts[accepted]:
            accepted += 1
        text += own[: accepted + 1]
        steps += 1
    assert text[:length] == plain
    assert steps < 0.8 * length, "hardly any draft was accepted"
