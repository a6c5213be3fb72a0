"""Records what `make soak` found, module by module, in `tests/soak.txt`; a plugin of that run.

A module's line is of its last whole run, so that a soak may be run in parts: the line names the
commit that was tested, and what was not run keeps its earlier line.
"""

from __future__ import annotations

import collections
import datetime
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("soak.txt")

_NOTE = "    "
"""Begins a line about the module before it: a test that failed, or what one measured."""


def pytest_configure(config: pytest.Config) -> None:
    """Records in the process that has the results of all others."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(RECORD))


class Recorder:
    """Keeps the record up to date as modules end."""

    def __init__(self, record: Path) -> None:
        """Starts with the record of earlier runs.

        Args:
            record: The file.
        """
        self._record = record
        self._lines = read(record)
        self._commit = _commit()
        self._missing: dict[str, set[str]] = {}
        self._found: dict[str, list[pytest.TestReport]] = collections.defaultdict(list)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Notes which tests each module has; without other processes."""
        self._expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        """Notes which tests each module has; all processes find the same."""
        del node
        if not self._missing:
            self._expect(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Writes a module's line when its last test has ended."""
        if report.when != "teardown":
            if report.when == "call" or not report.passed:
                self._found[_module(report.nodeid)].append(report)
            return
        if report.failed:
            self._found[_module(report.nodeid)].append(report)
        module = _module(report.nodeid)
        self._missing[module].discard(report.nodeid)
        if not self._missing[module]:
            self._lines[module] = self._describe(module, self._found[module])
            write(self._record, self._lines)

    def _expect(self, ids: list[str]) -> None:
        for nodeid in ids:
            self._missing.setdefault(_module(nodeid), set()).add(nodeid)

    def _describe(self, module: str, reports: list[pytest.TestReport]) -> list[str]:
        counts = collections.Counter(report.outcome for report in reports)
        found = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        seconds = sum(report.duration for report in reports)
        versions = f"Python {platform.python_version()}, JAX {metadata.version('jax')}"
        today = datetime.date.today()
        head = f"{module}: {found} in {seconds:.0f} s; {self._commit}, {today}, {versions}"
        failed = [f"{_NOTE}{report.outcome} {report.nodeid}" for report in reports if report.failed]
        measured = [
            f"{_NOTE}{name}: {value}"
            for report in reports
            if report.passed
            for name, value in report.user_properties
        ]
        return [head, *failed, *measured]


def read(record: Path) -> dict[str, list[str]]:
    """The lines of each module in a record; none where there is no record."""
    lines: dict[str, list[str]] = {}
    module = ""
    for line in record.read_text().splitlines() if record.exists() else ():
        if not line.startswith(_NOTE):
            module = line.split(": ")[0]
            lines[module] = []
        lines[module].append(line)
    return lines


def write(record: Path, lines: dict[str, list[str]]) -> None:
    """Writes a record, its modules in order."""
    text = "\n".join(line for module in sorted(lines) for line in lines[module])
    record.write_text(f"{text}\n")


def _module(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return f"commit {found or 'unknown'}"
