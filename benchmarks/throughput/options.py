"""What options cost: deterministic sampling, the sampling table, and models with experts.

    python benchmarks/throughput/options.py                              # half an hour
    python benchmarks/throughput/options.py --tables moe --pairs 1 --quick

A table's runs take turns in one process and answer the same requests, at temperature 1; the prefix
cache is emptied before each. What counts are speeds over that of the first run, turn by turn.

- determinism: the workloads of `make bench`, without and with `enable_deterministic_sampling`.
- sampling_table: 32 rows, by option, beside a temperature. The weights are random, so the
  distribution is flat: a nucleus of 0.9 holds thousands of tokens, its worst case.
- moe: a token goes through 4 of 32 experts, so that an expert's width is a quarter of that of
  the smaller dense model's MLP and a 32nd of the larger one's; 1, 8 and 64 rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import SMALL, SMALL_IN_WORDS
from benchmarks.lib.turns import speed_table, take_turns
from benchmarks.lib.workloads import Workload, make_workload
from sgljax_engine import Engine, ModelConfig, MoEConfig, SamplingParams

WORKLOADS = ("rl_longtail", "rl_uniform", "long_prompt", "single_stream")
PENALTIES = {"presence_penalty": 0.2, "frequency_penalty": 0.1, "repetition_penalty": 1.1}
EDITS = {"logit_bias": dict.fromkeys(range(32), 0.5), "bad_token_ids": tuple(range(32, 64))}
FILTERS = {"top_k": 50, "top_p": 0.95, "min_p": 0.01}
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_k=50": {"top_k": 50},
    "top_p=0.9": {"top_p": 0.9},
    "min_p=0.1": {"min_p": 0.1},
    "top_k, top_p, min_p": FILTERS,
    "penalties": PENALTIES,
    "logit_bias, bad_token_ids": EDITS,
    "all": {**FILTERS, **PENALTIES, **EDITS, "min_new_tokens": 16, "stop_token_ids": (1, 2)},
}

NUM_EXPERTS, NUM_CHOSEN, WIDTH = 32, 4, 256
DENSE = dataclasses.replace(SMALL, intermediate_size=NUM_CHOSEN * WIDTH)
EXPERTS = dataclasses.replace(
    SMALL,
    architecture="Qwen3MoeForCausalLM",
    intermediate_size=WIDTH,
    moe=MoEConfig(
        num_experts=NUM_EXPERTS,
        num_experts_per_token=NUM_CHOSEN,
        intermediate_size=WIDTH,
        norm_topk_prob=True,
    ),
)


class Run(NamedTuple):
    """A model, options of its engine, and sampling parameters beside temperature and lengths."""

    model: ModelConfig = SMALL
    options: tuple[tuple[str, Any], ...] = ()
    sampling: Mapping[str, Any] = MappingProxyType({})


class Case(NamedTuple):
    """Requests, and the runs that answer them."""

    name: str
    workload: Workload
    runs: dict[str, Run]


def fixed_workload(num_rows: int, prompt_len: int, num_tokens: int) -> Workload:
    """Requests of one length that all decode together."""
    prompts = np.random.default_rng(0).integers(64, SMALL.vocab_size, (num_rows, prompt_len))
    return Workload(
        name=f"{num_rows} rows",
        prompts=tuple(map(tuple, prompts.tolist())),
        num_samples=1,
        output_lengths=(num_tokens,) * num_rows,
        num_rows=num_rows,
    )


def determinism_cases(*, is_quick: bool) -> Iterator[Case]:
    """Each workload."""
    runs = {
        "default": Run(),
        "deterministic": Run(options=(("enable_deterministic_sampling", True),)),
    }
    for name in WORKLOADS:
        yield Case(name, make_workload(name, SMALL.vocab_size, is_quick=is_quick), runs)


def sampling_cases(*, is_quick: bool) -> Iterator[Case]:
    """A small vocabulary and a large one."""
    for vocab_size in (SMALL.vocab_size, 32768)[: 1 if is_quick else None]:
        model = dataclasses.replace(SMALL, vocab_size=vocab_size)
        runs = {name: Run(model, sampling=each) for name, each in SETTINGS.items()}
        yield Case(f"vocabulary {vocab_size}", fixed_workload(32, 32, 64), runs)


def expert_cases(*, is_quick: bool) -> Iterator[Case]:
    """Several batch sizes."""
    whole = dataclasses.replace(SMALL, intermediate_size=NUM_EXPERTS * WIDTH)
    runs = {
        "dense, active size": Run(DENSE),
        "experts": Run(EXPERTS),
        "experts, deterministic": Run(EXPERTS, (("enable_deterministic_sampling", True),)),
        "experts, XLA": Run(EXPERTS, (("linear_backend", "xla"),)),
        "dense, whole size": Run(whole),
    }
    for num_rows in (1, 8, 64):
        workload = fixed_workload(num_rows, 4, 16 if is_quick else 48)
        yield Case(workload.name, workload, runs)


TABLES: dict[str, tuple[str, Callable[..., Iterator[Case]]]] = {
    "determinism": ("What deterministic sampling costs", determinism_cases),
    "sampling_table": ("The cost of the sampling table", sampling_cases),
    "moe": ("Decoding with experts", expert_cases),
}
"""Title and cases of each table."""


def measure(case: Case, num_turns: int) -> dict[str, list[float]]:
    """Seconds of each run of a case."""
    workload = case.workload
    engines: dict[Any, Engine] = {}

    def ready(run: Run) -> Callable[[], None]:
        key = run.model, run.options
        if key not in engines:
            engines[key] = Engine(
                model_config=run.model,
                load_format="dummy",
                max_model_len=workload.max_model_len,
                max_running_requests=workload.num_rows,
                **dict(run.options),
            )
        engine = engines[key]
        params = [
            SamplingParams(temperature=1.0, max_new_tokens=n, ignore_eos=True, **run.sampling)
            for n in workload.output_lengths
        ]

        def generate() -> None:
            engine.flush_cache()
            engine.generate_requests(workload.requests, params)

        return generate

    try:
        return take_turns({name: ready(run) for name, run in case.runs.items()}, num_turns)
    finally:
        for engine in engines.values():
            engine.shutdown()


def main(argv: list[str] | None = None) -> None:
    """Measures and writes a report for each table."""
    parser = make_parser(__doc__, pairs=5)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    args = parser.parse_args(argv)
    for name in args.tables:
        title, make_cases = TABLES[name]
        cases = list(make_cases(is_quick=args.quick))
        found = {case.name: measure(case, args.pairs) for case in cases}
        write_results(
            output_dir(args) / f"{name}.md",
            title,
            f"benchmarks/throughput/options.py --tables {name}",
            speed_table(found, next(iter(cases[0].runs))),
            {"seconds": found},
            facts=[f"Model: {SMALL_IN_WORDS}, float32, random weights, or as the run says"],
        )


if __name__ == "__main__":
    main()
