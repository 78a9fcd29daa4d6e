"""How many drafts of each position a server accepted, from its `/metrics`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from mmtp_jax.bench.serving.target import Target

DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
# Ours: fewer drafts than others may be verified at a position, so it has a count of its own.
DRAFTED = "mmtp_drafts_verified_total"

_SAMPLE = re.compile(rf"^({DRAFTS}|{ACCEPTED}|{DRAFTED})(?:\{{(.*)\}})? (\S+)", re.MULTILINE)
_POSITION = re.compile(r'\bposition="(\d+)"')

type Counts = Counter[tuple[str, int]]


@dataclass(frozen=True)
class Acceptance:
    """`drafts`: verifications of drafts. Lists are by position: `accepted` drafts, those `drafted`
    (null: the server does not say, as many as `drafts`), and their ratio. `mean_length`: tokens per
    verification, the target's own among them."""

    drafts: int
    drafted: list[int] | None
    accepted: list[int]
    rate: list[float]
    mean_length: float


def counts(target: Target) -> Counts | None:
    """The counters so far by name and position; None if the server has none, or no numbers."""
    try:
        status, body = target.get("/metrics")
    except OSError:
        return None
    if status != 200:
        return None
    found: Counts = Counter()
    for name, labels, value in _SAMPLE.findall(body.decode(errors="replace")):
        position = _POSITION.search(labels)
        try:
            found[name, int(position[1]) if position else 0] += round(float(value))
        except (ValueError, OverflowError):
            return None
    return found or None


def acceptance(before: Counts | None, after: Counts | None) -> Acceptance | None:
    """What was counted in between; None if the server does not say, or drafted nothing."""
    if before is None or after is None:
        return None
    between = {key: count - before[key] for key, count in after.items()}
    drafts = between.get((DRAFTS, 0), 0)
    positions = sorted(position for name, position in between if name == ACCEPTED)
    if drafts <= 0 or not positions:
        return None
    accepted = [between[ACCEPTED, position] for position in positions]
    known = all((DRAFTED, position) in between for position in positions)
    drafted = [between[DRAFTED, position] for position in positions] if known else None
    of = drafted or [drafts] * len(positions)
    return Acceptance(
        drafts=drafts,
        drafted=drafted,
        accepted=accepted,
        rate=[one / all_ if all_ else 0.0 for one, all_ in zip(accepted, of, strict=True)],
        mean_length=1 + sum(accepted) / drafts,
    )
