"""Routers for tests: one of our own that forgets nothing of what it was asked, and real ones."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from tests.threads import wait_for

REAL = {"sglang-router": ("launch",), "vllm-router": ()}
"""Commands that start a router, and their first arguments.

They are not among the development tools, whose versions of aiohttp and pydantic they would decide:
install each into an environment of its own and put its folder of commands on the path.
"""


def is_installed(name: str) -> bool:
    return shutil.which(name) is not None


class ScriptedRouter:
    """Lists workers as a router does: with ids and slowly, or by their URLs and at once.

    Attributes:
        workers: URLs of workers by their names.
        asked: Method and path of each request that changes them.
        refuses: A status that it answers everything with; None for none.
    """

    def __init__(self, *, has_ids: bool) -> None:
        self.workers: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.refuses: int | None = None
        self._has_ids = has_ids
        self._num_added = 0
        router = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length) or b"null")
                router.headers.append({n.lower(): v for n, v in self.headers.items()})
                status, reply = router.answer(self.command, self.path, body)
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = _answer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """The status and the reply of a request."""
        if self.refuses is not None:
            return self.refuses, {}
        if method == "GET":
            listed = [
                {"url": url} | ({"id": name} if self._has_ids else {})
                for name, url in list(self.workers.items())
            ]
            return 200, {"workers": listed}
        self.asked.append((method, path))
        if method == "POST":
            if body["url"] in self.workers.values():
                return 400, {"error": f"Worker {body['url']} already exists"}
            self._num_added += 1
            name = f"id-{self._num_added}" if self._has_ids else body["url"]
            self.workers[name] = body["url"]
            return 202 if self._has_ids else 200, {}
        name = urllib.parse.unquote(path.removeprefix("/workers/"))
        return (202, {}) if self.workers.pop(name, None) else (404, {})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def real_router(name: str, folder: Path, *options: str) -> Iterator[str]:
    """The URL of a real router in a process of its own, without workers."""
    ports = [_free_port() for _ in range(2)]
    command = [name, *REAL[name], "--host", "127.0.0.1", "--port", str(ports[0])]
    command += ["--prometheus-port", str(ports[1])]
    command += ["--health-check-interval-secs", "1", "--worker-startup-check-interval", "1"]
    # Its interpreter is not this one.
    environment = {name: each for name, each in os.environ.items() if name != "PYTHONPATH"}
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log, env=environment)
    url = f"http://127.0.0.1:{ports[0]}"
    try:
        wait_for(lambda: process.poll() is not None or _answers(url))
        assert process.poll() is None, (folder / f"{name}.log").read_text()
        yield url
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/workers").status_code == 200
    except httpx.HTTPError:
        return False
