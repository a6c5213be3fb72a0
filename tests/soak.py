"""Records what `make soak` found in `tests/soak.txt`; a plugin of that run."""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("soak.txt")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the record, whether all is well or not."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # a process of xdist, whose results another one has
        return
    counts = {name: len(reporter.stats.get(name, ())) for name in ("passed", "failed", "error")}
    found = ", ".join(f"{count} {name}" for name, count in counts.items())
    failed = [
        report.nodeid for name in ("failed", "error") for report in reporter.stats.get(name, ())
    ]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    lines = [
        f"The last `make soak`: {found}.",
        f"Commit {commit or 'unknown'}, {datetime.date.today()}, {platform.machine()}, "
        f"Python {platform.python_version()}, JAX {metadata.version('jax')}.",
        *failed,
        *(
            f"{name}: {value}"
            for report in reporter.stats.get("passed", ())
            for name, value in report.user_properties
        ),
    ]
    RECORD.write_text("\n".join(lines) + "\n")
