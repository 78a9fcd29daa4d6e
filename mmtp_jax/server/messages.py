"""What the HTTP process and the engine's process say to each other, as msgpack.

One message per engine step carries the new tokens of all its requests.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mmtp_jax.engine.delta import TokenDelta
from mmtp_jax.engine.request import FinishReason


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """A request to run. `params` are the fields of `SamplingParams` that are not at their
    default."""

    request_id: str
    prompt_ids: list[int]
    params: dict[str, Any]
    seed: int


class EndRequests(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Requests that nobody waits for any more, or that ended at a stop string."""

    request_ids: list[str]
    reason: FinishReason


class Profile(msgspec.Struct, frozen=True, array_like=True, tag="profile"):
    """Write a trace of what follows to `directory`, or finish the trace (None)."""

    directory: str | None


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Leave the loop and end."""


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """The model is in memory; what the HTTP process needs to know of it."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_drafts: int
    max_model_len: int
    max_num_seqs: int
    description: str


class Starting(msgspec.Struct, frozen=True, array_like=True, tag="starting"):
    """What the engine does before it is ready."""

    what: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Every program is compiled."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The engine cannot start, because of something the user can correct."""

    message: str


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """One request did not start. `internal` if that is the server's fault."""

    request_id: str
    message: str
    internal: bool


class Pages(msgspec.Struct, frozen=True, array_like=True):
    """Pages of a cache group: all of them, and those that running requests refer to."""

    group: str
    total: int
    referenced: int


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """What the engine holds after a step; `steps` and `preemptions` count since the start."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    preemptions: int = 0
    pages: tuple[Pages, ...] = ()


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """What one step emitted, and how long it took (None: nothing ran, only `snapshot` changed)."""

    deltas: tuple[TokenDelta, ...]
    snapshot: Snapshot
    seconds: float | None


class Profiled(msgspec.Struct, frozen=True, array_like=True, tag="profiled"):
    """The answer to `Profile`: what went wrong, or None."""

    error: str | None


ToEngine = AddRequest | EndRequests | Profile | Shutdown
FromEngine = Loaded | Starting | Ready | Failed | Refused | Step | Profiled
