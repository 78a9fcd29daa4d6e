"""Runs an engine core on a thread of its own; any thread may submit, end or inspect requests.

Calls from other threads are executed between steps, so the core needs no locks. An exception in a
step reaches every open request and every later call.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from mmtp_jax.engine.core import EngineCore, TokenDelta

Sink = Callable[[TokenDelta | BaseException], None]


class EngineDead(RuntimeError):
    """The engine's thread ended; the cause is chained."""


class EngineDriver:
    """Owns the core. `call` runs a function of the core between steps and returns its result."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._calls: queue.SimpleQueue[tuple[Callable[[EngineCore], Any], Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="mmtp-engine", daemon=True)
        self._thread.start()

    def call[T](self, function: Callable[[EngineCore], T]) -> T:
        """Run `function(core)` on the engine's thread; its exceptions are raised here."""
        if self._closed or self._error is not None:
            raise EngineDead("the engine has stopped") from self._error
        future: Future[T] = Future()
        self._calls.put((function, future))
        return future.result()

    def submit(self, request_id: str, sink: Sink, add: Callable[[EngineCore], None]) -> None:
        """Add a request; `sink` gets its deltas (on the engine's thread) until one has a reason."""

        def start(core: EngineCore) -> None:
            add(core)
            self._sinks[request_id] = sink

        self.call(start)

    def finish(self, request_id: str, reason: Any = "abort") -> None:
        """End a request (nothing happens if it ended already). Safe on the engine's thread."""
        if threading.current_thread() is self._thread:
            self._finish(self._core, request_id, reason)
        elif not self._closed and self._error is None:
            self.call(lambda core: self._finish(core, request_id, reason))

    def close(self) -> None:
        """Stop the thread; open requests get an `EngineDead`."""
        if not self._closed:
            self._closed = True
            self._calls.put(None)
            self._thread.join()

    def _finish(self, core: EngineCore, request_id: str, reason: Any) -> None:
        core.finish(request_id, reason)
        self._sinks.pop(request_id, None)

    def _run(self) -> None:
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
            self._fail_everything()

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
            try:
                future.set_result(function(self._core))
            except Exception as error:
                future.set_exception(error)
            wait = False

    def _fail_everything(self) -> None:
        dead = EngineDead("the engine has stopped")
        dead.__cause__ = self._error
        self._closed = True
        for sink in list(self._sinks.values()):
            sink(dead)
        self._sinks.clear()
        while not self._calls.empty():
            item = self._calls.get()
            if item is not None:
                item[1].set_exception(dead)
