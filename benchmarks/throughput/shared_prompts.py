"""Decode of samples that share a prompt: its keys read once for neighbouring rows, and not.

    python benchmarks/throughput/shared_prompts.py            # about five minutes
    python benchmarks/throughput/shared_prompts.py --pairs 1 --quick

64 rows of 64 tokens on CPU kernels, by size of the groups that share a prompt and its length. Two
engines take turns: one reads a row's keys for this row alone. Their tokens and log-probs must be
equal. Prompts are in the prefix cache before the clock starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import SMALL, SMALL_IN_WORDS
from benchmarks.lib.turns import speed_table, take_turns
from sgljax_cpu import attention
from sgljax_engine import Engine, SamplingParams

NUM_ROWS, NUM_TOKENS = 64, 64
CASES = {
    "groups of 16, prompts of 2,048": (16, 2048),
    "groups of 16, prompts of 512": (16, 512),
    "different prompts of 256": (1, 256),
}
ALONE, TOGETHER = "each row alone", "once for neighbours"


def measure(group: int, prompt_len: int, num_turns: int) -> dict[str, list[float]]:
    """Seconds of decode with and without shared reads."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(64, SMALL.vocab_size, (NUM_ROWS // group, prompt_len)).tolist()
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, n=group, seed=0)
    with contextlib.ExitStack() as stack:

        def make(max_run_bytes: int) -> Engine:
            jax.clear_caches()
            with mock.patch.object(attention, "MAX_RUN_BYTES", max_run_bytes):
                engine = stack.enter_context(
                    Engine(
                        model_config=dataclasses.replace(SMALL, context_length=4096),
                        load_format="dummy",
                        max_model_len=prompt_len + NUM_TOKENS,
                        max_running_requests=NUM_ROWS,
                    )
                )
                engine.generate_requests(prompts, params)  # compiles
                return engine

        engines = {ALONE: make(0), TOGETHER: make(attention.MAX_RUN_BYTES)}

        def run(engine: Engine) -> Callable[[], object]:
            return lambda: engine.generate_requests(prompts, params)

        found = [_tokens(run(engine)()) for engine in engines.values()]
        assert found[0] == found[1]
        return take_turns({name: run(engine) for name, engine in engines.items()}, num_turns)


def _tokens(outputs: Any) -> list[tuple[list[int], list[float]]]:
    return [(each.output_ids, each.logprobs) for each in outputs]


def main(argv: list[str] | None = None) -> None:
    """Measures and writes the report."""
    args = make_parser(__doc__, pairs=5).parse_args(argv)
    cases = list(CASES.items())[1:2] if args.quick else CASES.items()
    found = {name: measure(*case, args.pairs) for name, case in cases}
    write_results(
        output_dir(args) / "shared_prompts.md",
        "Samples that share a prompt",
        "benchmarks/throughput/shared_prompts.py",
        speed_table(found, ALONE),
        {"seconds": found},
        facts=[f"Model: {SMALL_IN_WORDS}, float32, random weights"],
    )


if __name__ == "__main__":
    main()
