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
    "returns": End("the script ends", 0, ENDING),
    "raises": End("it ends by an error", 1, ENDING),
    "exits": End("`sys.exit(3)`", 3, ENDING),
    "interrupted": End("SIGINT (Ctrl-C)", 130, ENDING, "SIGINT"),
    "terminated": End("SIGTERM", 143, None, "SIGTERM"),
    "handles": End("SIGTERM, with a handler that calls `sys.exit(3)`", 3, ENDING, "SIGTERM"),
    "closes": End("`shutdown()`, then the script ends", 0, SHUT_DOWN),
    "os_exits": End("`os._exit(3)`", 3, None),
}

FORKS = {
    "os_exit": "ends by `os._exit`",
    "sys_exit": "ends by `sys.exit` or by an error",
    "atexit": "runs `atexit` handlers that call `shutdown()`",
    "closes": "calls `shutdown()`, or leaves the engine's `with` block",
    "calls": "calls anything else of the engine, its streams or futures",
    "collects": "drops the engine's streams and futures",
    "makes_own": "forks again, and the grandchild calls the engine",
    "executor": "is forked by an executor's thread",
    "process": "is a `multiprocessing.Process`",
    "daemon": "is one with `daemon=True`, and outlives the work",
    "pool": "is of a `multiprocessing.Pool` or `ProcessPoolExecutor`",
    "spawn": "is spawned",
    "subprocess": "is started by `subprocess`",
}

_FORK_ANSWERS = {
    "atexit": "the handlers do nothing to the engine",
    "closes": "nothing happens",
    "calls": "`EngineShutdownError: this engine lives in process N; a forked child cannot use it`",
    "makes_own": "the same",
    "daemon": "`multiprocessing` ends it with the parent",
    "spawn": "works; as an argument an engine is refused by a `TypeError`",
}


def table() -> str:
    """The tables of the docs, in Markdown."""
    lines = ["| a process with an engine | exit code | calls that its threads wait for |", "|---|---|---|"]
    for end in ENDS.values():
        calls = "end with the process" if end.calls is None else f"`{end.calls}`"
        lines.append(f"| {end.what} | {end.code} | {calls} |")
    lines += ["", "| a child process | |", "|---|---|"]
    lines += [f"| {what} | {_FORK_ANSWERS.get(name, 'works')} |" for name, what in FORKS.items()]
    return "\n".join(lines)
