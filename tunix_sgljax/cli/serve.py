"""`tunix-sgljax serve`: a model in a Hugging Face folder over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sgljax_engine import InvalidConfigError
from tunix_sgljax.cli.engine_options import (
    add_engine_options,
    engine_config,
    model_folder,
    read_pairs,
)
from tunix_sgljax.cli.interrupt import current
from tunix_sgljax.cli.output import emit, say

SUMMARY = "Serve a model in a Hugging Face folder over HTTP."

EXAMPLES = """examples:
  tunix-sgljax serve --model Qwen3-0.6B
  tunix-sgljax serve --model Qwen3-0.6B --port 8000 --engine max_model_len=4096 --warmup
  tunix-sgljax serve --model Qwen3-0.6B --host 0.0.0.0 --api-key-file key --admin-key-file admin
  tunix-sgljax serve --model Qwen3-0.6B --weights-root checkpoints --server halt_timeout_s=30

  tunix-sgljax serve --model Qwen3-0.6B --weights-store gs://bucket/policy \\
      --join http://router:30000 --advertise http://worker-3:30000

Routes of SGLang, vLLM and OpenAI; a picture of the engine at /. Without keys only 127.0.0.1 is
served. Keys come from an option, a file, or TUNIX_SGLJAX_API_KEY and TUNIX_SGLJAX_ADMIN_KEY.
Ctrl-C lets open requests finish, for a while; a second one ends at once. A server that joined a
router serves the newest version of its weight store first, and on SIGTERM leaves the router, lets
open requests finish, and ends. The router's key comes from TUNIX_SGLJAX_ROUTER_KEY."""

_WAIT_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a Hugging Face folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free port (30000)")
    for name, what in (("api", "generate and read"), ("admin", "control the engine")):
        parser.add_argument(
            f"--{name}-key", metavar="KEY", help=f"bearer key of the routes that {what}"
        )
        parser.add_argument(
            f"--{name}-key-file", metavar="FILE", help="the key is the first line of a file"
        )
    parser.add_argument("--model-name", metavar="NAME", help="in replies; the folder's by default")
    parser.add_argument(
        "--weights-root", metavar="FOLDER", help="where /update_weights_from_disk may read"
    )
    parser.add_argument(
        "--weights-store", metavar="URL", help="a folder or bucket whose newest weights are served"
    )
    parser.add_argument(
        "--join", metavar="URL", help="a router to register with: sglang-router or vllm-router"
    )
    parser.add_argument(
        "--advertise", metavar="URL", help="this server, as the router of --join reaches it"
    )
    parser.add_argument("--warmup", action="store_true", help="compile before the first request")
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the server, as often as needed: max_requests=256, halt_timeout_s=30",
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Serves until Ctrl-C or SIGTERM."""
    folder = model_folder(args.model)
    options = _server_options(args, folder)
    config = engine_config(args)

    from sgljax_engine import Engine
    from sgljax_engine.server import ServerConfig
    from tunix_sgljax.observability.progress import Progress

    # Both are refused before a model is loaded.
    server_config = ServerConfig.from_options(options)
    _check_join(args)
    _check_port(args.host, args.port)
    started_s = time.perf_counter()
    with Engine(folder, config=config, progress=Progress(None)) as engine:
        if args.warmup:
            engine.warmup(include_table=True)
        server = engine.serve(server_config)
        say(f"loaded {folder} in {time.perf_counter() - started_s:.1f} s")
        say(f"a page that shows the engine at work: {server.url}/")
        emit(f"serving {server_config.model_name} on {server.url}")
        stop = threading.Event()
        before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
        try:
            with _joined(args, server.url), current().on_interrupt(stop.set):
                while server.is_running and not stop.wait(_WAIT_S):
                    pass
            server.stop()
        finally:
            signal.signal(signal.SIGTERM, before)
    return 0


def _check_join(args: argparse.Namespace) -> None:
    """Refuses what no router could use, before a model is loaded."""
    if args.join is None:
        if args.advertise is not None:
            raise InvalidConfigError("--advertise goes with --join, the router that is told")
        return
    if args.advertise is None and args.host.strip("[]") in ("0.0.0.0", "::"):
        raise InvalidConfigError(
            f"--join needs --advertise, the URL of this server: --host {args.host} is none"
        )
    from tunix_sgljax.cli.membership import checked_url

    checked_url("--join", args.join)
    if args.advertise is not None:
        checked_url("--advertise", args.advertise)


@contextlib.contextmanager
def _joined(args: argparse.Namespace, url: str) -> Iterator[None]:
    """Keeps the server among the router's workers for the block."""
    if args.join is None:
        yield
        return
    from tunix_sgljax.cli.membership import Membership

    key = os.environ.get("TUNIX_SGLJAX_ROUTER_KEY")
    membership = Membership(args.join, args.advertise or url, api_key=key)
    try:
        yield
    finally:
        if not membership.leave():
            say(f"the router {args.join} still lists this server; it will find it gone")


def _check_port(host: str, port: int) -> None:
    """Refuses a port that another program listens on; the server takes it minutes later."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(1)  # two sockets may bind where none listens
    except OSError as error:
        raise InvalidConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; --port takes another, or 0 for any "
            "that is free"
        ) from None


def _server_options(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    options = read_pairs("--server", args.server)
    named: dict[str, Any] = {
        "host": args.host,
        "port": args.port,
        "model_name": args.model_name or folder.resolve().name,
        "api_key": _key("api", args.api_key, args.api_key_file),
        "admin_key": _key("admin", args.admin_key, args.admin_key_file),
        "weights_root": None if args.weights_root is None else Path(args.weights_root),
        "weights_store": args.weights_store,
    }
    twice = sorted(named.keys() & options.keys())
    if twice:
        raise InvalidConfigError(f"--server must not set {twice}; each has an option of its own")
    return named | options


def _key(name: str, given: str | None, file: str | None) -> str | None:
    if given is not None and file is not None:
        raise InvalidConfigError(f"give --{name}-key or --{name}-key-file, not both")
    if file is not None:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        if not lines or not lines[0].strip():
            raise InvalidConfigError(f"--{name}-key-file {file!r} has no key in its first line")
        return lines[0].strip()
    if given is not None:
        return given
    return os.environ.get(f"TUNIX_SGLJAX_{name.upper()}_KEY")
