"""Attention of the oracle, over all positions at once: nothing is paged, cached or absorbed."""

from __future__ import annotations

import numpy as np
from oracle_parameters import Parameters
from oracle_rotary import rotated

from mmtp_jax.specs import AttentionSpec, LatentAttentionSpec, LogScaling

LATENT_EPS = 1e-6  # of the norms inside latent attention

Streams = dict[str, np.ndarray]


def grouped_query(
    p: Parameters, spec: AttentionSpec, taps: int, x: np.ndarray, ahead: int
) -> tuple[np.ndarray, Streams, Streams]:
    """Output [T, H]; cached keys and values [T, Hkv, D]; raw inputs [T, C] of the convolutions.

    `ahead`: how far log scaling's position is ahead of the row's.
    """
    count, kv_heads = len(x), spec.num_kv_heads
    q = p.linear("q", x, bias=spec.qkv_bias).reshape(count, spec.num_heads, spec.head_dim)
    k = p.linear("k", x, bias=spec.qkv_bias)
    v = p.linear("v", x, bias=spec.qkv_bias)
    inputs = {}
    if taps:
        inputs = {"k": k, "v": v}
        k, v = convolved(p, "k_conv", k), convolved(p, "v_conv", v)
    k = k.reshape(count, kv_heads, spec.head_dim)
    v = v.reshape(count, kv_heads, spec.value_size) * spec.value_scale
    if spec.qk_norm:
        q, k = p.norm("q_norm", q), p.norm("k_norm", k)
    if spec.rope is not None:
        q, k = rotated(q, spec.rope), rotated(k, spec.rope)

    group = spec.num_heads // kv_heads
    logits = np.empty((spec.num_heads, count, count))
    for head in range(spec.num_heads):
        logits[head] = q[:, head] @ k[:, head // group].T * spec.logit_scale
    if spec.relative is not None:
        rows = p.linear("relative.rows", x).reshape(count, spec.num_heads, spec.relative.rank)
        logits += by_distance(rows, p["relative.table"])
    if spec.log_scaling is not None:
        logits *= log_scale(spec.log_scaling, np.arange(count) + ahead)[:, None]
    weights = softmax(logits, spec.window, p["sinks"] if spec.sinks else None)
    out = np.stack([weights[head] @ v[:, head // group] for head in range(spec.num_heads)], axis=1)
    if spec.head_gate:
        out *= sigmoid(p.linear("gate", x))[:, :, None]
    mixed = p.linear("o", out.reshape(count, -1), bias=spec.output_bias)
    return mixed, {"k": k, "v": v}, inputs


def latent(p: Parameters, spec: LatentAttentionSpec, x: np.ndarray) -> tuple[np.ndarray, Streams]:
    """Output [T, H] and the cached stream [T, 1, rank + rope.dim]. Every head gets keys and values
    of its own."""
    count, rank, nope = len(x), spec.latent_rank, spec.nope_dim
    if spec.query_rank is None:
        q = p.linear("q", x)
    else:
        down = p.linear("q_down", x, bias=spec.bias)
        q = p.linear("q_up", p.norm("q_norm", down, LATENT_EPS))
    q = q.reshape(count, spec.num_heads, nope + spec.rope.dim)
    q = np.concatenate([q[..., :nope], rotated(q[..., nope:], spec.rope)], axis=2)
    down = p.linear("kv_down", x, bias=spec.bias)
    compressed = p.norm("kv_norm", down[:, :rank], LATENT_EPS)
    shared = rotated(down[:, None, rank:], spec.rope)
    heads = (compressed @ p["kv_up"]).reshape(count, spec.num_heads, nope + spec.value_dim)
    out = np.empty((count, spec.num_heads, spec.value_dim))
    for head in range(spec.num_heads):
        k = np.concatenate([heads[:, head, :nope], shared[:, 0]], axis=1)
        weights = softmax(q[:, head] @ k.T * spec.scale, spec.window, None)
        out[:, head] = weights @ heads[:, head, nope:]
    mixed = p.linear("o", out.reshape(count, -1), bias=spec.bias)
    return mixed, {"k": np.concatenate([compressed[:, None], shared], axis=2)}


def by_distance(rows: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Bias [heads, T, T] of row vectors [T, heads, rank]: with a key `d` positions back, the
    product with column d of the table [rank, extent]; zero beyond."""
    count = len(rows)
    bias = np.zeros((rows.shape[1], count, count))
    for at in range(count):
        for key in range(max(at - table.shape[1] + 1, 0), at + 1):
            bias[:, at, key] = rows[at] @ table[:, at - key]
    return bias


def log_scale(scaling: LogScaling, position: np.ndarray) -> np.ndarray:
    return 1 + scaling.alpha * np.log(np.maximum((position + 1) / scaling.floor, 1.0))


def softmax(logits: np.ndarray, window: int | None, sinks: np.ndarray | None) -> np.ndarray:
    """Causal weights of logits [..., T, T]; a sink takes part and gets no weight."""
    count = logits.shape[-1]
    distance = np.arange(count)[:, None] - np.arange(count)
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    weights = np.where(visible, np.exp(logits), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / (total if sinks is None else total + np.exp(sinks)[:, None, None])


def convolved(p: Parameters, name: str, x: np.ndarray) -> np.ndarray:
    """x [T, C] plus a causal convolution of every channel; the last tap meets the row itself."""
    taps = p[f"{name}.taps"]
    past = np.concatenate([np.zeros((len(taps) - 1, x.shape[1])), x])
    return x + sum(tap * past[lag : lag + len(x)] for lag, tap in enumerate(taps))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
