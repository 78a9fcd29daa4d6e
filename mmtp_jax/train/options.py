"""Options of the commands: frozen, validated, without jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32

from mmtp_jax.checks import check_types, require

# Sequences are padded to multiples of it: the positions of a page in training.
PAGE = 64


@dataclass(frozen=True)
class NewModules:
    """`num_modules` layers like the target's last one, wired as MiMo-7B's (model card), which other
    engines can load. `mlp_size` None: as wide as that layer."""

    num_modules: int = 8
    mlp_size: int | None = None
    initial: Literal["fitted", "last_layer", "random"] = "fitted"
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        require(1 <= self.num_modules <= 32, f"num_modules must be in [1, 32]: {self.num_modules}")
        require(
            self.mlp_size is None or self.mlp_size >= 1,
            f"mlp_size must be >= 1, got {self.mlp_size}",
        )
        require(
            self.initial in ("fitted", "last_layer", "random"),
            f"initial must be 'fitted', 'last_layer' or 'random', got {self.initial!r}",
        )


@dataclass(frozen=True)
class Objective:
    """What is minimised: per predicted token `distill` times the Kullback-Leibler divergence from
    the target's distribution (of its `top_k` best tokens; 0: of all) plus `cross_entropy` times
    that of the true token plus `overlap` times the negative logarithm of how likely a draft is
    accepted (`Sums.overlap`), and over the depths a mean with weights `decay` ** m (FastMTP, arXiv
    2509.18362). `reach` is the share of a weight that falls with the chance that the drafts before
    are accepted: nobody sees what follows a refused draft.
    """

    distill: float = 0.5
    cross_entropy: float = 0.0
    decay: float = 1.0
    top_k: int = 0
    overlap: float = 1.0
    reach: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        require(self.distill >= 0, f"distill must be >= 0, got {self.distill}")
        require(self.cross_entropy >= 0, f"cross_entropy must be >= 0, got {self.cross_entropy}")
        require(self.overlap >= 0, f"overlap must be >= 0, got {self.overlap}")
        require(
            self.distill + self.cross_entropy + self.overlap > 0,
            "distill, cross_entropy and overlap must not all be 0",
        )
        require(0 < self.decay <= 1, f"decay must be in (0, 1], got {self.decay}")
        require(self.top_k >= 0, f"top_k must be >= 0, got {self.top_k}")
        require(0 <= self.reach <= 1, f"reach must be in [0, 1], got {self.reach}")

    def depth_weights(self, num_modules: int) -> Float32[np.ndarray, " N"]:
        """Of each module; they add up to 1."""
        weights = np.float32(self.decay) ** np.arange(num_modules, dtype=np.float32)
        return weights / weights.sum()


@dataclass(frozen=True)
class BatchOptions:
    """`batch_tokens` are the tokens of a step on one device, padding included."""

    batch_tokens: int = 32768
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        require(
            PAGE <= self.batch_tokens <= 2**24,
            f"batch_tokens must be in [{PAGE}, {2**24}], got {self.batch_tokens}",
        )


@dataclass(frozen=True)
class FitOptions:
    """How long and how fast. `steps` None: as many as `epochs` have. AdamW takes about half the
    `learning_rate` of Muon.

    `held_out` greedy samples are not trained on but drafted every `eval_every` steps.
    """

    epochs: int = 1
    steps: int | None = None
    optimizer: Literal["adamw", "muon"] = "muon"
    learning_rate: float = 4e-3
    final_rate: float = 0.02
    warmup: int = 200
    weight_decay: float = 0.01
    clip: float = 1.0
    held_out: int = 256
    log_every: int = 20
    save_every: int = 500
    eval_every: int = 500

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("epochs", "log_every", "save_every", "eval_every"):
            require(getattr(self, name) >= 1, f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("warmup", "held_out"):
            require(getattr(self, name) >= 0, f"{name} must be >= 0, got {getattr(self, name)}")
        require(self.steps is None or self.steps >= 1, f"steps must be >= 1, got {self.steps}")
        require(
            self.optimizer in ("adamw", "muon"),
            f"optimizer must be 'adamw' or 'muon', got {self.optimizer!r}",
        )
        require(self.learning_rate > 0, f"learning_rate must be > 0, got {self.learning_rate}")
        require(
            0 <= self.final_rate <= 1,
            f"final_rate must be in [0, 1] of learning_rate, got {self.final_rate}",
        )
        require(self.weight_decay >= 0, f"weight_decay must be >= 0, got {self.weight_decay}")
        require(self.clip > 0, f"clip must be > 0, got {self.clip}")


@dataclass(frozen=True)
class EvaluateOptions:
    """`limit` prompts of every set (None: all), answered at each temperature; 0 is greedy."""

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_tokens: int = 256
    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        require(len(self.temperatures) > 0, "temperatures must not be empty")
        for temperature in self.temperatures:
            require(0 <= temperature <= 2, f"temperatures must be in [0, 2], got {temperature}")
        require(self.max_tokens >= 2, f"max_tokens must be >= 2, got {self.max_tokens}")
        require(self.limit is None or self.limit >= 1, f"limit must be >= 1, got {self.limit}")
