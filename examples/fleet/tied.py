"""Runs a command that the kernel kills when the process that started it has ended.

    python examples/fleet/tied.py PARENT_PID COMMAND ...

The death signal of Linux outlives exec. It is sent when the *thread* that started this process
ends, so that a thread of the parent must last as long as its children. Other systems have no such
signal: there a parent that is killed leaves its children.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Becomes the command."""
    parent, *command = argv
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != int(parent):  # it ended before the call
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
