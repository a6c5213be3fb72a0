"""A server of a fleet, for benchmarks: random weights of one of their models.

    python -m benchmarks.lib.fleet_worker small STORE NAME

Writes its address, and serves until its input ends.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.lib.reporting import ROOT
from benchmarks.lib.shapes import MODELS, IdTokenizer
from sgljax_engine import Engine


def engine_options(num_rows: int, max_model_len: int) -> dict[str, Any]:
    """Options of all engines that are compared."""
    return {
        "max_running_requests": num_rows,
        "max_model_len": max_model_len,
        "num_kv_tokens": num_rows * max_model_len,
    }


def main() -> None:
    """Serves until standard input ends."""
    name, store, replica, num_rows, max_model_len = sys.argv[1:]
    engine = Engine(
        model_config=MODELS[name].config,
        load_format="dummy",
        tokenizer=IdTokenizer(),
        **engine_options(int(num_rows), int(max_model_len)),
    )
    with engine:
        server = engine.serve(port=0, weights_store=store, replica_id=replica)
        print(server.url, flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def fleet_worker(
    model: str, store: Path, replica: str, num_rows: int, max_model_len: int
) -> Iterator[str]:
    """Wraps the life of a server's process; yields its address."""
    command = [sys.executable, "-m", "benchmarks.lib.fleet_worker", model, str(store), replica]
    process = subprocess.Popen(
        [*command, str(num_rows), str(max_model_len)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    main()
