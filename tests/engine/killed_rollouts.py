"""Rollouts that die: started by test_kill.py, which kills them.

For each folder on standard input a child is forked that generates and saves checkpoints there all
the while. It tells on standard output, a line each: its process id; each save, with the requests
that were finished by then; that it is done, which it never should be. Importing takes longer than
dying, so it is done once; JAX starts its threads in the children alone.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time

from sgljax_engine.engine import Engine
from tests import inside
from tests.engine.models import TINY, spread_weights
from tests.engine.rollout_to_kill import NUM_LONG, NUM_REQUESTS, PARAMS, PROMPTS, RIDS
from tests.geometry import SMALL


def tell(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def linger(engine: Engine) -> None:
    """Once only the long requests are left, a step takes its time: a killer may come late."""
    core = inside.core(engine)
    step = core.step

    def step_late() -> None:
        if core.counters.num_finished >= NUM_REQUESTS - NUM_LONG:
            time.sleep(0.2)
        step()

    core.step = step_late


def roll_out(folder: str) -> None:
    with Engine(model_config=TINY, weights=spread_weights(), **SMALL) as engine:
        engine.warmup()
        linger(engine)
        is_over = threading.Event()

        def generate() -> None:
            engine.generate(input_ids=PROMPTS, sampling_params=PARAMS, rid=RIDS)
            is_over.set()

        threading.Thread(target=generate, daemon=True).start()
        while not engine.get_internal_state().running_batch_size:
            pass
        while not is_over.is_set():
            engine.save_checkpoint(folder)
            tell("saved", engine.get_internal_state().counters.num_finished)
        tell("done")


def main() -> None:
    importlib.import_module("tests.conftest")  # the compilation cache of all tests
    for line in sys.stdin:
        child = os.fork()
        if not child:
            tell("started", os.getpid())
            roll_out(line.rstrip("\n"))
            os._exit(0)
        os.waitpid(child, 0)
        tell("dead")


if __name__ == "__main__":
    main()
