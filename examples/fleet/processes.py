"""Processes of a fleet on one machine: started, restarted when they end, and ended in the end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

_TIED = Path(__file__).with_name("tied.py")
_TICK_S = 0.1
_DRAIN_S = 10.0
_LOG_LINES = 15


class LaunchError(RuntimeError):
    """A process of the fleet does not start."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
    """A process of the fleet.

    Attributes:
        name: Names its log.
        command: What it runs.
        url: Where it answers /health.
        may_be_killed: Whether `kill_every_s` may choose it.
    """

    name: str
    command: Sequence[str]
    url: str
    may_be_killed: bool = True


def free_port() -> int:
    """Returns a port of 127.0.0.1 on which nothing listens."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


class Runner(Protocol):
    """What runs the services of a fleet: processes of this machine, or Ray's actors."""

    num_kills: int
    num_restarts: int

    def __enter__(self) -> Self:
        """Starts the services."""
        ...

    def __exit__(self, *_: object) -> None:
        """Ends them."""
        ...

    def wait_until_healthy(self, limit_s: float = 300.0) -> None:
        """Returns when all answer; raises LaunchError where one cannot."""
        ...

    def start_killing(self) -> None:
        """From now on random workers are killed, if that was asked for."""
        ...


class Fleet:
    """Starts services, and starts each again that ends, until `close`. A context manager.

    Children are in sessions of their own, which the terminal's Ctrl-C does not reach, and are
    killed by the kernel when this process ends in whatever way (see tied.py). One thread starts
    them all, and lasts as long as they.

    Attributes:
        num_restarts: Services that were started again.
        num_kills: Services that `kill_every_s` killed.
    """

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
        """Starts nothing yet.

        Args:
            services: What to run.
            log_dir: Where the processes' outputs go, a file each.
            environment: More variables for all of them.
            kill_every_s: Seconds after which a random service is killed with SIGKILL, again and
                again once `start_killing` was called; None kills none.
            seed: Seed of the choice.
            on_event: Gets a line for each kill and restart, on a thread of the fleet.
        """
        self.num_restarts = self.num_kills = 0
        self._services, self._log_dir = services, log_dir
        self._environment = {**os.environ, **(environment or {})}
        self._kill_every_s, self._random = kill_every_s, random.Random(seed)
        self._on_event = on_event
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._error: str | None = None
        self._is_started, self._is_serving = threading.Event(), threading.Event()
        self._is_killing, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)

    def __enter__(self) -> Self:
        """Starts the services."""
        self._thread.start()
        self._is_started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends them."""
        self.close()

    def wait_until_healthy(self, limit_s: float = 300.0) -> None:
        """Returns when each service answers /health.

        Raises:
            LaunchError: One of them ended, or does not answer in time.
        """
        deadline = time.monotonic() + limit_s
        for service in self._services:
            while not is_healthy(service.url):
                if self._error is not None:
                    raise LaunchError(self._error)
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"{service.name} at {service.url} is not healthy after {limit_s:.0f} s:\n"
                        f"{self._log_end(service)}"
                    )
                self._is_over.wait(_TICK_S)
        self._is_serving.set()

    def start_killing(self) -> None:
        """From now on a random service is killed every `kill_every_s`."""
        self._is_killing.set()

    def stop_killing(self) -> None:
        """Kills none any more."""
        self._is_killing.clear()

    def pids(self) -> dict[str, int]:
        """Returns the process id of each service by its name."""
        return {name: process.pid for name, process in self._processes.items()}

    def close(self) -> None:
        """Ends all services: SIGTERM, which lets workers drain, and later SIGKILL. Idempotent."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            for service in self._services:
                self._start(service)
            self._is_started.set()
            kill_s = 0.0
            while not self._is_over.wait(_TICK_S):
                self._restart_ended()
                if not self._is_killing.is_set() or self._kill_every_s is None:
                    kill_s = time.monotonic() + (self._kill_every_s or 0.0)
                elif time.monotonic() >= kill_s:
                    self._kill_one()
                    kill_s += self._kill_every_s
        except Exception as error:
            self._error = f"the fleet's processes cannot be run: {error!r}"
        finally:
            self._is_started.set()
            self._end_all()

    def _start(self, service: Service) -> None:
        with (self._log_dir / f"{service.name}.log").open("ab") as log:
            self._processes[service.name] = subprocess.Popen(
                [sys.executable, str(_TIED), str(os.getpid()), *service.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def _restart_ended(self) -> None:
        for service in self._services:
            code = self._processes[service.name].poll()
            if code is None:
                continue
            if not self._is_serving.is_set():  # it will not start the next time either
                self._error = self._error or (
                    f"{service.name} ended with exit code {code}:\n{self._log_end(service)}"
                )
                continue
            self.num_restarts += 1
            self._on_event(f"{service.name} ended with exit code {code}, and is started again")
            self._start(service)

    def _kill_one(self) -> None:
        service = self._random.choice([each for each in self._services if each.may_be_killed])
        self._processes[service.name].send_signal(signal.SIGKILL)
        self.num_kills += 1

    def _end_all(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(OSError):
                process.terminate()
        deadline = time.monotonic() + _DRAIN_S
        for process in self._processes.values():
            try:
                process.wait(max(deadline - time.monotonic(), _TICK_S))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _log_end(self, service: Service) -> str:
        path = self._log_dir / f"{service.name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def is_healthy(url: str) -> bool:
    """Returns whether a server answers /health with 200."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0) as reply:
            return reply.status == 200
    except (OSError, urllib.error.URLError):
        return False
