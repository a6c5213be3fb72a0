"""Has cases played by processes that a zygote forks; see `zygote.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.threads import LIMIT_S

ROOT = Path(__file__).parents[2]


class Zygote:
    """Has cases played, each by a process of its own."""

    def __init__(self, scenes: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "tests.process.zygote", scenes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            text=True,
            bufsize=1,
            start_new_session=True,
        )

    def play(self, folder: Path, **case: Any) -> dict[str, Any]:
        """How a case ended: exit code, output and errors."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        out, err = folder / "out", folder / "err"
        line = json.dumps({**case, "out": str(out), "err": str(err)})
        watchdog = threading.Timer(LIMIT_S, self.kill)
        watchdog.start()
        try:
            self._process.stdin.write(line + "\n")
            answer = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        texts = {"out": out.read_text("utf-8"), "err": err.read_text("utf-8")}
        assert answer, f"it hung: {texts}"
        return json.loads(answer) | texts

    def kill(self) -> None:
        """Kills what hangs."""
        os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self._process.communicate(timeout=LIMIT_S)
