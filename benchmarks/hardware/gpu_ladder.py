"""What each change to a decode step brings on one GPU: a ladder of rungs, each one change more.

    python benchmarks/hardware/gpu_ladder.py

Rungs, in order of worth: the engine with XLA's code around its attention kernel; attention from
projections on, with norms, rotary embedding and cache write in its kernel; norms and gates in their
products; residuals in theirs (the engine's default); XLA's command buffers over loops and branches
too, and without any; dispatches of more steps; the workload of nano-vllm's bench.py; prefill; and
the products alone, against XLA's, by rows and tiles.

Each rung is checked before it is timed: greedy log-probs against those of the first rung, as far as
the tokens agree, and products against XLA's. One beyond its tolerance is reported as wrong and not
timed. Results are written after each rung. Rungs with XLA flags of their own run in a process of
their own; `--budget-s` ends the ladder, whatever runs.

`--smoke` runs all of it in miniature on any device, kernels interpreted: to see that it works.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.hardware.gpu_engine import EngineSizes, make_model
from benchmarks.hardware.gpu_prefill import measure_prefill_kernels
from benchmarks.lib.reporting import ROOT, report_head, write_report
from benchmarks.lib.turns import timed
from sgljax_engine import SamplingParams
from sgljax_engine.attention import pallas
from sgljax_engine.attention.base import AttentionBackend
from sgljax_engine.attention.batch_invariant import ordered_backend
from sgljax_engine.builder import parts
from sgljax_engine.kernels.gpu import linear
from sgljax_engine.layers.basic import Layout
from sgljax_engine.layers.fused import FusedProducts
from sgljax_engine.layers.kernels import LinearBackend, XlaKernels
from sgljax_engine.placement import submeshes
from tunix_sgljax import SglJaxRollout, create_sgljax_rollout
from tunix_sgljax.bench.environment import describe_environment
from tunix_sgljax.bench.shapes import IdTokenizer

TOLERANCE = 0.15
"""Most that a log-prob of a greedy token may differ from the first rung's, in bfloat16."""

_ALL = FusedProducts()

ALL_BUFFERS = "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CONDITIONAL,WHILE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung:
    """A variant of the engine, or a measurement of another kind.

    Attributes:
        fused: Products with what is around them; None for XLA's code, and attention without
            prologue.
        flags: XLA's, beside those of the environment.
        steps: Decode steps of a dispatch; None for the engine's default.
        measure: Name of what is measured, see `MEASUREMENTS`.
    """

    fused: FusedProducts | None = _ALL
    flags: str = ""
    steps: int | None = None
    measure: str = "decode"


RUNGS = {
    "base: XLA around the attention kernel": Rung(fused=None),
    "attention from projections on": Rung(fused=FusedProducts(norms=False, adds=False)),
    "norms and gates in products": Rung(fused=FusedProducts(adds=False)),
    "residuals in products (default)": Rung(),
    "products alone": Rung(measure="products"),
    "bench.py's workload": Rung(measure="bench"),
    "prefill": Rung(measure="prefill"),
    "256 steps a dispatch": Rung(steps=256),
    "default, command buffers over loops and branches": Rung(flags=ALL_BUFFERS),
    "default, no command buffers": Rung(flags="--xla_gpu_enable_command_buffer="),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured.

    Attributes:
        engine: The model, contexts and steps.
        rows: Of the decode steps.
        check_tokens: Greedy tokens of each row that are compared.
        bench_requests, bench_lengths: Of bench.py's workload: inputs and outputs.
        prefill_tokens: Prompt lengths.
        product_rows: Rows of the products alone.
        repeats: Timed runs; the median counts.
    """

    engine: EngineSizes = dataclasses.field(default_factory=EngineSizes)
    rows: int = 128
    check_tokens: int = 16
    bench_requests: int = 256
    bench_lengths: tuple[int, int] = (100, 1024)
    prefill_tokens: tuple[int, ...] = (512, 2048)
    product_rows: tuple[int, ...] = (64, 128, 256)
    repeats: int = 5

    @classmethod
    def smoke(cls) -> Sizes:
        """Runs in a minute on a CPU."""
        return cls(
            engine=EngineSizes.smoke(),
            rows=4,
            check_tokens=2,
            bench_requests=3,
            bench_lengths=(4, 8),
            prefill_tokens=(16,),
            product_rows=(16,),
            repeats=1,
        )


def use(fused: FusedProducts | None, *, is_smoke: bool) -> str:
    """Has engines that are built from now on use these; returns the name of their attention."""
    if fused is not None and is_smoke:
        fused = dataclasses.replace(fused, interpret=True)
    kernels = XlaKernels(fused=fused)
    parts.pick_kernels = lambda name, target: LinearBackend(name, kernels)
    if not is_smoke:
        return "pallas"
    attention = pallas.PallasAttention(interpret=True)
    interpreted = AttentionBackend(
        "pallas", attention, ordered_backend("cpu"), projections=attention.from_projections
    )
    pallas.gpu_backend = lambda target, head_dims: interpreted
    submeshes.default_layout = lambda platform: Layout.TOKENS_FIRST  # as on GPUs
    return "pallas"


class Ladder:
    """The rungs of one process, on the same random weights."""

    def __init__(self, sizes: Sizes, *, is_smoke: bool, reference: Path) -> None:
        """`reference` is where the first rung leaves its tokens and log-probs."""
        self.sizes, self.is_smoke, self.reference = sizes, is_smoke, reference
        self.model = make_model(sizes.engine)

    def run(self, rung: Rung) -> dict[str, Any]:
        """One rung's results."""
        return MEASUREMENTS[rung.measure](self, rung)

    def rollout(self, rung: Rung, *, max_model_len: int, rows: int) -> SglJaxRollout:
        """An engine of the rung."""
        options: dict[str, Any] = {} if rung.steps is None else {"decode_steps": rung.steps}
        return create_sgljax_rollout(
            self.model,
            IdTokenizer(),
            max_model_len=max_model_len,
            max_running_requests=rows,
            batch_buckets=(rows,),
            num_kv_tokens=rows * (max_model_len + 16),
            attention_backend=use(rung.fused, is_smoke=self.is_smoke),
            linear_backend="xla",  # of a CPU: its own kernels have weights in another layout
            dtype="bfloat16",
            **options,
        )

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Random prompts, the same each time."""
        rng = np.random.default_rng(1)
        return rng.integers(1, self.sizes.engine.model.vocab_size, (count, length)).tolist()

    def decode(self, rung: Rung) -> dict[str, Any]:
        """Seconds of a decode step, after the check."""
        sizes = self.sizes
        context, steps, rows = sizes.engine.context, sizes.engine.num_steps, sizes.rows
        rollout = self.rollout(rung, max_model_len=context + steps + 1, rows=rows)
        prompts = self.prompts(rows, context)

        def run(new_tokens: int) -> float:
            params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
            return timed(lambda: rollout.engine.generate_requests(prompts, params))

        try:
            found = self.check(rollout, prompts, is_base=rung == next(iter(RUNGS.values())))
            if not found["is_right"]:
                return found
            first = run(steps + 1)
            run(1)
            once = float(np.median([run(1) for _ in range(sizes.repeats)]))
            full = float(np.median([run(steps + 1) for _ in range(sizes.repeats)]))
        finally:
            rollout.close()
        step_s = (full - once) / steps
        return found | {
            "step, ms": 1e3 * step_s,
            "tokens/s": rows / step_s,
            "first run, s": first,
        }

    def check(
        self, rollout: SglJaxRollout, prompts: list[list[int]], *, is_base: bool
    ) -> dict[str, Any]:
        """Greedy log-probs against the first rung's, if that has run."""
        params = SamplingParams(
            temperature=0.0, max_new_tokens=self.sizes.check_tokens, ignore_eos=True
        )
        outputs = rollout.engine.generate_requests(prompts, params)
        ours = [(output.output_ids, output.logprobs) for output in outputs]
        if is_base:
            self.reference.write_text(json.dumps(ours))
        if not self.reference.exists():
            return {"is_right": True, "largest difference": float("nan"), "compared tokens": 0}
        largest, compared = 0.0, 0
        base = json.loads(self.reference.read_text())
        for (ids, logprobs), (base_ids, base_logprobs) in zip(ours, base, strict=True):
            same = itertools.takewhile(
                lambda i: ids[i] == base_ids[i],  # noqa: B023 - used at once
                range(len(ids)),
            )
            for i in same:
                largest = max(largest, abs(logprobs[i] - base_logprobs[i]))
                compared += 1
        is_right = compared > 0 and largest <= TOLERANCE
        return {"is_right": is_right, "largest difference": largest, "compared tokens": compared}

    def bench(self, rung: Rung) -> dict[str, Any]:
        """nano-vllm's bench.py: inputs and outputs uniform in a range, all at once."""
        sizes, rng = self.sizes, np.random.default_rng(0)
        low, high = sizes.bench_lengths
        lengths = rng.integers(low, high + 1, (2, sizes.bench_requests)).tolist()
        vocab = sizes.engine.model.vocab_size
        prompts = [rng.integers(1, vocab, length).tolist() for length in lengths[0]]
        params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in lengths[1]]
        rollout = self.rollout(rung, max_model_len=2 * high, rows=sizes.bench_requests)
        try:
            first = timed(lambda: rollout.engine.generate_requests(prompts, params))
            rollout.engine.flush_cache()
            took = timed(lambda: rollout.engine.generate_requests(prompts, params))
        finally:
            rollout.close()
        return {"tokens/s": sum(lengths[1]) / took, "seconds": took, "first run, s": first}

    def prefill(self, rung: Rung) -> dict[str, Any]:
        """Attention kernels alone; prompt tokens a second of a lone prompt with its one token."""
        sizes, found = self.sizes, dict(measure_prefill_kernels(is_smoke=self.is_smoke))
        rollout = self.rollout(rung, max_model_len=max(sizes.prefill_tokens) + 1, rows=sizes.rows)
        params = SamplingParams(max_new_tokens=1, ignore_eos=True)
        try:
            for length in sizes.prefill_tokens:
                prompts = self.prompts(1, length)
                times = []
                for _ in range(sizes.repeats + 1):
                    rollout.engine.flush_cache()
                    times.append(
                        timed(lambda p=prompts: rollout.engine.generate_requests(p, params))
                    )
                found[f"{length} tokens, tokens/s"] = length / float(np.median(times[1:]))
        finally:
            rollout.close()
        return found

    def products(self, rung: Rung) -> dict[str, Any]:
        """Microseconds of each kind of product, a layer after the other, by rows and tiles."""
        del rung
        found: dict[str, Any] = {}
        for rows in self.sizes.product_rows:
            for name, us in measure_products(self.sizes, rows, is_smoke=self.is_smoke):
                found[f"{name}, {rows} rows, us"] = us
        return found


MEASUREMENTS: dict[str, Callable[[Ladder, Rung], dict[str, Any]]] = {
    "decode": Ladder.decode,
    "bench": Ladder.bench,
    "prefill": Ladder.prefill,
    "products": Ladder.products,
}

_TILES = {
    "norm_gated": [
        linear.NORMED,
        linear.Tile(128, 64, 64, 8),
        linear.Tile(64, 64, 64),
        linear.Tile(128, 32, 128),
        linear.Tile(128, 16, 128),
    ],
    "linear_add": [
        linear.ADDED,
        linear.Tile(64, 32, 128),
        linear.Tile(128, 16, 128),
        linear.Tile(64, 16, 128),
        linear.Tile(32, 64, 128),
    ],
}


def measure_products(sizes: Sizes, rows: int, *, is_smoke: bool) -> Iterator[tuple[str, float]]:
    """Each kind of product by XLA and by our kernel in each tile, if it is right.

    A round goes through as many weights as the model has layers, which no cache holds, and each
    product's result is an input of the next. A wrong one yields NaN.
    """
    model = sizes.engine.model
    dim, wide, num = model.embed_dim, model.hidden_dim, model.num_layers
    keys = iter(jax.random.split(jax.random.key(0), 3 * num + 1))

    def draw(*shape: int) -> jax.Array:
        return (0.02 * jax.random.normal(next(keys), shape)).astype(jnp.bfloat16)

    x, norm = 50 * draw(rows, dim), linear.Norm(jnp.ones(dim), 1e-6, 0.0)
    layers = [(draw(dim, wide), draw(dim, wide), draw(wide, dim)) for _ in range(num)]

    def gated_by_xla(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        h = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + norm.eps)
        h = h.astype(x.dtype)
        return jax.nn.silu(h @ gate) * (h @ up)

    def run(gated: Callable[..., jax.Array], added: Callable[..., jax.Array]) -> Any:
        def all_layers(x: jax.Array, layers: Any) -> jax.Array:
            for gate, up, down in layers:
                x = added(gated(x, gate, up), down, x)
            return x

        return jax.jit(all_layers)

    def added_by_xla(h: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
        return x + h @ down

    def time_us(function: Any, expected: jax.Array | None) -> tuple[float, jax.Array]:
        out = function(x, layers).block_until_ready()
        if expected is not None:
            error = jnp.max(jnp.abs((out - expected).astype(jnp.float32)))
            if not float(error) <= 0.05 * float(jnp.max(jnp.abs(expected))):
                return float("nan"), out
        calls = 1 if is_smoke else 20
        took = timed(lambda: [function(x, layers) for _ in range(calls)][-1].block_until_ready())
        return 1e6 * took / (calls * num), out

    us, expected = time_us(run(gated_by_xla, added_by_xla), None)
    yield "MLP by XLA", us
    options = {"interpret": is_smoke}
    for tile in _TILES["norm_gated"]:
        ours = functools.partial(_gated, norm=norm, tile=tile, **options)
        yield f"norm_gated {tuple(tile)}", time_us(run(ours, added_by_xla), expected)[0]
    for tile in _TILES["linear_add"]:
        ours = functools.partial(linear.linear_add, tile=tile, **options)
        yield f"linear_add {tuple(tile)}", time_us(run(gated_by_xla, ours), expected)[0]


def _gated(
    x: jax.Array, gate: jax.Array, up: jax.Array, *, norm: linear.Norm, **options: Any
) -> jax.Array:
    return linear.norm_gated(x, norm, gate, up, jax.nn.silu, **options)


def run_here(names: Sequence[str], *, is_smoke: bool, reference: Path) -> None:
    """Runs rungs in this process, and prints a line of JSON for each; a failure costs no other."""
    sizes = Sizes.smoke() if is_smoke else Sizes()
    ladder = Ladder(sizes, is_smoke=is_smoke, reference=reference)
    for name in names:
        found: dict[str, Any] = {"device": jax.devices()[0].device_kind}
        try:
            found |= ladder.run(RUNGS[name])
        except Exception as error:
            traceback.print_exc()
            found["error"] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        print(json.dumps({"rung": name, **found}), flush=True)


def run_rungs(
    names: Sequence[str], budget_s: float, *, is_smoke: bool, save: Callable[[Any], None]
) -> dict[str, dict[str, Any]]:
    """Runs rungs, neighbours with equal flags in one process, and saves after each.

    A rung that takes its process with it is reported, and the next ones get another.
    """
    found: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + budget_s
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference.json"
        for flags, group in itertools.groupby(names, key=lambda name: RUNGS[name].flags):
            left = list(group)
            while left and time.monotonic() < end:
                command = [sys.executable, __file__, "--reference", str(reference)]
                command += ["--here", *left, *(["--smoke"] if is_smoke else [])]
                for one in _lines_of(command, flags, end):
                    found[left.pop(0)] = one
                    save(found)
                if left and time.monotonic() < end:
                    found[left.pop(0)] = {"error": "its process died"}
                    save(found)
    for name in names:
        found.setdefault(name, {"error": f"left out, or cut off after {budget_s:g} s"})
    save(found)
    return found


def _lines_of(command: Sequence[str], flags: str, end: float) -> Iterator[dict[str, Any]]:
    """What `run_here` prints in a process with XLA flags of its own, killed when time is up."""
    given = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    with subprocess.Popen(
        command, env={**os.environ, "XLA_FLAGS": given}, stdout=subprocess.PIPE, text=True
    ) as process:
        timer = threading.Timer(max(end - time.monotonic(), 0.0), process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"rung"'):
                one = json.loads(line)
                del one["rung"]
                yield one
        timer.cancel()


def report_lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """The report: a table of the decode steps, and lists of the others."""
    lines = ["| rung | step, ms | tokens/s | over base | log-probs differ by |"]
    lines.append("|---|---:|---:|---:|---:|")
    base = found.get(next(iter(RUNGS)), {}).get("step, ms")
    others = []
    for name in (name for name in RUNGS if name in found):
        one = found[name]
        if "error" in one:
            lines.append(f"| {name} | failed: {one['error'][:150]} | | | |")
        elif one.get("is_right") is False:
            lines.append(f"| {name} | wrong, not timed | | | {one['largest difference']:.3g} |")
        elif "step, ms" in one:
            gain = f"{base / one['step, ms']:.2f}" if base else ""
            lines.append(
                f"| {name} | {one['step, ms']:.3g} | {one['tokens/s']:,.0f} | {gain} "
                f"| {one['largest difference']:.3g} |"
            )
        else:
            values = {key: value for key, value in one.items() if key != "device"}
            others += ["", f"## {name}", ""]
            others += [f"- {key}: {value:,.4g}" for key, value in values.items()]
    return lines + others


def main(argv: Sequence[str] | None = None) -> None:
    """Climbs the ladder and writes the report; or some rungs, for the process that asked."""
    parser = argparse.ArgumentParser(description="Changes to a decode step on one GPU.")
    parser.add_argument("--smoke", action="store_true", help="in miniature, on any device")
    parser.add_argument("--only", nargs="+", choices=RUNGS, default=list(RUNGS))
    parser.add_argument("--budget-s", type=float, default=450.0)
    parser.add_argument("--here", nargs="+", choices=RUNGS, help="in this process, as JSON")
    parser.add_argument("--reference", type=Path, help="for --here: the first rung's log-probs")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/gpu_ladder.md")
    args = parser.parse_args(argv)
    if args.here:
        run_here(args.here, is_smoke=args.smoke, reference=args.reference)
        return
    sizes = Sizes.smoke() if args.smoke else Sizes()

    def save(found: dict[str, dict[str, Any]]) -> None:
        devices = {one["device"] for one in found.values() if "device" in one}
        environment = describe_environment(", ".join(sorted(devices)))
        head = report_head(
            "Changes to a decode step on one GPU",
            "benchmarks/hardware/gpu_ladder.py" + " --smoke" * args.smoke,
            environment,
            f"Model: {sizes.engine.in_words()}, random weights, bfloat16",
            f"{sizes.rows} rows, contexts of {sizes.engine.context} to "
            f"{sizes.engine.context + sizes.engine.num_steps}",
        )
        write_report(args.output, head + report_lines(found), environment, {"rungs": found})

    run_rungs(args.only, args.budget_s, is_smoke=args.smoke, save=save)


if __name__ == "__main__":
    main()
