"""Two real processes of four devices each, on one mesh: several controllers."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.devices import ROOT, device_variables
from tests.threads import LIMIT_S

_HAS_IPV6 = Path("/proc/net/if_inet6").exists()


class Process:
    """One of the processes."""

    def __init__(self, case: str, rank: int, port: int, log: Any) -> None:
        self._log = log
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.adapter.one_of_processes", case, str(rank), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            text=True,
            env=device_variables(4),
        )

    def read(self, word: str) -> str:
        """The rest of the next line that begins with this word; Gloo writes lines too."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            first, _, rest = line.strip().partition(" ")
            if first == word:
                return rest
        raise AssertionError(f"it ended without {word!r}:\n{self.log()}")

    def go(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write("go\n")
        self.popen.stdin.flush()

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Its exit status."""
        self.popen.communicate(timeout=limit_s)
        return self.popen.returncode

    def log(self) -> str:
        """What it wrote to standard error."""
        self._log.seek(0)
        return self._log.read()


@contextlib.contextmanager
def processes(case: str) -> Iterator[list[Process]]:
    """Two processes that run a case; they are dead afterwards."""
    with contextlib.ExitStack() as stack:
        # Bound all the while, so that nobody else gets the port; gRPC may bind it too.
        family, address = (socket.AF_INET6, "::") if _HAS_IPV6 else (socket.AF_INET, "0.0.0.0")
        held = stack.enter_context(socket.socket(family))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((address, 0))
        both: list[Process] = []
        for rank in range(2):
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            both.append(Process(case, rank, held.getsockname()[1], log))
            stack.enter_context(both[-1].popen)
            stack.callback(both[-1].popen.kill)
        yield both
