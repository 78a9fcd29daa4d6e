"""What a scheduler decides: a step, while it is put together and when it is whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from mmtp_jax.cache.manager import Admission
from mmtp_jax.engine.buckets import Bucket
from mmtp_jax.engine.request import Request, ScheduledRequest


@dataclass(frozen=True)
class ScheduledAdmission:
    """A request that takes over a slot before the step's rows run."""

    slot: int
    request: Request
    admission: Admission


@dataclass(frozen=True)
class ScheduledStep:
    """A step to dispatch: admissions in order, then all rows in one program."""

    admissions: tuple[ScheduledAdmission, ...]
    requests: tuple[ScheduledRequest, ...]
    bucket: Bucket


class Part(NamedTuple):
    """What a step gives a request, and the rows of the program that it costs."""

    num_rows: int
    num_drafts: int
    cost: int


@dataclass(slots=True)
class StepSoFar:
    """A step being put together."""

    budget: int
    reserves_ahead: bool
    cost: int = 0
    preempted: bool = False
    admissions: list[ScheduledAdmission] = field(default_factory=list)
    requests: dict[str, ScheduledRequest] = field(default_factory=dict)
    costs: dict[str, int] = field(default_factory=dict)
