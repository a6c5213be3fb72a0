"""The command line, with an engine that stops at some moment and waits there for Ctrl-C.

    python -m tests.cli.held_main MOMENT generate ...

A test sends Ctrl-C once it has read that the moment has come, however slow the machine is. Moments:

    compiling: A program was compiled; never goes on.
    decoding: Some tokens were generated; goes on when the engine was asked to abort.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from sgljax_engine.core import commands as cmd
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.hand_out import Distribute
from sgljax_engine.core.loop import EngineLoop
from sgljax_engine.runner.compile import compiled
from tests.threads import LIMIT_S
from tunix_sgljax.cli.main import main

NUM_TOKENS = 20
"""So many that some text has come of them."""

_goes_on = threading.Event()


def hold() -> None:
    if not _goes_on.is_set():
        sys.stderr.write("held\n")
        sys.stderr.flush()
        assert _goes_on.wait(LIMIT_S)


def hold_compilation() -> None:
    compile_program = compiled._compile

    def compile_and_hold(*args: Any) -> Any:
        program = compile_program(*args)
        hold()
        return program

    compiled._compile = compile_and_hold


def hold_decoding() -> None:
    step = EngineCore.step

    def hold_and_step(self: EngineCore) -> None:
        if self.counters.num_output_tokens >= NUM_TOKENS:
            hold()
        step(self)

    EngineCore.step = hold_and_step


def let_go_on_abort() -> None:
    put = EngineLoop.put

    def put_and_let_go(self: EngineLoop, task: cmd.Task) -> None:
        put(self, task)
        if isinstance(task, Distribute) and isinstance(task.command, cmd.Abort):
            _goes_on.set()

    EngineLoop.put = put_and_let_go


if __name__ == "__main__":
    moment = sys.argv.pop(1)
    if moment == "decoding":
        hold_decoding()
        let_go_on_abort()
    else:
        hold_compilation()
    sys.exit(main())
