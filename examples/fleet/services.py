"""Commands of a fleet's workers and of its router."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet.processes import LaunchError, Service, free_port

ROUTERS = {
    "sglang": ("sglang-router", "launch", "--policy", "manual"),
    "vllm": ("vllm-router", "--policy", "consistent_hash"),
}
"""Commands of public routers, which are installed beside: `pip install sglang-router`.

Their policies send the turns of one episode to one worker, by a header of the request.
"""

ROUTER_OPTIONS = (
    *("--health-check-interval-secs", "2"),
    *("--health-check-timeout-secs", "2"),
    *("--health-failure-threshold", "2"),
    *("--health-success-threshold", "1"),
    *("--worker-startup-check-interval", "1"),
    *("--cb-failure-threshold", "3"),  # less than the 5 attempts at a request, which is then
    *("--cb-success-threshold", "1"),  # sent to another worker
    *("--cb-timeout-duration-secs", "5"),
)
"""Without them a router looks once a minute for workers that died or came back."""

PROGRAM = (sys.executable, "-m", "tunix_sgljax.cli.main")
"""The command `tunix-sgljax`, of this interpreter."""

ROUTER = "router"
"""Name of the router's service."""


def router_service(router: str) -> Service:
    """Returns the router, which workers join.

    Raises:
        LaunchError: It is not installed.
    """
    program, *arguments = ROUTERS[router]
    found = shutil.which(program)
    if found is None:
        raise LaunchError(f"--router {router} needs {program}: pip install {program}")
    port = free_port()
    return Service(
        name=ROUTER,
        command=[
            *(found, *arguments, "--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-port", str(free_port()), *ROUTER_OPTIONS),
        ],
        url=f"http://127.0.0.1:{port}",
        may_be_killed=False,
    )


def worker_services(
    num: int,
    model: Path,
    weights_store: str | Path,
    engine_options: Mapping[str, Any],
    router: Service | None = None,
) -> list[Service]:
    """Returns workers on free ports; one that is started again keeps its own.

    Args:
        num: How many.
        model: The Hugging Face folder that they load first.
        weights_store: Folder or URL from which they take newer weights.
        engine_options: Flat EngineConfig options.
        router: What they join; None if the trainer is to know them by their addresses.
    """
    return [worker_service(i, model, weights_store, engine_options, router) for i in range(num)]


def worker_service(
    index: int,
    model: Path,
    weights_store: str | Path,
    engine_options: Mapping[str, Any],
    router: Service | None = None,
) -> Service:
    """Returns one of `worker_services`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command: list[str] = [
        *(*PROGRAM, "serve"),
        *("--model", str(model), "--port", str(port), "--weights-store", str(weights_store)),
    ]
    if router is not None:
        command += ["--join", router.url, "--advertise", url]
    command += engine_arguments(engine_options)
    return Service(name=f"worker{index}", command=command, url=url)


def engine_arguments(options: Mapping[str, Any]) -> Sequence[str]:
    """Returns options of EngineConfig as `tunix-sgljax serve` takes them."""
    return [
        argument
        for key, value in options.items()
        for argument in ("--engine", f"{key}={json.dumps(value)}")
    ]
