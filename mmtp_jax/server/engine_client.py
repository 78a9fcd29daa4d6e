"""The HTTP process's end of the engine: starts its process, sends requests, hands out deltas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from mmtp_jax.config import EngineConfig
from mmtp_jax.engine.delta import TokenDelta
from mmtp_jax.engine.request import FinishReason
from mmtp_jax.server.engine_process import run_engine
from mmtp_jax.server.errors import APIError, EngineDead, EngineStarting, Overloaded, ShuttingDown
from mmtp_jax.server.messages import (
    AddRequest,
    EndRequests,
    Failed,
    FromEngine,
    Loaded,
    Profile,
    Ready,
    Refused,
    Shutdown,
    Starting,
    Step,
    ToEngine,
)

logger = logging.getLogger(__name__)

# How long an engine that was told to stop may finish its step before it is killed.
STOP_SECONDS = 10.0
# How long messages are taken one after the other, if the engine sends them as fast. Without an end,
# streams got all of their text at once when it was complete. A shorter turn costs more per token
# (flooded, 256 streams: 5.8 us with 20 ms, 4.4 us with 100 ms), a longer one delays new requests.
TURN_SECONDS = 0.02

Sink = Callable[[TokenDelta | APIError], None]


class EngineClient:
    """One engine process, seen from asyncio. Not thread-safe: the event loop's thread calls it.

    `failure` is what the user can correct if the engine could not start; `dead` is set when the
    process ended without being told to.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_waiting: int,
        log_level: str,
        json_logs: bool,
        on_step: Callable[[Step], None],
    ) -> None:
        self.loaded: Loaded | None = None
        self.failure: str | None = None
        self.dead = asyncio.Event()
        self._max_waiting = max_waiting
        self._on_step = on_step
        self._refusal: APIError | None = EngineStarting("starting its process")
        self._ready = False
        self._sinks: dict[str, Sink] = {}
        self._profiled: asyncio.Future[str | None] | None = None
        self._know_model = asyncio.Event()
        self._encoder = msgspec.msgpack.Encoder()
        self._directory = tempfile.TemporaryDirectory(prefix="mmtp-")
        address = f"ipc://{Path(self._directory.name, 'engine')}"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.bind(address)
        # spawn: a forked process would share the threads' locks of this one.
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_engine,
            args=(config, address, log_level, json_logs),
            name="mmtp-engine",
            daemon=True,
        )
        self._process.start()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._process.sentinel, self._ended)
        self._receiver = loop.create_task(self._receive())

    @property
    def num_open(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._sinks)

    @property
    def refusal(self) -> APIError | None:
        """Why no request can be taken; None if one can."""
        return self._refusal

    async def model(self) -> Loaded | None:
        """What there is to know of the model, once it is loaded; None if that failed."""
        await self._know_model.wait()
        return self.loaded

    def submit(self, requests: Sequence[tuple[AddRequest, Sink]]) -> None:
        """Start requests; the sink of each gets what becomes of it, until a delta has a finish
        reason or there is an error. Raises `APIError` if none can be taken.
        """
        if self._refusal is not None:
            raise self._refusal
        assert self.loaded is not None  # or there would be a refusal
        most = self.loaded.max_num_seqs + self._max_waiting
        if len(self._sinks) + len(requests) > most:
            raise Overloaded(self._max_waiting)
        for request, sink in requests:
            self._sinks[request.request_id] = sink
            self._send(request)

    def end(self, request_ids: Iterable[str], reason: FinishReason) -> None:
        """End requests now; those that ended already are passed over."""
        known = [one for one in request_ids if self._sinks.pop(one, None) is not None]
        if known:
            self._send(EndRequests(known, reason))

    async def profile(self, directory: str | None) -> None:
        """Start a trace into `directory`, or finish it (None); `APIError` if that fails."""
        if self._refusal is not None:
            raise self._refusal
        if self._profiled is not None:
            raise APIError(409, "another profiling request is being served")
        self._profiled = asyncio.get_running_loop().create_future()
        self._send(Profile(directory))
        try:
            error = await self._profiled
        finally:
            self._profiled = None
        if error is not None:
            raise APIError(409, error)

    def refuse(self, reason: APIError) -> None:
        """Take no more requests."""
        self._refusal = reason

    def fail_open_requests(self, error: APIError) -> None:
        """Give every open request `error` as its end."""
        ids = list(self._sinks)
        sinks = [self._sinks[one] for one in ids]
        self.end(ids, "abort")
        for sink in sinks:
            sink(error)

    async def stop(self) -> None:
        """End the engine's process and free what belongs to it."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        self.refuse(ShuttingDown())
        self._send(Shutdown())
        if self._process.is_alive():
            # Before it is ready, the engine reads no messages.
            patience = STOP_SECONDS if self._ready else 0.0
            await asyncio.to_thread(self._process.join, patience)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._receiver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._receiver
        self._socket.close()
        self._context.term()
        self._directory.cleanup()

    def _send(self, message: ToEngine) -> None:
        if self._process.is_alive():
            self._socket.send(self._encoder.encode(message))

    async def _receive(self) -> None:
        decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        turn_ends = 0.0
        try:
            while True:
                # What is there already comes without giving way: streams that fell behind then get
                # the tokens of several steps at once, which costs less than one by one.
                arriving = asyncio.ensure_future(self._socket.recv())
                gives_way = not arriving.done()
                if not gives_way and time.monotonic() > turn_ends:
                    await asyncio.sleep(0)
                    gives_way = True
                message = decoder.decode(await arriving)
                if gives_way:
                    turn_ends = time.monotonic() + TURN_SECONDS
                self._take(message)
        except Exception:
            # Nobody would hear of the engine any more: its death is what everything else handles.
            logger.exception("a message of the engine could not be handled")
            self._process.kill()

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Step):
            for delta in message.deltas:
                ended = delta.finish_reason is not None
                take = self._sinks.pop if ended else self._sinks.get
                sink = take(delta.request_id, None)
                if sink is not None:
                    sink(delta)
            self._on_step(message)
        elif isinstance(message, Refused):
            sink = self._sinks.pop(message.request_id, None)
            if sink is not None:
                sink(APIError(500 if message.internal else 400, message.message))
        elif isinstance(message, Starting):
            logger.info(message.what)
            self.refuse(EngineStarting(message.what))
        elif isinstance(message, Loaded):
            self.loaded = message
            self._know_model.set()
        elif isinstance(message, Ready):
            self._ready, self._refusal = True, None
        elif isinstance(message, Failed):
            self.failure = message.message
        else:
            self._answer_profile(message.error)

    def _answer_profile(self, error: str | None) -> None:
        if self._profiled is not None and not self._profiled.done():
            self._profiled.set_result(error)

    def _ended(self) -> None:
        """The process is gone, and nobody told it to go."""
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        asyncio.get_running_loop().create_task(self._report_death())

    async def _report_death(self) -> None:
        # Its last message may be on its way.
        await asyncio.sleep(0.2)
        await asyncio.to_thread(self._process.join)
        why = self.failure or f"its process ended with code {self._process.exitcode}"
        error = EngineDead(why)
        self.refuse(error)
        if self.failure is None:
            logger.critical(error.message)
        self.fail_open_requests(error)
        self._answer_profile(error.message)
        self._know_model.set()
        self.dead.set()
