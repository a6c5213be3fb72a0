"""What rounded weights, keys and values do to the log-probs and texts of a real model.

    python benchmarks/exactness/rounding.py            # SmolLM2-135M, 15 minutes on 2 cores
    python benchmarks/exactness/rounding.py --quick    # a tiny model, a smoke test

- Each rollout samples completions at temperature 1, and Tunix's trainer scores the same tokens in
  float32. Sequence-level masks of the importance ratio keep what lies within [0.999, 1.002]: the
  share outside is counted of each sequence's mean log-ratio.
- Perplexity of texts that are there anyway: topics of the reference of the Python language.
- Seconds in which the attention of one layer writes a token a row and reads the keys before it, by
  the CPU kernels, of 64 rows with pages in no order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from transformers import AutoTokenizer
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.lib.models import load_tunix_model, make_tunix_model
from benchmarks.lib.reporting import ROOT, make_parser, output_dir, write_results
from benchmarks.lib.shapes import MODELS, PAD_ID, IdTokenizer
from benchmarks.lib.turns import speed_table, take_turns
from sgljax_engine.attention.base import AttentionOptions, BlockTables, NewTokens
from sgljax_engine.attention.cpu import NativeAttention
from sgljax_engine.cache.kv_pages import LayerKV, PageLayout
from tunix_sgljax import SglJaxRollout, mismatch_report
from tunix_sgljax.exactness.mismatch import SEQUENCE_BOUNDS

sys.path.insert(0, str(ROOT / "examples"))

from get_smollm2 import get_smollm2
from smollm2_as_qwen2 import as_qwen2

_TOGETHER = 16
"""Rows that the trainer scores together, in whose shape `trainer_match` has its bits."""

BASE = "float32"
INT8_KEYS = "int8 keys and values"
ROLLOUTS: dict[str, dict[str, Any]] = {
    BASE: {},
    "float32, trainer_match": {"logprobs_mode": "trainer_match", "match_batch_size": _TOGETHER},
    INT8_KEYS: {"kv_cache_dtype": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 weights": {"quantization": "int8"},
    "int8 weights, keys and values": {"quantization": "int8", "kv_cache_dtype": "int8"},
}
_PAGE_SIZE = 16
_STEPS = 4
"""Calls in a measurement of speed."""


class AttentionSizes(NamedTuple):
    """A layer whose speed is measured: SmolLM2-135M's, or Qwen3-0.6B's."""

    num_rows: int = 64
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    lengths: tuple[int, ...] = (256, 1024, 2048)


LAYERS = {
    "9/3 heads of 64": AttentionSizes(),
    "16/8 heads of 128": AttentionSizes(64, 16, 8, 128, (256, 1024, 2048)),
}


class Workload:
    """Sizes, the trainer's model, and prompts and texts."""

    def __init__(self, folder: Path | None) -> None:
        """Takes the folder of a model, or None for the tiny one."""
        self.num_rows, self.prompt, self.new, self.text = 64, 48, 128, 128
        self.bad: list[int] = []
        if folder is None:
            self.num_rows, self.prompt, self.new, self.text = 4, 16, 8, 32
            self.model: Any = make_tunix_model(MODELS["tiny"].config)
            self.tokenizer: Any = IdTokenizer()
            self.bad = [PAD_ID]
            ids = np.random.default_rng(0).integers(1, 1000, 4096).tolist()
        else:
            self.model = load_tunix_model(as_qwen2(folder), "float32")
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self.tokenizer.pad_token = "<|endoftext|>"  # see configs/grpo_reasoning.yaml
            ids = self.tokenizer.encode("\n".join(topics[name] for name in sorted(topics)))
        starts = np.linspace(0, len(ids) - self.text - 1, self.num_rows).astype(int)
        self.texts = [ids[start : start + self.text] for start in starts]
        # A text's first tokens may be encoded as a few more.
        self.prompts = [self.tokenizer.decode(text[: self.prompt - 8]) for text in self.texts]

    def rollout(self, name: str) -> SglJaxRollout:
        """One of `ROLLOUTS`."""
        config = RolloutConfig(
            max_tokens_to_generate=self.new,
            max_prompt_length=self.prompt,
            temperature=1.0,
            top_p=1.0,
            seed=jax.random.key(0),
            kv_cache_size=max(self.prompt + self.new, self.text) + 16,
            return_logprobs=True,
        )
        return SglJaxRollout(
            rollout_actor=self.model,
            tokenizer=self.tokenizer,
            rollout_config=config,
            sampling_params={"bad_token_ids": self.bad},
            max_running_requests=self.num_rows,
            **ROLLOUTS[name],
        )


def attention_seconds(sizes: AttentionSizes, num_turns: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of attention to keys in float32 and in 8 bits, in turns, by number of keys."""
    return {
        f"{sizes.num_rows} rows of {length:,} keys": take_turns(
            {name: _attending(sizes, length, is_int8=name != BASE) for name in (BASE, INT8_KEYS)},
            num_turns,
        )
        for length in sizes.lengths
    }


def _attending(sizes: AttentionSizes, length: int, *, is_int8: bool) -> Callable[[], object]:
    num_pages = -(-length // _PAGE_SIZE)
    rng, count = np.random.default_rng(0), sizes.num_rows * num_pages
    table = jnp.asarray(rng.permutation(count).reshape(sizes.num_rows, num_pages), jnp.int32)
    last = jnp.full((sizes.num_rows, 1), length - 1, jnp.int32)
    tables = BlockTables(table, last, last[:, 0] + 1)
    slots = table[:, -1] * _PAGE_SIZE + (length - 1) % _PAGE_SIZE
    q, k, v = (
        jnp.asarray(rng.normal(size=(sizes.num_rows, heads, sizes.head_dim)), jnp.float32)
        for heads in (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    )
    layout = PageLayout(sizes.num_kv_heads, sizes.head_dim, is_int8=is_int8)
    layer = layout.make_layer(count, _PAGE_SIZE, jnp.dtype(jnp.float32), jnp.ones)
    options = AttentionOptions(scale=sizes.head_dim**-0.5)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(layer: LayerKV) -> tuple[jax.Array, LayerKV]:
        new = NewTokens(q, k, v)
        return NativeAttention().write_and_attend(new, layer, tables, slots, options)

    state = [layer]

    def run() -> None:
        out = q
        for _ in range(_STEPS):
            out, state[0] = step(state[0])
        jax.block_until_ready((out, state[0]))

    return run


def measure(work: Workload, name: str) -> dict[str, Any]:
    """Log-probs against the trainer's, and perplexity."""
    rollout = work.rollout(name)
    try:
        report = mismatch_report(rollout, work.model, work.prompts, batch_size=_TOGETHER)
        memory = rollout.engine.get_internal_state().memory
        scores = rollout.engine.score(work.texts)
    finally:
        rollout.close()
    found, ratios = report.overall, report.sequence_ratios
    return {
        "kv_bytes": memory.kv_bytes // memory.kv_tokens,
        "perplexity": float(np.exp(-np.concatenate([np.asarray(row) for row in scores]).mean())),
        "tokens": found.num_tokens,
        "max": found.max_abs,
        "mean": found.mean_abs,
        "k3": found.k3,
        "quantiles": [float(found.ratio_quantiles[at]) for at in (1, 3)],
        "sequence_ratios": [float(ratios.min()), float(ratios.max())],
        "share_outside": report.share_outside(),
    }


def table(found: dict[str, Any]) -> list[str]:
    """A line a rollout."""
    lines = [
        "| rollout | KV bytes a token | perplexity | tokens | max | mean | k3 | "
        "ratios, 1 % to 99 % | sequences' ratios | outside |",
        "|---|---:|---:|---:|---:|---:|---:|---|---|---:|",
    ]
    for name, each in found.items():
        low, high = each["quantiles"]
        first, last = each["sequence_ratios"]
        lines.append(
            f"| {name} | {each['kv_bytes']:,} | {each['perplexity']:.4f} | {each['tokens']:,} | "
            f"{each['max']:.2e} | {each['mean']:.2e} | {each['k3']:.1e} | "
            f"{low:.4f} to {high:.4f} | {first:.6f} to {last:.6f} | {each['share_outside']:.1%} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the results."""
    parser = make_parser(__doc__, pairs=5)
    args = parser.parse_args(argv)
    work = Workload(None if args.quick else get_smollm2())
    found = {name: measure(work, name) for name in ROLLOUTS}
    layers = {"2/1 heads of 16": AttentionSizes(4, 2, 1, 16, (32,))} if args.quick else LAYERS
    seconds = {
        f"{name}, {label}": each
        for name, sizes in layers.items()
        for label, each in attention_seconds(sizes, args.pairs).items()
    }
    model = "a tiny random model" if args.quick else "SmolLM2-135M-Instruct"
    write_results(
        output_dir(args) / "rounding.md",
        "Rounded weights, keys and values",
        "benchmarks/exactness/rounding.py",
        [
            "## Log-probs of sampled tokens against Tunix's trainer in float32",
            "",
            *table(found),
            "",
            f"## Seconds of {_STEPS} calls of a layer's attention",
            "",
            *speed_table(seconds, BASE),
        ],
        {"rollouts": found, "seconds": seconds},
        facts=[
            f"{model}; {work.num_rows} completions of at most {work.new} tokens behind prompts of "
            f"{work.prompt}; perplexity of as many texts of {work.text} tokens",
            "sequences' ratios: exp of a sequence's mean log-ratio; outside: not within "
            f"[{SEQUENCE_BOUNDS[0]}, {SEQUENCE_BOUNDS[1]}]",
        ],
    )


if __name__ == "__main__":
    main()
