"""Decoding with experts, against dense models of the size that is active and of the whole size.

    python benchmarks/throughput/moe.py            # about five minutes
    python benchmarks/throughput/moe.py --pairs 1 --quick

A token goes through 4 of 32 experts, so that an expert's width is a quarter of that of the smaller
dense model's MLP and a 32nd of the larger one's. Engines take turns in one process, in alternating
order; each decodes 1, 8 and 64 rows. What counts are the ratios within a pair.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.lib.reporting import ROOT, report_head, write_report
from sgljax_engine import Engine, ModelConfig, MoEConfig, RopeConfig, SamplingParams
from tunix_sgljax.bench.environment import describe_environment

ROWS = (1, 8, 64)
NUM_EXPERTS, NUM_CHOSEN, WIDTH = 32, 4, 256
DENSE = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=NUM_CHOSEN * WIDTH,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    rope=RopeConfig(theta=1e6),
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    context_length=512,
)
EXPERTS = dataclasses.replace(
    DENSE,
    architecture="Qwen3MoeForCausalLM",
    intermediate_size=WIDTH,
    moe=MoEConfig(
        num_experts=NUM_EXPERTS,
        num_experts_per_token=NUM_CHOSEN,
        intermediate_size=WIDTH,
        norm_topk_prob=True,
    ),
)
ENGINES: Mapping[str, tuple[ModelConfig, dict[str, Any]]] = {
    "dense, active size": (DENSE, {}),
    "experts": (EXPERTS, {}),
    "experts, deterministic": (EXPERTS, {"enable_deterministic_sampling": True}),
    "experts, XLA": (EXPERTS, {"linear_backend": "xla"}),
    "dense, whole size": (dataclasses.replace(DENSE, intermediate_size=NUM_EXPERTS * WIDTH), {}),
}
BASE = next(iter(ENGINES))


def measure(num_tokens: int, num_pairs: int) -> dict[int, dict[str, list[float]]]:
    """Seconds a step of each engine with each number of rows."""
    made = {
        name: Engine(
            model_config=model,
            load_format="dummy",
            max_running_requests=ROWS[-1],
            batch_buckets=ROWS,
            max_model_len=256,
            **options,
        )
        for name, (model, options) in ENGINES.items()
    }
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=1.0, max_new_tokens=num_tokens, ignore_eos=True, seed=1)
    found: dict[int, dict[str, list[float]]] = {}
    try:
        for num_rows in ROWS:
            prompts = rng.integers(1, DENSE.vocab_size, (num_rows, 4)).tolist()
            runs = {name: generate(engine, prompts, params) for name, engine in made.items()}
            found[num_rows] = take_turns(runs, num_pairs)
    finally:
        for engine in made.values():
            engine.shutdown()
    return {
        num_rows: {name: [s / num_tokens for s in each] for name, each in seconds.items()}
        for num_rows, seconds in found.items()
    }


def generate(
    engine: Engine, prompts: list[list[int]], params: SamplingParams
) -> Callable[[], object]:
    """A run of one engine."""
    return lambda: engine.generate(input_ids=prompts, sampling_params=params)


def take_turns(runs: Mapping[str, Callable[[], object]], num_pairs: int) -> dict[str, list[float]]:
    """Seconds of each run, in turns of alternating order, after an untimed run of each."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-1, num_pairs):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            runs[name]()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def table(found: Mapping[int, Mapping[str, list[float]]]) -> list[str]:
    """Medians, and each turn's ratio to the dense model of the active size."""
    lines = [
        f"| rows | engine | median ms a step | over {BASE}: median | range |",
        "|---:|---|---:|---:|---|",
    ]
    for num_rows, seconds in found.items():
        for name, each in seconds.items():
            ratios = [a / b for a, b in zip(each, seconds[BASE], strict=True)]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            lines.append(
                f"| {num_rows} | {name} | {1e3 * np.median(each):.2f} | {np.median(ratios):.2f} | "
                f"{spread} |"
            )
    return lines


def main() -> None:
    """Measures and writes the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="16 tokens a row; not for reports")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "moe.md")
    args = parser.parse_args()
    found = measure(16 if args.quick else 48, args.pairs)
    environment = describe_environment(jax.devices()[0].device_kind)
    lines = [
        *report_head(
            "Decoding with experts",
            "benchmarks/throughput/moe.py",
            environment,
            f"Model: {DENSE.num_layers} layers of width {DENSE.hidden_size}, {NUM_CHOSEN} of "
            f"{NUM_EXPERTS} experts of width {WIDTH} for each token, float32, random weights",
            f"Dense models: the same with MLPs {NUM_CHOSEN * WIDTH} wide (the active size) and "
            f"{NUM_EXPERTS * WIDTH} wide (the whole size)",
            f"{args.pairs} turns of all engines; other jobs ran on the machine, so read the ratios",
        ),
        *table(found),
    ]
    write_report(args.output, lines, environment, {"step_s": {str(k): v for k, v in found.items()}})


if __name__ == "__main__":
    main()
