"""Decoder layers of the oracle, over all positions at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from oracle_attention import Streams, convolved, grouped_query, latent, sigmoid
from oracle_parameters import Parameters

from mmtp_jax.specs import DenseSpec, LatentAttentionSpec, LayerSpec, MoESpec


@dataclass(frozen=True)
class LayerTrace:
    """Cache entries by position: `attention` holds "k" and "v" [T, Hkv, D] (latent attention: "k"
    [T, 1, rank + rope.dim]), `conv` the raw inputs "k", "v", "attention", "mlp" [T, C].

    `margin`: the smallest difference of scores that an expert was chosen by. Below the rounding
    error of float32 another choice is as good.
    """

    attention: Streams
    conv: Streams
    output: np.ndarray
    margin: float

    def first(self, count: int) -> LayerTrace:
        """The first `count` positions."""
        attention, conv = (
            {name: stream[:count] for name, stream in streams.items()}
            for streams in (self.attention, self.conv)
        )
        return LayerTrace(attention, conv, self.output[:count], self.margin)


def run_layer(p: Parameters, spec: LayerSpec, x: np.ndarray, ahead: int) -> LayerTrace:
    """One pre-norm block over x [T, H]; `ahead` as in `grouped_query`."""
    normed, inputs = p.norm("attention_norm", x), {}
    if isinstance(spec.attention, LatentAttentionSpec):
        mixed, cached = latent(p.at("attention"), spec.attention, normed)
    else:
        attention = p.at("attention"), spec.attention, spec.conv_taps
        mixed, cached, inputs = grouped_query(*attention, normed, ahead)
    if spec.conv_taps:
        inputs["attention"] = mixed
        mixed = convolved(p, "attention_conv", mixed)
    x = x + mixed
    normed, margin = p.norm("mlp_norm", x), np.inf
    if isinstance(spec.mlp, DenseSpec):
        mixed = dense(p.at("mlp"), spec.mlp, normed)
    else:
        mixed, margin = mixture(p.at("mlp"), spec.mlp, normed)
    if spec.conv_taps:
        inputs["mlp"] = mixed
        mixed = convolved(p, "mlp_conv", mixed)
    return LayerTrace(cached, inputs, x + mixed, margin)


def dense(p: Parameters, spec: DenseSpec, x: np.ndarray) -> np.ndarray:
    names = ("gate.kernel", "up.kernel", "down.kernel")
    y = gated(x, *(p[name] for name in names), limit=spec.limit)
    return y * p["scale"] if spec.global_scale else y


def mixture(p: Parameters, spec: MoESpec, x: np.ndarray) -> tuple[np.ndarray, float]:
    """Every expert over every row, weighted by zero where it was not chosen; and the margin."""
    scores = sigmoid(p.linear("router", x))
    routed, sinks = scores[:, : spec.num_experts], scores[:, spec.num_experts :]
    ranking, margin = routed, np.inf
    if spec.selection_bias:
        ranking = ranking + p["router.bias"]
    if spec.num_groups > 1:
        size = spec.num_experts // spec.num_groups
        groups = np.sort(ranking.reshape(len(x), spec.num_groups, size))[..., -2:].sum(axis=2)
        best, margin = top(groups, spec.top_groups)
        ranking = np.where(np.repeat(best, size, axis=1), ranking, -np.inf)
    chosen, clear = top(ranking, spec.top_k)
    weights = np.where(chosen, routed, 0.0)
    if spec.normalize:
        total = weights.sum(axis=1, keepdims=True) + sinks.sum(axis=1, keepdims=True)
        weights, sinks = weights / total, sinks / total
    scale = spec.scale * (p["router.scale"] if spec.global_scale else 1.0)
    y = np.zeros_like(x)
    for expert in range(spec.num_experts):
        y += (scale * weights)[:, [expert]] * stacked(p.at("experts"), expert, x, spec.limit)
    for expert in range(spec.num_sinks):
        y += (scale * sinks)[:, [expert]] * stacked(p.at("sinks"), expert, x, None)
    if spec.shared is not None:
        y += dense(p.at("shared"), spec.shared, x)
    return y, min(margin, clear)


def top(scores: np.ndarray, count: int) -> tuple[np.ndarray, float]:
    """Marks the `count` best of each row (the first of equals); and by how much they are better
    than the rest."""
    order = np.argsort(-scores, axis=1, kind="stable")
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, order[:, :count], True, axis=1)
    if count == scores.shape[1]:
        return chosen, np.inf
    edge = np.take_along_axis(scores, order[:, count - 1 : count + 1], axis=1)
    return chosen, float(np.min(edge[:, 0] - edge[:, 1]))


def stacked(p: Parameters, expert: int, x: np.ndarray, limit: float | None) -> np.ndarray:
    return gated(x, *(p[name][expert] for name in ("gate", "up", "down")), limit=limit)


def gated(
    x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray, *, limit: float | None
) -> np.ndarray:
    opened, passed = x @ gate, x @ up
    opened = opened * sigmoid(opened)
    if limit is not None:
        opened, passed = np.minimum(opened, limit), np.clip(passed, -limit, limit)
    return (opened * passed) @ down
