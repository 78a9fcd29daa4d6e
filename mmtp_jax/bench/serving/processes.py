"""The client's processes: one run after the other, each divided among all of them."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import numpy as np
from jaxtyping import Float64

from mmtp_jax.bench.serving.bodies import Bodies
from mmtp_jax.bench.serving.events import Measured
from mmtp_jax.bench.serving.target import Target
from mmtp_jax.bench.serving.worker import STOP, Done, Share, Worker
from mmtp_jax.config import ConfigError

# From saying what to do to beginning with it, so that all processes begin at once.
LEAD_SECONDS = 0.05


@dataclass(frozen=True)
class Run:
    """Requests `first` to `first + count`, at these `arrivals` in seconds, or `concurrency` at a
    time (`arrivals` None) until `duration` seconds have passed (None: until all are answered)."""

    number: int
    first: int
    count: int | None
    concurrency: int = 0
    duration: float | None = None
    arrivals: Float64[np.ndarray, "N"] | None = None

    def share(self, process: int, processes: int, start: float) -> Share:
        """What one of the processes does of it."""
        if self.arrivals is not None:
            indices = range(self.first, self.first + len(self.arrivals))
            mine = slice(process, None, processes)
            times = tuple(self.arrivals[mine].tolist())
            return Share(self.number, start, indices=indices[mine], arrivals=times)
        return Share(
            self.number,
            start,
            slots=len(range(process, self.concurrency, processes)),
            limit=math.inf if self.count is None else self.first + self.count,
            deadline=math.inf if self.duration is None else start + self.duration,
        )


@dataclass(frozen=True)
class Observed:
    """What all processes saw of a run; `busy` is that of the busiest one."""

    requests: list[Measured]
    unfinished: int
    busy: float
    interrupted: bool


class Processes:
    """Processes that have started."""

    def __init__(self, pipes: list[Pipe], counter: Synchronized[int]) -> None:
        self._pipes = pipes
        self._counter = counter

    def run(self, run: Run) -> Observed:
        """Do a run; Ctrl-C ends it early. Raises `ConfigError` if a process dies."""
        self._counter.value = run.first
        start = time.perf_counter() + LEAD_SECONDS
        for number, pipe in enumerate(self._pipes):
            _send(pipe, run.share(number, len(self._pipes), start))
        with _interruptible(self._pipes) as interrupted:
            done: list[Done] = [_received(pipe) for pipe in self._pipes]
        return Observed(
            requests=[request for one in done for request in one.requests],
            unfinished=sum(one.unfinished for one in done),
            busy=max(one.busy for one in done),
            interrupted=interrupted.is_set(),
        )


def _send(pipe: Pipe, message: object) -> None:
    # If nobody is there any more, receiving tells.
    with contextlib.suppress(OSError):
        pipe.send(message)


def _received(pipe: Pipe) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        raise ConfigError("a process of the client died; is there enough memory?") from None


@contextmanager
def _interruptible(pipes: list[Pipe]) -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event and tells the processes to stop; the next one is Python's."""
    interrupted = threading.Event()

    def stop(number: int, frame: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, handler)
        for pipe in pipes:
            _send(pipe, STOP)

    handler = signal.signal(signal.SIGINT, stop)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """A Ctrl-C meanwhile comes afterwards."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def processes(
    number: int, target: Target, path: str, bodies: Bodies, timeout: float
) -> Iterator[Processes]:
    """`number` processes that ask `target` at `path`, all ready, until the context ends."""
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    pipes, children = [], []
    try:
        with _ctrl_c_waits():  # and children are born deaf to it
            for _ in range(number):
                ours, theirs = context.Pipe()
                worker = Worker(theirs, counter, target, path, bodies, timeout)
                child = context.Process(target=worker.serve, daemon=True)
                child.start()
                theirs.close()
                pipes.append(ours)
                children.append(child)
        for pipe in pipes:
            _received(pipe)
        yield Processes(pipes, counter)
    finally:
        for pipe in pipes:
            pipe.close()
        for child in children:
            child.join(1)
            child.kill()
            child.join()
            child.close()
