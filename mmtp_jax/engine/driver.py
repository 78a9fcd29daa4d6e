"""Runs an engine core on a thread of its own; any thread may submit, end or inspect requests.

Calls from other threads are executed in order between steps, so the core needs no locks. An
exception in a step reaches every open request and every later call.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax

from mmtp_jax.engine.core import EngineCore
from mmtp_jax.engine.delta import TokenDelta
from mmtp_jax.engine.request import FinishReason

Sink = Callable[[TokenDelta | BaseException], None]


class EngineDead(RuntimeError):
    """The engine's thread ended; the cause is chained."""


@dataclass(frozen=True)
class Submission:
    """A request to come: `add` queues it in the core, `sink` gets its deltas on the engine's thread
    until one has a finish reason, or the exception that ended the engine. A sink must not raise.
    """

    request_id: str
    add: Callable[[EngineCore], None]
    sink: Sink


class EngineDriver:
    """Owns the core. `call` runs a function of the core between steps and returns its result."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        # A function without a future must not fail: its exception is the engine's end.
        self._calls: queue.SimpleQueue[
            tuple[Callable[[EngineCore], Any], Future[Any] | None] | None
        ]
        self._calls = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._error: BaseException | None = None
        self._closed = False
        self._closing = threading.Lock()  # no call is queued once the thread stopped reading
        self._thread = threading.Thread(target=self._run, name="mmtp-engine", daemon=True)
        self._thread.start()

    def call[T](self, function: Callable[[EngineCore], T]) -> T:
        """Run `function(core)` on the engine's thread; its exceptions are raised here."""
        future: Future[T] = Future()
        self._queue(function, future)
        return future.result()

    def submit(self, submissions: Sequence[Submission]) -> Future[None]:
        """Add requests between two steps: all of them, or none if one is refused.

        The future holds the exception that refused it. `EngineDead` is raised at once.
        """

        def start(core: EngineCore) -> None:
            added: list[str] = []
            try:
                for submission in submissions:
                    submission.add(core)
                    added.append(submission.request_id)
            except Exception:
                for request_id in added:
                    core.finish(request_id)
                raise
            self._sinks.update((each.request_id, each.sink) for each in submissions)

        future: Future[None] = Future()
        self._queue(start, future)
        return future

    def finish(self, request_id: str, reason: FinishReason = "abort") -> None:
        """End a request before the next step, without waiting for it; nothing happens if it ended
        already. Everything asked for before it, from the same thread, is done first.
        """

        def end(core: EngineCore) -> None:
            core.finish(request_id, reason)
            self._sinks.pop(request_id, None)

        with contextlib.suppress(EngineDead):
            self._queue(end, None)

    def close(self) -> None:
        """Stop the thread; open requests get an `EngineDead`."""
        with self._closing:
            self._closed = True
            self._calls.put(None)
        if threading.current_thread() is not self._thread:  # garbage may be collected on it
            self._thread.join()

    def _queue(self, function: Callable[[EngineCore], Any], future: Future[Any] | None) -> None:
        with self._closing:
            if self._closed:
                raise EngineDead("the engine has stopped") from self._error
            self._calls.put((function, future))

    def _run(self) -> None:
        # What is there now stays: looking for garbage in it, again and again, would hold up a step
        # for as long as a tenth of a second.
        gc.freeze()
        try:
            while self._serve_calls(wait=not self._core.has_work):
                for delta in self._core.step():
                    sink = self._sinks.get(delta.request_id)
                    if delta.finish_reason is not None:
                        self._sinks.pop(delta.request_id, None)
                    if sink is not None:
                        sink(delta)
        except BaseException as error:  # reported to everyone who waits
            self._error = error
        finally:
            # The interpreter may end next, and must not while the device runs a step.
            with contextlib.suppress(Exception):
                jax.block_until_ready(self._core.device.state)
            self._fail_everything()
            gc.unfreeze()

    def _serve_calls(self, wait: bool) -> bool:
        """Execute queued calls; False once the driver is closed."""
        while True:
            try:
                item = self._calls.get(block=wait)
            except queue.Empty:
                return True
            if item is None:
                return False
            function, future = item
            if future is None:
                function(self._core)
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self._core))
                except Exception as error:
                    future.set_exception(error)
            wait = False

    def _fail_everything(self) -> None:
        dead = EngineDead("the engine has stopped")
        dead.__cause__ = self._error
        with self._closing:
            self._closed = True
        for sink in self._sinks.values():
            sink(dead)
        self._sinks.clear()
        while not self._calls.empty():
            item = self._calls.get()
            if item is None:
                continue
            _, future = item
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(dead)
