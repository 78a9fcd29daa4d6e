"""Runs the server: the engine's process, the HTTP server, signals, and the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from mmtp_jax.config import ConfigError, EngineConfig
from mmtp_jax.server.accept import Acceptor
from mmtp_jax.server.app import create_app
from mmtp_jax.server.engine_client import EngineClient
from mmtp_jax.server.errors import ShuttingDown
from mmtp_jax.server.logs import configure_logging
from mmtp_jax.server.metrics import Metrics
from mmtp_jax.server.service import Service
from mmtp_jax.tokenizer import Tokenizer, load_tokenizer
from mmtp_jax.weights.checkpoint import open_checkpoint
from mmtp_jax.weights.errors import ModelError
from mmtp_jax.weights.resolve import resolve_model

logger = logging.getLogger(__name__)

BACKLOG = 2048
# The garbage collector looks at new objects when there are so many more than before.
GARBAGE_OBJECTS = 20_000
# A dead engine's server answers for so long that health checks see the reason.
DEAD_SECONDS = 3.0
# What is left of the grace time for open streams to hear that they ended.
LAST_WORDS_SECONDS = 1.0


@dataclass(frozen=True)
class ServerConfig:
    """How to serve. `grace_seconds`: how long open requests may go on after SIGTERM.
    `max_waiting`: requests beyond `max_num_seqs` that are held."""

    host: str = "127.0.0.1"
    port: int = 8000
    model_names: tuple[str, ...] = ()
    api_key: str | None = None
    chat_template: str | None = None
    max_waiting: int = 1024
    max_body_bytes: int = 32 << 20
    grace_seconds: float = 30.0
    profile_directory: str | None = None
    log_level: str = "info"
    json_logs: bool = False
    log_requests: bool = False


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, as ours decide when to stop and with which exit code,
    and with an acceptor of ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        (listener,) = sockets or []
        self._acceptor = Acceptor(listener, self._protocol)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._acceptor.close()
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


def run_server(config: EngineConfig, server: ServerConfig) -> int:
    """Serve until a signal or the engine's end; the exit code: 0, or 1 if the engine died.

    Raises `ConfigError`, `ModelError` or `ChatTemplateError` for what the user can correct.
    """
    configure_logging(server.log_level, server.json_logs)
    with _listen(server.host, server.port) as listener:
        factory = uvicorn.Config("", loop="auto", log_config=None).get_loop_factory()
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(_Server(config, server, listener).run())


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # at once: clients may connect as soon as the address is known
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


class _Server:
    """The engine's client, the HTTP server, and what ends both."""

    def __init__(self, config: EngineConfig, server: ServerConfig, listener: socket.socket) -> None:
        self._config = config
        self._server = server
        self._listener = listener
        self._stop = asyncio.Event()

    async def run(self) -> int:
        server = self._server
        names = server.model_names or (self._config.model,)
        metrics = Metrics(names[0])
        self._client = EngineClient(
            self._config,
            max_waiting=server.max_waiting,
            log_level=server.log_level,
            json_logs=server.json_logs,
            on_step=metrics.engine_step,
        )
        service = Service(
            self._client,
            metrics,
            names,
            seed=self._config.seed,
            log_requests=server.log_requests,
            profile_directory=server.profile_directory,
        )
        app = create_app(service, api_key=server.api_key, max_body_bytes=server.max_body_bytes)
        self._http = _Uvicorn(
            uvicorn.Config(
                app,
                log_config=None,
                lifespan="off",
                server_header=False,
                # Seconds; open requests are ended before.
                timeout_graceful_shutdown=int(server.grace_seconds + LAST_WORDS_SECONDS + 1),
            )
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        host, port = self._listener.getsockname()[:2]
        logger.info(f"listening on http://{host}:{port}; /health tells when the engine is ready")
        serving = asyncio.create_task(self._http.serve([self._listener]))
        try:
            code = await self._until_end(service)
        finally:
            self._http.should_exit = True
            await serving
            await self._client.stop()
        return code

    def _signalled(self) -> None:
        if self._stop.is_set():  # once more: now
            self._http.force_exit = True
        self._stop.set()

    async def _until_end(self, service: Service) -> int:
        stop = asyncio.create_task(self._stop.wait())
        dead = asyncio.create_task(self._client.dead.wait())
        prepare = asyncio.create_task(self._prepare(service))
        await asyncio.wait({stop, dead, prepare}, return_when=asyncio.FIRST_COMPLETED)
        if prepare.done():
            prepare.result()
            await asyncio.wait({stop, dead}, return_when=asyncio.FIRST_COMPLETED)
        prepare.cancel()
        if self._client.failure is not None:
            raise ModelError(self._client.failure)
        if dead.done():
            await asyncio.wait({stop}, timeout=DEAD_SECONDS)
            return 1
        await self._drain()
        return 0

    async def _prepare(self, service: Service) -> None:
        """Load the tokenizer once the model is there: it may have to be fetched first."""
        model = await self._client.model()
        if model is None:
            return
        logger.info(model.description)
        service.metrics.know_drafts(model.num_drafts)
        service.tokenizer = await asyncio.to_thread(
            _load_tokenizer, self._config, self._server.chat_template
        )
        # What is there now stays, and requests leave little garbage in cycles. Looking for it took
        # an eighth of the CPU time of 256 streams, up to 60 ms at once.
        gc.freeze()
        gc.set_threshold(GARBAGE_OBJECTS, 10, 10)
        service.prepared = True

    async def _drain(self) -> None:
        """Take no more requests, and give the open ones the grace time to end."""
        logger.info(f"stopping: {self._client.num_open} open requests")
        self._client.refuse(ShuttingDown())
        self._http.should_exit = True
        loop = asyncio.get_running_loop()
        end = loop.time() + self._server.grace_seconds
        while self._client.num_open and loop.time() < end and not self._http.force_exit:
            await asyncio.sleep(0.05)
        if self._client.num_open:
            logger.warning(f"ending {self._client.num_open} requests that did not finish in time")
            self._client.fail_open_requests(ShuttingDown())


def _load_tokenizer(config: EngineConfig, chat_template: str | None) -> Tokenizer | None:
    checkpoint = open_checkpoint(
        resolve_model(config.model),
        config.hf_overrides,
        with_weights=config.load_format != "dummy",
    )
    return load_tokenizer(checkpoint.tokenizer_source, chat_template)
