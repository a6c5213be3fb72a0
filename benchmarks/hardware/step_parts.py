"""Where the time of a decode step goes, part by part, beside the least that each part takes.

    python benchmarks/hardware/step_parts.py                       # small, 64 rows
    python benchmarks/hardware/step_parts.py --model tiny --quick

The engine answers `rl_uniform`; one of its decode dispatches is kept, arguments and all, and then
run again alone, in turn: as it is, and with one part at a time replaced by something that costs
nothing. A part takes what the step loses without it. Projections are timed alone, all of a step's
matrix products in a loop on the device. What remains (norms, rotary embeddings, writing keys, the
loop) is "other"; it is negative when parts cost more in company than alone. "host" is the time of
the real run outside its dispatches, a step. The parts add up to a step of the real run. All are
medians, those of parts of what a round of runs differed by.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.hardware.ceilings import Ceilings, measure_ceilings
from benchmarks.hardware.roofline import decode_work, limit_by_part
from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine import Engine, SamplingParams
from sgljax_engine.attention.base import AttentionOptions, BlockTables
from sgljax_engine.cache.contiguous_kv import LayerContiguousKV
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.layers.basic import Layout
from sgljax_engine.layers.devices import is_own_cpu
from sgljax_engine.layers.kernels import CpuKernels, Weight
from sgljax_engine.layers.tiles import Tokens
from sgljax_engine.models.spec import ModelContext, Params
from sgljax_engine.runner import attend, programs
from sgljax_engine.runner.compiled import ProgramCall, ProgramState
from sgljax_engine.runner.program_context import ProgramContext
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.sampling.logprobs import LogprobBatch
from sgljax_engine.sampling.sampler import Sampled, Sampler, SamplingBatch
from sgljax_engine.xla_options import compiler_options
from tunix_sgljax.bench.environment import describe_environment
from tunix_sgljax.bench.shapes import MODELS, BenchModel
from tunix_sgljax.bench.workloads import Workload, make_workload

_NOISE = 0.02
"""Of a step: what two timings of the same work may differ by."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Seconds of one part of a decode step."""

    part: str
    measured_s: float
    limit_s: float


class Dispatch(NamedTuple):
    """A decode dispatch of a running engine, to be run again.

    Attributes:
        runner: The engine's, idle.
        args: What the decode program took after weights and pages.
        num_steps: Steps that it took.
        num_rows: Rows that took part.
        num_keys: Keys that all rows together saw in the middle step.
        host_s: Seconds a step that the real run took longer than its dispatches.
    """

    runner: ModelRunner
    args: tuple[Any, ...]
    num_steps: int
    num_rows: int
    num_keys: int
    host_s: float


def capture(engine: Engine, workload: Workload) -> Dispatch:
    """Runs the workload twice and keeps a dispatch of the second run, one with most rows."""
    runner = engine._group.loops[0]._core.runner
    kept: list[tuple[Any, ...]] = []
    original = runner.programs.run

    def run(call: ProgramCall, state: ProgramState) -> tuple[ProgramState, Any]:
        if call.name == "decode":
            kept.append(call.args)
        return original(call, state)

    params = [
        SamplingParams(max_new_tokens=length, ignore_eos=True) for length in workload.output_lengths
    ]
    engine.generate_requests(workload.requests, params)
    before = engine.get_internal_state().counters
    with mock.patch.object(runner.programs, "run", run):
        start = time.perf_counter()
        engine.generate_requests(workload.requests, params)
        wall_s = time.perf_counter() - start
    after = engine.get_internal_state().counters
    device_s = after.decode_s - before.decode_s + after.prefill_s - before.prefill_s
    num_running = [int(np.sum(args[0].step_limits > 0)) for args in kept]
    full = [
        args for args, count in zip(kept, num_running, strict=True) if count == max(num_running)
    ]
    args = full[len(full) // 2]
    rows, num_steps = args[0], int(args[3])
    steps = np.minimum(rows.step_limits, num_steps)
    is_running = steps > 0
    keys = rows.positions[is_running] + steps[is_running] // 2 + 1
    total_steps = sum(int(min(a[3], np.max(a[0].step_limits))) for a in kept)
    return Dispatch(
        runner=runner,
        args=args,
        num_steps=int(steps.max()),
        num_rows=int(is_running.sum()),
        num_keys=int(keys.sum()),
        host_s=max(wall_s - device_s, 0.0) / total_steps,
    )


def _in_turn(runs: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Seconds of every call. They are called in turn, so that other work disturbs all alike."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds * len(runs)
    while len(times[next(iter(runs))]) < 5 or time.perf_counter() < end:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def _no_attention(
    q: jax.Array, layer: LayerKV, tables: BlockTables, options: AttentionOptions
) -> jax.Array:
    del layer, tables, options
    return q


def _no_decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: LayerKV,
    tables: BlockTables,
    options: AttentionOptions,
) -> tuple[jax.Array, LayerKV]:
    """Still reads keys and values, so that computing them cannot be left out."""
    del tables, options
    group = q.shape[1] // k.shape[1]
    return q + jnp.repeat(k + v, group, axis=1) * 1e-30, layer


def _no_logits(
    params: Params, context: ModelContext, hidden: jax.Array, adapters: jax.Array | None
) -> jax.Array:
    del params, adapters
    shape = (hidden.shape[0], context.config.vocab_size)
    return jnp.broadcast_to(hidden[:, :1], shape).astype(jnp.float32)


def _no_sampling(
    logits: jax.Array,
    rows: SamplingBatch,
    step: jax.Array,
    adjusted: jax.Array | None,
    tokens: Tokens,
    num_shards: int,
    sampler: Sampler,
    others: LogprobBatch | None,
) -> Sampled:
    """Still reads every logit once, so that computing them cannot be left out."""
    del rows, adjusted, tokens, num_shards, sampler, others
    peak = jnp.max(logits, axis=-1)
    token = jnp.where(peak > 1e30, step, 1).astype(jnp.int32)
    return Sampled(token=token, logprob=peak, scaled_logprob=peak, processed_logprob=peak)


def _no_row_attention(
    q: jax.Array,
    rows: LayerContiguousKV,
    kv_lens: jax.Array,
    shared: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    del rows, kv_lens, shared, options
    return q


def decode_run(
    dispatch: Dispatch, static: ProgramContext, state: list[Any], **parts: Any
) -> Callable[[], object]:
    """The dispatch compiled for `static`, with other functions for `parts`, ready to be run.

    `state` has the pages and rows, which each run takes and leaves there.
    """
    runner = dispatch.runner
    run = jax.jit(
        functools.partial(programs.decode, static=static),
        donate_argnums=(1, 2),
        compiler_options=compiler_options(is_own_cpu(jax.devices()[0])),
    )
    with contextlib.ExitStack() as patches:
        for name, part in parts.items():
            module = attend if hasattr(attend, name) else programs
            patches.enter_context(mock.patch.object(module, name, part))
        compiled = run.lower(runner.weights, *state, *dispatch.args).compile()

    def once() -> None:
        *state[:], output = compiled(runner.weights, *state, *dispatch.args)
        jax.block_until_ready((state, output))

    return once


def projections_run(
    dispatch: Dispatch, context: ModelContext, num_rows: int
) -> Callable[[], object]:
    """All matrix products of the dispatch, but the logits, ready to be run.

    Every product needs the last one, so they run one after the other, and whole.
    """
    layout = context.layout

    def multiply(x: jax.Array, weight: Weight) -> jax.Array:
        """The product, a scalar that needs all of it."""
        product = context.linear(weight, x)
        if isinstance(context.kernels, CpuKernels):
            return product[0, 0]  # XLA leaves out nothing of what is not its own
        return jnp.max(product)

    weights = {
        name: weight
        for name, weight in context.kernels.weights(dispatch.runner.weights).items()
        if len(weight.shape) == 2 and "embed" not in name and "lm_head" not in name
    }

    def num_inputs(weight: Weight) -> int:
        return weight.shape[1 if layout is Layout.FEATURES_FIRST else 0]

    base = {
        size: layout.place(jnp.ones((num_rows, size)))
        for size in {num_inputs(weight) for weight in weights.values()}
    }

    def steps(weights: dict[str, Weight], start: jax.Array) -> jax.Array:
        def body(
            _: int, carry: tuple[jax.Array, dict[int, jax.Array]]
        ) -> tuple[jax.Array, dict[int, jax.Array]]:
            last, inputs = carry
            inputs = dict(inputs)
            for weight in weights.values():
                size = num_inputs(weight)
                inputs[size] = inputs[size].at[0, 0].set(1 + last)
                last = multiply(inputs[size], weight) * 1e-30
            return last, inputs

        return lax.fori_loop(0, dispatch.num_steps, body, (start, base))[0]

    run = jax.jit(steps, compiler_options=compiler_options(is_own_cpu(jax.devices()[0])))
    return lambda: run(weights, jnp.zeros(())).block_until_ready()


def measure_parts(
    engine: Engine, bench_model: BenchModel, workload: Workload, seconds: float
) -> tuple[Dispatch, Ceilings, list[Part]]:
    """Times everything on one captured dispatch, and the ceilings for what its steps read."""
    dispatch = capture(engine, workload)
    runner = dispatch.runner
    static, num_rows = runner._static, len(dispatch.args[0].input_ids)
    kv = runner.kv_memory.kv, runner.kv_memory.contiguous_kv
    state: list[Any] = [*jax.tree.map(jnp.copy, kv)]
    no_attention = static._replace(attention=_no_attention)
    if static.decode_attention is not None:
        no_attention = no_attention._replace(decode_attention=_no_decode_attention)
    no_logits = static._replace(model=static.model._replace(logits=_no_logits))
    runs = {
        "step": decode_run(dispatch, static, state),
        "attention": decode_run(dispatch, no_attention, state, row_attention=_no_row_attention),
        "logits": decode_run(dispatch, no_logits, state),
        "sampling": decode_run(dispatch, static, state, sample=_no_sampling),
        "projections": projections_run(dispatch, static.context, num_rows),
    }
    times = {
        name: np.array(times) / dispatch.num_steps
        for name, times in _in_turn(runs, seconds).items()
    }
    full_s = float(np.median(times["step"]))
    measured = {
        part: float(np.median(times["step"] - times[part]))
        for part in ("attention", "logits", "sampling")
    }
    measured["projections"] = float(np.median(times["projections"]))
    measured["other"] = full_s - sum(measured.values())
    measured["host"] = dispatch.host_s
    work = decode_work(
        bench_model.config,
        num_tokens=dispatch.num_rows,
        num_keys=dispatch.num_keys,
        num_passes=1,
    )
    num_bytes = round(sum(entry.num_bytes for entry in work))
    ceilings = measure_ceilings(num_bytes, seconds=min(seconds, 0.5))
    limits = limit_by_part(work, ceilings)
    order = ("projections", "attention", "logits", "sampling", "other", "host")
    parts = [
        Part(part=part, measured_s=measured[part], limit_s=limits.get(part, 0.0)) for part in order
    ]
    return dispatch, ceilings, parts


def _report(parts: Sequence[Part]) -> list[str]:
    total, limit = sum(p.measured_s for p in parts), sum(p.limit_s for p in parts)
    lines = [
        "| part | ms a step | of the step | limit, ms | of its limit |",
        "|---|---:|---:|---:|---:|",
    ]
    for p in (*parts, Part(part="sum", measured_s=total, limit_s=limit)):
        reached = f"{p.limit_s / p.measured_s:.0%}" if p.limit_s and p.measured_s > 0 else ""
        lines.append(
            f"| {p.part} | {p.measured_s * 1e3:.2f} | {p.measured_s / total:.0%} "
            f"| {p.limit_s * 1e3:.2f} | {reached} |"
        )
    # "other" is what parts cost more alone than in company.
    impossible = [p.part for p in parts if p.part != "other" and p.measured_s < -_NOISE * total]
    if impossible:
        names = ", ".join(impossible)
        lines += ["", f"No part takes less than nothing ({names}): other work disturbed this run."]
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser(description="Parts of a decode step.")
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each timing")
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--output-dir", type=Path, help="instead of benchmarks/results")
    args = parser.parse_args(argv)
    folder = args.output_dir or ROOT / (
        "outputs/bench_quick" if args.quick else "benchmarks/results"
    )
    bench_model = MODELS[args.model]
    seconds = 0.02 if args.quick else args.seconds
    workload = make_workload("rl_uniform", bench_model.config.vocab_size, is_quick=args.quick)
    with Engine(
        model_config=bench_model.config,
        load_format="dummy",
        max_running_requests=workload.num_rows,
        max_model_len=workload.max_model_len,
    ) as engine:
        dispatch, ceilings, parts = measure_parts(engine, bench_model, workload, seconds)
    environment = describe_environment(jax.devices()[0].device_kind)
    mean_context = dispatch.num_keys / dispatch.num_rows
    lines = [
        *report_head(
            f"Where a decode step of {dispatch.num_rows} rows goes, model `{bench_model.name}`",
            "benchmarks/hardware/step_parts.py",
            environment,
            f"Model: {bench_model.in_words}, float32; {mean_context:.0f} keys a row",
            f"Ceilings measured in this run: {ceilings.in_words()}",
        ),
        *_report(parts),
    ]
    content = {
        "is_quick": args.quick,
        "model": dataclasses.asdict(bench_model),
        "num_rows": dispatch.num_rows,
        "mean_context": mean_context,
        "ceilings": dataclasses.asdict(ceilings),
        "parts": [dataclasses.asdict(part) for part in parts],
    }
    write_report(folder / f"step_parts_{bench_model.name}.md", lines, environment, content)


if __name__ == "__main__":
    main()
