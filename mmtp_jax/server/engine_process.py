"""The engine in a process of its own: messages in, one message out per step.

The HTTP process starts it, and it ends when that process tells it to, or dies. jax is imported
here only.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from mmtp_jax.config import ConfigError, EngineConfig
from mmtp_jax.engine.delta import TokenDelta
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.server.logs import configure_logging
from mmtp_jax.server.messages import (
    AddRequest,
    EndRequests,
    Failed,
    FromEngine,
    Loaded,
    Pages,
    Profile,
    Profiled,
    Ready,
    Refused,
    Snapshot,
    Starting,
    Step,
    ToEngine,
)
from mmtp_jax.weights.errors import ModelError

if TYPE_CHECKING:
    from mmtp_jax.engine.core import EngineCore
    from mmtp_jax.engine.grammar import Grammar, Grammars

logger = logging.getLogger(__name__)

# While a grammar compiles on its thread, the loop looks for the result this often.
COMPILING_POLL_MS = 2
SWITCH_SECONDS = 0.0003


class Channel:
    """Messages from and to the HTTP process, and whether it lives."""

    def __init__(self, address: str) -> None:
        self._socket: Any = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        parent = multiprocessing.parent_process()
        assert parent is not None
        self._parent: Any = parent.sentinel
        self._poller.register(self._parent, zmq.POLLIN)

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))

    def receive(self, timeout_ms: int | None) -> list[ToEngine] | None:
        """The messages that came, waiting for the first (None: for ever); None if the HTTP process
        is gone."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._parent in ready:
            return None
        messages: list[ToEngine] = []
        while self._socket in ready:
            try:
                messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return messages

    def close(self) -> None:
        """Close after what was sent is delivered."""
        self._socket.close()
        zmq.Context.instance().term()


def run_engine(config: EngineConfig, address: str, log_level: str, json_logs: bool) -> None:
    """The process's main function; its exit code is 2 where the user can correct the cause."""
    # The HTTP process decides when this one ends: Ctrl-C and systemd signal both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging(log_level, json_logs)
    channel = Channel(address)
    try:
        core, grammars = _start(config, channel)
    except (ConfigError, ModelError) as error:
        channel.send(Failed(" ".join(str(error).split())))
        channel.close()
        sys.exit(2)
    # What is there now stays: looking for garbage in it, again and again, would hold up a step.
    gc.freeze()
    # The thread that feeds the device would wait for the loop as long as Python lets it by default,
    # 5 ms: at 256 requests a step took 3.8 ms then, now 3.4 (emulated on a CPU: 2 ms of device, 1.9
    # of the loop).
    sys.setswitchinterval(SWITCH_SECONDS)
    channel.send(Ready())
    EngineService(core, grammars, channel).run()
    channel.close()


def _start(config: EngineConfig, channel: Channel) -> tuple[EngineCore, Grammars | None]:
    channel.send(Starting("importing jax"))

    from mmtp_jax.engine.core import EngineCore
    from mmtp_jax.engine.grammar import Grammars
    from mmtp_jax.engine.programs import enable_compilation_cache
    from mmtp_jax.loader import describe, load_model

    channel.send(Starting(f"loading {config.model}"))
    enable_compilation_cache()
    loaded = load_model(config)
    model = loaded.graph.config
    channel.send(
        Loaded(
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            num_drafts=model.num_drafts,
            max_model_len=loaded.max_model_len,
            max_num_seqs=loaded.config.limits.max_num_seqs,
            description=describe(loaded),
        )
    )
    channel.send(Starting("compiling the engine's programs"))
    core = EngineCore(
        loaded.config,
        loaded.graph,
        loaded.params,
        max_model_len=loaded.max_model_len,
        progress=lambda done, total, name: channel.send(
            Starting(f"compiled {done} of {total} programs, the last one: {name}")
        ),
    )
    grammars = None
    if loaded.tokenizer is not None:
        grammars = Grammars(loaded.tokenizer, model.vocab_size, model.eos_token_ids)
    return core, grammars


class EngineService:
    """Runs a core until it is told to stop. One thread calls the core; grammars compile on
    another."""

    def __init__(self, core: EngineCore, grammars: Grammars | None, channel: Channel) -> None:
        self._core = core
        self._grammars = grammars
        self._channel = channel
        self._compilers = ThreadPoolExecutor(1, thread_name_prefix="mmtp-grammar")
        self._compiling: dict[str, tuple[AddRequest, Future[tuple[SamplingParams, Grammar]]]] = {}
        self._reported = Snapshot()

    def run(self) -> None:
        """Serve messages and run steps. An exception of a step ends the process."""
        begin = 0.0
        while True:
            idle = not self._core.has_work
            if not self._serve_messages():
                break
            if idle:
                begin = time.perf_counter()
            deltas: list[TokenDelta] = []
            seconds = None
            if self._core.has_work:
                deltas = self._core.step()
                # From the end of one step to the end of the next: messages are part of it.
                end = time.perf_counter()
                begin, seconds = end, end - begin
            snapshot = self._snapshot()
            if deltas or snapshot != self._reported:
                self._channel.send(Step(tuple(deltas), snapshot, seconds))
                self._reported = snapshot
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def _serve_messages(self) -> bool:
        timeout = 0 if self._core.has_work else COMPILING_POLL_MS if self._compiling else None
        messages = self._channel.receive(timeout)
        if messages is None:
            logger.error("the HTTP process is gone: the engine ends")
            return False
        for message in messages:
            if isinstance(message, AddRequest):
                self._add(message)
            elif isinstance(message, EndRequests):
                for request_id in message.request_ids:
                    self._compiling.pop(request_id, None)
                    self._core.finish(request_id, message.reason)
            elif isinstance(message, Profile):
                self._channel.send(Profiled(_profile(message.directory)))
            else:
                return False
        self._add_compiled()
        return True

    def _add(self, message: AddRequest) -> None:
        try:
            if "structured_outputs" in message.params:
                compiled = self._compilers.submit(self._compile, message)
                self._compiling[message.request_id] = (message, compiled)
            else:
                self._queue(message, SamplingParams(**message.params), None)
        except Exception as error:
            self._refuse(message.request_id, error)

    def _compile(self, message: AddRequest) -> tuple[SamplingParams, Grammar]:
        """On the compiler's thread: reading the parameters validates the grammar, too."""
        if self._grammars is None:
            raise ValueError("structured outputs need a tokenizer, and this model has none")
        params = SamplingParams(**message.params)
        return params, self._grammars.compile(params)

    def _add_compiled(self) -> None:
        """Start the requests whose grammar is ready."""
        for request_id, (message, compiled) in list(self._compiling.items()):
            if not compiled.done():
                continue
            del self._compiling[request_id]
            try:
                self._queue(message, *compiled.result())
            except Exception as error:
                self._refuse(request_id, error)

    def _queue(self, message: AddRequest, params: SamplingParams, grammar: Grammar | None) -> None:
        self._core.add(
            message.request_id, message.prompt_ids, params, message.seed, grammar=grammar
        )

    def _refuse(self, request_id: str, error: Exception) -> None:
        """One request's error is nobody else's."""
        internal = not isinstance(error, ValueError)
        if internal:
            logger.error("a request could not be started", exc_info=error)
        message = "the request could not be started" if internal else str(error)
        self._channel.send(Refused(request_id, message, internal))

    def _snapshot(self) -> Snapshot:
        core = self._core
        return Snapshot(
            running=len(core.scheduler.running),
            waiting=len(core.scheduler.waiting) + len(self._compiling),
            steps=core.stats.steps,
            preemptions=core.scheduler.num_preemptions,
            pages=tuple(
                Pages(group.name, pool.num_pages - 1, pool.num_referenced)
                for group, pool in zip(core.cache.groups, core.cache.pools, strict=True)
            ),
        )


def _profile(directory: str | None) -> str | None:
    """Start or finish a trace of jax.profiler; the error, if there is one."""
    import jax

    try:
        if directory is None:
            jax.profiler.stop_trace()
        else:
            jax.profiler.start_trace(directory)
    except Exception as error:
        return str(error)
    return None
