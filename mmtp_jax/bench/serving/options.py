"""What to measure, checked before anything is sent."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

from mmtp_jax.config import require

GOALS = ("ttft", "tpot", "e2e")

type Endpoint = Literal["chat", "completions"]


@dataclasses.dataclass(frozen=True)
class ServingOptions:
    """A run for each of `concurrency` (requests open at once), or for each of `request_rates` (a
    second) if there are any.

    `dataset` None: prompts of random token ids. `endpoint` None: chat for a dataset, completions
    for token ids. `goals`: milliseconds by the names of `GOALS` that a good request takes at most.
    """

    concurrency: tuple[int, ...] = (8,)
    request_rates: tuple[float, ...] = ()
    burstiness: float = 1.0
    num_prompts: int = 128
    duration: float | None = None
    warm_up: int = 0
    seed: int = 0
    dataset: Path | None = None
    random_input_len: tuple[int, ...] = (128,)
    random_ids: tuple[int, ...] = (1000, 30000)
    endpoint: Endpoint | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: dict[str, Any] = dataclasses.field(default_factory=dict)
    goals: dict[str, float] = dataclasses.field(default_factory=dict)
    processes: int = 1
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for flag, count, least in (
            *(("--concurrency", one, 1) for one in self.concurrency),
            ("--num-prompts", self.num_prompts, 1),
            ("--warm-up", self.warm_up, 0),
            ("--seed", self.seed, 0),
            *(("--random-input-len", one, 1) for one in self.random_input_len),
            *(("--random-ids", one, 0) for one in self.random_ids),
            ("--max-tokens", self.max_tokens, 1),
            ("--processes", self.processes, 1),
        ):
            require(count >= least, f"{flag} must be >= {least}, got {count}")
        for flag, value in (
            *(("--request-rate", one) for one in self.request_rates),
            ("--burstiness", self.burstiness),
            ("--timeout", self.timeout),
            *(("--duration", one) for one in (self.duration,) if one is not None),
            *((f"--goodput {name}", one) for name, one in self.goals.items()),
        ):
            require(
                0 < value < math.inf,
                f"{flag} must be > 0{' and finite' * (value > 0)}, got {value:g}",
            )
        require(
            0 <= self.temperature < math.inf,
            f"--temperature must be >= 0, got {self.temperature:g}",
        )
        _require_range("--random-input-len", self.random_input_len)
        _require_range("--random-ids", self.random_ids)
        most = 0 if self.request_rates else max(self.concurrency)
        require(
            self.duration is not None or self.num_prompts >= most,
            f"--num-prompts must be >= {most}, the largest --concurrency, got {self.num_prompts}",
        )
        require(
            self.dataset is not None or self.endpoint != "chat",
            "--endpoint chat needs --dataset: random token ids are for completions",
        )

    @property
    def asked_endpoint(self) -> Endpoint:
        """`endpoint`, or the default for these prompts."""
        return self.endpoint or ("completions" if self.dataset is None else "chat")


def _require_range(flag: str, bounds: tuple[int, ...]) -> None:
    require(len(bounds) <= 2, f"{flag} takes one number or two, got {len(bounds)}")
    require(
        bounds[0] <= bounds[-1], f"{flag}: the second number must be >= the first, got {bounds}"
    )
