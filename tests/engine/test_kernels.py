"""The engine as on a GPU: interpreted kernels for attention, writes and the choice of tokens,
modules one after the other instead of a scan, two steps dispatched ahead. Checked against the
oracle like any other engine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import pytest
from engine.harness import GREEDY, Harness
from engine.models import chain, hybrid, narrow
from engine.suite import prompt

import mmtp_jax.engine.core as core
import mmtp_jax.engine.device as device
import mmtp_jax.models.attention as attention
import mmtp_jax.models.latent_attention as latent_attention
import mmtp_jax.models.visit as visit
import mmtp_jax.sampling.sampler as sampler
from mmtp_jax.sampling.params import SamplingParams

MODELS = {
    "chain": functools.partial(chain, 2),
    "windows": functools.partial(narrow, 2),
    "convolutions": hybrid,
}
INTERPRETED = {
    attention: ("ragged_paged_attention", "rotate_and_write"),
    latent_attention: ("ragged_paged_attention",),
}


@pytest.fixture(
    scope="module",
    params=["chain", *(pytest.param(name, marks=pytest.mark.slow) for name in list(MODELS)[1:])],
)
def engine(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with pytest.MonkeyPatch.context() as patch:
        for module, names in INTERPRETED.items():
            for name in names:
                kernel = functools.partial(getattr(module, name), implementation="triton")
                patch.setattr(module, name, kernel)
        patch.setattr(visit, "kernels", lambda: "triton")
        patch.setattr(sampler, "uses_kernel", lambda: True)
        patch.setattr(core, "steps_ahead", lambda: 2)
        patch.setattr(device, "unrolls_modules", lambda: True)
        jax.clear_caches()  # layers were traced with other implementations, and will be
        yield Harness(MODELS[request.param](), page_size=4)
    jax.clear_caches()


def test_concurrent_requests_chunks_and_rejections(engine: Harness) -> None:
    engine.reset()
    engine.chunk = lambda request, limit: min(3, limit)
    engine.add(prompt(11, 1))
    engine.add(prompt(5, 2), SamplingParams(temperature=0.0, max_tokens=6))
    engine.add(prompt(9, 3), GREEDY)
    engine.run()


def test_a_prefix_is_reused(engine: Harness) -> None:
    engine.reset()
    engine.chunk = lambda request, limit: limit
    engine.generate(prompt(14, 4), GREEDY)
    engine.generate(prompt(14, 4), GREEDY)
    assert engine.deltas[-1].num_cached_tokens > 0
