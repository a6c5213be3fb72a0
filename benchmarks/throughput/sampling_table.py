"""What the options of the sampling table cost, beside a temperature.

    python benchmarks/throughput/sampling_table.py            # some minutes
    python benchmarks/throughput/sampling_table.py --pairs 1 --quick

32 rows of 64 tokens, by option, with a small vocabulary and a large one. The runs take turns on one
engine. The weights are random, so the distribution is flat: a nucleus of 0.9 holds thousands of
tokens, its worst case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import SMALL, SMALL_IN_WORDS
from benchmarks.lib.turns import generating, speed_table, take_turns
from sgljax_engine import Engine, SamplingParams

NUM_ROWS, PROMPT_LEN, NUM_TOKENS = 32, 32, 64
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


def measure(vocab_size: int, num_turns: int) -> dict[str, list[float]]:
    """Seconds of each setting."""
    prompts = np.random.default_rng(0).integers(64, SMALL.vocab_size, (NUM_ROWS, PROMPT_LEN))
    with Engine(
        model_config=dataclasses.replace(SMALL, vocab_size=vocab_size),
        load_format="dummy",
        max_model_len=PROMPT_LEN + NUM_TOKENS,
        max_running_requests=NUM_ROWS,
    ) as engine:

        def run(settings: Mapping[str, Any]) -> Callable[[], object]:
            params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, **settings)
            return generating(engine, prompts.tolist(), params)

        return take_turns({name: run(each) for name, each in SETTINGS.items()}, num_turns)


def main(argv: list[str] | None = None) -> None:
    """Measures and writes the report."""
    args = make_parser(__doc__, pairs=5).parse_args(argv)
    sizes = (SMALL.vocab_size, 32768)[: 1 if args.quick else None]
    found = {f"vocabulary {size}": measure(size, args.pairs) for size in sizes}
    write_results(
        output_dir(args) / "sampling_table.md",
        "The cost of the sampling table",
        "benchmarks/throughput/sampling_table.py",
        speed_table(found, "temperature"),
        {"seconds": found},
        facts=[f"Model: {SMALL_IN_WORDS}, float32, random weights"],
    )


if __name__ == "__main__":
    main()
