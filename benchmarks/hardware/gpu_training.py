"""What a training asks of the engine on one GPU; rungs of gpu_ladder.py."""

from __future__ import annotations

import dataclasses
import functools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import yaml
from flax import nnx
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.lib.reporting import ROOT
from benchmarks.lib.turns import take_turns, timed
from benchmarks.lib.vanilla import VanillaPeer
from sgljax_engine import SamplingParams
from tunix_sgljax import mismatch_report
from tunix_sgljax.training import load_config
from tunix_sgljax.training.models import tunix_config

sys.path.insert(0, str(ROOT / "examples"))

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


def task_rows(vocab_size: int, length: int, num: int) -> list[dict[str, Any]]:
    """Prompts of random ids; `grpo` trains on them."""
    ids = np.random.default_rng(2).integers(1, vocab_size, (num, length)).tolist()
    return [{"prompts": " ".join(map(str, prompt))} for prompt in ids]


def even_share(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """The share of even token ids; the reward of `grpo`."""
    del prompts
    ids = [[int(word) for word in text.split()] for text in completions]
    return [sum(token % 2 == 0 for token in row) / max(len(row), 1) for row in ids]


def grpo(ladder: Ladder, rung: Rung) -> dict[str, Any]:
    """A whole training with Tunix's GRPOLearner: mean seconds of the steps after the first."""
    from benchmarks.hardware.gpu_rungs import use
    from grpo_reasoning import Training

    sizes, here = ladder.sizes, __name__
    prompt, new = sizes.grpo_tokens
    shape = dataclasses.asdict(tunix_config(sizes.model))
    shape = {name: value for name, value in shape.items() if type(value) in (int, float)}
    task = {"vocab_size": sizes.model.vocab_size, "length": prompt}
    settings = {
        "actor_model_config": {
            "family": "qwen3",
            "shape": shape | {"use_tied_embedding": sizes.model.tie_word_embeddings},
            "dtype": "bfloat16",
            "remat": "decoder",
        },
        "tokenizer_config": {"function": "benchmarks.lib.shapes:IdTokenizer"},
        "task": {
            "dataset": f"{here}:task_rows",
            "dataset_args": task | {"num": sizes.grpo_prompts},
            "eval_dataset": f"{here}:task_rows",
            "eval_dataset_args": task | {"num": 1},
            "reward_functions": [f"{here}:even_share"],
        },
        "grpo_config": {"num_generations": sizes.grpo_group, "beta": 0.0},
        "batch_size": sizes.grpo_prompts,
        "num_batches": 3,
        "rl_training_config": {
            "train_micro_batch_size": 1,
            "eval_every_n_steps": 3,
            "actor_optimizer_config": {"opt_type": "adamw", "learning_rate": 1e-6},
        },
        "rollout_config": {
            "max_prompt_length": prompt,
            "total_generation_steps": new,
            "temperature": 1.0,
        },
        "sgljax_config": {
            "attention_backend": use(rung.fused, is_smoke=ladder.is_smoke),
            "linear_backend": "xla",
            "max_running_requests": sizes.grpo_prompts * sizes.grpo_group,
            "num_kv_tokens": sizes.grpo_prompts * sizes.grpo_group * (prompt + new + 16),
            "release_kv_between_steps": True,
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "grpo.yaml"
        path.write_text(yaml.safe_dump(settings), encoding="utf-8")
        config = load_config(path, [f"output_dir={folder}"])
        steps = Training(config, functools.partial(print, file=sys.stderr)).run().steps
    found: dict[str, Any] = {"first step, s": steps[0].end_s}
    for name in ("rollout_s", "sync_s", "trainer_s", "num_tokens"):
        mean = float(np.mean([getattr(step, name) for step in steps[1:]]))
        found[name.replace("_s", ", s a step").replace("num_tokens", "tokens a step")] = mean
    return found
