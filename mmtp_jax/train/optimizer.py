"""What makes steps of derivatives: AdamW or Muon, after a warm-up and along a cosine."""

from __future__ import annotations

import optax
from optax.contrib import MuonDimensionNumbers, muon

from mmtp_jax.models.leaves import Leaf
from mmtp_jax.models.model import ModelGraph
from mmtp_jax.train.options import FitOptions
from mmtp_jax.train.step import trained_leaves

_SECOND_MOMENT = 0.95
_MOMENTUM = 0.95

# The root mean square of Muon's steps, relative to the learning rate: about that of AdamW's
# (Moonlight, arXiv 2502.16982, section 2.2).
_RMS = 0.2

# Axes along which an array holds matrices of their own: depths and experts.
_SEPARATE = frozenset({None, "experts", "sinks"})


def optimizer_for(
    graph: ModelGraph, options: FitOptions, total: int
) -> optax.GradientTransformation:
    """The optimiser of the modules' parameters for a training of `total` steps.

    `options.optimizer` "muon" takes steps with equal singular values for every matrix (Jordan et
    al. 2024, https://kellerjordan.github.io/posts/muon; arXiv 2502.16982), and AdamW's for what is
    none: norms, biases, convolutions. Weights decay in matrices only.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=options.learning_rate,
        warmup_steps=min(options.warmup, total - 1),
        decay_steps=total,
        end_value=options.final_rate * options.learning_rate,
    )
    matrices = tuple(_matrix(leaf) for leaf in trained_leaves(graph))
    if options.optimizer == "muon":
        rule = muon(
            schedule,
            beta=_MOMENTUM,
            weight_decay=options.weight_decay,
            adam_b2=_SECOND_MOMENT,
            muon_weight_dimension_numbers=lambda _masters: matrices,
            consistent_rms=_RMS,
        )
    else:
        rule = optax.adamw(
            schedule,
            b2=_SECOND_MOMENT,
            weight_decay=options.weight_decay,
            mask=tuple(matrix is not None for matrix in matrices),
        )
    return optax.chain(optax.clip_by_global_norm(options.clip), rule)


def _matrix(leaf: Leaf) -> MuonDimensionNumbers | None:
    """Which axes of an array are the inputs and outputs of its matrices; None if it holds none."""
    own = [axis for axis, name in enumerate(leaf.axes) if name not in _SEPARATE]
    if len(own) < 2 or "taps" in leaf.axes or leaf.names[0].endswith(".bias"):
        return None
    return MuonDimensionNumbers(own[0], own[-1])
