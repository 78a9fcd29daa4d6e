"""Teacher-forced drafts of texts do not depend on the texts beside them."""

from __future__ import annotations

import numpy as np
import pytest
from engine.models import VOCAB, chain, random_values

from mmtp_jax.models.model import assemble, model_graph
from mmtp_jax.sampling.state import NEUTRAL_ROW
from mmtp_jax.train import drafts
from mmtp_jax.train.drafts import Drafts
from mmtp_jax.train.shards import Dataset

LENGTHS = np.array([60, 300, 20, 64], np.int32)


def test_texts_together_are_drafted_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Four texts of up to 64 tokens, or one text longer than a batch.
    monkeypatch.setattr(drafts, "_BATCH_TOKENS", 256)
    graph = model_graph(chain(2))
    params = assemble(graph, random_values(graph))
    data = Dataset(
        all_tokens=np.random.default_rng(0).integers(0, VOCAB, LENGTHS.sum()).astype(np.uint16),
        lengths=LENGTHS,
        prompt_lengths=np.array([1, 40, 5, 60], np.int32),
        temperatures=np.zeros(4, np.float32),
        vocab_size=VOCAB,
    )

    program = Drafts(graph)  # one program for each shape of a batch

    def hits(chosen: list[int]) -> dict[int, np.ndarray]:
        rows = np.tile(NEUTRAL_ROW, (len(chosen), 1))
        found = program.hits(params, data, chosen, rows)
        return {chosen[place]: own for place, own in found}

    together = hits([1, 2, 0, 3])
    assert sorted(together) == [0, 1, 2, 3]
    assert sum(own.sum() for own in together.values()) > 5
    for index, own in together.items():
        assert own.shape == (2, LENGTHS[index])
        assert not own[:, : data.prompt_lengths[index]].any()
        np.testing.assert_array_equal(own, hits([index])[index])
    np.testing.assert_array_equal(hits([2, 3])[3], together[3])
