"""What draft tokens bring and cost: the speed of `speculation="auto"` over that of "off".

    python benchmarks/throughput/speculation.py                                  # ten minutes
    python benchmarks/throughput/speculation.py --models qwen3-0.6b --pairs 3 --tables made_up
    python benchmarks/throughput/speculation.py --models tiny --pairs 1 --tokens 24   # smoke test

Two engines with the same weights answer the same requests in turns in one process, at temperature
1; the order within a pair alternates. They are warmed up, and an untimed run of each comes first.
All outputs of both must be equal. Times include the prefill of the prompts.

The engine with drafts finds in its history an answer to each prompt that the benchmark made up from
the true one. It is put there before each run, outside the time. In the first table a token of it is
right with a given probability. In the second one it does its worst: see `benchmarks/lib/
draft_cases.py`. Drafters beside the history are on too, as by default.

Before each case the engine forgets how often drafts were right, and in the untimed run it learns
about those of the case. In the case "in a new engine" it forgets before each run. The costs of
steps it keeps, and goes on learning them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from benchmarks.lib.draft_cases import (
    DRAFT_TOKENS,
    PROMPT_TOKENS,
    Case,
    adversarial_cases,
    made_up_cases,
    make_requests,
)
from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine import Engine, EngineCounters, ModelConfig
from sgljax_engine.scheduler.speculator import _FIRST_ACCEPTANCE, _TRIAL_STEPS, Speculator
from sgljax_engine.speculation.drafters import Answer, HistoryDrafter
from sgljax_engine.speculation.plan import ACCEPTANCE_KINDS
from sgljax_engine.speculation.texts import RequestText
from tunix_sgljax.bench.environment import Environment, describe_environment
from tunix_sgljax.bench.shapes import MODELS, BenchModel

MODES = ("off", "auto")
TITLES = {
    "made_up": "Drafts that are right some of the time",
    "adversarial": "Adversarial drafts",
}
NUM_TOKENS = {"qwen3-0.6b": 64}
DEFAULT_NUM_TOKENS = 256


class Run(NamedTuple):
    """One run of one engine: its outputs, seconds, and counters before and after."""

    outputs: list[list[int]]
    seconds: float
    before: EngineCounters
    after: EngineCounters

    @property
    def counters(self) -> EngineCounters:
        """What the counters grew by."""
        return self.after.since(self.before)

    @property
    def tokens_per_step(self) -> float:
        """See `EngineCounters.acceptance_length`."""
        return self.counters.acceptance_length

    @property
    def drafted_share(self) -> float:
        """Share of the tokens that came from dispatches with drafts."""
        return self.counters.num_verified_tokens / self.counters.num_output_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The runs of one case, in pairs.

    Attributes:
        name: Of the case.
        rows: Requests that decode together.
        off_s, auto_s: Seconds.
        tokens_per_step, drafted_share: As of `Run`, with drafts.
        num_draft_tokens, num_accepted_tokens: Drafts that were verified, and those that were right.
    """

    name: str
    rows: int
    off_s: list[float]
    auto_s: list[float]
    tokens_per_step: list[float]
    drafted_share: list[float]
    num_draft_tokens: list[int]
    num_accepted_tokens: list[int]

    @property
    def ratios(self) -> list[float]:
        """Speed with drafts over that without, pair by pair."""
        return [off / auto for off, auto in zip(self.off_s, self.auto_s, strict=True)]

    def row(self) -> str:
        """A line of the table."""
        ratios, per_step = self.ratios, float(np.median(self.tokens_per_step))
        cells = (
            f"{self.rows}",
            self.name,
            f"{np.median(self.off_s):.3f}",
            f"{np.median(self.auto_s):.3f}",
            f"{np.median(ratios):.3f}",
            f"{min(ratios):.3f} to {max(ratios):.3f}",
            f"{len(ratios)}",
            f"{per_step:.2f}" if per_step else "-",
            f"{np.median(self.drafted_share):.0%}",
        )
        return f"| {' | '.join(cells)} |"


# -------------------------------------------------------------------- engines


def make_engines(model: ModelConfig, num_rows: int, num_tokens: int) -> dict[str, Engine]:
    """Warm engines by mode."""
    engines = {
        mode: Engine(
            model_config=model,
            load_format="dummy",
            random_seed=0,
            max_running_requests=num_rows,
            batch_buckets=(num_rows,),
            max_model_len=PROMPT_TOKENS + num_tokens + DRAFT_TOKENS,
            chunked_prefill_size=256,
            speculation=mode,
            speculative_num_draft_tokens=DRAFT_TOKENS,
        )
        for mode in MODES
    }
    for engine in engines.values():
        engine.warmup()
    return engines


def speculator_of(engine: Engine) -> Speculator:
    """Of an engine with drafts."""
    speculator = engine._group.loops[0]._core._speculator
    assert speculator is not None, "no batch is small enough for drafts"
    return speculator


def forget(engine: Engine) -> None:
    """Makes an idle engine expect of drafts what a new one does."""
    speculator = speculator_of(engine)
    speculator._prior = [_FIRST_ACCEPTANCE] * ACCEPTANCE_KINDS
    speculator._trial_steps, speculator._steps_without = _TRIAL_STEPS, 0


def set_history(engine: Engine, case: Case) -> None:
    """Makes the drafts of a case the only answers that an idle engine knows."""
    known = {}
    for prompt, draft in zip(case.prompts, case.drafts, strict=True):
        text = RequestText(prompt)
        text.update(draft.tolist())
        known[text.key] = [Answer(0, text.reference)]
    history = speculator_of(engine)._drafters["history"]
    assert isinstance(history, HistoryDrafter)
    history.clear()
    history.load(known)


# -------------------------------------------------------------------- measurement


def run(engine: Engine, case: Case, *, has_drafts: bool, is_first: bool) -> Run:
    """Times the requests of a case."""
    engine.flush_cache()  # its thread does that, so it has also put the last answers away
    if has_drafts:
        set_history(engine, case)
        if is_first or case.forgets:
            forget(engine)
    before = engine.get_internal_state().counters
    started = time.perf_counter()
    outputs = engine.generate_requests(case.prompts, case.params)
    seconds = time.perf_counter() - started
    after = engine.get_internal_state().counters
    return Run([output.output_ids for output in outputs], seconds, before, after)


def measure(engines: Mapping[str, Engine], case: Case, rows: int, num_pairs: int) -> Result:
    """Runs both engines in turns, after an untimed run of each."""
    runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
    for pair in range(-1, num_pairs):
        for mode in MODES[:: 1 if pair % 2 else -1]:
            each = run(engines[mode], case, has_drafts=mode == "auto", is_first=pair < 0)
            runs[mode].append(each)
    expected = runs["off"][0].outputs
    for each in itertools.chain(*runs.values()):
        assert each.outputs == expected, f"{rows} rows, {case.name}: outputs differ"
    off, auto = (runs[mode][1:] for mode in MODES)
    result = Result(
        name=case.name,
        rows=rows,
        off_s=[each.seconds for each in off],
        auto_s=[each.seconds for each in auto],
        tokens_per_step=[each.tokens_per_step for each in auto],
        drafted_share=[each.drafted_share for each in auto],
        num_draft_tokens=[each.counters.num_draft_tokens for each in auto],
        num_accepted_tokens=[each.counters.num_accepted_tokens for each in auto],
    )
    print(result.row(), flush=True)
    return result


def measure_rows(
    model: ModelConfig, num_rows: int, num_tokens: int, num_pairs: int, tables: Sequence[str]
) -> dict[str, list[Result]]:
    """The cases of tables with so many rows."""
    engines = make_engines(model, num_rows, num_tokens)
    try:
        requests = make_requests(engines["off"], num_rows, num_tokens)
        cases: dict[str, Sequence[Case]] = {}
        if "made_up" in tables:
            cases["made_up"] = made_up_cases(requests)
        if "adversarial" in tables:
            cases["adversarial"] = adversarial_cases(engines["off"], requests)
        return {
            name: [measure(engines, case, num_rows, num_pairs) for case in each]
            for name, each in cases.items()
        }
    finally:
        for engine in engines.values():
            engine.shutdown()


# -------------------------------------------------------------------- the report


def table(title: str, results: Sequence[Result]) -> list[str]:
    """A section of the report."""
    return [
        f"## {title}",
        "",
        "| rows | drafts | off, s | auto, s | speed, median pair | smallest to largest | pairs "
        "| tokens per step | tokens with drafts |",
        "|---:|---|---:|---:|---:|---|---:|---:|---:|",
        *(result.row() for result in results),
    ]


def report(
    model: BenchModel, command: str, environment: Environment, results: Mapping[str, list[Result]]
) -> list[str]:
    """The lines of a model's report."""
    head = report_head(
        f"What draft tokens bring and cost, model `{model.name}`",
        command,
        environment,
        f"Model: {model.in_words}, float32",
        f"Up to {DRAFT_TOKENS} draft tokens of a row in a step; prompts of {PROMPT_TOKENS} tokens",
        "Speed: of `auto` over that of `off`; the outputs of both are equal",
        "Tokens per step: what a row gets from a step of a dispatch with drafts",
        "Tokens with drafts: share of all tokens that came from such dispatches",
    )
    lines = list(head)
    for name, each in results.items():
        lines += [*table(TITLES[name], each), ""]
    return lines[:-1]


def measure_model(model: BenchModel, args: argparse.Namespace) -> None:
    """Measures a model and writes its results."""
    num_tokens = args.tokens or NUM_TOKENS.get(model.name, DEFAULT_NUM_TOKENS)
    results: dict[str, list[Result]] = {}
    for num_rows in args.rows:
        found = measure_rows(model.config, num_rows, num_tokens, args.pairs, args.tables)
        for key, each in found.items():
            results.setdefault(key, []).extend(each)
    command = (
        f"benchmarks/throughput/speculation.py --models {model.name} "
        f"--rows {' '.join(map(str, args.rows))} --tokens {num_tokens} --pairs {args.pairs} "
        f"--tables {' '.join(args.tables)}"
    )
    environment = describe_environment(jax.devices()[0].device_kind)
    lines = report(model, command, environment, results)
    content = {
        key: [{**dataclasses.asdict(each), "ratios": each.ratios} for each in of_table]
        for key, of_table in results.items()
    }
    write_report(args.output_dir / f"speculation_{model.name}.md", lines, environment, content)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures each model."""
    parser = argparse.ArgumentParser(description="What draft tokens bring and cost.")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=("small",))
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 8))
    parser.add_argument("--tokens", type=int, help="of a request; 256, or 64 for qwen3-0.6b")
    parser.add_argument("--tables", nargs="+", choices=tuple(TITLES), default=tuple(TITLES))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--output-dir", type=Path, default=ROOT / "benchmarks/results")
    args = parser.parse_args(argv)
    for name in args.models:
        measure_model(MODELS[name], args)


if __name__ == "__main__":
    main()
