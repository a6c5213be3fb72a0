"""How far log-probs of an engine with rounded keys or weights are from the exact ones; its speed.

    python benchmarks/exactness/kv_cache.py            # SmolLM2-135M, 10 minutes on 2 cores
    python benchmarks/exactness/kv_cache.py --quick    # a tiny model, a smoke test

- Each engine samples completions at temperature 1, and one in float32 scores the same tokens: the
  trainer's part. Log-ratios are the latter's log-probs minus the sampler's; the mean of a sequence
  is within when its exponential is in [0.999, 1.002], as sequence-level masks ask.
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

from benchmarks.lib.reporting import ROOT, make_parser, output_dir, write_results
from benchmarks.lib.shapes import MODELS
from benchmarks.lib.turns import speed_table, take_turns
from sgljax_engine import Engine, SamplingParams
from sgljax_engine.attention.base import AttentionOptions, BlockTables, NewTokens
from sgljax_engine.attention.cpu import NativeAttention
from sgljax_engine.cache.kv_pages import LayerKV, PageLayout

sys.path.insert(0, str(ROOT / "examples"))

from get_smollm2 import get_smollm2

BASE = "float32"
INT8_KEYS = "int8 keys and values"
ENGINES: dict[str, dict[str, Any]] = {
    BASE: {},
    INT8_KEYS: {"kv_cache_dtype": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 weights": {"quantization": "int8"},
    "int8 weights, keys and values": {"quantization": "int8", "kv_cache_dtype": "int8"},
}
WITHIN = (0.999, 1.002)
"""Bounds of the exponential of a sequence's mean log-ratio."""

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
    """Sizes, and the texts as token ids."""

    def __init__(self, folder: Path | None) -> None:
        """Takes the folder of a model, or None for the tiny one."""
        self.folder = folder
        self.num_rows, self.prompt, self.new, self.text = 32, 64, 64, 128
        if folder is None:
            self.num_rows, self.prompt, self.new, self.text = 8, 16, 16, 32
            ids = np.random.default_rng(0).integers(1, 1000, 4096).tolist()
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            ids = tokenizer.encode("\n".join(topics[name] for name in sorted(topics)))
        starts = np.linspace(0, len(ids) - self.text - 1, self.num_rows).astype(int)
        self.texts = [ids[start : start + self.text] for start in starts]

    def engine(self, name: str) -> Engine:
        """One of `ENGINES`."""
        options: dict[str, Any] = {
            "max_running_requests": self.num_rows,
            "max_model_len": max(self.prompt + self.new, self.text) + 16,
            "dtype": "float32",
            **ENGINES[name],
        }
        if self.folder is not None:
            return Engine(self.folder, **options)
        config = MODELS["tiny"].config
        return Engine(model_config=config, load_format="dummy", **options)


def completions(engine: Engine, work: Workload) -> list[tuple[list[int], np.ndarray]]:
    """Tokens, behind the prompts' own, and the sampler's log-probs of them."""
    prompts = [text[: work.prompt] for text in work.texts]
    params = [
        SamplingParams(temperature=1.0, max_new_tokens=work.new, ignore_eos=True, seed=row)
        for row in range(work.num_rows)
    ]
    outs = engine.generate_requests(prompts, params)
    return [
        (prompt + out.output_ids, np.asarray(out.logprobs, np.float64))
        for prompt, out in zip(prompts, outs, strict=True)
    ]


def distances(sampled: Sequence[tuple[list[int], np.ndarray]], scores: Sequence[Any]) -> Any:
    """Statistics of the log-ratios of sampled tokens."""
    rows = [
        np.asarray(score, np.float64) - own for (_, own), score in zip(sampled, scores, strict=True)
    ]
    ratios, means = np.concatenate(rows), np.exp([row.mean() for row in rows])
    is_within = (means >= WITHIN[0]) & (means <= WITHIN[1])
    return {
        "tokens": ratios.size,
        "max": float(np.abs(ratios).max()),
        "mean": float(np.abs(ratios).mean()),
        "k3": float((np.expm1(ratios) - ratios).mean()),
        "quantiles": np.exp(np.quantile(ratios, [0.01, 0.99])).tolist(),
        "sequence_means": [float(means.min()), float(means.max())],
        "share_outside": float(1 - is_within.mean()),
    }


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


def table(found: dict[str, Any]) -> list[str]:
    """A line an engine."""
    lines = [
        "| engine | KV bytes a token | perplexity | max | mean | k3 | ratios, 1 % to 99 % | "
        "sequences' mean ratios | outside |",
        "|---|---:|---:|---:|---:|---:|---|---|---:|",
    ]
    for name, each in found.items():
        low, high = each["quantiles"]
        first, last = each["sequence_means"]
        lines.append(
            f"| {name} | {each['kv_bytes']:,} | {each['perplexity']:.4f} | {each['max']:.2e} | "
            f"{each['mean']:.2e} | {each['k3']:.1e} | {low:.4f} to {high:.4f} | "
            f"{first:.5f} to {last:.5f} | {each['share_outside']:.1%} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the results."""
    parser = make_parser(__doc__, pairs=5)
    args = parser.parse_args(argv)
    work = Workload(None if args.quick else get_smollm2())
    texts = [text[: work.text] for text in work.texts]
    found, sampled = {}, {}
    for name in ENGINES:
        with work.engine(name) as engine:
            sampled[name] = completions(engine, work)
            memory = engine.get_internal_state().memory
            mean = np.concatenate([np.asarray(row) for row in engine.score(texts)]).mean()
        found[name] = {
            "kv_bytes": memory.kv_bytes // memory.kv_tokens,
            "perplexity": float(np.exp(-mean)),
        }
    with work.engine(BASE) as engine:
        for name, each in sampled.items():
            scores = engine.score([ids for ids, _ in each], 1.0, [work.prompt] * work.num_rows)
            found[name] |= distances(each, scores)
    layers = {"2/1 heads of 16": AttentionSizes(4, 2, 1, 16, (32,))} if args.quick else LAYERS
    seconds = {
        f"{name}, {label}": each
        for name, sizes in layers.items()
        for label, each in attention_seconds(sizes, args.pairs).items()
    }
    model = "a tiny random model" if args.quick else "SmolLM2-135M-Instruct"
    write_results(
        output_dir(args) / "kv_cache.md",
        "Keys and values of 8 bits",
        "benchmarks/exactness/kv_cache.py",
        [
            "## Log-probs of sampled tokens against float32's",
            "",
            *table(found),
            "",
            f"## Seconds of {_STEPS} calls of a layer's attention",
            "",
            *speed_table(seconds, BASE),
        ],
        {"engines": found, "seconds": seconds},
        facts=[
            f"{model}; {work.num_rows} completions of {work.new} tokens behind prompts of "
            f"{work.prompt}; perplexity of {work.num_rows} texts of {work.text} tokens",
            f"outside: sequences whose mean ratio is not in [{WITHIN[0]}, {WITHIN[1]}]",
        ],
    )


if __name__ == "__main__":
    main()
