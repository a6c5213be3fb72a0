"""A TCP proxy that stands for a slow and lossy network, where the kernel has no netem."""

from __future__ import annotations

import asyncio
import random
import threading
from urllib.parse import urlsplit

_RETRANSMIT_S = 0.2
"""What a lost segment costs a TCP connection, at least: Linux's minimal timeout."""

_TICK_S = 1e-6


class SlowNetwork:
    """Forwards connections to a server, each chunk late; on a thread of its own.

    A lost segment does not damage a TCP stream, it delays all that follows. Connections may also be
    cut in the middle, as by a middlebox.

    Attributes:
        url: Address that stands for the server's.
        num_cut: Connections that were cut.
    """

    def __init__(
        self, url: str, *, delay_s: float, loss: float = 0.0, cut: float = 0.0, seed: int = 0
    ) -> None:
        """Starts to forward.

        Args:
            url: The server's address.
            delay_s: Seconds that a chunk takes in either direction.
            loss: Part of the chunks that are retransmitted once.
            cut: Part of the chunks at which the connection is reset.
            seed: Of what is lost and cut.
        """
        target = urlsplit(url)
        self._host, self._port = target.hostname or "", target.port or 80
        self._delay_s, self._loss, self._cut = delay_s, loss, cut
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._is_frozen = False
        self._transports: set[asyncio.BaseTransport] = set()
        self.num_cut = 0
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        listen = self._loop.create_server(lambda: _End(self), "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(listen, self._loop).result()
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def __enter__(self) -> SlowNetwork:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it."""
        self.close()

    def freeze(self) -> None:
        """Lets nothing arrive any more; connections stay open."""
        self._is_frozen = True

    def close(self) -> None:
        """Stops forwarding, and resets what is open."""

        async def end() -> None:
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            for transport in list(self._transports):
                transport.abort()  # type: ignore[attr-defined]
            while self._transports:
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ------------------------------------------------------------------ on the loop

    def opened(self, end: _End, transport: asyncio.Transport) -> None:
        """Connects a client's end with the server."""
        self._transports.add(transport)
        if end.peer is None:
            end.connecting = self._loop.create_task(self._connect(end, transport))

    async def _connect(self, end: _End, transport: asyncio.Transport) -> None:
        try:
            await self._loop.create_connection(lambda: _End(self, end), self._host, self._port)
        except OSError:
            transport.abort()

    def closed(self, transport: asyncio.BaseTransport | None) -> None:
        """Forgets a connection."""
        if transport is not None:
            self._transports.discard(transport)

    def send(self, end: _End, data: bytes) -> None:
        """Has data arrive at the other end; b"" is the end of the stream."""
        if self._is_frozen:
            return
        if self._random.random() < self._cut:
            self.num_cut += 1
            end.abort()
            return
        late_s = _RETRANSMIT_S if self._random.random() < self._loss else 0.0
        earliest_s = end.arrives_s + _TICK_S  # at equal times a loop keeps no order
        end.arrives_s = max(earliest_s, self._loop.time() + self._delay_s + late_s)
        self._loop.call_at(end.arrives_s, self._deliver, end, data)

    def _deliver(self, end: _End, data: bytes) -> None:
        if not self._is_frozen and end.peer is not None:
            end.peer.take(data)


class _End(asyncio.Protocol):
    """One end of a connection: a client's, or the server's with its client's as peer."""

    def __init__(self, network: SlowNetwork, peer: _End | None = None) -> None:
        self.peer = peer
        self.arrives_s = 0.0
        self.connecting: asyncio.Task[None] | None = None
        self._network = network
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._network.opened(self, transport)  # type: ignore[arg-type]
        if self.peer is not None:
            self.peer.meet(self)

    def meet(self, peer: _End) -> None:
        """Sends what came before the other end was there."""
        self.peer = peer
        early, self._early = self._early, []
        for data in early:
            self._network.send(self, data)

    def data_received(self, data: bytes) -> None:
        if self.peer is None:
            self._early.append(data)
        else:
            self._network.send(self, data)

    def eof_received(self) -> bool:
        self.data_received(b"")
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._network.closed(self._transport)
        if self.peer is not None and exc is not None:
            self.peer.abort()

    def take(self, data: bytes) -> None:
        """Passes on what arrived."""
        if self._transport is None or self._transport.is_closing():
            return
        if data:
            self._transport.write(data)
        else:
            self._transport.close()

    def abort(self) -> None:
        """Resets the connection, and so the other end's."""
        for end in (self, self.peer):
            if end is not None and end._transport is not None:
                end._transport.abort()
