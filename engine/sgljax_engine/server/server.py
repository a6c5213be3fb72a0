"""Serves an app on a thread and an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import weakref
from concurrent.futures import Future

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgljax_engine import Engine, EngineError, InvalidConfigError
from sgljax_engine.server.app import create_app
from sgljax_engine.server.config import ServerConfig, is_loopback
from sgljax_engine.server.connections import BoundedConfig
from sgljax_engine.server.responses import error_response, overloaded

_BACKLOG = 2048
"""Connections that the system accepts before the event loop does."""

_START_LIMIT_S = 60.0


class Server:
    """An HTTP server of one engine, on a daemon thread. It handles no signals.

    Any thread may call any method. The engine outlives its server; `Engine.shutdown` stops those
    that `Engine.serve` started.

    Attributes:
        port: The port that it listens on.
    """

    def __init__(self, engine: Engine, config: ServerConfig | None = None) -> None:
        """Listens; returns when requests are answered. The engine may be used in process too.

        Raises:
            InvalidConfigError: when the address cannot be used.
            EngineError: when the server did not start.
        """
        self._config = config or ServerConfig()
        app = create_app(engine, self._config, is_local=is_loopback(self._config.host))
        self._context = app.state.context
        self._socket = _listen(self._config.host, self._config.port)
        self.port: int = self._socket.getsockname()[1]
        self._context.replica.id = self._config.replica_name(self.port)
        self._started: Future[None] = Future()
        self._drain_timeout_s = self._config.drain_timeout_s
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._uvicorn = _Uvicorn(
            BoundedConfig(
                _EndsPolitely(app),
                max_connections=self._config.connection_limit,
                header_timeout_s=self._config.body_timeout_s,
            )
        )
        _servers.add(self)
        self._thread = threading.Thread(target=self._run, name="sgljax-server", daemon=True)
        self._thread.start()
        self._started.result(_START_LIMIT_S)

    @property
    def url(self) -> str:
        """The address, without a slash at the end."""
        host = self._config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def is_running(self) -> bool:
        """Whether it answers requests."""
        return self._thread.is_alive()

    def stop(self, *, drain_timeout_s: float | None = None) -> None:
        """Refuses new requests, waits for open ones, then aborts them; ends the thread. Idempotent.

        Args:
            drain_timeout_s: Seconds that open requests have; None takes the config's.
        """
        loop = self._loop
        if loop is not None and self._thread.is_alive():
            if drain_timeout_s is not None:
                self._drain_timeout_s = drain_timeout_s
                if drain_timeout_s == 0:
                    with contextlib.suppress(RuntimeError):
                        loop.call_soon_threadsafe(self._context.generation.hurry.set)
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(self._stopping.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the server to end; returns whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def descriptors(self) -> list[int]:
        """File descriptors of the port and of all connections."""
        connections = list(self._uvicorn.server_state.connections)
        sockets = [
            each.transport.get_extra_info("socket") for each in connections if each.transport
        ]
        found = [each.fileno() for each in (self._socket, *sockets) if each is not None]
        return [each for each in found if each >= 0]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(EngineError(f"the server did not start: {error!r}"))
            else:
                raise
        finally:
            self._socket.close()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        serving = asyncio.ensure_future(self._uvicorn.serve(sockets=[self._socket]))
        starting = asyncio.ensure_future(self._uvicorn.is_up.wait())
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            starting.cancel()
            serving.result()
            raise EngineError("it ended at once")
        # Uvicorn listened with the number of connections that it accepts at once.
        self._socket.listen(_BACKLOG)
        self._started.set_result(None)
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await self._context.generation.drain(self._drain_timeout_s)
        self._uvicorn.should_exit = True
        stopping.cancel()
        await serving
        # A client that reads nothing leaves what it was sent in the buffer of an open connection.
        for connection in list(self._uvicorn.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)  # lets the event loop close them


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _release_in_child() -> None:
    """Leaves a forked child neither the port nor connections, which would stay open with it.

    Nothing is closed: Python's objects own the descriptors and close them some time.
    """
    servers = list(_servers)
    if servers:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (each for server in servers for each in server.descriptors()):
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


class _EndsPolitely:
    """ASGI middleware: what uvicorn cancels at the end gets status 503."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def noting(message: Message) -> None:
            nonlocal is_started
            is_started |= message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if is_started:
                raise
            await error_response(overloaded("the server has ended"))(scope, receive, send)


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.is_up.set()


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidConfigError(f"host must be an address, got {host!r}: {error}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise InvalidConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listening
