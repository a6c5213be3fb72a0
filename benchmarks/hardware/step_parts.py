"""Where the time of a decode step goes, part by part, beside the least that each part takes.

    python benchmarks/hardware/step_parts.py                       # small, 64 rows
    python benchmarks/hardware/step_parts.py --model tiny --quick

The engine answers `rl_uniform`; one of its decode dispatches is kept, arguments and all, and then
run again alone, in turn: as it is, and with one part at a time replaced by something that costs
nothing. A part takes what the step loses without it, the median of turns. Projections are timed
alone, all of a step's matrix products in a loop on the device. What remains (norms, rotary
embeddings, writing keys, the loop) is "other"; it is negative when parts cost more together than
alone. "host" is the time of the real run outside its dispatches, a step.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.hardware.ceilings import Ceilings, measure_ceilings
from benchmarks.hardware.roofline import decode_work, limit_by_part
from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import MODELS, BenchModel
from benchmarks.lib.turns import take_turns
from benchmarks.lib.workloads import Workload, make_workload
from sgljax_engine import Engine, SamplingParams
from sgljax_engine.attention.base import AttentionOptions, BlockTables, NewTokens
from sgljax_engine.attention.cpu import NativeAttention
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.layers.devices import compiler_options, is_own_cpu
from sgljax_engine.layers.kernels import CpuKernels, Weight
from sgljax_engine.models.spec import ModelContext
from sgljax_engine.runner.compile.compiled import ProgramCall, ProgramState
from sgljax_engine.runner.programs import decode
from sgljax_engine.runner.programs.context import ProgramContext
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.sampling import sampler
from sgljax_engine.sampling.sampler import Sampled


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
    """Runs the workload twice and keeps a dispatch of the second run, the first with most rows."""
    runner = engine._group.loops[0]._core.runner
    kept: list[tuple[Any, ...]] = []
    original = runner.programs.run_program

    def run(call: ProgramCall, state: ProgramState) -> tuple[ProgramState, Any]:
        if call.name == "decode":
            kept.append(call.args)
        return original(call, state)

    params = [
        SamplingParams(max_new_tokens=length, ignore_eos=True) for length in workload.output_lengths
    ]
    engine.generate_requests(workload.requests, params)
    before = engine.get_internal_state().counters
    with mock.patch.object(runner.programs, "run_program", run):
        start = time.perf_counter()
        engine.generate_requests(workload.requests, params)
        wall_s = time.perf_counter() - start
    after = engine.get_internal_state().counters
    device_s = after.decode_s - before.decode_s + after.prefill_s - before.prefill_s
    args = max(kept, key=lambda args: np.sum(args[0].step_limits > 0))
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


# What takes the place of a part. What a part's inputs cost must not be left out with it, so those
# of attention and of sampling are still read.


class _NoAttention(NativeAttention):
    def write_and_attend(
        self,
        new: NewTokens,
        layer: LayerKV,
        tables: BlockTables,
        slots: jax.Array,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerKV]:
        del tables, slots, options
        group = new.q.shape[1] // new.k.shape[1]
        return new.q + jnp.repeat(new.k + new.v, group, axis=1) * 1e-30, layer


def _no_logits(_: Any, context: ModelContext, hidden: jax.Array, __: Any) -> jax.Array:
    shape = (hidden.shape[0], context.config.vocab_size)
    return jnp.broadcast_to(hidden[:, :1], shape).astype(jnp.float32)


def _no_sampling(logits: jax.Array, _: Any, step: jax.Array, *__: Any) -> Sampled:
    peak = jnp.max(logits, axis=-1)
    token = jnp.where(peak > 1e30, step, 1).astype(jnp.int32)
    return Sampled(token=token, logprob=peak, scaled_logprob=peak, processed_logprob=peak)


def decode_run(
    dispatch: Dispatch, static: ProgramContext, state: list[Any], sample: Any = sampler.sample
) -> Callable[[], object]:
    """The dispatch compiled for `static` and `sample`, ready to be run.

    `state` has the pages, which each run takes and leaves there.
    """
    runner = dispatch.runner
    run = jax.jit(
        functools.partial(decode.decode, static=static),
        donate_argnums=1,
        compiler_options=compiler_options(is_own_cpu(jax.devices()[0])),
    )
    with mock.patch.object(decode, "sample", sample):
        compiled = run.lower(runner.weights, *state, *dispatch.args).compile()

    def once() -> None:
        state[0], output = compiled(runner.weights, *state, *dispatch.args)
        jax.block_until_ready((state, output))

    return once


def projections_run(
    dispatch: Dispatch, context: ModelContext, num_rows: int
) -> Callable[[], object]:
    """All matrix products of the dispatch, but the logits; each needs the one before."""

    def multiply(x: jax.Array, weight: Weight) -> jax.Array:
        """The product, a scalar that needs all of it."""
        product = context.kernels.linear(weight, x)
        if isinstance(context.kernels, CpuKernels):
            return product[0, 0]  # XLA leaves out nothing of what is not its own
        return jnp.max(product)

    weights = {
        name: weight
        for name, weight in context.kernels.weights(dispatch.runner.weights).items()
        if len(weight.shape) == 2 and "embed" not in name and "lm_head" not in name
    }

    def num_inputs(weight: Weight) -> int:
        return weight.shape[0]

    base = {
        size: jnp.ones((num_rows, size))
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
    engine: Engine, bench_model: BenchModel, workload: Workload, num_turns: int
) -> tuple[Dispatch, Ceilings, list[dict[str, Any]]]:
    """Times everything on one captured dispatch, and the ceilings for what its steps read."""
    dispatch = capture(engine, workload)
    runner = dispatch.runner
    static, num_rows = runner._static, len(dispatch.args[0].input_ids)
    state: list[Any] = [jax.tree.map(jnp.copy, runner.kv_memory.kv)]
    no_attention = static._replace(attention=_NoAttention())
    no_logits = static._replace(model=static.model._replace(logits=_no_logits))
    runs = {
        "step": decode_run(dispatch, static, state),
        "attention": decode_run(dispatch, no_attention, state),
        "logits": decode_run(dispatch, no_logits, state),
        "sampling": decode_run(dispatch, static, state, sample=_no_sampling),
        "projections": projections_run(dispatch, static.context, num_rows),
    }
    times = {
        name: np.array(times) / dispatch.num_steps
        for name, times in take_turns(runs, num_turns).items()
    }
    measured = {"projections": float(np.median(times["projections"]))}
    for part in ("attention", "logits", "sampling"):
        measured[part] = float(np.median(times["step"] - times[part]))
    measured["other"] = float(np.median(times["step"])) - sum(measured.values())
    measured["host"] = dispatch.host_s
    work = decode_work(
        bench_model.config,
        num_tokens=dispatch.num_rows,
        num_keys=dispatch.num_keys,
        num_passes=1,
    )
    num_bytes = round(sum(entry.num_bytes for entry in work))
    ceilings = measure_ceilings(num_bytes, seconds=min(0.02 * num_turns, 0.5))
    limits = limit_by_part(work, ceilings)
    parts = [
        {"part": part, "measured_s": measured_s, "limit_s": limits.get(part, 0.0)}
        for part, measured_s in measured.items()
    ]
    return dispatch, ceilings, parts


def report(parts: Sequence[dict[str, Any]]) -> list[str]:
    """The table."""
    total_s, limit_s = (sum(part[field] for part in parts) for field in ("measured_s", "limit_s"))
    lines = [
        "| part | ms a step | of the step | limit, ms | of its limit |",
        "|---|---:|---:|---:|---:|",
    ]
    for part in (*parts, {"part": "sum", "measured_s": total_s, "limit_s": limit_s}):
        measured_s, part_limit_s = part["measured_s"], part["limit_s"]
        reached = f"{part_limit_s / measured_s:.0%}" if part_limit_s and measured_s > 0 else ""
        lines.append(
            f"| {part['part']} | {measured_s * 1e3:.2f} | {measured_s / total_s:.0%} "
            f"| {part_limit_s * 1e3:.2f} | {reached} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the table."""
    parser = make_parser(__doc__, pairs=30)
    parser.add_argument("--model", choices=list(MODELS), default="small")
    args = parser.parse_args(argv)
    bench_model = MODELS[args.model]
    workload = make_workload("rl_uniform", bench_model.config.vocab_size, is_quick=args.quick)
    with Engine(
        model_config=bench_model.config,
        load_format="dummy",
        max_running_requests=workload.num_rows,
        max_model_len=workload.max_model_len,
    ) as engine:
        num_turns = 1 if args.quick else args.pairs
        dispatch, ceilings, parts = measure_parts(engine, bench_model, workload, num_turns)
    mean_context = dispatch.num_keys / dispatch.num_rows
    write_results(
        output_dir(args) / f"step_parts_{bench_model.name}.md",
        f"Where a decode step of {dispatch.num_rows} rows goes, model `{bench_model.name}`",
        "benchmarks/hardware/step_parts.py",
        report(parts),
        {"num_rows": dispatch.num_rows, "ceilings": dataclasses.asdict(ceilings), "parts": parts},
        facts=[
            f"Model: {bench_model.in_words}, float32; {mean_context:.0f} keys a row",
            f"Ceilings measured in this run: {ceilings.in_words()}",
        ],
    )


if __name__ == "__main__":
    main()
