"""Uvicorn with bounds that it has no options for: connections, and the wait for a request."""

from __future__ import annotations

import asyncio
import json
import logging

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sgljax_engine.server.responses import HTTPError, error_body, overloaded

logger = logging.getLogger(__name__)
# Clients are told what they do wrong. A line for each of them could fill the disk.
logger.setLevel(logging.ERROR)

_KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open. A client that keeps connections for less never sends
a request on one that is just being closed: httpx keeps them for 5 s, as uvicorn does by default."""

_MAX_HEADER_BYTES = 65_536

_ACCEPTED_AT_ONCE = 32
"""Connections that the event loop accepts before it counts them."""

_REFUSAL_S = 1.0
"""Seconds for a refused client to read why; to close at once could take the reply from it."""

_STALLED_S = 60.0
"""Seconds in which a client must take some of a reply that is written."""


class BoundedConfig(uvicorn.Config):
    """Uvicorn's configuration, which leaves the process's logging and signals alone, and bounds."""

    def __init__(self, app: object, *, max_connections: int, header_timeout_s: float) -> None:
        super().__init__(
            app,  # pyright: ignore[reportArgumentType]
            http=BoundedProtocol,
            log_config=None,
            access_log=False,
            backlog=_ACCEPTED_AT_ONCE,
            lifespan="off",  # the server drains: only then are connections closed
            timeout_keep_alive=_KEEP_ALIVE_S,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_graceful_shutdown=1,
            server_header=False,
            ws="none",
        )
        self.max_connections = max_connections
        self.header_timeout_s = header_timeout_s


class BoundedProtocol(H11Protocol):
    """A connection that ends when its client sends no request, or takes no reply."""

    config: BoundedConfig
    _header_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _num_unsent = 0
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Waits for the first request, or refuses the connection."""
        self.logger = logger
        super().connection_made(transport)
        num_others, limit = len(self.connections) - 1, self.config.max_connections
        if num_others >= 2 * limit:
            transport.abort()
        elif num_others >= limit:
            self._is_refused = True
            self._end_with(overloaded(f"{num_others} connections are open, the limit is {limit}"))
            transport.write_eof()
            self._header_timer = self.loop.call_later(_REFUSAL_S, transport.abort)
        else:
            self._watch_headers()
            self._stall_timer = self.loop.call_later(_STALLED_S, self._look_for_stall)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser."""
        if self._is_refused:
            return
        super().data_received(data)
        self._watch_headers()

    def on_response_complete(self) -> None:
        """Waits for the next request; a part of its headers may be here."""
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._unset_keepalive_if_required()
            self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timers."""
        for timer in (self._header_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _watch_headers(self) -> None:
        """Keeps one timer while headers are awaited: uvicorn's between requests, or this one."""
        is_awaited = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if is_awaited and self._header_timer is None:
            self._header_timer = self.loop.call_later(
                self.config.header_timeout_s, self._headers_are_late
            )
        elif not is_awaited and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_are_late(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0]:
            seconds = self.config.header_timeout_s
            self._end_with(HTTPError(408, f"the headers did not come within {seconds} s"))
        self.transport.close()

    def _end_with(self, error: HTTPError) -> None:
        """Writes a reply beside the parser, whose state allows none."""
        body = json.dumps(error_body(error)).encode()
        more = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
        head = (
            f"HTTP/1.1 {error.status} \r\nContent-Type: application/json\r\n{more}"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)

    def _look_for_stall(self) -> None:
        """A closed transport would wait for ever for a client that takes nothing."""
        num_unsent = self.transport.get_write_buffer_size()
        is_written = self.cycle is None or self.cycle.response_complete
        is_written |= self.transport.is_closing()
        if is_written and 0 < self._num_unsent <= num_unsent:
            self.transport.abort()
            return
        self._num_unsent = num_unsent if is_written else 0
        self._stall_timer = self.loop.call_later(_STALLED_S, self._look_for_stall)
