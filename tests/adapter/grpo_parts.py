"""A tiny GRPO program on Tunix, in parts: model, data, reward, cluster, and a check at its end."""

from __future__ import annotations

import types
from typing import Any

import grain
import jax
import numpy as np
import optax
from flax import nnx
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.rl_cluster import ClusterConfig, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from tests import tunix_reference as ref
from tests.adapter.helpers import EndingTokenizer, max_difference, params_of, scores, text_of
from tunix_sgljax import SglJaxRollout

MODEL: dict[str, Any] = {
    "vocab_size": 64,
    "num_layers": 2,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "norm_eps": 1e-6,
    "rope_theta": ref.ROPE_THETA,
    "use_tied_embedding": True,
}
EOS = 1
NUM_STEPS = 2
PROMPTS_PER_STEP = 2
NUM_GENERATIONS = 4
TEMPERATURE = 0.8
PROMPTS = [text_of(ids) for ids in ref.make_prompts(64, (3, 5, 2, 4), seed=7)]


def one_device_mesh():
    """The mesh of a Tunix program on one device."""
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


def rollout_config(**changes):
    """Short completions at a temperature that is not 1."""
    fields: dict[str, Any] = {
        "max_tokens_to_generate": 8,
        "max_prompt_length": 8,
        "kv_cache_size": 128,
        "temperature": TEMPERATURE,
    }
    return RolloutConfig(**(fields | changes))


def list_batches() -> list[dict[str, Any]]:
    """A plain list of batches."""
    return [
        {"prompts": np.array(PROMPTS[i : i + PROMPTS_PER_STEP])}
        for i in range(0, len(PROMPTS), PROMPTS_PER_STEP)
    ]


def grain_batches():
    """The same from a grain dataset."""
    source = grain.MapDataset.source(PROMPTS).map(lambda prompt: {"prompts": prompt})
    return source.batch(PROMPTS_PER_STEP)


def reward(prompts, completions, **_):
    """The share of even tokens: something that samples differ in."""
    assert all(type(text) is str for text in completions)
    ids = [[int(word) for word in text.split()] for text in completions]
    assert len(ids) == len(prompts) == PROMPTS_PER_STEP * NUM_GENERATIONS
    assert not any(EOS in row for row in ids)
    return [sum(token % 2 == 0 for token in row) / (len(row) or 1) for row in ids]


def make_parts(*, meshes=None, max_steps=NUM_STEPS, **changes):
    """The arguments of an RLCluster, and the model that the actor is made of."""
    model = ref.make_tunix_qwen3(MODEL)
    mesh = one_device_mesh()
    fields = {
        "role_to_mesh": meshes or dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
        "rollout_config": rollout_config(),
        "training_config": RLTrainingConfig(
            actor_optimizer=optax.adam(1e-2),
            eval_every_n_steps=100,
            max_steps=max_steps,
            mini_batch_size=PROMPTS_PER_STEP,
            train_micro_batch_size=PROMPTS_PER_STEP,
            rollout_micro_batch_size=PROMPTS_PER_STEP,
            compute_logps_micro_batch_size=PROMPTS_PER_STEP,
        ),
    }
    arguments: dict[str, Any] = {
        "actor": model,
        "reference": ref.make_tunix_qwen3(MODEL),
        "tokenizer": EndingTokenizer(eos=EOS),
        "cluster_config": ClusterConfig(**(fields | changes)),
    }
    return types.SimpleNamespace(model=model, mesh=mesh, arguments=arguments)


def grpo_config(**changes):
    """GRPO with a reference, so that Tunix computes everything it can."""
    fields = {"num_generations": NUM_GENERATIONS, "beta": 0.04}
    return GRPOConfig(**(fields | changes))


def check_trained(cluster, num_updates=NUM_STEPS):
    """The rollout samples from the actor as it is now, and that is not what it was."""
    rollout, actor = cluster.rollout, cluster.actor_trainer.model
    assert isinstance(rollout, SglJaxRollout)
    assert cluster.global_steps == NUM_STEPS
    assert rollout.weight_version == num_updates
    prompts = [np.array(prompt.split(), np.int32) for prompt in PROMPTS]
    completions = ref.make_prompts(64, (8, 3, 8, 5), seed=8)
    got = scores(rollout, prompts, completions)

    def trainer(model):
        return ref.trainer_logps(model, prompts, completions, temperature=TEMPERATURE)

    model = ref.make_tunix_qwen3(MODEL)
    assert max_difference(got, trainer(model)) > 1e-2
    # Through the host, since the actor may be on other devices or in the host's memory.
    params = jax.tree.map(lambda x: jax.device_put(np.asarray(x)), params_of(actor))
    nnx.update(model, params)
    assert max_difference(got, trainer(model)) < 1e-4
