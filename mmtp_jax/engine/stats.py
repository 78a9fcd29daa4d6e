"""Counters of a running engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Acceptance:
    """Drafts verified and accepted, by position (0 = first module)."""

    num_drafts: int
    # How many verifications were of, and accepted, so many drafts (0 to num_drafts).
    _by_drafted: list[int] = field(init=False)
    _by_accepted: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._by_drafted = [0] * (self.num_drafts + 1)
        self._by_accepted = [0] * (self.num_drafts + 1)

    def count(self, drafted: int, accepted: int) -> None:
        """One verification of `drafted` drafts of which the first `accepted` matched."""
        self._by_drafted[drafted] += 1
        self._by_accepted[accepted if accepted < drafted else drafted] += 1

    def add(self, other: Acceptance) -> None:
        """Count what `other`, of as many drafts, counted."""
        for own, more in (
            (self._by_drafted, other._by_drafted),
            (self._by_accepted, other._by_accepted),
        ):
            own[:] = [a + b for a, b in zip(own, more, strict=True)]

    @property
    def drafted(self) -> list[int]:
        """Drafts verified by position."""
        return [sum(self._by_drafted[place + 1 :]) for place in range(self.num_drafts)]

    @property
    def accepted(self) -> list[int]:
        """Drafts accepted by position."""
        return [sum(self._by_accepted[place + 1 :]) for place in range(self.num_drafts)]

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
