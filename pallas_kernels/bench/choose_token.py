"""The choice of tokens: greedy rows, rows with a temperature and rows with top-p, and the argmax
that XLA makes of the same logits.

A call's tokens are the indices that the next one draws noise for. Logits have a standard deviation
of 4, which leaves a top-p of 0.9 some hundreds of tokens; few rows lie in the L2 cache, as right
after the product that they come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.measure import Variant, calls_for
from pallas_kernels.choose_token import FLOATS, INTS, STOP_IDS, choose_token

_SPREAD, _SEED = 4.0, 7
_CHECKED_ROWS = 16
_LOGITS_BYTES = 1e9


@dataclass(frozen=True)
class ChoiceCase:
    """`num_rows` rows of one request; a temperature of 0 is greedy, a `top_p` of 1 is none."""

    kind: str
    num_rows: int
    vocab_size: int
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.kind} S={self.num_rows} V={self.vocab_size}"

    @property
    def bytes_moved(self) -> float:
        """The logits, once."""
        return 4 * self.num_rows * self.vocab_size

    @property
    def flops(self) -> float:
        """Comparisons are none."""
        return 0

    def arguments(self) -> tuple[Any, ...]:
        """Indices; logits of several calls; the request's row, bias, masks and history."""
        copies = min(self._calls, max(1, int(_LOGITS_BYTES / self.bytes_moved)))
        shape = (self.num_rows, self.vocab_size)
        logits = tuple(
            _SPREAD * jax.random.normal(jax.random.key(seed), shape, jnp.float32)
            for seed in range(copies)
        )
        values = dict.fromkeys(FLOATS, 0.0) | {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "repetition": 1.0,
        }
        floats = np.array([values[name] for name in FLOATS], np.float32).view(np.int32)
        integers = [{"seed": _SEED}.get(name, 0) for name in INTS]
        row = np.full(STOP_IDS + 1, -1, np.int32)
        row[:STOP_IDS] = [*floats, *integers]
        return (
            jnp.arange(self.num_rows, dtype=jnp.int32),
            logits,
            jnp.zeros(self.num_rows, jnp.int32),
            jnp.asarray(row)[None],
            jnp.zeros((1, self.vocab_size), jnp.float32),
            jnp.zeros((1, 1, -(-self.vocab_size // 32)), jnp.int32),
            jnp.full(1, -1, jnp.int32),
            jnp.zeros((1, 1), jnp.int32),
        )

    @property
    def _calls(self) -> int:
        return calls_for(self.bytes_moved)

    def variants(self) -> dict[str, Variant]:
        """The kernel; for greedy rows also an argmax."""
        choose = jax.jit(choose_token)

        @jax.jit
        def best(index: jax.Array, logits: jax.Array) -> jax.Array:
            # Without the token of the call before, so that one waits for the other.
            ids = jnp.arange(self.vocab_size)
            others = jnp.where(ids == index[:, None], -jnp.inf, logits)
            return jnp.argmax(others, axis=1).astype(jnp.int32)

        def by_kernel(
            number: int, index: jax.Array, logits: Any, slot: jax.Array, *rest: jax.Array
        ) -> Any:
            tokens = choose(logits[number % len(logits)], slot, index, *rest)
            return tokens, tokens

        def by_argmax(number: int, index: jax.Array, logits: Any, *_: jax.Array) -> Any:
            tokens = best(index, logits[number % len(logits)])
            return tokens, tokens

        variants = {"triton": Variant(by_kernel, self._calls)}
        if self.temperature == 0:
            variants["argmax"] = Variant(by_argmax, self._calls)
        return variants

    def error(self, variant: str, arguments: tuple[Any, ...], result: Any, passed: Any) -> float:
        """The share of some rows whose token is another one than by sorting in float64."""
        index, (logits, *_), *_ = arguments
        picked = np.arange(self.num_rows)[:_CHECKED_ROWS]
        wrong = 0
        for row in picked:
            scores = np.asarray(logits[row], np.float64)
            if variant == "argmax":
                scores[int(index[row])] = -np.inf
            elif self.temperature > 0:
                scores = self._kept(scores / self.temperature)
                key = jax.random.fold_in(jax.random.key(_SEED), index[row])
                scores += np.asarray(jax.random.gumbel(key, scores.shape, mode="high"))
            wrong += int(np.argmax(scores)) != int(result[row])
        return wrong / len(picked)

    def _kept(self, scores: np.ndarray) -> np.ndarray:
        """The fewest best tokens whose probabilities sum to `top_p`; -inf for the others."""
        order = np.argsort(-scores, kind="stable")
        weights = np.exp(scores[order] - scores[order[0]])
        before = np.cumsum(weights) - weights
        scores[order[before >= self.top_p * weights.sum()]] = -np.inf
        return scores


KINDS: dict[str, tuple[float, float]] = {
    "greedy": (0.0, 1.0),
    "temperature": (0.8, 1.0),
    "top-p": (1.0, 0.9),
}
CASES = [
    ChoiceCase(kind, num_rows, vocab_size, *options)
    for vocab_size in (49152, 128256)
    for kind, options in KINDS.items()
    for num_rows in (1, 64, 576)
]
