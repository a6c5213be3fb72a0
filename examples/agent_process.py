"""A program that plays episodes, as a child process: tasks go in and episodes come out as JSON."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

_END_LIMIT_S = 10.0


class AgentError(RuntimeError):
    """The agent's process has ended, or does not keep to the protocol."""


class AgentProcess:
    """The agent's process; any thread may call any method.

    It ends when its stdin is closed: by `close`, or since this process is gone. A Ctrl-C of the
    terminal does not reach it. Its stderr is this process's.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the process with more environment variables."""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._open: dict[int, Future[dict[str, Any]]] = {}
        self._error: str | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def play(self, problem: str) -> dict[str, Any]:
        """Returns the episode of a problem when it is finished.

        Raises:
            AgentError: There is no agent.
        """
        assert self._process.stdin is not None
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            self.check()
            number = next(self._ids)
            self._open[number] = future
            task = json.dumps({"id": number, "problem": problem})
            with contextlib.suppress(OSError):  # the reader sees that the process is gone
                self._process.stdin.write(f"{task}\n")
                self._process.stdin.flush()
        return future.result()

    def check(self) -> None:
        """Raises AgentError when there is no agent any more."""
        if self._error is not None:
            raise AgentError(self._error)

    def close(self) -> None:
        """Ends the process, and the calls that wait for it. Idempotent."""
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError):
            self._error = self._error or "the agent was closed"
            self._process.stdin.close()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join()

    def __enter__(self) -> AgentProcess:
        """Returns the agent."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes."""
        self.close()

    def _read(self) -> None:
        """Gives episodes to those who wait; whatever ends this also ends their waiting."""
        assert self._process.stdout is not None
        line = ""
        try:
            with self._process.stdout as lines:
                for line in lines:
                    episode = json.loads(line)
                    self._open.pop(episode.pop("id")).set_result(episode)
            reason = f"the agent ended with exit code {self._process.wait()}"
        except Exception as error:
            self._process.kill()
            reason = (
                f"the agent wrote {line[:80]!r}, which is no episode of an open task: {error!r}"
            )
        with self._lock:
            self._error = self._error or reason
            left, self._open = self._open, {}
        for future in left.values():
            future.set_exception(AgentError(self._error))
