"""A rollout with a long tail: orders of requests, on this machine and simulated.

    python benchmarks/throughput/long_tail.py            # `small`, about 5 minutes on 2 cores
    python benchmarks/throughput/long_tail.py --quick    # a smoke test

128 requests, 8 samples of 16 prompts, on 32 rows, step after step with the same prompts; the prefix
cache is emptied between steps, as a weight update does. Lengths are lognormal: prompts' medians
around 64 tokens (sigma 0.7), samples around those (sigma 0.5). An answer ends at a stop token that
its seed gives at that place, so that the engine knows no length before the end.

Engines with "fcfs" and "longest_first" take turns. Then the simulator runs the same steps over a
table of step times, which was measured before on one of the engines.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.lib.page import write_page
from benchmarks.lib.reporting import make_parser, output_dir, write_results
from sgljax_engine import Engine, RequestOutput, SamplingParams
from sgljax_engine.simulation import LognormalLengths, Plan, Simulation, StepTable
from tunix_sgljax.bench.shapes import MODELS

_MORE = 64
"""Tokens behind a wanted length, among which is one that the answer has not had yet."""

POLICIES = ("fcfs", "longest_first")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is run.

    Attributes:
        model: Name of the model's shape.
        num_prompts, num_samples, num_rows: Prompts, samples of each, rows.
        num_steps: Steps; the first one, of which nothing is known, is reported apart.
        prompt_tokens: Tokens of a prompt.
        lengths: Lengths of answers.
        batches: Batch sizes whose steps are timed.
    """

    model: str = "small"
    num_prompts: int = 16
    num_samples: int = 8
    num_rows: int = 32
    num_steps: int = 6
    prompt_tokens: int = 64
    lengths: LognormalLengths
    batches: tuple[int, ...] = (1, 4, 8, 16, 32)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.lengths.max_new_tokens + 16


FULL = Sizes(lengths=LognormalLengths(median=64, max_new_tokens=512))

QUICK = Sizes(
    model="tiny",
    num_prompts=4,
    num_samples=2,
    num_rows=4,
    num_steps=2,
    lengths=LognormalLengths(median=16, max_new_tokens=48),
    batches=(1, 4),
)


class Steps:
    """The requests of all steps: prompts, seeds, and the tokens that end them.

    It is a `Lengths` too, so that the simulator runs the same steps.

    Attributes:
        max_new_tokens: The limit of every request.
    """

    def __init__(self, engine: Engine, sizes: Sizes) -> None:
        """Draws lengths, and samples once without an end to find each answer's last token.

        Args:
            engine: Samples them; any engine draws the same tokens of a seed.
            sizes: How many there are.
        """
        rng = random.Random(0)
        self._sizes = sizes
        vocab_size = MODELS[sizes.model].config.vocab_size
        self._prompts = [
            [rng.randrange(1, vocab_size) for _ in range(sizes.prompt_tokens)]
            for _ in range(sizes.num_prompts)
        ]
        self.max_new_tokens = sizes.lengths.max_new_tokens
        self._params: list[list[SamplingParams]] = []
        self._lengths: list[list[int]] = []
        for step in range(sizes.num_steps):
            wanted = [
                length
                for prompt in range(sizes.num_prompts)
                for length in sizes.lengths.draw(prompt, sizes.num_samples, rng)
            ]
            seeds = [step * len(wanted) + index for index in range(len(wanted))]
            whole = engine.generate_requests(
                self.requests,
                [
                    self._endless(seed, min(length + _MORE, self.max_new_tokens))
                    for seed, length in zip(seeds, wanted, strict=True)
                ],
            )
            ends = [_end(out.output_ids, length) for out, length in zip(whole, wanted, strict=True)]
            self._lengths.append([length for length, _ in ends])
            self._params.append(
                [
                    dataclasses.replace(
                        self._endless(seed, self.max_new_tokens), stop_token_ids=(token,)
                    )
                    for seed, (_, token) in zip(seeds, ends, strict=True)
                ]
            )

    def _endless(self, seed: int, num_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=num_tokens, ignore_eos=True, seed=seed, temperature=1.0
        )

    @property
    def requests(self) -> list[list[int]]:
        """The prompt of every request of a step."""
        return [prompt for prompt in self._prompts for _ in range(self._sizes.num_samples)]

    def run(self, engine: Engine, step: int) -> tuple[float, list[RequestOutput]]:
        """Runs a step on an engine; returns its seconds and outputs."""
        engine.flush_cache()
        start = time.perf_counter()
        outputs = engine.generate_requests(self.requests, self._params[step])
        seconds = time.perf_counter() - start
        assert [len(out.output_ids) for out in outputs] == self._lengths[step]
        return seconds, outputs

    def simulate(self, policy: str, table: StepTable) -> list[float]:
        """Seconds of the same steps in the simulator."""
        self._asked = 0
        plan = Plan(
            num_groups=self._sizes.num_prompts,
            num_samples=self._sizes.num_samples,
            num_rows=self._sizes.num_rows,
            num_prompts=self._sizes.num_prompts,
            prompt_tokens=self._sizes.prompt_tokens,
            schedule_policy=policy,
        )
        return [step.seconds for step in Simulation(plan, self, table).steps(len(self._lengths))]

    def draw(self, prompt: int, count: int, rng: random.Random) -> list[int]:
        """The lengths that the engines had, in the order in which a simulation asks."""
        step = self._asked // self._sizes.num_prompts
        self._asked += 1
        return self._lengths[step][prompt * count : (prompt + 1) * count]


def _end(tokens: Sequence[int], length: int) -> tuple[int, int]:
    """Length and last token of an answer that ends at the first new token from there on."""
    for index in range(length - 1, len(tokens)):
        if tokens[index] not in tokens[:index]:
            return index + 1, tokens[index]
    return len(tokens), -1


def measure_table(engine: Engine, sizes: Sizes, repeats: int) -> StepTable:
    """Times steps of full batches, the keys they read, prompts, and the host's part.

    A dispatch of many steps and one of few tell a step from the rest; long prompts in the cache
    tell the keys.
    """
    vocab_size = MODELS[sizes.model].config.vocab_size
    rng = np.random.default_rng(0)
    few, many = 8, 64
    contexts = 16, sizes.max_model_len - many
    short, long = (rng.integers(1, vocab_size, size).tolist() for size in contexts)

    def seconds(prompts: list[list[int]], num_tokens: int) -> float:
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            engine.generate_requests(prompts, params)
            times.append(time.perf_counter() - start)
        return float(np.median(times[1:]))

    step_s, rest_s = [], []
    for rows in sizes.batches:
        short_s, long_s = (seconds([short] * rows, count) for count in (few, many))
        step_s.append((long_s - short_s) / (many - few))
        rest_s.append(max(short_s - few * step_s[-1], 0.0))
    most = sizes.batches[-1]
    more_s = seconds([long] * most, many) - seconds([short] * most, many)
    key_s = max(more_s / (many * most * (len(long) - len(short))), 0.0)
    keys = len(short) + (few + many) / 2  # what the timed steps read on average
    fresh = [rng.integers(1, vocab_size, 64).tolist() for _ in range(16 * (repeats + 1))]
    prefill_s = []
    for index in range(0, len(fresh), 16):
        start = time.perf_counter()
        engine.generate_requests(fresh[index : index + 16], SamplingParams(max_new_tokens=0))
        prefill_s.append(time.perf_counter() - start)
    one_s = step_s[min(len(step_s) - 1, sizes.batches.index(min(16, most)))]
    prefill_token_s = max(float(np.median(prefill_s[1:])) - one_s, 0.0) / (16 * 64)
    return StepTable(
        source="measured in this run",
        rows=sizes.batches,
        step_s=tuple(
            max(each - key_s * rows * keys, each / 2)
            for rows, each in zip(sizes.batches, step_s, strict=True)
        ),
        key_s=key_s,
        prefill_token_s=prefill_token_s,
        dispatch_s=float(np.median(rest_s)) / 2,  # of a dispatch that prefills, and the call
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and simulates."""
    parser = make_parser(__doc__, pairs=3)
    parser.add_argument("--model", choices=("tiny", "small"), default="small")
    args = parser.parse_args(argv)
    sizes = QUICK if args.quick else dataclasses.replace(FULL, model=args.model)
    engines = {
        policy: Engine(
            model_config=MODELS[sizes.model].config,
            load_format="dummy",
            max_running_requests=sizes.num_rows,
            max_model_len=sizes.max_model_len,
            schedule_policy=policy,
        )
        for policy in POLICIES
    }
    first = engines[POLICIES[0]]
    table = measure_table(first, sizes, args.pairs)
    steps = Steps(first, sizes)
    found: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for engine in engines.values():  # programs, and the lengths of no step that counts
        engine.warmup()
    for step in range(sizes.num_steps):
        runs = {}
        for policy in POLICIES[:: 1 if step % 2 else -1]:
            seconds, runs[policy] = steps.run(engines[policy], step)
            found[policy].append(seconds)
        fcfs, longest = ([out.output_ids for out in runs[policy]] for policy in POLICIES)
        assert fcfs == longest, "samples depend on the order of starts"
        print(f"step {step}: { ({name: each[-1] for name, each in found.items()}) }", flush=True)
    for engine in engines.values():
        engine.shutdown()
    simulated = {policy: steps.simulate(policy, table) for policy in POLICIES}
    lines = _table(found, simulated)
    content = {"runs_s": found, "simulated_s": simulated, "table": dataclasses.asdict(table)}
    write_results(
        output_dir(args) / f"long_tail_{sizes.model}.md",
        "A rollout with a long tail",
        "benchmarks/throughput/long_tail.py",
        [
            f"Model: {sizes.model}, {sizes.num_rows} rows, {len(steps.requests)} requests",
            "",
            *lines,
        ],
        {"is_quick": args.quick, **content},
    )
    print(f"wrote {write_page(output_dir(args))}")


def _table(found: dict[str, list[float]], simulated: dict[str, list[float]]) -> list[str]:
    lines = [
        "| step | " + " | ".join(f"{name}, s | simulated, s" for name in POLICIES) + " | speed of "
        "longest first | simulated |",
        "|---|" + "---:|" * 6,
    ]
    parts = {"first": slice(1), "later, mean": slice(1, None)}
    for name, part in parts.items():
        means = [
            float(np.mean(each[policy][part])) for policy in POLICIES for each in (found, simulated)
        ]
        fcfs, fcfs_simulated, longest, longest_simulated = means
        speeds = f"{fcfs / longest:.2f} | {fcfs_simulated / longest_simulated:.2f}"
        lines.append(
            f"| {name} | " + " | ".join(f"{each:.3f}" for each in means) + f" | {speeds} |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    main()
