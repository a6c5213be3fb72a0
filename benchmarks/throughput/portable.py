"""What a CPU without our kernels loses: the portable code of XLA beside the JIT-compiled kernels.

    python benchmarks/throughput/portable.py                  # about ten minutes
    python benchmarks/throughput/portable.py --pairs 1 --quick

Such CPUs are x86-64 without AVX2; engines on several host devices compute the same way. Both run in
turns in one process on the same requests: decode of 1, 8 and 64 rows of 16 tokens behind prompts of
16, and prompts of 512 tokens with one token each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import SMALL, SMALL_IN_WORDS
from benchmarks.lib.turns import generating, speed_table, take_turns
from sgljax_engine import Engine, MoEConfig, SamplingParams

BACKENDS: dict[str, dict[str, Any]] = {
    "kernels": {},
    "XLA": {"linear_backend": "xla", "attention_backend": "xla"},
}
MODELS = {
    "dense": SMALL,
    "4 of 32 experts": dataclasses.replace(
        SMALL,
        architecture="Qwen3MoeForCausalLM",
        intermediate_size=256,
        moe=MoEConfig(
            num_experts=32, num_experts_per_token=4, intermediate_size=256, norm_topk_prob=True
        ),
    ),
}
CASES = {"1 row": (1, 16, 16), "8 rows": (8, 16, 16), "64 rows": (64, 16, 16)}
PROMPTS = {"4 prompts of 512": (4, 512, 1)}
"""Requests, tokens of each prompt, and tokens of each answer."""


def measure(model: str, dtype: str, num_pairs: int, *, is_quick: bool) -> dict[str, Any]:
    """Seconds by case and backend."""
    engines = {
        name: Engine(
            model_config=MODELS[model],
            load_format="dummy",
            dtype=dtype,
            max_model_len=640,
            max_running_requests=64,
            batch_buckets=(1, 8, 64),
            **options,
        )
        for name, options in BACKENDS.items()
    }

    def run(name: str, count: int, length: int, num_tokens: int) -> Callable[[], object]:
        prompts = np.random.default_rng(0).integers(1, SMALL.vocab_size, (count, length)).tolist()
        params = SamplingParams(temperature=0, max_new_tokens=num_tokens, ignore_eos=True)
        return generating(engines[name], prompts, params)

    cases = {**CASES, **PROMPTS}
    if is_quick:
        cases = {"1 row": (1, 4, 2)}
    try:
        return {
            f"{model}, {dtype}, {case}": take_turns(
                {name: run(name, *sizes) for name in BACKENDS}, num_pairs
            )
            for case, sizes in cases.items()
        }
    finally:
        for engine in engines.values():
            engine.shutdown()


def main(argv: list[str] | None = None) -> None:
    """Measures and writes a report."""
    args = make_parser(__doc__, pairs=5).parse_args(argv)
    found: dict[str, Any] = {}
    for model, dtype in (
        ("dense", "float32"),
        ("dense", "bfloat16"),
        ("4 of 32 experts", "float32"),
    ):
        found |= measure(model, dtype, args.pairs, is_quick=args.quick)
    write_results(
        output_dir(args) / "portable.md",
        "What a CPU without our kernels loses",
        "benchmarks/throughput/portable.py",
        speed_table(found, "kernels"),
        {"seconds": found},
        facts=[f"Model: {SMALL_IN_WORDS}, random weights; or experts in place of its MLPs"],
    )


if __name__ == "__main__":
    main()
