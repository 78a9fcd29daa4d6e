"""The sampler: position-keyed Gumbel coupling (drafter-invariant speculation, arXiv 2408.07978).

The token at index i of a sequence is argmax(filtered log p_i + G(seed, i)) with counter-based
Gumbel noise G: a draw from p_i (the Gumbel-max trick) that depends on the prompt, the parameters
and the seed alone. Drafts are chosen by the same function, hence with the same noise, from the
module's logits; a draft is accepted iff it equals the target's own token, so speculation never
changes text. Greedy is the case without noise. Dims: S rows of a step, R slots, V vocabulary,
L longest history.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float32, Int32, UInt32

from mmtp_jax.sampling.filters import filter_scores
from mmtp_jax.sampling.params import MAX_LOGPROBS
from mmtp_jax.sampling.processors import apply_if, changes_logits, process
from mmtp_jax.sampling.state import RowParams, SamplingState, mask_column, params_of
from pallas_kernels.choose_token import choose_token


def sample(
    logits: Float32[Array, "S V"],
    state: SamplingState,
    slot: Int32[Array, " S"],
    index: Int32[Array, " S"],
    history: Int32[Array, "R L"],
) -> Int32[Array, " S"]:
    """Choose the token at `index` of each row's sequence (arguments as for `process`).

    A row's token depends on its logits, parameters, index and history alone: not on other rows, S
    or the slot's number. Rows whose slot is R or more are padding; their tokens mean nothing. Ties
    go to the lowest id. Logits that are NaN give some id of the vocabulary.

    On a GPU this is one kernel: there a step would pay more for its conditionals than for its
    products. Devices that share the vocabulary run the code below, which XLA can divide.
    """
    if uses_kernel():
        return choose_token(
            logits,
            slot,
            index,
            state.rows,
            state.bias,
            state.masks,
            state.mask_start,
            history,
        )
    return sample_by_xla(logits, state, slot, index, history)


def uses_kernel() -> bool:
    """Whether tokens are chosen by a kernel: on a GPU, unless devices share the vocabulary."""
    return jax.default_backend() == "gpu" and jax.sharding.get_abstract_mesh().empty


def sample_by_xla(
    logits: Float32[Array, "S V"],
    state: SamplingState,
    slot: Int32[Array, " S"],
    index: Int32[Array, " S"],
    history: Int32[Array, "R L"],
) -> Int32[Array, " S"]:
    """`sample`, on any platform and any number of devices."""
    params = params_of(state, slot)

    def processed() -> Int32[Array, " S"]:
        scores = process(logits, state, slot, index, history)
        return _argmax(_add_noise(filter_scores(scores, params), params, index))

    # The branches return tokens, not logits: a plain greedy step copies nothing of size V.
    tokens: Array = lax.cond(
        jnp.any(changes_logits(params, mask_column(state, slot, index), index)),
        processed,
        lambda: _argmax(logits),
    )
    return tokens


def logprobs(
    logits: Float32[Array, "S V"], tokens: Int32[Array, " S"]
) -> tuple[Float32[Array, " S"], Int32[Array, "S 20"], Float32[Array, "S 20"]]:
    """Log-probabilities under the model's raw logits, before any processing.

    Returns those of `tokens`, and the ids and values of the 20 best tokens, best first (ids -1 and
    values -inf beyond a smaller vocabulary).
    """
    values = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(values, tokens[:, None], axis=1)[:, 0]
    num_top = min(MAX_LOGPROBS, logits.shape[1])
    top_values, top_ids = lax.top_k(values, num_top)
    padding = ((0, 0), (0, MAX_LOGPROBS - num_top))
    return (
        chosen,
        jnp.pad(top_ids, padding, constant_values=-1),
        jnp.pad(top_values, padding, constant_values=-jnp.inf),
    )


def _argmax(scores: Float32[Array, "S V"]) -> Int32[Array, " S"]:
    return jnp.argmax(scores, axis=1).astype(jnp.int32)


def _add_noise(
    scores: Float32[Array, "S V"], params: RowParams, index: Int32[Array, " S"]
) -> Float32[Array, "S V"]:
    sampled = params.temperature > 0

    def add(scores: Float32[Array, "S V"]) -> Float32[Array, "S V"]:
        noise = gumbel_noise(params.seed, index, scores.shape[1])
        return jnp.where(sampled[:, None], scores + noise, scores)

    return apply_if(sampled, add, scores)


def gumbel_noise(
    seed: UInt32[Array, " S"], index: Int32[Array, " S"], vocab_size: int
) -> Float32[Array, "S {vocab_size}"]:
    """Standard Gumbel noise of each (seed, index), always finite.

    The generator is named because a batch of the platform's default one may not be row-invariant.
    Mode "high" reaches 44 instead of 16: tokens less likely than 1e-7 can be drawn, and a large
    vocabulary has many of them.
    """

    def row(seed: UInt32[Array, ""], index: Int32[Array, ""]) -> Float32[Array, " V"]:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), index)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="high")

    return jax.vmap(row)(seed, index)
