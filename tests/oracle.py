"""A teacher-forced oracle in NumPy float64, written without the engine's model code.

It recomputes everything from scratch for a list of tokens: the target's per-position cache entries,
hidden states and logits, and for every module the entries and logits at the positions whose inputs
are known. Parameters come as a mapping from flat name to array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from oracle_layers import LayerTrace, run_layer
from oracle_parameters import Parameters, Values

from mmtp_jax.specs import ModelConfig, MTPConfig


@dataclass(frozen=True)
class ModuleTrace:
    """Rows 0..T-2-m of module m; `fed` is what the next module may be fed with."""

    layer: LayerTrace
    fed: np.ndarray
    logits: np.ndarray

    def first(self, count: int) -> ModuleTrace:
        """The first `count` rows."""
        return ModuleTrace(self.layer.first(count), self.fed[:count], self.logits[:count])


@dataclass(frozen=True)
class Trace:
    """`hidden` [T, H] is what modules see of the target."""

    layers: list[LayerTrace]
    logits: np.ndarray
    hidden: np.ndarray
    modules: list[ModuleTrace]

    @property
    def margin(self) -> float:
        """The smallest margin of all layers."""
        layers = [*self.layers, *(module.layer for module in self.modules)]
        return min(layer.margin for layer in layers)

    def first(self, count: int) -> Trace:
        """What the first `count` tokens alone give: nothing depends on later tokens."""
        return Trace(
            [layer.first(count) for layer in self.layers],
            self.logits[:count],
            self.hidden[:count],
            [
                module.first(count - 1 - number)
                for number, module in enumerate(self.modules[: count - 1])
            ],
        )


class Oracle:
    """Float64 model over float32 parameters."""

    def __init__(self, config: ModelConfig, values: Values) -> None:
        self.config = config
        self.parameters = Parameters(config, values)
        self._traces: dict[tuple[int, ...], Trace] = {}  # of a text or of a longer one

    def trace(self, tokens: Sequence[int]) -> Trace:
        text = tuple(tokens)
        if text not in self._traces:
            if len(self._traces) > 10_000:
                self._traces.clear()
            target = self._target(text)
            trace = replace(target, modules=self._modules(text, target.hidden))
            self._traces |= {text[:end]: trace for end in range(1, len(text) + 1)}
        return self._traces[text].first(len(text))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The target's own continuation."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(np.argmax(self._target(tokens).logits[-1])))
        return tokens[len(prompt) :]

    def drafts(self, tokens: Sequence[int]) -> list[int]:
        """Greedy drafts for the tokens after `tokens`, whose last one the target has not seen."""
        known = list(tokens)
        for logits in self._drafting(known):
            known.append(int(np.argmax(logits)))
        return known[len(tokens) :]

    def draft_logits(self, tokens: Sequence[int], number: int) -> np.ndarray:
        """Logits [V] of the draft after `tokens`, of which the last `number` are drafts too."""
        known = list(tokens[: len(tokens) - number])
        drafting = self._drafting(known)
        logits = next(drafting)
        while len(known) < len(tokens):
            known.append(tokens[len(known)])
            logits = next(drafting)
        return logits

    def _drafting(self, known: list[int]) -> Iterator[np.ndarray]:
        """Logits [V] of one draft after the other; before the next, `known` has to grow by it.

        A repeated module reads on, one row further for each draft, with its last output in place of
        a hidden state that the target does not have yet.
        """
        mtp = self.config.mtp
        assert mtp is not None
        feed = self.trace(known[:-1]).hidden
        for number in range(mtp.num_drafts):
            module = self._module(mtp, 0 if mtp.repeats > 1 else number, known, feed)
            yield module.logits[-1]
            if mtp.repeats > 1:
                feed = np.concatenate([feed, module.fed[-1:]])
            elif mtp.feed != "target":
                feed = module.fed

    def _target(self, tokens: Sequence[int]) -> Trace:
        """A trace without modules."""
        mtp, layers = self.config.mtp, []
        x = self._embedded(tokens, norm=self.config.embed_norm)
        for index, spec in enumerate(self.config.layers):
            layer = run_layer(self.parameters.at(f"layers.{index}"), spec, x, ahead=0)
            layers.append(layer)
            x = layer.output
        normed = self.parameters.norm("norm", x)
        pre = mtp is not None and mtp.target_hidden == "pre"
        return Trace(layers, self._head(normed), x if pre else normed, [])

    def _modules(self, tokens: Sequence[int], feed: np.ndarray) -> list[ModuleTrace]:
        mtp, traces = self.config.mtp, []
        if mtp is None:
            return traces
        for number in range(min(mtp.num_modules, len(tokens) - 1)):
            module = self._module(mtp, number, tokens, feed)
            traces.append(module)
            if mtp.feed != "target":
                feed = module.fed
        return traces

    def _module(
        self, mtp: MTPConfig, number: int, tokens: Sequence[int], feed: np.ndarray
    ) -> ModuleTrace:
        """Row q consumes tokens[q + 1 + number] and feed[q]."""
        p = self.parameters.at(f"mtp.{number}")
        embedded = self._embedded(tokens[1 + number :], norm=mtp.embed_norm)
        if mtp.zero_first_embedding:
            embedded[0] = 0
        token = p.norm("token_norm", embedded)
        hidden = p.norm("hidden_norm", feed[: len(token)])
        pair = [hidden, token] if mtp.concat == "hidden_first" else [token, hidden]
        fused = p.linear("fuse", np.concatenate(pair, axis=1))
        ahead = 1 + number if mtp.consumed_position else 0
        layer = run_layer(p.at("layer"), mtp.modules[number], fused, ahead)
        post = layer.output
        if mtp.norm != "none":
            post = (p if mtp.norm == "own" else self.parameters.at("mtp")).norm("norm", post)
        logits = self._cut(p.linear("head", post)) if mtp.own_head else self._head(post)
        return ModuleTrace(layer, layer.output if mtp.feed == "chain_pre" else post, logits)

    def _embedded(self, tokens: Sequence[int], *, norm: bool) -> np.ndarray:
        embedded = self.parameters["embed.weight"][np.asarray(tokens)]
        return self.parameters.norm("embed_norm", embedded) if norm else embedded

    def _head(self, normed: np.ndarray) -> np.ndarray:
        scaled = normed / self.config.logits_divisor
        if self.config.tie_embeddings:
            return self._cut(scaled @ self.parameters["embed.weight"].T)
        return self._cut(self.parameters.linear("head", scaled))

    def _cut(self, logits: np.ndarray) -> np.ndarray:
        """Rows beyond the vocabulary are padding."""
        return logits[:, : self.config.vocab_size]
