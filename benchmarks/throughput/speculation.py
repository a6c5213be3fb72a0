"""What draft tokens bring and cost: the speed of `speculation="auto"` over that of "off".

    python benchmarks/throughput/speculation.py                                  # ten minutes
    python benchmarks/throughput/speculation.py --models qwen3-0.6b --pairs 3
    python benchmarks/throughput/speculation.py --models tiny --pairs 1 --quick       # smoke test

Two engines with the same weights answer the same requests in turns in one process, at temperature
1; the order within a pair alternates. They are warmed up, and an untimed run of each comes first.
All outputs of both must be equal. Times include the prefill of the prompts.

The engine with drafts finds in its history an answer to each prompt that the benchmark made up from
the true one. It is put there before each run, outside the time. A token of it is right with a given
probability; in the last cases it is of no use: see `make_cases`. Drafters beside the history are on
too, as by default.

Before each case the engine forgets how fast steps were.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib.reporting import make_parser, output_dir, read_results, write_results
from benchmarks.lib.shapes import MODELS
from benchmarks.lib.turns import speeds
from sgljax_engine import Engine, EngineCounters, ModelConfig, SamplingParams
from sgljax_engine.scheduler.speculator import Speculator
from sgljax_engine.speculation.drafters import Answer, HistoryDrafter
from sgljax_engine.speculation.speeds import Speeds
from sgljax_engine.speculation.texts import RequestText

MODES = ("off", "auto")
NUM_TOKENS = {"qwen3-0.6b": 64}
DEFAULT_NUM_TOKENS = 256
SHARES = (0, 30, 60, 90)
"""Per cent of the drafts that are right."""

PROMPT_TOKENS = 32

DRAFT_TOKENS = 15
"""Most drafts of a row in a step."""


class Case(NamedTuple):
    """Requests, and what the history says about them.

    Attributes:
        name: For the table.
        prompts: Token ids.
        params: Of each prompt.
        drafts: int32, an earlier answer to each prompt.
    """

    name: str
    prompts: list[list[int]]
    params: list[SamplingParams]
    drafts: list[np.ndarray]


def make_cases(engine: Engine, num_rows: int, num_tokens: int) -> list[Case]:
    """Drafts that are right some of the time, and drafts that are of no use.

    Args:
        engine: Without drafts, which says the true answers.
        num_rows: Requests, one for each row.
        num_tokens: Tokens of an answer.
    """
    rng, vocab_size = np.random.default_rng(0), engine.model_config.vocab_size
    prompts = rng.integers(1, vocab_size, (num_rows, PROMPT_TOKENS)).tolist()
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_new_tokens=num_tokens, ignore_eos=True)
        for seed in range(num_rows)
    ]
    longer = [
        dataclasses.replace(each, max_new_tokens=num_tokens + DRAFT_TOKENS) for each in params
    ]
    outputs = engine.generate_requests(prompts, longer)
    right = [np.asarray(output.output_ids, np.int32) for output in outputs]
    answers = [ids[:num_tokens] for ids in right]
    drafts = {
        f"{share} % right": some_right(answers, share / 100, vocab_size, rng) for share in SHARES
    }
    drafts["beyond max_new_tokens"] = right
    drafts["of another vocabulary"] = [answer + vocab_size for answer in right]
    return [Case(name, prompts, params, each) for name, each in drafts.items()]


def some_right(
    answers: Sequence[np.ndarray], share: float, vocab_size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Answers of which each token is kept with a probability, and is another one if not."""
    return [
        np.where(rng.random(len(answer)) < share, answer, (answer + 1) % vocab_size)
        for answer in answers
    ]


class Run(NamedTuple):
    """One run of one engine: its outputs, seconds, and what it counted."""

    outputs: list[list[int]]
    seconds: float
    counted: EngineCounters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The runs of one case, in pairs.

    Attributes:
        name: Of the case.
        rows: Requests that decode together.
        seconds: By mode.
        tokens_per_step: What a row got from a step that may verify drafts, with drafts.
        drafted_share: Share of the tokens that came from dispatches with drafts.
    """

    name: str
    rows: int
    seconds: dict[str, list[float]]
    tokens_per_step: float
    drafted_share: float

    def row(self) -> str:
        """A line of the table."""
        off_s, auto_s = (float(np.median(self.seconds[mode])) for mode in MODES)
        ratios = speeds(self.seconds, "off")["auto"]
        return (
            f"| {self.rows} | {self.name} | {off_s:.3f} | {auto_s:.3f} | {np.median(ratios):.3f} "
            f"| {min(ratios):.3f} to {max(ratios):.3f} | {len(ratios)} "
            f"| {self.tokens_per_step:.2f} | {self.drafted_share:.0%} |"
        )


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
    """The speculator of an engine with drafts."""
    speculator = engine._group.loops[0]._core._speculator
    assert speculator is not None, "no batch is small enough for drafts"
    return speculator


def forget(engine: Engine) -> None:
    """Makes an idle engine know as little of drafts as a new one does."""
    speculator = speculator_of(engine)
    speculator._speeds = {size: Speeds(each) for size, each in speculator._row_tokens.items()}


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


def run(engine: Engine, case: Case, *, has_drafts: bool, is_first: bool) -> Run:
    """Times the requests of a case."""
    engine.flush_cache()  # its thread does that, so it has also put the last answers away
    if has_drafts:
        set_history(engine, case)
        if is_first:
            forget(engine)
    before = engine.get_internal_state().counters
    started = time.perf_counter()
    outputs = engine.generate_requests(case.prompts, case.params)
    seconds = time.perf_counter() - started
    after = engine.get_internal_state().counters
    return Run([output.output_ids for output in outputs], seconds, after.since(before))


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
    counted = [each.counted for each in runs["auto"][1:]]
    result = Result(
        name=case.name,
        rows=rows,
        seconds={mode: [each.seconds for each in runs[mode][1:]] for mode in MODES},
        tokens_per_step=float(np.median([each.acceptance_length for each in counted])),
        drafted_share=float(
            np.median([each.num_verified_tokens / each.num_output_tokens for each in counted])
        ),
    )
    print(result.row(), flush=True)
    return result


def measure_rows(
    model: ModelConfig, num_rows: int, num_tokens: int, num_pairs: int
) -> list[Result]:
    """All cases with so many rows."""
    engines = make_engines(model, num_rows, num_tokens)
    try:
        cases = make_cases(engines["off"], num_rows, num_tokens)
        return [measure(engines, case, num_rows, num_pairs) for case in cases]
    finally:
        for engine in engines.values():
            engine.shutdown()


def main(argv: Sequence[str] | None = None) -> None:
    """Measures each model."""
    parser = make_parser(__doc__, pairs=5)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=("small",))
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 8))
    parser.add_argument("--tokens", type=int, help="of a request; 256, or 64 for qwen3-0.6b")
    args = parser.parse_args(argv)
    for model in (MODELS[name] for name in args.models):
        num_tokens = args.tokens or NUM_TOKENS.get(model.name, DEFAULT_NUM_TOKENS)
        num_tokens = 24 if args.quick else num_tokens
        results = [
            dataclasses.asdict(result)
            for num_rows in args.rows
            for result in measure_rows(model.config, num_rows, num_tokens, args.pairs)
        ]
        output = output_dir(args) / "speculation.md"
        models = read_results(output).get("models", {})
        models[model.name] = {"num_tokens": num_tokens, "results": results}
        write_report(output, models)


def write_report(output: Path, models: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes what was measured of all models."""
    write_results(
        output,
        "What draft tokens bring and cost",
        "benchmarks/throughput/speculation.py",
        [
            "| model | rows | drafts | off, s | auto, s | speed, median pair | smallest to largest "
            "| pairs | tokens per step | tokens with drafts |",
            "|---|---:|---|---:|---:|---:|---|---:|---:|---:|",
            *(
                f"| {name} {Result(**result).row()}"
                for name, found in models.items()
                for result in found["results"]
            ),
        ],
        {"models": models},
        facts=[
            *(
                f"{name}: {MODELS[name].in_words}, float32; answers of {found['num_tokens']} tokens"
                for name, found in models.items()
            ),
            f"Up to {DRAFT_TOKENS} draft tokens of a row in a step; prompts of {PROMPT_TOKENS} "
            "tokens",
            "Speed: of `auto` over that of `off`; the outputs of both are equal",
            "Tokens per step: what a row gets from a step of a dispatch with drafts",
            "Tokens with drafts: share of all tokens that came from such dispatches",
        ],
    )


if __name__ == "__main__":
    main()
