"""The host's work for one dispatch, against waiting requests, context length and batch size.

    python benchmarks/throughput/scheduler_growth.py

The engine's own scheduler, prefix cache and batch building run, on a device that answers at once
with made-up tokens; the time of that answer is subtracted. So what is measured is what the engine
thread does between two dispatches, but for handing arrays to JAX. Three cases:

- churn: 256 rows run; whenever one finishes, another request arrives. Prompts of 64 to 128 tokens
  in groups of 8 that share one, lognormal outputs of 16 to 256 tokens, pages for all: the
  dispatch ends at the first finished row, and the oldest waiting request takes its place.
- steady: 256 rows of one context length decode and none finishes, with and without penalties.
- arrival: requests are added at once to an idle scheduler, then the first dispatch is planned.

The share is that of 16 decode steps of the small model at 256 rows, measured in the same run with
the real engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine import Engine, SamplingParams, SchedulerConfig
from sgljax_engine.attention.registry import pick_attention
from sgljax_engine.cache.allocator import PageAllocator
from sgljax_engine.cache.pool import PagePool
from sgljax_engine.models.registry import get_model
from sgljax_engine.models.spec import ModelContext
from sgljax_engine.placement.submeshes import place
from sgljax_engine.runner.batch import default_batch_buckets, default_token_buckets
from sgljax_engine.runner.compiled import ProgramCall, ProgramState
from sgljax_engine.runner.program_context import ProgramContext
from sgljax_engine.runner.programs import DecodeOutput
from sgljax_engine.runner.runner import ModelRunner
from sgljax_engine.runner.shapes import BatchShapes
from sgljax_engine.scheduler.scheduler import Scheduler
from sgljax_engine.types import Request, StepOutput, StepTimes
from tunix_sgljax.bench.environment import Environment, describe_environment
from tunix_sgljax.bench.shapes import SMALL, SMALL_IN_WORDS

ROWS, STEPS, PAGE, BLOCK, BUDGET, GROUP = 256, 16, 16, 16, 2048, 8
WAITING = (0, 100, 1_000, 10_000)
CONTEXTS = (64, 512, 4096, 16_384)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Medians over dispatches, in milliseconds of the engine thread.

    Attributes:
        case: Which workload.
        rows: Running requests.
        waiting: Waiting requests.
        context: Tokens of each prompt, or "64-128".
        schedule_ms, update_ms: In the scheduler's two calls.
        batch_ms: Building the arrays of the dispatch and taking its results apart.
    """

    case: str
    rows: int
    waiting: int
    context: str
    schedule_ms: float
    batch_ms: float
    update_ms: float

    @property
    def total_ms(self) -> float:
        """All of it."""
        return self.schedule_ms + self.batch_ms + self.update_ms


class HostArray:
    """An array that is on the host already."""

    def __init__(self, array: np.ndarray) -> None:
        """Holds it."""
        self._array = array

    def copy_to_host_async(self) -> None:
        """Does nothing."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The array itself."""
        return self._array


class InstantDevice:
    """Runs programs in place of the runner's `ProgramCache`: tokens at once.

    Attributes:
        spent_s: Seconds that took.
    """

    def __init__(self) -> None:
        """Starts the clock at zero."""
        self.spent_s = 0.0
        self._rng = np.random.default_rng(0)

    def run(self, call: ProgramCall, state: ProgramState) -> tuple[ProgramState, Any]:
        """Returns what `ProgramCache.run` would."""
        started = time.perf_counter()
        result = self._decode(*call.args) if call.name == "decode" else None
        self.spent_s += time.perf_counter() - started
        return state, result

    def _decode(
        self, rows: Any, sampling: Any, options: Any, num_steps: int, max_finished: int
    ) -> DecodeOutput:
        limits, size = rows.step_limits, len(rows.step_limits)
        steps = min(int(num_steps), int(limits.max(initial=0)))
        ends = np.sort(limits[rows.ends_at_limit & (limits > 0)])
        if len(ends) >= max_finished:
            steps = min(steps, int(ends[max_finished - 1]))
        values = np.zeros((STEPS, size), np.float32)
        tokens = self._rng.integers(0, SMALL.vocab_size, (STEPS, size), np.int32)
        counts = np.minimum(limits, steps)
        output = DecodeOutput(tokens, values, values, values, counts, np.zeros(size, bool), None)  # type: ignore[arg-type]
        return jax.tree.map(HostArray, output)


class Host:
    """Scheduler and runner without a device, and the seconds of each part."""

    def __init__(self, rows: int, num_tokens: int, table_tokens: int) -> None:
        """Makes an idle one with `num_tokens` of KV pages, for requests of `table_tokens`."""
        model = dataclasses.replace(
            SMALL, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, context_length=2**20
        )
        placement = place(model, None, "float32").whole
        num_pages = -(-num_tokens // PAGE)
        self._pool = PagePool(PageAllocator(num_pages), PAGE)
        config = SchedulerConfig(
            max_running_requests=rows, chunked_prefill_size=BUDGET, decode_steps=STEPS
        )
        self.scheduler = Scheduler(
            config,
            self._pool,
            token_block=BLOCK,
            max_prefill_tokens=BUDGET,
            prefill_sizes=(BUDGET,),
        )
        self._runner = ModelRunner(
            static=ProgramContext(
                model=get_model(model.architecture),
                context=ModelContext(model, placement.layout),
                attention=pick_attention("auto", placement.target, model.head_dims).attend,
                page_size=PAGE,
                max_steps=STEPS,
            ),
            placement=placement,
            weights={},
            num_pages=num_pages,
            shapes=BatchShapes(
                default_batch_buckets(rows, placement.platform),
                default_token_buckets(BUDGET, BLOCK),
                BLOCK,
                table_width=-(-table_tokens // PAGE),
            ),
            contiguous_shapes=None,
        )
        self._device = InstantDevice()
        self._runner.programs.run = self._device.run

    def step(self) -> tuple[list[Request], tuple[float, float, float]]:
        """One dispatch: the requests that it finished; seconds in schedule, batch and update."""
        started = time.perf_counter()
        output = self.scheduler.schedule()
        scheduled = time.perf_counter()
        device_s = self._device.spent_s
        if output.prefill:
            self._runner.prefill(output.prefill)
        if output.copies:
            self._runner.copy_pages(output.copies)
        rows = self._runner.decode(output).wait() if output.decode else []
        # As fast as this, so that every dispatch may take all its steps.
        step = StepOutput(rows, times=StepTimes(0.0, 0.0, 0.0, 1e-6))
        ran = time.perf_counter()
        finished = self.scheduler.update(output, step).finished
        updated = time.perf_counter()
        device_s = self._device.spent_s - device_s
        return finished, (scheduled - started, ran - scheduled - device_s, updated - ran)


def long_tail() -> Iterator[Request]:
    """Requests without end, in groups that share a prompt."""
    rng = np.random.default_rng(1)
    number = 0
    while True:
        prompt = rng.integers(0, SMALL.vocab_size, rng.integers(64, 129)).tolist()
        for length in np.clip(rng.lognormal(np.log(64), 0.8, GROUP), 16, 256).astype(int):
            yield make_request(number, prompt, int(length))
            number += 1


def make_request(number: int, prompt: list[int], max_new: int, **settings: Any) -> Request:
    """A request as the engine's factory makes it."""
    return Request(
        rid=f"{number:032x}",
        prompt_ids=prompt,
        params=SamplingParams(temperature=1.0, max_new_tokens=max_new, **settings),
        seed=number,
        stop_ids=(SMALL.vocab_size - 1,),
        prompt_key=hash(tuple(prompt)),
    )


def churn(waiting: int, num_steps: int) -> Result:
    """256 rows, of which one finishes at most dispatches, with a waiting queue of one length."""
    host = Host(ROWS, ROWS * 512, 384)
    arriving = long_tail()
    for _ in range(ROWS + waiting):
        host.scheduler.add(next(arriving))
    times = []
    for index in range(num_steps + 50):
        finished, seconds = host.step()
        for _ in finished:
            host.scheduler.add(next(arriving))
        if index >= 50:
            times.append(seconds)
    return _result("churn", ROWS, waiting, "64-128", times)


def steady(case: str, rows: int, context: int, num_steps: int, **settings: Any) -> Result:
    """Rows of one context length that only decode."""
    room = STEPS * (num_steps + 8)
    host = Host(rows, rows * (context + room + PAGE), context + room)
    rng = np.random.default_rng(2)
    for number in range(rows):
        prompt = rng.integers(0, SMALL.vocab_size, context).tolist()
        host.scheduler.add(make_request(number, prompt, room, **settings))
    # Prefill is not what is measured: all prompts count as computed at once.
    num_tokens = rows * (context + BLOCK)
    host.scheduler._max_prefill_tokens = num_tokens
    host.scheduler.pacer._prefill_sizes = (num_tokens,)
    host.scheduler.schedule()
    for request in host.scheduler.running:
        request.num_computed = request.kv_len
    assert len(host.scheduler.running) == rows
    times = [host.step()[1] for _ in range(num_steps + 2)][2:]
    return _result(case, rows, 0, str(context), times)


def arrival(count: int, repeats: int) -> tuple[float, float]:
    """Milliseconds to add requests at once and to plan the first dispatch; medians."""
    added_ms, planned_ms = [], []
    for _ in range(repeats):
        host = Host(ROWS, ROWS * 512, 384)
        arriving = long_tail()
        requests = [next(arriving) for _ in range(count)]
        started = time.perf_counter()
        for request in requests:
            host.scheduler.add(request)
        added = time.perf_counter()
        host.scheduler.schedule()
        planned_ms.append(1e3 * (time.perf_counter() - added))
        added_ms.append(1e3 * (added - started))
    return float(np.median(added_ms)), float(np.median(planned_ms))


def _result(
    case: str, rows: int, waiting: int, context: str, times: list[tuple[float, float, float]]
) -> Result:
    schedule, batch, update = 1e3 * np.median(np.asarray(times), axis=0)
    result = Result(
        case=case,
        rows=rows,
        waiting=waiting,
        context=context,
        schedule_ms=float(schedule),
        batch_ms=float(batch),
        update_ms=float(update),
    )
    print(f"{case}, {rows} rows, {waiting} waiting, context {context}: {result.total_ms:.2f} ms")
    return result


def device_ms() -> float:
    """Milliseconds of 16 decode steps of the small model at 256 rows."""
    with Engine(
        model_config=SMALL,
        load_format="dummy",
        max_running_requests=ROWS,
        batch_buckets=(ROWS,),
        decode_steps=STEPS,
        num_kv_tokens=ROWS * 160,
        random_seed=0,
    ) as engine:
        params = SamplingParams(max_new_tokens=STEPS, ignore_eos=True)
        prompts = np.random.default_rng(3).integers(0, SMALL.vocab_size, (ROWS, 96)).tolist()
        engine.generate_requests(prompts[:8], params)
        before = engine.get_internal_state().counters
        engine.generate_requests(prompts[:8], dataclasses.replace(params, n=ROWS // 8))
        after = engine.get_internal_state().counters
    # However many dispatches the engine made of them, each row took 16 steps.
    return 1e3 * (after.decode_s - before.decode_s)


def measure(num_steps: int) -> list[Result]:
    """All cases but the arrivals."""
    penalties = {"frequency_penalty": 0.5}
    return [
        *(churn(waiting, 4 * num_steps) for waiting in WAITING),
        *(steady("steady", ROWS, context, num_steps) for context in CONTEXTS),
        *(steady("penalties", ROWS, context, num_steps, **penalties) for context in CONTEXTS[:3]),
        *(steady("batch size", rows, 512, num_steps) for rows in (8, 64, 1024)),
    ]


def report(
    results: list[Result],
    arrivals: dict[str, tuple[float, float]],
    dispatch_ms: float,
    before: dict[str, Any],
    environment: Environment,
) -> list[str]:
    """Returns the lines of the results in Markdown."""
    old = {_key(r): r for r in before.get("results", [])}
    lines = [
        *report_head(
            "Host work for one dispatch",
            "benchmarks/throughput/scheduler_growth.py",
            environment,
            f"{STEPS} decode steps of {SMALL_IN_WORDS} at {ROWS} rows took "
            f"{dispatch_ms:.0f} ms on the device; the share is of that",
        ),
        "| case | rows | waiting | context | schedule, ms | batch, ms | update, ms | all, ms "
        "| before, ms | share |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        earlier = old.get(_key(dataclasses.asdict(result)))
        then = "" if earlier is None else f"{_total(earlier):.2f}"
        lines.append(
            f"| {result.case} | {result.rows} | {result.waiting} | {result.context} "
            f"| {result.schedule_ms:.2f} | {result.batch_ms:.2f} | {result.update_ms:.2f} "
            f"| {result.total_ms:.2f} | {then} | {100 * result.total_ms / dispatch_ms:.2f} % |"
        )
    lines += [
        "",
        "| arriving at once | add all, ms | before | first dispatch planned, ms | before |",
        "|---:|---:|---:|---:|---:|",
    ]
    for count, (add_ms, plan_ms) in arrivals.items():
        then = before.get("arrivals", {}).get(count, ("", ""))
        add_then, plan_then = (f"{ms:.2f}" if ms != "" else "" for ms in then)
        lines.append(f"| {count} | {add_ms:.2f} | {add_then} | {plan_ms:.2f} | {plan_then} |")
    return lines


def _key(result: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(result[name] for name in ("case", "rows", "waiting", "context"))


def _total(result: dict[str, Any]) -> float:
    return result["schedule_ms"] + result["batch_ms"] + result["update_ms"]


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description="Host work for one dispatch.")
    parser.add_argument("--steps", type=int, default=40, help="dispatches of each steady case")
    parser.add_argument("--before", type=Path, help="results of an earlier version, to compare")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks/results/scheduler_growth.md"
    )
    args = parser.parse_args()
    before = json.loads(args.before.read_text()) if args.before else {}
    results = measure(args.steps)
    arrivals = {str(count): arrival(count, 5) for count in (100, 1_000, 10_000)}
    dispatch_ms = device_ms()
    environment = describe_environment(jax.devices()[0].device_kind)
    content = {
        "results": [dataclasses.asdict(r) for r in results],
        "arrivals": arrivals,
        "dispatch_ms": dispatch_ms,
        "before": {name: before[name] for name in ("results", "arrivals") if name in before},
    }
    lines = report(results, arrivals, dispatch_ms, before, environment)
    write_report(args.output, lines, environment, content)


if __name__ == "__main__":
    main()
