"""A training whose rollout has its own device, with micro-batches and evaluations; a child process.

Arguments: the number of steps, a seed for the yields at each lock, and `OverSampling.unfinished`.
It ends well if each prompt was trained on once, at the age that it may have.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
import optax
from absl import logging
from jax.sharding import Mesh
from tunix.rl.rl_cluster import RLTrainingConfig, Role

from tests.adapter.grpo_parts import PROMPTS, PROMPTS_PER_STEP
from tests.adapter.test_over_sampling import Run, check_ages
from tests.threads import LIMIT_S, start
from tests.yields import yield_at_locks
from tunix_sgljax import OverSampling

SIZE = 2 * PROMPTS_PER_STEP


def batches(num_steps: int) -> list[dict[str, Any]]:
    """Batches of prompts that are all different."""
    prompts = [
        f"{2 + i % 50} {2 + i // 50 % 50} {PROMPTS[i % len(PROMPTS)]}"
        for i in range(num_steps * SIZE)
    ]
    return [{"prompts": np.array(prompts[i : i + SIZE])} for i in range(0, len(prompts), SIZE)]


def main(num_steps: int, seed: int, unfinished: Any) -> None:
    """Trains: calls of half an update, an evaluation before each update."""
    logging.set_verbosity(logging.ERROR)
    trainer, sampler = (
        Mesh(np.array([device]).reshape(1, 1), ("fsdp", "tp")) for device in jax.devices()
    )
    num_yields = yield_at_locks(seed)
    run = Run(
        OverSampling(factor=2.0, max_age=2, unfinished=unfinished),
        role_to_mesh={Role.ACTOR: trainer, Role.REFERENCE: trainer, Role.ROLLOUT: sampler},
        training_config=RLTrainingConfig(
            actor_optimizer=optax.adam(1e-2),
            eval_every_n_steps=1,
            max_steps=num_steps,
            mini_batch_size=SIZE,
            train_micro_batch_size=1,
            rollout_micro_batch_size=1,
            compute_logps_micro_batch_size=1,
        ),
    )
    data = batches(num_steps)
    start(lambda: run.train(data, data[:1])).result(LIMIT_S)
    wanted = sorted(str(prompt) for batch in data for prompt in batch["prompts"])
    assert run.num_evaluated
    if unfinished != "drop":
        assert sorted(map(str, run.rewarded)) == wanted
        assert run.cluster.global_steps == num_steps
    assert len(set(run.rewarded)) == len(run.rewarded) == run.cluster.global_steps * SIZE
    check_ages(run, max_age=2)
    assert num_yields() > 100 * num_steps


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
