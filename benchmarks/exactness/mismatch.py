"""How far a rollout's log-probs are from those of Tunix's trainer, and what closing the gap costs.

    python benchmarks/exactness/mismatch.py            # small, 4 minutes on 2 cores
    python benchmarks/exactness/mismatch.py --quick    # tiny, a smoke test

- `mismatch_report` of both modes in float32: the engine's own log-probs ("trainer_logprobs") and
  those that Tunix's function computes again ("trainer_match").
- Seconds of the same `generate` with the engine's own, which it always computes, and matched.
- The engine's own in bfloat16, on a smaller model: CPUs take long for it.
- `compute_per_token_logps` against itself, with other numbers of rows and more padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.lib.models import make_tunix_model
from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import MODELS, PAD_ID, IdTokenizer
from benchmarks.lib.turns import speed_table, take_turns
from tunix_sgljax import MismatchReport, SglJaxRollout, mismatch_report
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


def make_prompts(case: Case) -> list[str]:
    """Texts of 16 to `WIDTH` tokens."""
    rng = np.random.default_rng(0)
    vocab_size = MODELS[case.model].config.vocab_size
    lengths = rng.integers(16, WIDTH + 1, case.num_rows)
    return [" ".join(map(str, rng.integers(1, vocab_size, length))) for length in lengths]


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


def generate_s(rollout: SglJaxRollout, case: Case, num_turns: int) -> dict[str, list[float]]:
    """Seconds of one `generate` with the engine's own log-probs, and with the trainer's."""
    prompts = make_prompts(case)

    def run(*, is_matched: bool) -> Callable[[], object]:
        config = dataclasses.replace(config_of(case), return_logprobs=is_matched)
        return lambda: rollout.generate(prompts, config)

    modes = {"trainer_logprobs": run(is_matched=False), "trainer_match": run(is_matched=True)}
    return take_turns(modes, num_turns)


def against_itself(case: Case, model: Any) -> dict[str, tuple[float, float]]:
    """Tunix's own function on the same tokens in other shapes: largest and mean difference."""
    prompts = [[int(word) for word in text.split()] for text in make_prompts(case)]
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
    return {change: (float(gap.max()), float(gap.mean())) for change, gap in changes.items()}


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


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the results."""
    parser = make_parser(__doc__, pairs=3)
    args = parser.parse_args(argv)
    name, size = ("tiny", 8) if args.quick else ("small", 128)
    case = Case(model=name, dtype=jnp.float32, num_rows=size, num_tokens=size // 2)
    low = Case(model="tiny", dtype=jnp.bfloat16, num_rows=size // 8, num_tokens=32)
    reports: dict[str, MismatchReport] = {}
    costs: dict[str, list[float]] = {}
    for each, mode, bad in (
        (case, "trainer_logprobs", [PAD_ID]),
        (case, "trainer_match", []),
        (low, "trainer_logprobs", [PAD_ID]),
    ):
        model = make_tunix_model(MODELS[each.model].config, dtype=each.dtype)
        rollout = make_rollout(each, model, bad, logprobs_mode=mode)
        report = mismatch_report(rollout, model, make_prompts(each))
        reports[f"`{mode}`: {each.in_words()}"] = report
        if mode == "trainer_match":
            costs = generate_s(rollout, each, args.pairs)
        rollout.close()
    selves = against_itself(case, make_tunix_model(MODELS[name].config))
    lines = [
        "## Absolute differences of the sampled tokens' log-probs",
        "",
        *table(reports),
        "## Seconds of one `generate`",
        "",
        *speed_table({"": costs}, "trainer_logprobs"),
        "",
        "## `compute_per_token_logps` against itself, same tokens and weights",
        "",
        f"In one batch of {case.num_rows} rows of {WIDTH} + {case.num_tokens} tokens, against:",
        "",
        "| | max | mean |",
        "|---|---:|---:|",
        *(f"| {change} | {most:.2e} | {mean:.2e} |" for change, (most, mean) in selves.items()),
    ]
    summaries = {name: report.to_dict() for name, report in reports.items()}
    write_results(
        output_dir(args) / "mismatch.md",
        "Log-probs of the rollout against Tunix's trainer",
        "benchmarks/exactness/mismatch.py",
        lines,
        {
            "reports": summaries,
            "generate_s": costs,
            "against_itself": selves,
        },
        facts=[
            f"{name}: {MODELS[name].in_words}; random weights",
            f"Prompts of 16 to {WIDTH} tokens, padded to {WIDTH}; temperature 1; the trainer "
            "scores all rows in one batch",
        ],
    )


if __name__ == "__main__":
    main()
