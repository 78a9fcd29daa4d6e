"""Counters of a running engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Acceptance:
    """Drafts verified and accepted, by position (0 = first module)."""

    num_drafts: int
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drafted = [0] * self.num_drafts
        self.accepted = [0] * self.num_drafts

    def count(self, drafted: int, accepted: int) -> None:
        """One verification of `drafted` drafts of which the first `accepted` matched."""
        for position in range(drafted):
            self.drafted[position] += 1
            self.accepted[position] += position < accepted

    @property
    def rates(self) -> list[float]:
        """Accepted over drafted by position; 0 where nothing was drafted."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]


@dataclass
class EngineStats:
    """Totals since start. `decode_steps` counts request-steps that emitted tokens."""

    num_drafts: int
    steps: int = 0
    decode_steps: int = 0
    tokens: int = 0
    acceptance: Acceptance = field(init=False)

    def __post_init__(self) -> None:
        self.acceptance = Acceptance(self.num_drafts)

    def count(self, drafted: int, accepted: int, emitted: int) -> None:
        """One request's part of one step that emitted tokens."""
        self.decode_steps += 1
        self.tokens += emitted
        self.acceptance.count(drafted, accepted)

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per verification of one request (1.0 without speculation)."""
        return self.tokens / self.decode_steps if self.decode_steps else 0.0
