"""What may happen to a process that has an engine, and what comes of it: the table of the docs.

Each row of `ENDS` ends the process, each of `FORKS` leaves it running. `test_process.py` brings all
of them about, and compares docs/troubleshooting.md with the table.
"""

from __future__ import annotations

from typing import NamedTuple

ENDING = "EngineShutdownError: the engine was shut down, since the main thread has ended"
SHUT_DOWN = "EngineShutdownError: the engine was shut down"


class End(NamedTuple):
    """One way in which a process ends.

    Attributes:
        what: Its name in the table.
        code: Exit code as a shell has it, which is 128 and the signal's number after a signal.
        calls: What becomes of calls that other threads wait for; None for calls that never return.
        signal: Name of the signal that another process sends.
    """

    what: str
    code: int
    calls: str | None
    signal: str = ""


ENDS = {
    "returns": End("ends", 0, ENDING),
    "raises": End("ends by an error", 1, ENDING),
    "exits": End("calls `sys.exit(3)`", 3, ENDING),
    "interrupted": End("gets SIGINT (Ctrl-C)", 130, ENDING, "SIGINT"),
    "terminated": End("gets SIGTERM", 143, None, "SIGTERM"),
    "handles": End("gets SIGTERM, and handles it by `sys.exit(3)`", 3, ENDING, "SIGTERM"),
    "closes": End("calls `shutdown()` and ends", 0, SHUT_DOWN),
    "os_exits": End("calls `os._exit(3)`", 3, None),
}

FORKS = {
    "os_exit": ("ends by `os._exit`", "nothing"),
    "sys_exit": ("ends by `sys.exit`, or by an error", "nothing; JAX's destructors do not run"),
    "atexit": ("runs `atexit` handlers that call `shutdown()`", "nothing"),
    "closes": ("calls `shutdown()`, or leaves the engine's `with` block", "nothing"),
    "calls": ("calls anything else, or reads a stream or future", "`EngineShutdownError` at once"),
    "collects": ("drops the engine's streams", "nothing"),
    "makes_own": ("forks a child that calls the engine", "`EngineShutdownError` at once"),
    "executor": ("is forked on an executor's thread", "nothing"),
    "process": ("is a `multiprocessing.Process`", "nothing"),
    "daemon": ("is one with `daemon=True`, and still works", "it ends with its parent"),
    "pool": ("is of a `multiprocessing.Pool` or `ProcessPoolExecutor`", "nothing"),
    "grain": ("is a worker of grain's `mp_prefetch`", "nothing"),
    "spawn": ("is spawned", "nothing; an engine among its arguments is a `TypeError`"),
    "subprocess": ("is started by `subprocess`", "nothing"),
}
"""What a child process does, and what is special about it. The parent never loses anything."""


def table() -> str:
    """The two tables of the docs, in Markdown."""
    lines = ["| The process | Exit code | Calls that other threads wait for |", "|---|---|---|"]
    for end in ENDS.values():
        calls = "never return" if end.calls is None else "`EngineShutdownError`"
        lines.append(f"| {end.what} | {end.code} | {calls} |")
    alike: dict[str, list[str]] = {}
    for what, special in FORKS.values():
        alike.setdefault(special, []).append(what)
    lines += ["", "| A child process | What is special |", "|---|---|"]
    lines += [f"| {'; '.join(children)} | {special} |" for special, children in alike.items()]
    return "\n".join(lines)
