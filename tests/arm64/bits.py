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
from tests.geometry import SMALL

NUM_REQUESTS = 9
"""Requests, with settings of many kinds, to a model whose arithmetic is all in kernels: XLA's own
may round otherwise on another processor."""


def main() -> int:
    """Runs the engines."""
    compilation.keep_programs()
    if sgljax_cpu.unavailable() is not None:
        raise SystemExit(f"no JIT-compiled CPU kernels here: {sgljax_cpu.unavailable()}")
    vectors = machine.host_vectors()._replace(lanes=8)
    chain.host_vectors = lambda: vectors
    sys.stdout.write(f"{platform.machine()}\n")
    with make_engine({**SMALL, "dtype": "float32"}) as engine:
        for bits in ask(engine, requests(NUM_REQUESTS, MODEL.vocab_size)):
            sys.stdout.write(f"{bits!r}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
