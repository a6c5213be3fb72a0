"""Bytes and seconds that a version of a weight store takes: bases against deltas.

    python benchmarks/throughput/fleet_sync.py           # some minutes; writes 2 GB to a folder

Tensors of the shapes of SmolLM2-135M. Between two versions a part of the elements changes, at
random places, or a step of Adam is taken: of a learning rate of 1e-6, on float32 weights with
random gradients, of which versions are bfloat16 copies. A reader that holds the version before
reads the deltas; one that holds nothing reads the bases. CPU seconds are of all threads.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from sgljax_engine.fleet import VersionReader, VersionWriter

LEARNING_RATE = 1e-6
PARTS = (0.01, 0.03, 1.0)
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}

Weights = dict[str, np.ndarray]


def make_weights(num_layers: int, hidden: int, vocab_size: int) -> Weights:
    """Random weights in float32, of a standard deviation of 0.02."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, hidden)}
    parts = {"q_proj": hidden, "k_proj": hidden // 3, "v_proj": hidden // 3, "o_proj": hidden}
    parts |= {"gate_proj": 8 * hidden // 3, "up_proj": 8 * hidden // 3}
    for layer in range(num_layers):
        shapes |= {f"layers.{layer}.{name}.weight": (n, hidden) for name, n in parts.items()}
        shapes |= {f"layers.{layer}.down_proj.weight": (hidden, 8 * hidden // 3)}
        shapes |= {f"layers.{layer}.norm.weight": (hidden,)}
    rng = np.random.default_rng(0)
    return {name: 0.02 * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def flipped(weights: Weights, dtype: np.dtype, part: float) -> Iterator[Weights]:
    """Versions of which about this part of the elements differs from the one before in a bit."""
    rng = np.random.default_rng(1)
    current = {name: array.astype(dtype) for name, array in weights.items()}
    while True:
        yield current
        for array in current.values():
            flat = array.reshape(-1).view(f"u{dtype.itemsize}")
            size = int(flat.size * part)
            flat[slice(None) if part == 1 else rng.integers(flat.size, size=size)] ^= 1


def trained(weights: Weights, dtype: np.dtype) -> Iterator[Weights]:
    """Versions that a step of Adam lies between."""
    optimizer = optax.adam(LEARNING_RATE)
    params = {name: jnp.asarray(array) for name, array in weights.items()}
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params: Any, state: Any, key: jax.Array) -> Any:
        keys = dict(zip(params, jax.random.split(key, len(params)), strict=True))
        grads = {name: jax.random.normal(keys[name], x.shape) for name, x in params.items()}
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    for key in jax.random.split(jax.random.key(0), 1000):
        yield {name: np.asarray(array).astype(dtype) for name, array in params.items()}
        params, state = step(params, state, key)


def timed(run: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What `run` returns, and its seconds."""
    start, start_cpu = time.perf_counter(), time.process_time()
    found = run()
    cpu_s = time.process_time() - start_cpu
    return found, {"s": time.perf_counter() - start, "cpu_s": cpu_s}


def measure(versions: Iterator[Weights], num: int) -> list[dict[str, Any]]:
    """Writes and reads versions: a base, and what follows from it."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        writer, reader = VersionWriter(folder), VersionReader(folder)
        for _ in range(num):
            tensors = next(versions)
            done, write = timed(lambda tensors=tensors: writer.write(tensors))
            read, took = timed(lambda version=done.version: reader.read(version))
            if any(read.tensors[name].tobytes() != x.tobytes() for name, x in tensors.items()):
                raise AssertionError(f"version {done.version} is not what was written")
            fields = {"is_base": done.is_base, "num_bytes": done.num_bytes}
            fields |= {"whole_bytes": done.whole_bytes, "num_changed": done.num_changed}
            runs.append({**fields, "write": write, "read": took})
    return runs


def row(dtype: str, change: str, runs: list[dict[str, Any]]) -> str:
    """A row of the table: medians of versions behind the first."""
    of = {key: float(np.median([run[key] for run in runs])) for key in ("num_bytes", "whole_bytes")}
    cells = [f"{of['num_bytes'] / 1e6:.1f}", f"{of['num_bytes'] / of['whole_bytes']:.1%}"]
    for side in ("write", "read"):
        for unit in ("s", "cpu_s"):
            cells.append(f"{np.median([run[side][unit] for run in runs]):.2f}")
    kind = "base" if runs[0]["is_base"] else "delta"
    return f"| {dtype} | {change} | {kind} | {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> None:
    """Measures and writes the report."""
    args = make_parser(__doc__, pairs=3).parse_args(argv)
    weights = make_weights(2, 48, 512) if args.quick else make_weights(30, 576, 49_152)
    lines = [
        "| dtype | changed | version | MB | of the whole | write, s | CPU s | read, s | CPU s |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    found = []
    for name, dtype in DTYPES.items():
        cases = {f"{part:.0%}": flipped(weights, dtype, part) for part in PARTS}
        if name == "bfloat16":
            cases["by a step of Adam"] = trained(weights, dtype)
        for change, versions in cases.items():
            runs = measure(versions, 1 + args.pairs)
            lines.append(row(name, change, runs[1:]))
            found.append({"dtype": name, "changed": change, "versions": runs})
    num = sum(array.size for array in weights.values())
    write_results(
        output_dir(args) / "fleet_sync.md",
        "Weight versions through a store",
        "benchmarks/throughput/fleet_sync.py",
        lines,
        {"num_parameters": num, "runs": found},
        facts=[f"{num / 1e6:.0f}M parameters in a folder; medians of {args.pairs} versions"],
    )


if __name__ == "__main__":
    main()
