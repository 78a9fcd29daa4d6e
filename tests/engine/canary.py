"""A model whose modules are right by construction, and only if their caches are.

The target counts: token t is followed by t+1 (cyclically over 1..V-1; 0 is the decoy). Module m
adds up two halves for its prediction at position q, each alone too weak to beat a constant decoy
logit: the target's hidden state shifted by m+2 (another shift per module, so permuted modules
fail), and the token its cache holds for position q-1 shifted by 2 (so a stale or misplaced entry
fails).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mmtp_jax.specs import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, MTPConfig

VOCAB = 24
# Hidden layout: A = prediction stream, D = consumed token (read by attention), one constant.
HIDDEN = 2 * VOCAB + 2
CONSTANT = 2 * VOCAB
PLAIN = LayerSpec(AttentionSpec(1, 1, HIDDEN), DenseSpec(8))
PAIR = LayerSpec(AttentionSpec(1, 1, HIDDEN, window=2), DenseSpec(8))


def canary(num_modules: int) -> ModelConfig:
    mtp = MTPConfig(
        (PAIR,) * num_modules, feed="target", target_hidden="pre", zero_first_embedding=False
    )
    return ModelConfig("canary", VOCAB, HIDDEN, (PLAIN,), 512, norm_eps=1e-12, mtp=mtp)


def shift(by: int) -> np.ndarray:
    """[V, V] with row t -> column t+by over the cycle 1..V-1."""
    matrix = np.zeros((VOCAB, VOCAB), np.float32)
    for token in range(1, VOCAB):
        matrix[token, (token - 1 + by) % (VOCAB - 1) + 1] = 1
    return matrix


def rms(*entries: float) -> float:
    return float(np.sqrt(sum(x * x for x in entries) / HIDDEN))


def canary_values(order: list[int]) -> Callable[[str], np.ndarray]:
    """Parameters by flat name; module m of the model gets the weights made for depth order[m]."""
    stream_a, stream_d = slice(0, VOCAB), slice(VOCAB, 2 * VOCAB)
    embedding = np.zeros((VOCAB, HIDDEN), np.float32)
    embedding[:, stream_a] = 2 * np.eye(VOCAB)  # the target alone beats the decoy
    embedding[:, CONSTANT] = 1
    scale = rms(2, 1)  # RMSNorm divides embeddings and hidden states by it

    head = np.zeros((HIDDEN, VOCAB), np.float32)
    head[stream_a] = shift(1)
    head[CONSTANT, 0] = 1.5

    def fuse(module: int) -> np.ndarray:
        kernel = np.zeros((2 * HIDDEN, HIDDEN), np.float32)
        feed, token = kernel[:HIDDEN], kernel[HIDDEN:]
        feed[stream_a, stream_a] = shift(module + 1) * 0.5 * scale
        # Attention will add both of the last two tokens; take the newest one back out here.
        token[stream_a, stream_a] = -shift(1) * 0.5 * scale
        token[stream_a, stream_d] = np.eye(VOCAB) * 0.5 * scale
        feed[CONSTANT, CONSTANT] = scale
        return kernel

    inner = rms(1, 1, 1, 1)  # fused row: +1 and -1 in A, 1 in D, the constant
    out = np.zeros((HIDDEN, HIDDEN), np.float32)
    out[stream_d, stream_a] = 2 * inner * shift(1)  # attention halves the two tokens

    def value(name: str) -> np.ndarray:
        shapes = {
            "embed.weight": embedding,
            "head.kernel": head,
        }
        if name in shapes:
            return shapes[name]
        if name.endswith(".scale"):
            return np.ones(HIDDEN, np.float32)
        if name.endswith("fuse.kernel"):
            return fuse(order[int(name.split(".")[1])])
        inside = name.startswith("mtp.")
        if name.endswith("attention.v.kernel") and inside:
            return np.eye(HIDDEN, dtype=np.float32)
        if name.endswith("attention.o.kernel") and inside:
            return out
        if ".attention." in name:
            return np.zeros((HIDDEN, HIDDEN), np.float32)
        wide, narrow = (8, HIDDEN) if name.endswith("down.kernel") else (HIDDEN, 8)
        return np.zeros((wide, narrow), np.float32)

    return value


def counting(start: int, length: int) -> list[int]:
    """The sequence the target continues."""
    return [(start - 1 + i) % (VOCAB - 1) + 1 for i in range(length)]
