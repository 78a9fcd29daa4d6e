"""One process of the client: it sends its share of a run's requests, and reads the answers when the
run is over."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.sharedctypes import Synchronized

from mmtp_jax.bench.serving.bodies import Bodies
from mmtp_jax.bench.serving.connection import Answer, Client
from mmtp_jax.bench.serving.events import Measured, measured
from mmtp_jax.bench.serving.target import Target

READY = "ready"
STOP = "stop"


@dataclass(frozen=True)
class Share:
    """What one process does of a run that begins at `start` (of `time.perf_counter`).

    A closed loop keeps `slots` requests open; each takes the next index below `limit` from a
    counter that the processes share, until `deadline`. An open loop sends the requests `indices` at
    the seconds `arrivals`.
    """

    run: int
    start: float
    slots: int = 0
    limit: float = float("inf")
    deadline: float = float("inf")
    indices: range = range(0)
    arrivals: tuple[float, ...] = ()


@dataclass(frozen=True)
class Done:
    """`unfinished` requests were open when the run was stopped; `busy` is the share of the time in
    which the process computed."""

    requests: list[Measured]
    unfinished: int
    busy: float


@dataclass
class Worker:
    """`pipe` brings shares and takes what was done; `counter`: the next index of a closed loop."""

    pipe: Pipe
    counter: Synchronized[int]
    target: Target
    path: str
    bodies: Bodies
    timeout: float

    def serve(self) -> None:
        """Do the shares that the pipe brings until it is closed."""
        # Ctrl-C reaches every process of a terminal; the parent says what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A pause of the garbage collector would look like one of the server.
        gc.disable()
        _allow_many_connections()
        self._head = self.target.post(self.path)
        with contextlib.suppress(EOFError, BrokenPipeError):
            self.pipe.send(READY)
            while True:
                share = self.pipe.recv()
                if isinstance(share, Share):
                    self.pipe.send(self._done(share))
                    gc.collect()

    def _done(self, share: Share) -> Done:
        import uvloop  # not on Windows, where other commands do run

        answers: list[Answer] = []
        begin, cpu = time.perf_counter(), time.process_time()
        unfinished = uvloop.run(self._run(share, answers))
        busy = (time.process_time() - cpu) / (time.perf_counter() - begin)
        return Done([measured(answer) for answer in answers], unfinished, busy)

    async def _run(self, share: Share, answers: list[Answer]) -> int:
        """Fill `answers`; the number of requests that were open when the pipe said to stop."""
        begun = 0

        async def ask(index: int) -> None:
            nonlocal begun
            begun += 1
            body, answer = self.bodies.body(share.run, index), Answer()
            await client.ask(self._head + b"%d\r\n\r\n" % len(body) + body, answer)
            answers.append(answer)

        async def slot() -> None:
            while (index := self._next(share)) is not None:
                await ask(index)

        async def load() -> None:
            await _until(share.start)
            async with asyncio.TaskGroup() as group:
                for _ in range(share.slots):
                    group.create_task(slot())
                for index, seconds in zip(share.indices, share.arrivals, strict=True):
                    await _until(share.start + seconds)
                    group.create_task(ask(index))

        client = Client(self.target, self.timeout)
        loading = asyncio.create_task(load())
        loop = asyncio.get_running_loop()
        # Whatever comes now, or the pipe's end, says to stop.
        loop.add_reader(self.pipe.fileno(), loading.cancel)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await loading
        finally:
            loop.remove_reader(self.pipe.fileno())
            # uvloop leaves it so that reading does not wait.
            os.set_blocking(self.pipe.fileno(), True)
            client.close()
        return begun - len(answers)

    def _next(self, share: Share) -> int | None:
        if time.perf_counter() >= share.deadline:
            return None
        with self.counter.get_lock():
            index = self.counter.value
            if index >= share.limit:
                return None
            self.counter.value = index + 1
        return index


async def _until(moment: float) -> None:
    await asyncio.sleep(moment - time.perf_counter())


def _allow_many_connections() -> None:
    """Every open request is a file; shells often allow 1,024 unless asked for more."""
    import resource  # not on Windows either

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
