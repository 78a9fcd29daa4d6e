"""Drawing the target's tokens in chunks of rows, the sizes of programs, and modules in a scan or
unrolled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmtp_jax.config import EngineConfig
from mmtp_jax.engine import draw as draw_module
from mmtp_jax.engine.buckets import CPU_SPACING, GPU_SPACING, bucket_sizes, buckets
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.sampling.state import empty, host_row, write_slot
from mmtp_jax.speculative.propose import _over_depths


class Head:
    """A target of which only the head is needed."""

    def __init__(self, hidden: int, vocab_size: int) -> None:
        rng = np.random.default_rng(0)
        self.weight = jnp.asarray(rng.standard_normal((hidden, vocab_size)), jnp.float32)
        self.vocab_size = vocab_size
        self.rows: list[int] = []

    def logits(self, hidden: jax.Array) -> jax.Array:
        self.rows.append(hidden.shape[0])
        return hidden @ self.weight


def test_chunks_draw_what_all_rows_at_once_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    states = jnp.asarray(rng.standard_normal((150, 8)), jnp.float32)
    sampling = empty(4, 50)
    for slot, temperature in enumerate((0.0, 1.0, 0.5, 2.0)):
        row = host_row(SamplingParams(temperature=temperature), slot, 3)
        sampling = write_slot(sampling, slot, row)
    slot = jnp.asarray(rng.integers(0, 4, 150), jnp.int32)
    index = jnp.arange(150, dtype=jnp.int32)
    history = jnp.zeros((4, 200), jnp.int32)
    target = Head(8, 50)
    draw = draw_module.draw.__wrapped__  # the head is none of the annotated class
    whole = draw(target, states, sampling, slot, index, history)
    monkeypatch.setattr(draw_module, "LOGITS_AT_ONCE", 50 * 70)
    parts = draw(target, states, sampling, slot, index, history)
    assert target.rows == [150, 64, 64, 22]
    np.testing.assert_array_equal(parts, whole)
    assert len(set(np.asarray(whole).tolist())) > 10


def test_a_gpu_has_more_programs_and_none_of_few_rows() -> None:
    assert bucket_sizes(64, 1024, 1, 1, CPU_SPACING) == (1, 4, 16, 64, 256, 1024)
    assert bucket_sizes(64, 1024, 1, 1, GPU_SPACING) == (8, 32, 64, 96, 192, 384, 768, 1024)
    assert bucket_sizes(8, 512, 9, 1, GPU_SPACING) == (9, 36, 72, 108, 216, 432, 512)
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=1)
    (bucket,) = buckets(
        config, num_modules=0, width=1, num_groups=1, row_counts=(1,), spacing=GPU_SPACING
    )
    assert (bucket.num_rows, bucket.num_requests, bucket.logit_rows) == (8, 1, 1)


def test_unrolled_depths_do_what_the_scan_does() -> None:
    def step(carry: tuple, inputs: tuple) -> tuple[tuple, tuple]:
        weight, depth, number = inputs
        x = jnp.tanh(carry[0] * weight["w"]) + number
        return (x,), (x + depth, None)

    weights = {"w": jnp.linspace(0.5, 2.0, 12).reshape(3, 4)}
    start = (jnp.ones(4),)
    unrolled, scanned = (
        _over_depths.__wrapped__(step, start, weights, 2, 3, unroll) for unroll in (True, False)
    )
    for got, want in zip(jax.tree.leaves(unrolled), jax.tree.leaves(scanned), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    text = jax.jit(lambda: _over_depths.__wrapped__(step, start, weights, 2, 3, True))
    named = text.trace().lower().as_text(debug_info=True)
    assert all(f"mtp_{module}" in named for module in (2, 3, 4))
