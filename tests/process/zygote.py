"""Starts processes with an engine, each forked from one that has imported everything.

JAX has no threads yet where it is forked, so the children are like processes of their own, and end
like those. For each line of JSON on standard input, a case, a child is forked; a line of JSON on
standard output says how it ended. Signals are sent once the child has asked for them.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys


def serve() -> dict[str, str] | None:
    """Forks a child for each case; returns the case in the child, and None at the end."""
    for line in sys.stdin:
        case = json.loads(line)
        asked, ask = os.pipe()
        child = os.fork()
        if not child:
            os.close(asked)
            for number, name in ((1, case["out"]), (2, case["err"])):
                os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            return case | {"ask": str(ask)}
        os.close(ask)
        while name := os.read(asked, 100).decode():
            os.kill(child, signal.Signals[name])
        os.close(asked)
        _, status, used = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        cpu_s = used.ru_utime + used.ru_stime
        sys.stdout.write(json.dumps({"code": code, "cpu_s": cpu_s}) + "\n")
        sys.stdout.flush()
    return None


if __name__ == "__main__":
    importlib.import_module("tests.conftest")  # the compilation cache of all tests
    scenes = importlib.import_module(sys.argv[1])
    if case := serve():
        # Whatever it leaves by, it is the end of the interpreter.
        scenes.play(case)
