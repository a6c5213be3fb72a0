"""A rollout with a long tail: orders of requests, on this machine and simulated.

    python benchmarks/throughput/long_tail.py            # 4 minutes on 2 cores
    python benchmarks/throughput/long_tail.py --quick    # a smoke test

Steps of the workload `rl_longtail` with the model `small`: 128 requests, 8 samples of 16 prompts,
on 32 rows, again and again with the same prompts; the prefix cache is emptied between steps, as a
weight update does. Each prompt keeps its lengths, in another order each step. An answer ends at a
stop token that its seed gives at that place, so that the engine knows no length before the end.

Engines with "fcfs" and "longest_first" take turns and do the same work: samples are compared. Then
the simulator runs the same steps over a table of step times, which is measured on one of the
engines now and then.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import MODELS
from benchmarks.lib.workloads import Workload, make_workload
from sgljax_engine import Engine, ModelConfig, RequestOutput, SamplingParams
from tools.simulation import Plan, RecordedLengths, Simulation, StepTable

POLICIES = ("fcfs", "longest_first")

_MORE = 16
"""Tokens behind a wanted length, among which is one that the answer has not had yet."""

_FEW, _MANY = 8, 64
"""Tokens of the two runs that tell a step from the rest."""

_NUM_TABLES = 4
"""Times that the table is measured, spread over the steps."""

_MODEL_LEN = 192
"""Enough for all that is timed for the table."""


class Steps:
    """The requests of all steps, and as `Lengths` of a simulation their answers.

    Attributes:
        requests: The prompt of every request of a step.
        num_samples: Requests of a prompt.
        max_new_tokens: The limit of every request.
        lengths: Tokens of the answers of each step that has run.
    """

    def __init__(
        self, requests: list[list[int]], num_samples: int, params: list[list[SamplingParams]]
    ) -> None:
        """Takes the sampling parameters of each step's requests."""
        self.requests = requests
        self.num_samples = num_samples
        most = params[0][0].max_new_tokens
        assert most is not None
        self.max_new_tokens = most
        self.lengths: list[list[int]] = []
        self._params = params

    @property
    def num_prompts(self) -> int:
        """Prompts of a step."""
        return len(self.requests) // self.num_samples

    @property
    def num_steps(self) -> int:
        """Steps."""
        return len(self._params)

    def lengths_by_prompt(self) -> list[list[int]]:
        """Tokens of all answers to each prompt, as `tools.simulation --lengths` reads them."""
        by_prompt = np.reshape(self.lengths, (len(self.lengths), self.num_prompts, -1))
        return by_prompt.swapaxes(0, 1).reshape(self.num_prompts, -1).tolist()

    def run(self, engine: Engine, step: int) -> tuple[float, list[RequestOutput]]:
        """Runs a step on an engine; returns its seconds and outputs."""
        engine.flush_cache()
        start = time.perf_counter()
        outputs = engine.generate_requests(self.requests, self._params[step])
        seconds = time.perf_counter() - start
        self.lengths[step:] = [[len(out.output_ids) for out in outputs]]
        return seconds, outputs

    def simulate(self, policy: str, table: StepTable, num_rows: int) -> list[float]:
        """Seconds of the same steps in the simulator."""
        self._num_asked = 0
        plan = Plan(
            num_groups=self.num_prompts,
            num_samples=self.num_samples,
            num_rows=num_rows,
            num_prompts=self.num_prompts,
            prompt_tokens=round(float(np.mean([len(prompt) for prompt in self.requests]))),
            schedule_policy=policy,
        )
        return [step.seconds for step in Simulation(plan, self, table).steps(len(self.lengths))]

    def draw(self, prompt: int, count: int, rng: random.Random) -> list[int]:
        """The lengths that the engines had, in the order in which a simulation asks."""
        step = self._num_asked // self.num_prompts
        self._num_asked += 1
        return self.lengths[step][prompt * count : (prompt + 1) * count]


def make_engine(config: ModelConfig, workload: Workload, policy: str, num_rows: int) -> Engine:
    """An engine that starts requests in an order."""
    return Engine(
        model_config=config,
        load_format="dummy",
        max_running_requests=num_rows,
        max_model_len=max(workload.max_model_len + _MORE, _MODEL_LEN),
        schedule_policy=policy,
    )


def make_steps(engine: Engine, workload: Workload, num_steps: int) -> Steps:
    """The requests, whose stop tokens the engine says."""
    groups = np.reshape(workload.output_lengths, (-1, workload.num_samples)).tolist()
    recorded, rng = RecordedLengths(groups), random.Random(0)
    most = workload.max_output_len + _MORE
    params = []
    for step in range(num_steps):
        wanted = [
            length
            for prompt in range(len(groups))
            for length in recorded.draw(prompt, workload.num_samples, rng)
        ]
        endless = [
            SamplingParams(
                max_new_tokens=length + _MORE, ignore_eos=True, seed=step * len(wanted) + index
            )
            for index, length in enumerate(wanted)
        ]
        outputs = engine.generate_requests(workload.requests, endless)
        params.append(
            [
                dataclasses.replace(each, max_new_tokens=most, stop_token_ids=(token,))
                for each, token in zip(endless, map(_end, outputs, wanted), strict=True)
            ]
        )
    return Steps(workload.requests, workload.num_samples, params)


def _end(output: RequestOutput, length: int) -> int:
    """The first token from a length on that the answer has not had before."""
    tokens = output.output_ids
    return next(
        tokens[index]
        for index in range(length - 1, len(tokens))
        if tokens[index] not in tokens[:index]
    )


def measure_table(engine: Engine, num_rows: int, repeats: int) -> StepTable:
    """Times steps of full batches, the keys they read, prompts, and the host's part.

    A dispatch of many steps and one of few tell a step from the rest; long prompts in the cache
    tell the keys.
    """
    rng = np.random.default_rng(0)
    batches = [rows for rows in (1, 4, 8, 16, 32) if rows <= num_rows]
    vocab_size = engine.model_config.vocab_size
    short, long = (rng.integers(1, vocab_size, size).tolist() for size in (16, 128))

    def seconds(prompts: list[list[int]], num_tokens: int) -> float:
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            engine.generate_requests(prompts, params)
            times.append(time.perf_counter() - start)
        return float(np.median(times[1:]))

    step_s, rest_s = [], []
    for rows in batches:
        short_s, long_s = (seconds([short] * rows, count) for count in (_FEW, _MANY))
        step_s.append((long_s - short_s) / (_MANY - _FEW))
        rest_s.append(max(short_s - _FEW * step_s[-1], 0.0))
    most = batches[-1]
    more_s = seconds([long] * most, _MANY) - seconds([short] * most, _MANY)
    key_s = max(more_s / (_MANY * most * (len(long) - len(short))), 0.0)
    keys = len(short) + (_FEW + _MANY) / 2  # what the timed steps read on average
    prefill_s = []
    for _ in range(repeats + 1):
        fresh = rng.integers(1, vocab_size, (16, 64)).tolist()
        start = time.perf_counter()
        engine.generate_requests(fresh, SamplingParams(max_new_tokens=0))
        prefill_s.append(time.perf_counter() - start)
    one_s = step_s[batches.index(min(16, most))]
    return StepTable(
        source="measured in this run",
        rows=tuple(batches),
        step_s=tuple(
            max(each - key_s * rows * keys, each / 2)
            for rows, each in zip(batches, step_s, strict=True)
        ),
        key_s=key_s,
        prefill_token_s=max(float(np.median(prefill_s[1:])) - one_s, 0.0) / (16 * 64),
        dispatch_s=float(np.median(rest_s)) / 2,  # of a dispatch that prefills, and the call
    )


def median_table(tables: Sequence[StepTable]) -> StepTable:
    """Medians of tables of the same rows, since others disturb some of them."""
    fields = {
        name: float(np.median([getattr(table, name) for table in tables]))
        for name in ("key_s", "prefill_token_s", "dispatch_s")
    }
    step_s = np.median([table.step_s for table in tables], axis=0)
    return dataclasses.replace(tables[0], step_s=tuple(step_s.tolist()), **fields)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and simulates the steps, and writes what it finds."""
    args = make_parser(__doc__, pairs=3).parse_args(argv)
    model, num_rows, num_steps = ("tiny", 4, 2) if args.quick else ("small", 32, 7)
    config = MODELS[model].config
    workload = make_workload("rl_longtail", config.vocab_size, is_quick=args.quick)
    engines = {name: make_engine(config, workload, name, num_rows) for name in POLICIES}
    first = engines[POLICIES[0]]
    steps = make_steps(first, workload, num_steps)
    for engine in engines.values():  # programs, and the lengths of no step that counts
        engine.warmup()
    tables: list[StepTable] = []
    found: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for step in range(steps.num_steps):
        if step % -(-steps.num_steps // _NUM_TABLES) == 0:
            tables.append(measure_table(first, num_rows, args.pairs))
        outputs = {}
        for policy in POLICIES[:: 1 if step % 2 else -1]:
            seconds, outputs[policy] = steps.run(engines[policy], step)
            found[policy].append(seconds)
        fcfs, longest = ([out.output_ids for out in outputs[policy]] for policy in POLICIES)
        assert fcfs == longest, "samples depend on the order of starts"
        print(f"step {step}:", *(f"{each[-1]:.3f} s" for each in found.values()), flush=True)
    for engine in engines.values():
        engine.shutdown()
    table = median_table(tables)
    simulated = {policy: steps.simulate(policy, table, num_rows) for policy in POLICIES}
    write_results(
        output_dir(args) / "long_tail.md",
        "A rollout with a long tail",
        "benchmarks/throughput/long_tail.py",
        [f"{len(steps.requests)} requests on {num_rows} rows.", "", *_lines(found, simulated)],
        {
            "is_quick": args.quick,
            "runs_s": found,
            "simulated_s": simulated,
            "table": dataclasses.asdict(table),
            "lengths": steps.lengths_by_prompt(),
        },
    )


def _lines(found: dict[str, list[float]], simulated: dict[str, list[float]]) -> list[str]:
    """A line for each policy and for its speed, in the first step and in the later ones."""
    lines = ["| steps | | measured, s | simulated, s | measured over simulated |"]
    lines += ["|---|---|---:|---:|---:|"]
    for part, some in {"first": slice(1), "later, median": slice(1, None)}.items():
        middles = {
            policy: [float(np.median(each[policy][some])) for each in (found, simulated)]
            for policy in POLICIES
        }
        for policy, (real, model) in middles.items():
            lines.append(f"| {part} | {policy} | {real:.3f} | {model:.3f} | {real / model:.3f} |")
        real, model = (a / b for a, b in zip(*middles.values(), strict=True))
        lines.append(
            f"| {part} | speed of longest first | {real:.3f} | {model:.3f} | {real / model:.3f} |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    main()
