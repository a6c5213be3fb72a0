"""How far a rollout's log-probs are from those of Tunix's trainer, and what closing the gap costs.

    python benchmarks/exactness/mismatch.py            # small, 5 minutes on 2 cores
    python benchmarks/exactness/mismatch.py --quick    # tiny, a smoke test

- `mismatch_report` of both modes in float32: the engine's own log-probs ("trainer_logprobs") and
  those that Tunix's function computes again ("trainer_match").
- Seconds of the same `generate` with the engine's own, which it always computes, and matched.
- The engine's own in bfloat16, on a smaller model: CPUs take long for it.
- `compute_per_token_logps` against itself, with other numbers of rows and more padding.
- The engine and the trainer against numpy's float64: what each of them errs by alone. A rollout
  without any error would still differ from the trainer by the trainer's.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.lib.float64_reference import float64_logprobs
from benchmarks.lib.reporting import ROOT, report_head, write_report
from tunix_sgljax import MismatchReport, SglJaxRollout, mismatch_report
from tunix_sgljax.bench.environment import describe_environment
from tunix_sgljax.bench.models import make_tunix_model
from tunix_sgljax.bench.shapes import MODELS, PAD_ID, IdTokenizer
from tunix_sgljax.exactness.trainer_match import trainer_logps
from tunix_sgljax.padding import left_pad_prompts

WIDTH = 64
"""To which prompts are padded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how much is sampled from it."""

    model: str
    dtype: Any
    num_rows: int
    num_tokens: int

    def in_words(self) -> str:
        """For tables."""
        name = np.dtype(self.dtype).name
        return f"{self.model}, {name}, {self.num_rows} samples of {self.num_tokens} tokens"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Against:
    """`compute_per_token_logps` in one shape against another."""

    change: str
    max_abs: float
    mean_abs: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Errors:
    """Log-probs of the same tokens against float64."""

    who: str
    max_abs: float
    mean_abs: float
    mean: float


def make_prompts(case: Case) -> list[str]:
    """Texts of 16 to `WIDTH` tokens."""
    rng = np.random.default_rng(0)
    vocab_size = MODELS[case.model].config.vocab_size
    lengths = rng.integers(16, WIDTH + 1, case.num_rows)
    return [" ".join(map(str, rng.integers(1, vocab_size, length))) for length in lengths]


def make_prompt_ids(case: Case) -> list[list[int]]:
    """The tokens of those texts."""
    return [[int(word) for word in text.split()] for text in make_prompts(case)]


def config_of(case: Case, **changes: Any) -> RolloutConfig:
    """Sampling at temperature 1, of a fixed number of tokens."""
    return RolloutConfig(
        max_tokens_to_generate=case.num_tokens,
        max_prompt_length=WIDTH,
        temperature=1.0,
        top_p=1.0,
        seed=jax.random.key(0),
        kv_cache_size=WIDTH + case.num_tokens,
        eos_tokens=[],
        return_logprobs=True,
        **changes,
    )


def make_rollout(case: Case, model: Any, bad: Sequence[int], **options: Any) -> SglJaxRollout:
    """A rollout that never samples some ids.

    Tunix hides a sampled pad id from the tokens behind it, in the trainer alone.
    """
    return SglJaxRollout(
        rollout_actor=model,
        tokenizer=IdTokenizer(),
        rollout_config=config_of(case),
        sampling_params={"bad_token_ids": list(bad)},
        max_running_requests=case.num_rows,
        **options,
    )


def seconds(rollout: SglJaxRollout, case: Case, repeats: int, *, logprobs: bool) -> float:
    """Of one `generate`, the median; everything is compiled before."""
    config = dataclasses.replace(config_of(case), return_logprobs=logprobs)
    prompts, found = make_prompts(case), []
    for number in range(repeats + 1):
        started = time.perf_counter()
        rollout.generate(prompts, config)
        if number:
            found.append(time.perf_counter() - started)
    return float(np.median(found))


def against_itself(case: Case, model: Any) -> list[Against]:
    """Tunix's own function on the same tokens in other shapes."""
    prompts = make_prompt_ids(case)
    rng = np.random.default_rng(1)
    shape = case.num_rows, case.num_tokens
    completions = rng.integers(1, MODELS[case.model].config.vocab_size, shape).astype(np.int32)
    graphdef, state = nnx.split(model)

    def score(
        width: int = WIDTH, more: int = 0, size: int | None = None, order: Any = slice(None)
    ) -> np.ndarray:
        padded = left_pad_prompts(prompts, WIDTH, PAD_ID)
        padded = np.pad(padded, ((0, 0), (width - WIDTH, 0)), constant_values=PAD_ID)
        wider = np.pad(completions, ((0, 0), (0, more)), constant_values=PAD_ID)
        logps = trainer_logps(
            graphdef,
            state,
            padded[order],
            wider[order],
            pad_id=PAD_ID,
            eos_id=-1,
            temperature=1.0,
            batch_size=size,
        )
        return logps[:, : case.num_tokens]

    base, order = score(), rng.permutation(case.num_rows)
    half = case.num_rows // 2
    changes = {
        "the same again": np.abs(score() - base),
        "rows in another order": np.abs(score(order=order) - base[order]),
        f"{half} rows at a time": np.abs(score(size=half) - base),
        "8 rows at a time": np.abs(score(size=8) - base),
        "1 row at a time": np.abs(score(size=1) - base),
        f"prompts padded to {WIDTH + 8}": np.abs(score(WIDTH + 8) - base),
        "completions padded by 8 more": np.abs(score(more=8) - base),
    }
    return [
        Against(change=change, max_abs=float(gap.max()), mean_abs=float(gap.mean()))
        for change, gap in changes.items()
    ]


def against_float64(case: Case, model: Any) -> tuple[list[Errors], float]:
    """The engine's and the trainer's errors on what the engine sampled, and their correlation."""
    rollout = make_rollout(case, model, [PAD_ID])
    output = rollout.generate(make_prompts(case), config_of(case))
    rollout.close()
    prompts = make_prompt_ids(case)
    completions = np.stack([np.asarray(tokens) for tokens in output.tokens]).astype(np.int32)
    assert output.logprobs is not None
    graphdef, state = nnx.split(model)
    padded = left_pad_prompts(prompts, WIDTH, PAD_ID)
    limits = {"pad_id": PAD_ID, "eos_id": -1, "temperature": 1.0}
    config = MODELS[case.model].config
    exact = np.stack(float64_logprobs(model, config, prompts, completions.tolist()))
    found = {
        "engine": np.stack([np.asarray(row) for row in output.logprobs]),
        "trainer": trainer_logps(graphdef, state, padded, completions, **limits),
        "trainer, 8 rows at a time": trainer_logps(
            graphdef, state, padded, completions, batch_size=8, **limits
        ),
    }
    errors = {who: (logprobs - exact).ravel() for who, logprobs in found.items()}
    correlation = float(np.corrcoef(errors["engine"], errors["trainer"])[0, 1])
    return [
        Errors(
            who=who,
            max_abs=float(np.abs(error).max()),
            mean_abs=float(np.abs(error).mean()),
            mean=float(error.mean()),
        )
        for who, error in errors.items()
    ], correlation


def table(reports: dict[str, MismatchReport]) -> list[str]:
    """A line a report."""
    lines = [
        "| | tokens | max | mean | k1 | k3 | importance ratios, 1 % to 99 % | tolerance |",
        "|---|---:|---:|---:|---:|---:|---|---|",
    ]
    for name, report in reports.items():
        found = report.overall
        ratios = found.ratio_quantiles
        verdict = "within" if report.is_within() else "beyond"
        lines.append(
            f"| {name} | {found.num_tokens} | {found.max_abs:.2e} | {found.mean_abs:.2e} | "
            f"{found.k1:+.1e} | {found.k3:.1e} | {ratios[1]:.7f} to {ratios[3]:.7f} | {verdict} "
            f"{report.default_tolerance:g} |"
        )
    return [*lines, ""]


def summary(report: MismatchReport) -> dict[str, Any]:
    """All but the statistics of every position."""
    return {key: value for key, value in report.to_dict().items() if key != "per_position"}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description="Trainer-sampler mismatch.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output-dir", type=Path, help="instead of benchmarks/results")
    args = parser.parse_args(argv)
    repeats = 1 if args.quick else args.repeats
    name, size = ("tiny", 8) if args.quick else ("small", 128)
    case = Case(model=name, dtype=jnp.float32, num_rows=size, num_tokens=size // 2)
    narrow = Case(model="tiny", dtype=jnp.bfloat16, num_rows=size // 8 or 1, num_tokens=32)
    folder = args.output_dir or ROOT / (
        "outputs/bench_quick" if args.quick else "benchmarks/results"
    )
    reports: dict[str, MismatchReport] = {}
    costs: dict[str, float] = {}
    model = make_tunix_model(MODELS[name].config)
    for mode, bad in (("trainer_logprobs", [PAD_ID]), ("trainer_match", [])):
        rollout = make_rollout(case, model, bad, logprobs_mode=mode)
        report = mismatch_report(rollout, model, make_prompts(case))
        reports[f"`{mode}`: {case.in_words()}"] = report
        if mode == "trainer_match":
            for what, logprobs in (("`trainer_logprobs`", False), ("`trainer_match`", True)):
                costs[what] = seconds(rollout, case, repeats, logprobs=logprobs)
        rollout.close()
    selves = against_itself(case, model)
    errors, correlation = against_float64(case, model)
    small = make_tunix_model(MODELS[narrow.model].config, dtype=narrow.dtype)
    rollout = make_rollout(narrow, small, [PAD_ID])
    reports[f"`trainer_logprobs`: {narrow.in_words()}"] = mismatch_report(
        rollout, small, make_prompts(narrow)
    )
    rollout.close()

    environment = describe_environment(jax.devices()[0].device_kind)
    lines = report_head(
        "Log-probs of the rollout against Tunix's trainer",
        "benchmarks/exactness/mismatch.py",
        environment,
        f"{case.model}: {MODELS[case.model].in_words}; {narrow.model}: "
        f"{MODELS[narrow.model].in_words}; random weights",
        f"Prompts of 16 to {WIDTH} tokens, padded to {WIDTH}; temperature 1; the trainer scores "
        "all rows in one batch",
    )
    lines += ["## Absolute differences of the sampled tokens' log-probs", "", *table(reports)]
    base = costs["`trainer_logprobs`"]
    lines += [
        f"## Seconds of one `generate`, medians of {repeats}",
        "",
        "| log-probs | s | of the first |",
        "|---|---:|---:|",
        *(f"| {name} | {cost:.2f} | {cost / base:.2f} |" for name, cost in costs.items()),
        "",
        "## `compute_per_token_logps` against itself, same tokens and weights",
        "",
        f"In one batch of {case.num_rows} rows of {WIDTH} + {case.num_tokens} tokens, against:",
        "",
        "| | max | mean |",
        "|---|---:|---:|",
        *(f"| {each.change} | {each.max_abs:.2e} | {each.mean_abs:.2e} |" for each in selves),
        "",
        "## Against float64, tokens that the engine sampled",
        "",
        "| | max | mean absolute | mean |",
        "|---|---:|---:|---:|",
        *(f"| {e.who} | {e.max_abs:.2e} | {e.mean_abs:.2e} | {e.mean:+.1e} |" for e in errors),
        "",
        f"The engine's errors and the trainer's correlate by {correlation:.2f}.",
        "",
        "![Differences by position and by token, `trainer_logprobs`](mismatch.svg)",
        "",
    ]
    content = {
        "reports": {name: summary(report) for name, report in reports.items()},
        "generate_s": costs,
        "against_itself": [dataclasses.asdict(each) for each in selves],
        "against_float64": [dataclasses.asdict(each) for each in errors],
        "error_correlation": correlation,
    }
    write_report(folder / "mismatch.md", lines, environment, content)
    next(iter(reports.values())).plot(folder / "mismatch.svg")


if __name__ == "__main__":
    main()
