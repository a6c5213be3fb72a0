"""Runs a command and prints a line every ten seconds, for commands that are silent for minutes.

    python .ci/with_lines.py "installing into .venv" pip install --quiet ...

Needs Python alone: it runs before anything is installed.
"""

from __future__ import annotations

import subprocess
import sys
import time

EVERY_S = 10.0


def run(what: str, command: list[str], every_s: float = EVERY_S) -> int:
    """Runs the command and returns its exit code; prints `what` and the seconds so far."""
    start = time.monotonic()
    print(what, flush=True)
    with subprocess.Popen(command) as process:
        while True:
            try:
                return process.wait(every_s)
            except subprocess.TimeoutExpired:
                print(f"{what}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
