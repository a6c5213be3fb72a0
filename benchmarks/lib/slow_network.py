"""A TCP proxy that stands for a slow and lossy network, where the kernel has no netem."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from urllib.parse import urlsplit

_CHUNK_BYTES = 64 * 1024
_RETRANSMIT_S = 0.2
"""What a lost segment costs a TCP connection, at least: Linux's minimal timeout."""


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
        self._target = urlsplit(url)
        self._delay_s, self._loss, self._cut = delay_s, loss, cut
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self.num_cut = 0
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._forward, "127.0.0.1", 0), self._loop
        ).result()
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
        self._delay_s = math.inf

    def close(self) -> None:
        """Stops forwarding."""

        async def end() -> None:
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection(self._target.hostname, self._target.port)
        except OSError:
            writer.transport.abort()
            return
        pipes = [
            asyncio.ensure_future(pipe)
            for pipe in (self._pipe(reader, there[1]), self._pipe(there[0], writer))
        ]
        try:
            await asyncio.gather(*pipes)
        except OSError:
            pass
        finally:
            for pipe in pipes:
                pipe.cancel()
            for each in (writer, there[1]):
                each.transport.abort()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one direction: chunks keep their order, and may be under way together."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)
        sender = asyncio.ensure_future(self._send(under_way, writer))
        try:
            arrives_s = 0.0
            while chunk := await reader.read(_CHUNK_BYTES):
                late_s = _RETRANSMIT_S if self._random.random() < self._loss else 0.0
                arrives_s = max(arrives_s, self._loop.time() + self._delay_s + late_s)
                if self._random.random() < self._cut:
                    self.num_cut += 1
                    raise ConnectionResetError("cut")
                await under_way.put((arrives_s, chunk))
            await under_way.put((arrives_s, b""))
            await sender
        finally:
            sender.cancel()

    async def _send(
        self, under_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        while True:
            arrives_s, chunk = await under_way.get()
            if arrives_s == math.inf:
                await asyncio.Event().wait()
            await asyncio.sleep(max(0.0, arrives_s - self._loop.time()))
            if not chunk:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(chunk)
            await writer.drain()
