"""What LoRA costs: decoding with adapters, and a sync of full weights, merged pairs and an adapter.

    python benchmarks/throughput/lora.py                  # small, about ten minutes
    python benchmarks/throughput/lora.py --pairs 1 --quick

Engines and rollouts with the same weights take turns in one process; the order within a pair
alternates. Each engine decodes 64 rows for 128 tokens; each rollout takes the parameters that
Tunix's `sync_weights` hands over, new arrays every time.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import qwix
from flax import nnx

from benchmarks.lib.models import make_tunix_model
from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.shapes import MODELS, BenchModel, IdTokenizer
from benchmarks.lib.turns import speed_table, take_turns
from sgljax_engine import Engine, LoraRule, SamplingParams, WeightRule, logical_rules
from sgljax_engine.models.registry import get_model
from tunix_sgljax import SglJaxRollout

NUM_ROWS = 64
DECODE_RANK, SYNC_RANK = 16, 8
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

SYNCS: Mapping[str, dict[str, Any]] = {
    "full": {},
    "merged": {"lora": "merged"},
    "adapter": {"lora": "adapter"},
}
"""Options of a rollout that gets all parameters, pairs that it merges, or pairs to keep apart."""

Adapter = tuple[dict[str, np.ndarray], tuple[WeightRule, ...]]


def make_adapter(model: BenchModel, shapes: Mapping[str, tuple[int, ...]], seed: int) -> Adapter:
    """Random pairs for all projections, and their rules."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    rules: list[WeightRule] = list(logical_rules(model.config))
    for name, shape in shapes.items():
        if name.split(".")[-2] not in PROJECTIONS:
            continue
        num_in, num_out = shape
        arrays[f"{name}.a"] = 0.02 * rng.standard_normal((num_in, DECODE_RANK), np.float32)
        arrays[f"{name}.b"] = 0.02 * rng.standard_normal((DECODE_RANK, num_out), np.float32)
        rules.append(LoraRule(name, f"{name}.a", f"{name}.b", 1.0))
    return arrays, tuple(rules)


def logical_shapes(engine: Engine) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights, by name."""
    specs = get_model(engine.model_config.architecture).param_specs(engine.model_config)
    return {name: spec.shape for name, spec in specs.items()}


def measure_decode(model: BenchModel, num_tokens: int, num_pairs: int) -> dict[str, list[float]]:
    """Seconds of decoding 64 rows without adapters, with one, and with four in one batch."""
    options: dict[str, Any] = {"max_running_requests": NUM_ROWS, "batch_buckets": (NUM_ROWS,)}
    slots = {"no adapters": 0, "one adapter": 1, "four adapters": 4}
    engines = {
        name: Engine(
            model_config=model.config,
            load_format="dummy",
            max_loras=count,
            max_lora_rank=DECODE_RANK,
            **options,
        )
        for name, count in slots.items()
    }
    shapes = logical_shapes(engines["no adapters"])
    for name, count in slots.items():
        for slot in range(count):
            engines[name].load_adapter(f"{slot}", *make_adapter(model, shapes, slot))
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, model.config.vocab_size, (NUM_ROWS, 16)).tolist()
    params = SamplingParams(temperature=1.0, max_new_tokens=num_tokens, ignore_eos=True, seed=1)

    def run(name: str) -> Callable[[], object]:
        count = slots[name]
        loras = [f"{row % count}" for row in range(NUM_ROWS)] if count else None

        def generate() -> object:
            engines[name].flush_cache()
            return engines[name].generate(input_ids=prompts, sampling_params=params, lora=loras)

        return generate

    try:
        return take_turns({name: run(name) for name in slots}, num_pairs)
    finally:
        for engine in engines.values():
            engine.shutdown()


def with_lora(base: nnx.Module) -> Any:
    """The model with pairs of rank 8 at all projections."""
    provider = qwix.LoraProvider(module_path=".*(attn|mlp).*", rank=SYNC_RANK, alpha=16.0)
    inputs: Any = base.get_model_input()  # pyright: ignore[reportAttributeAccessIssue]
    return qwix.apply_lora_to_model(base, provider, **inputs, rngs=nnx.Rngs(0))


def measure_syncs(model: BenchModel, num_pairs: int) -> dict[str, list[float]]:
    """Seconds of syncs of each kind, in turns."""
    models, rollouts, kinds = {}, {}, list(SYNCS)
    for kind in kinds:
        base = make_tunix_model(model.config)
        models[kind] = base if kind == "full" else with_lora(base)
        rollouts[kind] = SglJaxRollout(
            rollout_actor=models[kind],
            tokenizer=IdTokenizer(),
            max_model_len=64,
            max_running_requests=1,
            num_kv_tokens=64,
            **SYNCS[kind],
        )
        for _ in range(2):  # compiles
            sync_s(models[kind], rollouts[kind], kind)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for pair in range(num_pairs):
        for kind in kinds[:: 1 if pair % 2 else -1]:
            seconds[kind].append(sync_s(models[kind], rollouts[kind], kind))
    for rollout in rollouts.values():
        rollout.close()
    return seconds


def sync_s(model: Any, rollout: SglJaxRollout, kind: str) -> float:
    """Gives the trained parameters new arrays, untimed, and times their update."""
    filter_type = nnx.Param if kind == "full" else nnx.LoRAParam
    state = nnx.state(model, filter_type)
    nnx.update(model, jax.block_until_ready(jax.tree.map(lambda x: x * 1.0001, state)))
    params = nnx.state(model, filter_type)
    start = time.perf_counter()
    rollout.update_params(params, (filter_type,))
    return time.perf_counter() - start


def main() -> None:
    """Measures and writes the report."""
    parser = make_parser(__doc__, pairs=7)
    parser.add_argument("--model", choices=MODELS, default="small")
    args = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    model = MODELS[args.model]
    decode = measure_decode(model, 16 if args.quick else 128, args.pairs)
    syncs = measure_syncs(model, 2 * args.pairs)
    lines = [
        *speed_table({f"decode, {NUM_ROWS} rows": decode}, "no adapters"),
        "",
        *speed_table({"sync": syncs}, "full"),
    ]
    write_results(
        output_dir(args) / "lora.md",
        "What LoRA costs",
        "benchmarks/throughput/lora.py",
        lines,
        {"decode_s": decode, "sync_s": syncs},
        facts=[
            f"Model: {model.in_words}, float32",
            f"Decoding at rank {DECODE_RANK}, all projections; the adapters of a batch go to its "
            "rows in turns",
            f"Syncs at rank {SYNC_RANK}, all projections",
        ],
    )


if __name__ == "__main__":
    main()
