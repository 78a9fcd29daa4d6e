"""A teacher-forced oracle in NumPy float64, written without the engine's model code.

It recomputes everything from scratch for a list of tokens: the target's per-position cache entries,
hidden states and logits, and for every module the entries and logits at the positions whose inputs
are known. Parameters come as a mapping from flat name to array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mmtp_jax.config import LayerSpec, ModelConfig, RopeConfig

Values = Callable[[str], np.ndarray]


@dataclass(frozen=True)
class LayerTrace:
    """Cache entries by position: "k", "v" [T, Hkv, D] and, with a convolution, "x" [T, H]."""

    streams: dict[str, np.ndarray]
    output: np.ndarray


@dataclass(frozen=True)
class ModuleTrace:
    """Rows 0..T-2-m of module m."""

    layer: LayerTrace
    logits: np.ndarray


@dataclass(frozen=True)
class Trace:
    layers: list[LayerTrace]
    logits: np.ndarray
    modules: list[ModuleTrace]


class Oracle:
    """Float64 model over float32 parameters."""

    def __init__(self, config: ModelConfig, values: Values) -> None:
        self.config = config
        self._raw = values
        self._known: dict[str, np.ndarray] = {}

    def trace(self, tokens: Sequence[int]) -> Trace:
        config = self.config
        ids = np.asarray(tokens)
        embedding = self._value("embed.weight")
        x, layers = embedding[ids], []
        for index, spec in enumerate(config.layers):
            layer = self._layer(f"layers.{index}", spec, x)
            layers.append(layer)
            x = layer.output
        normed = self._norm("norm", x)
        return Trace(layers, self._head(normed), self._modules(ids, x, normed))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The target's own continuation."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(np.argmax(self.trace(tokens).logits[-1])))
        return tokens[len(prompt) :]

    def drafts(self, tokens: Sequence[int]) -> list[int]:
        """Greedy drafts for the tokens after `tokens`, whose last one the target has not seen."""
        tokens = list(tokens)
        row = len(tokens) - 2
        for module in range(self.config.num_modules):
            logits = self.trace(tokens).modules[module].logits[row]
            tokens.append(int(np.argmax(logits)))
        return tokens[row + 2 :]

    def _modules(self, ids: np.ndarray, raw: np.ndarray, normed: np.ndarray) -> list[ModuleTrace]:
        mtp = self.config.mtp
        if mtp is None:
            return []
        target = raw if mtp.target_hidden == "pre" else normed
        feed, traces = target, []
        for module, spec in enumerate(mtp.modules):
            rows = len(ids) - 1 - module
            if rows <= 0:
                break
            name = f"mtp.{module}"
            embedded = self._value("embed.weight")[ids[1 + module :]].copy()
            if mtp.zero_first_embedding:
                embedded[0] = 0
            token = self._norm(f"{name}.token_norm", embedded)
            hidden = self._norm(f"{name}.hidden_norm", feed[:rows])
            pair = [hidden, token] if mtp.concat == "hidden_first" else [token, hidden]
            fused = np.concatenate(pair, axis=1) @ self._value(f"{name}.fuse.kernel")
            layer = self._layer(f"{name}.layer", spec, fused)
            post = self._norm(f"{name}.norm", layer.output) if mtp.own_norm else layer.output
            own = f"{name}.head.kernel"
            logits = post @ self._value(own) if mtp.own_head else self._head(post)
            traces.append(ModuleTrace(layer, logits))
            feed = {"target": target, "chain_pre": layer.output, "chain_post": post}[mtp.feed]
        return traces

    def _layer(self, name: str, spec: LayerSpec, x: np.ndarray) -> LayerTrace:
        normed = self._norm(f"{name}.attention_norm", x)
        mixed, streams = self._attention(f"{name}.attention", spec, normed)
        if spec.conv_taps:
            streams["x"] = mixed
            taps = self._value(f"{name}.conv.taps")
            padded = np.concatenate([np.zeros((spec.conv_taps - 1, mixed.shape[1])), mixed])
            mixed = mixed + sum(taps[j] * padded[j : j + len(x)] for j in range(spec.conv_taps))
        x = x + mixed
        normed = self._norm(f"{name}.mlp_norm", x)
        gate = normed @ self._value(f"{name}.mlp.gate.kernel")
        up = normed @ self._value(f"{name}.mlp.up.kernel")
        down = (gate / (1 + np.exp(-gate)) * up) @ self._value(f"{name}.mlp.down.kernel")
        return LayerTrace(streams, x + down)

    def _attention(
        self, name: str, spec: LayerSpec, x: np.ndarray
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        count = len(x)

        def projected(part: str, heads: int) -> np.ndarray:
            y = x @ self._value(f"{name}.{part}.kernel")
            if spec.qkv_bias:
                y = y + self._value(f"{name}.{part}.bias")
            return y.reshape(count, heads, spec.head_dim)

        q = projected("q", spec.num_heads)
        k, v = projected("k", spec.num_kv_heads), projected("v", spec.num_kv_heads)
        if spec.rope is not None:
            q, k = _rotate(q, spec.rope), _rotate(k, spec.rope)
        group = spec.num_heads // spec.num_kv_heads
        distance = np.arange(count)[:, None] - np.arange(count)
        hidden = distance < 0
        if spec.window is not None:
            hidden |= distance >= spec.window
        out = np.empty((count, spec.num_heads, spec.head_dim))
        for head in range(spec.num_heads):
            scores = q[:, head] @ k[:, head // group].T / np.sqrt(spec.head_dim)
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[:, head] = weights @ v[:, head // group]
        return out.reshape(count, -1) @ self._value(f"{name}.o.kernel"), {"k": k, "v": v}

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        scale = self._value(f"{name}.scale")
        if self.config.norm_style == "one_plus":
            scale = 1 + scale
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config.norm_eps) * scale

    def _head(self, normed: np.ndarray) -> np.ndarray:
        if self.config.tie_embeddings:
            return normed @ self._value("embed.weight").T
        return normed @ self._value("head.kernel")

    def _value(self, name: str) -> np.ndarray:
        if name not in self._known:
            self._known[name] = np.asarray(self._raw(name), np.float64)
        return self._known[name]


def _rotate(x: np.ndarray, rope: RopeConfig) -> np.ndarray:
    assert rope.scaling is None
    half = rope.dim // 2
    angle = np.arange(len(x))[:, None] * rope.theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second, rest = x[..., :half], x[..., half : rope.dim], x[..., rope.dim :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
