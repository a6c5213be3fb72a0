"""Several controllers: two real processes of four devices each, on one mesh."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.devices import ROOT, device_variables
from tests.threads import LIMIT_S

END_LIMIT_S = 60
"""For a process whose peer has died. Shorter than JAX's own 100 s, so that its settings matter."""

HAS_IPV6 = Path("/proc/net/if_inet6").exists()

pytestmark = pytest.mark.slow


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
        family, address = (socket.AF_INET6, "::") if HAS_IPV6 else (socket.AF_INET, "0.0.0.0")
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


def test_grpo_with_prompts_of_its_own_in_each_process():
    with processes("train") as both:
        before = [json.loads(each.read("before")) for each in both]
        after = [json.loads(each.read("after")) for each in both]
        for each in both:
            assert each.end() == 0, each.log()
    assert before[0] == before[1]
    assert after[0] == after[1]
    assert all(after[0][name] != checksum for name, checksum in before[0].items())


def test_a_tensor_axis_across_processes_is_refused():
    with processes("refuse") as both:
        for each in both:
            message = each.read("refused")
            assert "mesh axis 'tp' (size 8) must lie within one process" in message
            assert "processes [0, 1]" in message
            each.read("accepted")
        for each in both:
            assert each.end() == 0, each.log()


def test_gathered_arrays_keep_what_lies_within_a_process():
    with processes("gather") as both:
        for each in both:
            each.read("gathered")
        for each in both:
            assert each.end() == 0, each.log()


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("case", ["sample", "update"])
def test_a_killed_process_ends_the_other(case, killed):
    """Outside a collective and in one; the coordinator is process 0."""
    with processes(case) as both:
        for each in both:
            each.read("ready")
        other = both[1 - killed]
        other.go()
        other.read("busy")
        both[killed].popen.kill()
        assert other.end(END_LIMIT_S) != 0
        assert "This most likely indicates that another task died" in other.log()


def test_a_process_that_raises_ends_the_other():
    with processes("fail") as both:
        for each in both:
            each.read("ready")
        both[1].go()
        assert both[1].end(END_LIMIT_S) != 0
        assert "ValueError: a reward function failed" in both[1].log()
        assert both[0].end(END_LIMIT_S) != 0
        assert "This most likely indicates that another task died" in both[0].log()
