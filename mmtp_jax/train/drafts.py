"""Which tokens of finished texts the modules would have drafted, and what speculation makes of it.

A draft is a function of the committed tokens before it and, beyond those, of drafts that were right
if it counts at all. So the modules' teacher-forced choices say exactly what a decoding engine does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from mmtp_jax.engine.stats import Acceptance
from mmtp_jax.models.model import ModelGraph, Params
from mmtp_jax.sampling.sampler import sample
from mmtp_jax.sampling.state import SamplingState, empty
from mmtp_jax.train.batches import Shape, load
from mmtp_jax.train.chain import module_states, target_states
from mmtp_jax.train.loss import ANCHORS_AT_ONCE, Anchors
from mmtp_jax.train.options import PAGE
from mmtp_jax.train.shards import Dataset
from mmtp_jax.train.step import Batch

# Of a batch, padding included; a longer text is a batch of its own.
_BATCH_TOKENS = 16384


class Drafts:
    """The modules' drafts for texts of a model.

    All texts of a call are padded to one length, a power of two: each shape of a batch is a program
    of its own, and compiling one takes a GPU as long as thousands of texts.
    """

    def __init__(self, graph: ModelGraph) -> None:
        self._program = jax.jit(functools.partial(_hits, graph))

    def hits(
        self, params: Params, data: Dataset, chosen: Sequence[int], rows: Int32[np.ndarray, "X C"]
    ) -> Iterator[tuple[int, Bool[np.ndarray, "N L"]]]:
        """Of every chosen sample, its place in `chosen` and whether each module's draft is the
        token at each index.

        `rows` are the packed sampling parameters of the chosen samples (`sampling.state.host_row`).
        """
        longest = max(int(data.lengths[index]) for index in chosen)
        length = max(_power_of_two(longest), PAGE)
        sequences = min(max(_BATCH_TOKENS // length, 1), _power_of_two(len(chosen)))
        shape = Shape(sequences, length, sequences * length)
        for first in range(0, len(chosen), sequences):
            part = chosen[first : first + sequences]
            packed = np.zeros((sequences, rows.shape[1]), np.int32)
            packed[: len(part)] = rows[first : first + len(part)]
            batch = load(data, shape, [part])
            found = np.asarray(self._program(params, batch, packed))
            at, owner = np.asarray(batch.at[0]), np.asarray(batch.row[0]) // length
            for place, index in enumerate(part):
                own = (at > 0) & (owner == place)
                hits = np.zeros((found.shape[0], int(data.lengths[index])), bool)
                hits[:, at[own]] = found[:, own]
                yield first + place, hits


def _power_of_two(number: int) -> int:
    """The smallest one that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _hits(
    graph: ModelGraph, params: Params, batch: Batch, packed: Int32[Array, "B C"]
) -> Bool[Array, "N A"]:
    """Whether each module's draft for each anchor is the token there."""
    mtp = graph.config.mtp
    assert mtp is not None
    model = graph.bind(params)
    tokens, anchors = batch.tokens[0], Anchors(batch.row[0], batch.token[0], batch.at[0])
    raw, normed = target_states(graph, model, tokens)
    states = module_states(graph, model, tokens, raw if mtp.target_hidden == "pre" else normed)
    rows, there = anchors.rows_of(mtp.num_modules)
    states = jax.vmap(lambda own, row: own[row])(states, rows)
    neutral = empty(packed.shape[0], graph.config.vocab_size)
    sampling = SamplingState(packed, neutral.bias, neutral.masks, neutral.mask_start)

    def drafted(piece: tuple[Array, ...]) -> Bool[Array, " size"]:
        states, row, token, at = piece
        slot = row // tokens.shape[1]
        logits = model.target.logits(states)
        return sample(logits, sampling, slot, at, tokens) == token

    def hit(piece: tuple[Array, ...]) -> Bool[Array, " size"]:
        at = piece[-1]  # all zero in the padding at the end
        return jax.lax.cond(jnp.any(at > 0), drafted, lambda _: jnp.zeros_like(at, bool), piece)

    size = min(ANCHORS_AT_ONCE, anchors.row.shape[0])

    def of_module(states: Array) -> Bool[Array, " A"]:
        pieces = jax.tree.map(
            lambda array: array.reshape(-1, size, *array.shape[1:]),
            (states, *anchors),
        )
        return jax.lax.map(hit, pieces).reshape(-1)

    return jax.lax.map(of_module, states) & there


def walk(
    hits: Bool[np.ndarray, "N L"], first: int, *, stopped: bool, acceptance: Acceptance
) -> None:
    """Count the verifications of a text in `acceptance`, as an engine would make them.

    The prompt has `first` tokens, and the step that ends it emits the token at that index.
    `stopped`: the last token is a stop token, and drafts past it do not count.
    """
    num_modules, length = hits.shape
    newest = first
    while newest < length - 1:
        remaining = length - 1 - newest
        accepted = 0
        while accepted < min(num_modules, remaining - 1) and hits[accepted, newest + 1 + accepted]:
            accepted += 1
        ends = accepted == remaining - 1
        drafted = num_modules
        if ends or not stopped:
            drafted = min(num_modules, remaining - 1)
        acceptance.count(drafted, accepted)
        newest += accepted + 1


def tokens_per_verification(acceptance: Acceptance) -> float:
    """Tokens emitted per verification of one draft or more."""
    verified = acceptance.drafted[0] if acceptance.num_drafts else 0
    return 1.0 + sum(acceptance.accepted) / verified if verified else 1.0
