"""The run of run.py with workers that are Ray's: an actor process runs a server.

    pip install ray                                      # written for 2.60; nothing else needs it
    python examples/fleet/ray_fleet.py --workers 2       # the options are those of run.py
    python examples/fleet/ray_fleet.py --kill-every 5 --minutes 10

Ray makes an actor again that died (`max_restarts=-1`) and calls `serve` again (`max_task_retries`),
with the same port. This script starts a Ray of its own on this machine, where it has run to its end
with workers killed every 10 s. On a cluster, which has not been tried, give actors
what a server needs (`num_gpus=1`, `resources={"TPU": 4}`), workers a --host that others reach,
with keys, and a router to join, since an actor may come back on another machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/

import contextlib
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import ray  # pyright: ignore[reportMissingImports]

from fleet.launch import main
from fleet.processes import Fleet, LaunchError, Service, is_healthy
from fleet.services import PROGRAM, ROUTER


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Worker:
    """An actor that is a server; its process's main thread serves until it is killed."""

    def serve(self, arguments: Sequence[str]) -> int:
        """Runs `tunix-sgljax` with these arguments."""
        from tunix_sgljax.cli.main import main as command

        return command(list(arguments))


class RayFleet:
    """A `Fleet` whose workers are actors of a Ray on this machine; a router stays a process."""

    def __init__(
        self,
        services: Sequence[Service],
        log_dir: Path,
        *,
        environment: Mapping[str, str] | None = None,
        kill_every_s: float | None = None,
        seed: int = 0,
        on_event: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Starts nothing yet; the arguments are those of `Fleet`."""
        self.num_kills = self.num_restarts = 0  # Ray does not tell of its restarts
        self._services, self._environment = services, dict(environment or {})
        self._workers = [service for service in services if service.name != ROUTER]
        routers = [service for service in services if service.name == ROUTER]
        self._router = Fleet(routers, log_dir) if routers else None
        self._kill_every_s, self._random, self._on_event = (
            kill_every_s,
            random.Random(seed),
            on_event,
        )
        self._actors: dict[str, Any] = {}
        self._calls: dict[str, Any] = {}
        self._is_over = threading.Event()
        self._killer: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Starts Ray and the actors."""
        ray.init(
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": self._environment},
        )
        if self._router is not None:
            self._router.__enter__()
        for service in self._workers:
            actor = Worker.remote()  # pyright: ignore[reportAttributeAccessIssue]
            self._actors[service.name] = actor
            self._calls[service.name] = actor.serve.remote(service.command[len(PROGRAM) :])
        return self

    def wait_until_healthy(self, limit_s: float = 300.0) -> None:
        """Returns when each service answers /health; LaunchError if one cannot start."""
        deadline = time.monotonic() + limit_s
        for service in self._services:
            while not is_healthy(service.url):
                ended, _ = ray.wait(list(self._calls.values()), timeout=0.1)
                if ended:
                    raise LaunchError(f"a server ended: {ray.get(ended[0])}; Ray has its log")
                if time.monotonic() > deadline:
                    raise LaunchError(f"{service.name} is not healthy after {limit_s:.0f} s")

    def start_killing(self) -> None:
        """From now on a random worker is killed every `kill_every_s`."""
        if self._kill_every_s is not None and self._killer is None:
            self._killer = threading.Thread(target=self._kill, name="killer", daemon=True)
            self._killer.start()

    def _kill(self) -> None:
        while not self._is_over.wait(self._kill_every_s):
            name = self._random.choice([service.name for service in self._workers])
            ray.kill(self._actors[name], no_restart=False)
            self.num_kills += 1
            self._on_event(f"{name} was killed, and Ray makes it again")

    def close(self) -> None:
        """Ends the actors, Ray and the router."""
        self._is_over.set()
        if self._killer is not None:
            self._killer.join()
        with contextlib.suppress(Exception):  # an actor that Ray is making again
            for actor in self._actors.values():
                ray.kill(actor)
        ray.shutdown()
        if self._router is not None:
            self._router.close()

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()


if __name__ == "__main__":
    sys.exit(main(make_fleet=RayFleet))
