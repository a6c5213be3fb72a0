"""What a training asks of the engine on one GPU; rungs of gpu_ladder.py."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.lib.turns import take_turns, timed
from benchmarks.lib.vanilla import VanillaPeer
from sgljax_engine import SamplingParams
from tunix_sgljax import mismatch_report

if TYPE_CHECKING:
    from benchmarks.hardware.gpu_rungs import Ladder, Rung

_FEW_ROWS = 16
"""Requests where their number is not what is measured."""


def rollouts(ladder: Ladder, rung: Rung) -> dict[str, Any]:
    """Useful tokens a second of a GRPO step, beside Tunix's vanilla sampler, in turns."""
    work = ladder.sizes.workload()
    rollout = ladder.rollout(rung, max_model_len=work.max_model_len, rows=work.num_rows)
    vanilla = VanillaPeer(ladder.model, ladder.sizes.model, work, None)
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in work.output_lengths]

    def ours() -> None:
        rollout.engine.flush_cache()
        rollout.engine.generate_requests(work.requests, params)

    runs = {"this engine": ours, "Tunix's": lambda: vanilla.generate(work)}
    try:
        seconds = take_turns(runs, ladder.sizes.repeats)
    finally:
        rollout.close()
    medians = {name: float(np.median(each)) for name, each in seconds.items()}
    found = {f"{n}, useful tokens/s": work.useful_tokens / s for n, s in medians.items()}
    return found | {"times Tunix's": medians["Tunix's"] / medians["this engine"]}


def interruptions(ladder: Ladder, rung: Rung) -> dict[str, Any]:
    """Weight sync, sleep and wake: the first of each, and the median of the others.

    Before each round pages are filled, as a rollout that just ended leaves them.
    """
    context, weights = ladder.sizes.context, nnx.state(ladder.model)
    rollout = ladder.rollout(rung, max_model_len=context, rows=_FEW_ROWS)
    engine, params = rollout.engine, SamplingParams(max_new_tokens=2, ignore_eos=True)
    taken: dict[str, list[float]] = {}
    try:
        for _ in range(ladder.sizes.repeats + 1):
            engine.generate_requests(ladder.prompts(_FEW_ROWS, context // 4), params)
            sync = functools.partial(rollout.update_params, weights)
            taken.setdefault("sync", []).append(timed(sync))
            for level in (1, 2):
                sleep = functools.partial(engine.sleep, level)
                taken.setdefault(f"sleep({level})", []).append(timed(sleep))
                wake_s = timed(engine.wake_up)
                taken.setdefault(f"wake_up after sleep({level})", []).append(wake_s)
                sync()
    finally:
        rollout.close()
    found = {"weights, GB": sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) / 1e9}
    for name, seconds in taken.items():
        found[f"{name}, first, ms"] = 1e3 * seconds[0]
        found[f"{name}, ms"] = 1e3 * float(np.median(seconds[1:]))
    return found


def mismatch(ladder: Ladder, rung: Rung) -> dict[str, Any]:
    """Log-probs of sampled tokens in bfloat16 against Tunix's trainer on the same weights."""
    width, num_tokens = ladder.sizes.context // 4, ladder.sizes.num_steps
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
    rollout = ladder.rollout(rung, max_model_len=width + num_tokens, rows=_FEW_ROWS)
    prompts = [" ".join(map(str, ids)) for ids in ladder.prompts(_FEW_ROWS, width)]
    try:
        overall = mismatch_report(
            rollout, ladder.model, prompts, rollout_config=config, batch_size=_FEW_ROWS
        ).overall
    finally:
        rollout.close()
    return {"tokens": overall.num_tokens, "largest": overall.max_abs, "mean": overall.mean_abs}
