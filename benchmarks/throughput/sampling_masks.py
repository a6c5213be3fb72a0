"""What `return_sampling_mask` costs the sampler, in microseconds a token and row.

    python benchmarks/throughput/sampling_masks.py           # some minutes

Draws of one step, with masks and without, take turns; tokens and masks come to the host. Logits
follow Zipf's law: a nucleus of 0.9 holds about 16 tokens. With masks, top_k is at most 512.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.turns import take_turns
from sgljax_engine import SamplingParams
from sgljax_engine.runner.batches.sampling import mask_batch
from sgljax_engine.sampling.filters import KEEP_ALL, make_filters
from sgljax_engine.sampling.native import NATIVE
from sgljax_engine.sampling.sampler import XLA, SamplingBatch, sample
from sgljax_engine.sampling_params import MAX_STOP_TOKEN_IDS

EXPONENT = 1.7
FILTERS: tuple[dict[str, Any], ...] = ({"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05})
SAMPLERS = {"native": NATIVE, "xla": XLA}

draw = jax.jit(sample, static_argnames=("num_shards", "sampler"))


def run(logits_BV: jax.Array, params: SamplingParams, sampler: str) -> Callable[[], object]:
    """A step of rows that all have these parameters."""
    size, most = len(logits_BV), params.sampling_mask_size
    top_k = params.top_k if params.top_k and params.top_k > 0 else most or KEEP_ALL
    filters = make_filters(
        *(np.full(size, value) for value in (1.0, top_k, params.top_p, params.min_p))
    )
    seeds = np.stack([np.zeros(size), np.arange(size)], axis=-1).astype(np.uint32)
    stop_ids = np.full((size, MAX_STOP_TOKEN_IDS), -1, np.int32)
    arrays: Any = np.ones(size, np.float32), filters, seeds, np.zeros(size, np.int32), stop_ids
    masks = mask_batch(np.full(size, most, np.int32)) if most else None
    rows, masks = jax.device_put((SamplingBatch(*arrays), masks))
    step = functools.partial(draw, sampler=SAMPLERS[sampler], masks=masks)
    return lambda: jax.device_get(step(logits_BV, rows, jnp.int32(0)))


def main(argv: list[str] | None = None) -> None:
    """Measures and writes the report."""
    args = make_parser(__doc__, pairs=20).parse_args(argv)
    rng, found = np.random.default_rng(0), []
    lines = [
        "| vocabulary | rows | filter | sampler | without masks | with masks | masks cost |",
        "|---:|---:|---|---|---:|---:|---:|",
    ]
    for vocab_size, size in [(2048, 2)] if args.quick else CASES:
        ranks = rng.permuted(np.tile(np.arange(1, vocab_size + 1), (size, 1)), axis=1)
        logits = jnp.asarray(-EXPONENT * np.log(ranks), jnp.float32)
        for filters in FILTERS:
            for sampler in SAMPLERS:
                runs = {
                    name: run(logits, SamplingParams(return_sampling_mask=on, **filters), sampler)
                    for name, on in (("off", False), ("on", True))
                }
                seconds = take_turns(runs, args.pairs)
                off, on = (1e6 * np.array(seconds[name]) / size for name in runs)
                cost = float(np.median(on - off))
                (name,) = (f"{key}={value}" for key, value in filters.items())
                cells = f"{np.median(off):.0f} | {np.median(on):.0f} | {cost:.0f}"
                lines.append(f"| {vocab_size} | {size} | {name} | {sampler} | {cells} |")
                fields = {"vocab_size": vocab_size, "rows": size, "sampler": sampler, **filters}
                found.append({**fields, "off_us": off.tolist(), "on_us": on.tolist()})
    write_results(
        output_dir(args) / "sampling_masks.md",
        "The cost of sampling masks",
        "benchmarks/throughput/sampling_masks.py",
        lines,
        {"runs": found},
        facts=["Microseconds a token and row: medians of turns"],
    )


CASES = [(vocab_size, size) for vocab_size in (49_152, 151_936) for size in (1, 8, 64)]


if __name__ == "__main__":
    main()
