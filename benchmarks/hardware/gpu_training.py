"""What a training step asks of the engine on one GPU, beside tokens; see gpu.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.hardware.gpu_engine import EngineSizes, make_model, make_rollout
from benchmarks.hardware.gpu_kernels import Ceilings
from benchmarks.lib.turns import timed
from sgljax_engine import SamplingParams
from tunix_sgljax import SglJaxRollout, mismatch_report


def _start_requests(rollout: SglJaxRollout, sizes: EngineSizes) -> None:
    """Fills pages with the prompts' keys, as a rollout that just ended leaves them."""
    rng = np.random.default_rng(2)
    shape = sizes.num_prompts, sizes.prompt_lengths[1]
    prompts = rng.integers(1, sizes.model.vocab_size, shape).tolist()
    rollout.engine.generate_requests(prompts, SamplingParams(max_new_tokens=2, ignore_eos=True))


def measure_interruptions(
    sizes: EngineSizes, backends: Sequence[str], ceilings: Ceilings
) -> Iterator[dict[str, Any]]:
    """Weight sync, sleep and wake: the first of each, and the median of the others.

    A sync copies all weights on the device, so its limit is that of a copy. Sleep at level 1 takes
    the weights to the host and wake brings them back: no ceiling was measured for that.
    """
    del backends
    model = make_model(sizes)
    weights = nnx.state(model)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    rollout = make_rollout(
        model,
        "auto",
        max_model_len=sizes.context,
        rows=sizes.num_prompts,
        buckets=(sizes.num_prompts,),
    )
    _start_requests(rollout, sizes)
    engine = rollout.engine
    found: dict[str, list[float]] = {}
    freed: dict[str, int] = {}
    for _ in range(sizes.repeats + 1):
        found.setdefault("sync", []).append(timed(lambda: rollout.update_params(weights)))
        for level in (1, 2):
            freed[f"sleep({level})"] = 0

            def sleep(level: int = level) -> None:
                freed[f"sleep({level})"] = engine.sleep(level)

            found.setdefault(f"sleep({level})", []).append(timed(sleep))
            found.setdefault(f"wake_up after sleep({level})", []).append(timed(engine.wake_up))
            rollout.update_params(weights)
        _start_requests(rollout, sizes)
    rollout.close()
    for name, seconds in found.items():
        median = float(np.median(seconds[1:]))
        limit_s = 2 * num_bytes / ceilings.bytes_per_s if name == "sync" else None
        yield {
            "operation": name,
            "first, ms": 1e3 * seconds[0],
            "ms": 1e3 * median,
            "weights, GB/s": num_bytes / median / 1e9,
            "of limit": "" if limit_s is None else limit_s / median,
            "freed, GB": freed[name] / 1e9 if name in freed else "",
        }


def measure_mismatch(
    sizes: EngineSizes, backends: Sequence[str], ceilings: Ceilings
) -> Iterator[dict[str, Any]]:
    """Log-probs of sampled tokens in bfloat16 against Tunix's trainer on the same weights."""
    del ceilings
    model = make_model(sizes)
    width, num_tokens = sizes.prompt_lengths[1], sizes.output_lengths[1]
    rng = np.random.default_rng(3)
    prompts = [
        " ".join(map(str, rng.integers(1, sizes.model.vocab_size, width)))
        for _ in range(sizes.num_prompts)
    ]
    config = RolloutConfig(
        max_tokens_to_generate=num_tokens,
        max_prompt_length=width,
        temperature=1.0,
        top_p=1.0,
        seed=jax.random.key(0),
        kv_cache_size=width + num_tokens,
        eos_tokens=[],
        return_logprobs=True,
    )
    for backend in backends:
        rollout = make_rollout(
            model,
            backend,
            max_model_len=width + num_tokens,
            rows=sizes.num_prompts,
            buckets=(sizes.num_prompts,),
        )
        report = mismatch_report(
            rollout, model, prompts, rollout_config=config, batch_size=sizes.num_prompts
        )
        rollout.close()
        gc.collect()
        overall = report.overall
        yield {
            "backend": backend,
            "tokens": overall.num_tokens,
            "largest": overall.max_abs,
            "mean": overall.mean_abs,
            "k3": overall.k3,
        }
