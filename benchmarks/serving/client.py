"""A light HTTP client that opens many streams at once, for a process of its own.

    python benchmarks/serving/client.py http://127.0.0.1:30000 < requests.json > replies.json

It reads a list of bodies of `/generate`, posts all at the same time, each on a connection of its
own, and writes a list with one object for each: `ids`, `logprobs`, `versions`, `finish_reason`, and
the seconds to the first event (`first_s`) and to the end (`end_s`). Sockets and a little parsing
alone, since it shares the machine's cores with the engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit


async def stream_all(url: str, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Posts all bodies at once; returns what their streams said, in order."""
    return await asyncio.gather(*(_stream(url, body) for body in bodies))


async def _stream(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    content = json.dumps({**body, "stream": True, "stream_output": True}).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    start_s = time.perf_counter()
    writer.write(head.encode() + content)
    result: dict[str, Any] = {"ids": [], "logprobs": [], "versions": [], "first_s": None}
    status = (await reader.readline()).split()[1:2]
    if status != [b"200"]:
        raise RuntimeError(f"status {status}: {(await reader.read()).decode()}")
    async for line in reader:  # chunk sizes, headers and empty lines are between the events
        if not line.startswith(b"data: {"):
            continue
        if result["first_s"] is None:
            result["first_s"] = time.perf_counter() - start_s
        piece = json.loads(line[6:])
        if "error" in piece:
            raise RuntimeError(piece["error"]["message"])
        meta = piece["meta_info"]
        result["ids"] += piece["output_ids"]
        result["versions"] += meta["token_weight_versions"]
        result["logprobs"] += [entry[0] for entry in meta.get("output_token_logprobs", ())]
        result["finish_reason"] = meta["finish_reason"]
    result["end_s"] = time.perf_counter() - start_s
    writer.close()
    return result


def main() -> None:
    """Reads bodies from stdin, writes results to stdout."""
    json.dump(asyncio.run(stream_all(sys.argv[1], json.load(sys.stdin))), sys.stdout)


if __name__ == "__main__":
    main()
