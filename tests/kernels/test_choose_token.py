"""The kernel that chooses tokens against the sampler's XLA code ("triton" is interpreted on a CPU),
its lowering for CUDA, and the kernel on a GPU."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling.reference import make_state

from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.sampling.sampler import sample, sample_by_xla
from mmtp_jax.sampling.state import ROW_SIZE, SamplingState, write_masks
from pallas_kernels.aot import on_h200
from pallas_kernels.choose_token import Config, choose_token

R, S, L, PROMPT, WIDTH = 6, 8, 300, 250, 3
# Vocabularies that are no multiple of a block; the small one in many blocks.
CONFIGS = {300: Config(greedy_block=128, block=64, noise_block=32), 5000: Config()}

GREEDY = SamplingParams(temperature=0)
OPTIONS = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(top_k=5),
    "top_k above the vocabulary": SamplingParams(top_k=10_000),
    "top_p": SamplingParams(top_p=0.7),
    "tiny top_p": SamplingParams(top_p=1e-6),
    "min_p": SamplingParams(min_p=0.2),
    "all filters": SamplingParams(temperature=1.3, top_k=20, top_p=0.8, min_p=0.05),
    "bias": SamplingParams(temperature=0, logit_bias={3: 4.0, 7: 9.0}, banned_token_ids=[5]),
    "allowed": SamplingParams(allowed_token_ids=[1, 2, 290]),
    "min_tokens": SamplingParams(
        temperature=0, min_tokens=25, max_tokens=50, stop_token_ids=list(range(16))
    ),
    "repetition": SamplingParams(temperature=0, repetition_penalty=3.0),
    "frequency": SamplingParams(temperature=0, frequency_penalty=1.5),
    "presence": SamplingParams(temperature=0, presence_penalty=2.0),
    "negative penalties": SamplingParams(presence_penalty=-1.0, frequency_penalty=-0.7),
    "everything": SamplingParams(
        temperature=0.8,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        logit_bias={4: 3.0},
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        min_tokens=25,
        max_tokens=50,
        stop_token_ids=[2, 7],
    ),
}

by_xla = jax.jit(sample_by_xla)


@functools.cache
def by_kernel(vocab_size: int):  # type: ignore[no-untyped-def]
    def run(
        logits: jax.Array,
        state: SamplingState,
        slot: jax.Array,
        index: jax.Array,
        history: jax.Array,
    ) -> jax.Array:
        arrays = (state.rows, state.bias, state.masks, state.mask_start)
        return choose_token(logits, slot, index, *arrays, history, CONFIGS[vocab_size])

    return jax.jit(run)


@dataclasses.dataclass
class Batch:
    """Rows of R requests with random logits; the history after a row's index is random too."""

    logits: np.ndarray
    state: SamplingState
    slot: np.ndarray
    index: np.ndarray
    history: np.ndarray

    def tokens(self, function) -> np.ndarray:  # type: ignore[no-untyped-def]
        arrays = (self.logits, self.state, self.slot, self.index, self.history)
        return np.asarray(function(*arrays))

    def check(self) -> np.ndarray:
        got = self.tokens(by_kernel(self.logits.shape[1]))
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, self.tokens(by_xla))
        return got


def make(requests: list[SamplingParams], vocab_size: int = 300, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    requests = [dataclasses.replace(r, seed=int(rng.integers(2**32))) for r in requests]
    # Half of the history from a few tokens: some occur often.
    tokens = rng.integers(0, vocab_size, (R, L))
    few = rng.integers(0, 20, (R, L))
    return Batch(
        logits=rng.normal(scale=2.0, size=(S, vocab_size)).astype(np.float32),
        state=make_state(requests, vocab_size, prompt_lens=PROMPT, width=WIDTH),
        slot=rng.permutation(np.arange(S) % len(requests)).astype(np.int32),
        index=rng.integers(PROMPT, L, S).astype(np.int32),
        history=np.where(rng.random((R, L)) < 0.5, few, tokens).astype(np.int32),
    )


def mask(batch: Batch, share: float, seed: int) -> None:
    """Masks for the requests of even slots, from an index on that some rows have."""
    rng = np.random.default_rng(seed)
    slots = np.arange(0, R, 2, dtype=np.int32)
    starts = np.array([batch.index[batch.slot == s].max(initial=0) - 1 for s in slots], np.int32)
    allowed = rng.random((len(slots), WIDTH, batch.state.masks.shape[2] * 32)) < share
    words = np.packbits(allowed, axis=-1, bitorder="little").view(np.int32)
    batch.state = write_masks(batch.state, *map(jnp.asarray, (slots, starts, words)))


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(name: str) -> None:
    for seed in range(3):
        make([OPTIONS[name]] * R, seed=seed).check()


def test_mixed_rows_and_a_vocabulary_of_many_blocks() -> None:
    names = list(OPTIONS)
    for first in range(0, len(names), 4):
        batch = make([OPTIONS[n] for n in (names * 2)[first : first + R]], 5000, seed=first)
        batch.check()
        mask(batch, 0.02, first)
        batch.check()


@pytest.mark.parametrize("place", [0, PROMPT - 1, PROMPT, 279, 280], ids=str)
@pytest.mark.parametrize("name", ["repetition", "frequency", "presence"])
def test_penalties_count_the_past(name: str, place: int) -> None:
    """Token 42 is the best, and 9 once 42 counts: in the prompt or the output, before the index."""
    batch = make([OPTIONS[name]] * R)
    batch.logits[:], batch.index[:], batch.history[:] = 0.0, 280, 7
    batch.logits[:, 42], batch.logits[:, 9] = 1.0, 0.5
    batch.history[:, place] = 42
    counts = place < 280 if name == "repetition" else PROMPT <= place < 280
    assert (batch.check() == (9 if counts else 42)).all()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_parameters(data: st.DataObject) -> None:
    requests = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
            top_k=data.draw(st.sampled_from([0, 1, 2, 30, 299])),
            top_p=data.draw(st.sampled_from([1.0, 0.05, 0.5, 0.93])),
            min_p=data.draw(st.sampled_from([0.0, 0.03, 0.5, 1.0])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 0.7, 1.4])),
            frequency_penalty=data.draw(st.sampled_from([0.0, -0.9, 0.4])),
            presence_penalty=data.draw(st.sampled_from([0.0, -1.1, 0.6])),
            logit_bias=data.draw(st.sampled_from([None, {0: 5.0, 299: -3.0}])),
            min_tokens=data.draw(st.sampled_from([0, 25])),
            max_tokens=50,
            stop_token_ids=[0, 17, 299],
        )
        for _ in range(R)
    ]
    batch = make(requests, seed=data.draw(st.integers(0, 2**16)))
    share = data.draw(st.sampled_from([0.0, 0.05, 0.5]))
    if share:
        mask(batch, share, 1)
    batch.check()


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(top_k=1),
        SamplingParams(top_k=77),
        SamplingParams(top_k=150, top_p=0.3505, min_p=0.01),
        SamplingParams(top_p=0.3505),
        SamplingParams(top_p=1e-6),
        SamplingParams(temperature=0, logit_bias={299: 0.0}),
    ],
    ids=repr,
)
def test_of_equal_scores_the_lowest_ids_stay(params: SamplingParams, levels: int) -> None:
    for seed in range(6):
        batch = make([params] * R, seed=seed)
        ranks = np.random.default_rng(seed).integers(0, levels, batch.logits.shape)
        batch.logits = ranks.astype(np.float32)
        got = batch.check()
        if params.greedy or params.top_k == 1 or params.top_p < 1e-3:
            np.testing.assert_array_equal(got, batch.logits.argmax(axis=1))


def test_zeros_of_either_sign_are_equal() -> None:
    batch = make([SamplingParams(top_k=3), GREEDY] * (R // 2))
    batch.logits = np.where(np.arange(300) % 2, 0.0, -0.0).astype(np.float32) * np.ones((S, 1), "f")
    assert (batch.check() < 3).all()


@pytest.mark.parametrize("name", ["greedy", "temperature", "all filters", "everything"])
def test_tokens_of_minus_infinity_are_not_chosen(name: str) -> None:
    batch = make([OPTIONS[name]] * R)
    few = np.arange(300) % 97 != 5
    batch.logits[:, few] = -np.inf
    assert not few[batch.check()].any()
    batch.logits[:] = -np.inf  # nothing is left: the lowest id
    assert not batch.check().any()


def test_padding_rows_and_nan_change_nothing() -> None:
    names = ["greedy", "temperature", "all filters", "repetition", "everything", "bias"]
    batch = make([OPTIONS[name] for name in names])
    whole = batch.check()
    broken = np.arange(S) % 2 == 0
    for bad in (np.nan, np.inf, -np.inf):
        logits = batch.logits.copy()
        batch.logits = np.where(broken[:, None], np.float32(bad), logits)
        tokens = batch.tokens(by_kernel(300))
        batch.logits = logits
        assert ((tokens >= 0) & (tokens < 300)).all()
        np.testing.assert_array_equal(tokens[~broken], whole[~broken])
    batch.logits[broken, 10:] = np.nan  # some tokens only
    tokens = batch.tokens(by_kernel(300))
    assert ((tokens >= 0) & (tokens < 300)).all()
    batch.slot[broken], batch.index[broken] = R + np.arange(S // 2), -(2**31)
    np.testing.assert_array_equal(batch.tokens(by_kernel(300))[~broken], whole[~broken])


@pytest.mark.parametrize("vocab_size", [49152, 128256, 151669, 201024])
def test_lowers_for_cuda(vocab_size: int) -> None:
    """`sample` is one kernel and nothing else."""
    words = -(-vocab_size // 32)
    state = SamplingState(
        rows=jax.ShapeDtypeStruct((4, ROW_SIZE), jnp.int32),
        bias=jax.ShapeDtypeStruct((4, vocab_size), jnp.float32),
        masks=jax.ShapeDtypeStruct((4, 2, words), jnp.int32),
        mask_start=jax.ShapeDtypeStruct((4,), jnp.int32),
    )
    row = jax.ShapeDtypeStruct((16,), jnp.int32)
    logits = jax.ShapeDtypeStruct((16, vocab_size), jnp.float32)
    history = jax.ShapeDtypeStruct((4, 4096), jnp.int32)
    with on_h200():
        traced = jax.jit(sample).trace(logits, state, row, row, history)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton") and text.count("stablehlo.") == text.count("stablehlo.custom_call")


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [300, 5000])
def test_on_a_gpu(vocab_size: int) -> None:
    """Fresh random rows of every option, and of all of them together."""
    seed = int(np.random.default_rng().integers(2**31))
    names = list(OPTIONS)
    for first, name in enumerate(names):
        make([OPTIONS[name]] * R, vocab_size, seed + first).check()
        mixed = [OPTIONS[n] for n in (names * 2)[first : first + R]]
        batch = make(mixed, vocab_size, seed + first)
        mask(batch, 0.02, seed)
        batch.check()
