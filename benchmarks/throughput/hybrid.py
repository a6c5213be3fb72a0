"""A hybrid of gated delta nets and attention beside a dense model: batches, prefixes, memory.

    python benchmarks/throughput/hybrid.py                  # about half an hour
    python benchmarks/throughput/hybrid.py --pairs 1 --quick

Both models have random weights, and MLPs that give them the same number of parameters. Batches:
rows generate 32 tokens behind prompts of 16, and 64 rows behind prompts of 512, in turns, each time
with an empty prefix cache. Prefixes: the same requests with the prefix cache on and off, in turns,
each time with an empty cache: a group of 16 samples of one prompt, and episodes of four turns whose
next prompt is all of the last one and new tokens. Memory: what engines of both shapes plan for 64
requests of 32,768 tokens; nothing is allocated for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.turns import generating, speed_table, take_turns
from sgljax_engine import (
    Engine,
    EngineConfig,
    LinearAttentionConfig,
    ModelConfig,
    RopeConfig,
    SamplingParams,
    preview_engine,
)
from sgljax_engine.models.registry import get_model

NUM_ROWS = (1, 8, 64)
GROUP, TURNS, EPISODES = 16, 4, 8


class Sizes(NamedTuple):
    """Sizes of a run."""

    dense: ModelConfig
    hybrid: ModelConfig
    prompt: int
    num_tokens: int


def sizes(*, is_quick: bool) -> Sizes:
    """The two models, and the lengths of prompts and answers."""
    width, num_layers, dim = (64, 4, 16) if is_quick else (1024, 8, 128)
    dense = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=512 if is_quick else 8192,
        hidden_size=width,
        intermediate_size=3 * width,
        num_layers=num_layers,
        num_heads=width // 64,
        num_kv_heads=width // 128 or 1,
        head_dim=dim,
        rope=RopeConfig(theta=1e6),
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        context_length=65_536,
    )
    hybrid = dataclasses.replace(
        dense,
        architecture="Qwen3_5ForCausalLM",
        intermediate_size=2 * width if is_quick else 1952,
        num_heads=width // 128 or 1,
        num_kv_heads=1 if is_quick else 2,
        head_dim=2 * dim,
        rope=RopeConfig(theta=1e6, rotary_dim=dim // 2),
        linear_attention=LinearAttentionConfig(
            layers=((True,) * 3 + (False,)) * (num_layers // 4),
            num_key_heads=width // 64,
            num_value_heads=width // 64,
            key_dim=dim,
            value_dim=dim,
            conv_size=4,
            is_grouped=False,
        ),
    )
    return Sizes(dense, hybrid, 64 if is_quick else 512, 4 if is_quick else 32)


def num_parameters(model: ModelConfig) -> int:
    """Parameters of a model."""
    specs = get_model(model.architecture).param_specs(model).values()
    return sum(math.prod(spec.shape) for spec in specs)


def engine_of(model: ModelConfig, **options: Any) -> Engine:
    """An engine with random weights; the untimed first turns compile."""
    given: dict[str, Any] = {
        "max_model_len": 2048,
        "max_running_requests": NUM_ROWS[-1],
        "batch_buckets": NUM_ROWS,
        "num_kv_tokens": 131_072,
        "dtype": "float32",
    }
    return Engine(model_config=model, load_format="dummy", **given | options)


def random_prompts(model: ModelConfig, count: int, length: int) -> list[list[int]]:
    """Prompts of one length."""
    return np.random.default_rng(0).integers(1, model.vocab_size, (count, length)).tolist()


def measure_batches(size: Sizes, num_pairs: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of whole batches, by number of rows and length of their prompts."""
    params = SamplingParams(temperature=0, max_new_tokens=size.num_tokens, ignore_eos=True)
    engines = {"dense": engine_of(size.dense), "hybrid": engine_of(size.hybrid)}

    def run(name: str, rows: int, length: int) -> Callable[[], object]:
        return generating(engines[name], random_prompts(size.dense, rows, length), params)

    cases = [*((rows, 16) for rows in NUM_ROWS), (NUM_ROWS[-1], size.prompt)]
    try:
        return {
            f"{rows} rows, prompts of {length}": take_turns(
                {name: run(name, rows, length) for name in engines}, num_pairs
            )
            for rows, length in cases
        }
    finally:
        for engine in engines.values():
            engine.shutdown()


def group(engine: Engine, size: Sizes) -> None:
    """Sixteen samples of one prompt."""
    params = SamplingParams(temperature=1, max_new_tokens=8, n=GROUP, seed=0, ignore_eos=True)
    engine.generate_requests(random_prompts(size.hybrid, 1, size.prompt), params)


def episodes(engine: Engine, size: Sizes) -> None:
    """Episodes side by side; each turn's prompt is the last one, its answer, and new tokens."""
    params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    prompts = random_prompts(size.hybrid, EPISODES, size.prompt // 2)
    new = random_prompts(size.hybrid, TURNS, size.prompt // 8)
    for turn in range(TURNS):
        outputs = engine.generate_requests(prompts, params)
        prompts = [output.prompt_ids + output.output_ids + new[turn] for output in outputs]


def measure_prefixes(
    size: Sizes, num_pairs: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, int]]]:
    """Seconds, and tokens that are prefilled, with the prefix cache and without."""
    engines = {
        "cache off": engine_of(size.hybrid, disable_radix_cache=True),
        "cache on": engine_of(size.hybrid),
    }
    seconds: dict[str, dict[str, list[float]]] = {}
    tokens: dict[str, dict[str, int]] = {}
    work = {f"group of {GROUP}": group, f"{EPISODES} episodes of {TURNS} turns": episodes}

    def run(name: str, what: Callable[[Engine, Sizes], None], counts: dict[str, int]) -> None:
        engines[name].flush_cache()
        before = engines[name].get_internal_state().counters.num_prefill_tokens
        what(engines[name], size)
        after = engines[name].get_internal_state().counters.num_prefill_tokens
        counts[name] = after - before

    try:
        for label, what in work.items():
            tokens[label] = {}
            runs = {
                name: lambda name=name, what=what, label=label: run(name, what, tokens[label])
                for name in engines
            }
            seconds[label] = take_turns(runs, num_pairs)
    finally:
        for engine in engines.values():
            engine.shutdown()
    return seconds, tokens


def planned_memory(model: ModelConfig) -> dict[str, int]:
    """Bytes of keys and of states for 64 requests of 32,768 tokens, on a device with room."""
    options = {"num_kv_tokens": 64 * 32_768, "max_running_requests": 64, "dtype": "bfloat16"}
    options |= {"max_model_len": 32_768, "attention_backend": "xla"}
    config = EngineConfig.from_options(options)
    memory = preview_engine(model, config=config, device_bytes=1 << 40).memory
    assert memory is not None
    return {"keys": memory.kv_bytes, "states": memory.state_bytes}


def main(argv: list[str] | None = None) -> None:
    """Measures, and writes the results."""
    parser = make_parser(__doc__, pairs=5)
    args = parser.parse_args(argv)
    size = sizes(is_quick=args.quick)
    batches = measure_batches(size, args.pairs)
    seconds, tokens = measure_prefixes(size, args.pairs)
    memory = {name: planned_memory(getattr(size, name)) for name in ("dense", "hybrid")}
    lines = [
        *speed_table(batches, "dense"),
        "",
        "The prefix cache of the hybrid:",
        "",
        *speed_table(seconds, "cache off"),
        "",
        "| | tokens prefilled, cache off | cache on |",
        "|---|---:|---:|",
        *(f"| {w} | {n['cache off']:,} | {n['cache on']:,} |" for w, n in tokens.items()),
        "",
        "Memory of 64 requests of 32,768 tokens, bfloat16 keys and float32 states, as planned:",
        "",
        "| model | keys, GB | states, GB |",
        "|---|---:|---:|",
        *(f"| {n} | {m['keys'] / 1e9:.2f} | {m['states'] / 1e9:.2f} |" for n, m in memory.items()),
    ]
    counts = {name: num_parameters(getattr(size, name)) for name in ("dense", "hybrid")}
    write_results(
        output_dir(args) / "hybrid.md",
        "A hybrid of gated delta nets and attention",
        "benchmarks/throughput/hybrid.py",
        lines,
        {"decode": batches, "prefixes": seconds, "prefilled": tokens, "memory": memory},
        facts=[
            f"Models: {size.dense.num_layers} layers of width {size.dense.hidden_size}, float32; "
            f"dense {counts['dense']:,} parameters, hybrid {counts['hybrid']:,}",
            "Cores are shared with other machines, so read the ratios",
        ],
    )


if __name__ == "__main__":
    main()
