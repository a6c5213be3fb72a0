"""Prints what an engine with kernels of eight lanes answers: the processor, then a line a request.

`test_emulated.py` runs it on this processor and on an emulated one.
"""

from __future__ import annotations

import platform
import sys

import sgljax_cpu
from sgljax_cpu import chain, machine
from tests import compilation
from tests.engine.determinism_cases import MODEL, ask, make_engine, requests
from tests.engine.models import HYBRID
from tests.geometry import SMALL

NUM_REQUESTS = 9
"""Requests to each model, with settings of many kinds."""


def main() -> int:
    """Runs the engines."""
    compilation.keep_programs()
    if sgljax_cpu.unavailable() is not None:
        raise SystemExit(f"no JIT-compiled CPU kernels here: {sgljax_cpu.unavailable()}")
    vectors = machine.host_vectors()._replace(lanes=8)
    chain.host_vectors = lambda: vectors
    sys.stdout.write(f"{platform.machine()}\n")
    for model, dtype in ((MODEL, "float32"), (HYBRID, "bfloat16")):
        with make_engine({**SMALL, "dtype": dtype}, model) as engine:
            for bits in ask(engine, requests(NUM_REQUESTS, model.vocab_size)):
                sys.stdout.write(f"{bits!r}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
