"""Small MaxText actors, and Tunix's cluster around them, without `train_rl`."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import grain
import optax
from flax import nnx
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from tests.maxtext import recipe, task
from tests.recipes.models import make_tokenizer
from tunix_sgljax.maxtext import SglJaxMaxTextRollout
from tunix_sgljax.maxtext.axes import logical_rules

# By name: types are checked without MaxText.
pyconfig: Any = importlib.import_module("maxtext.configs.pyconfig")
lora_utils: Any = importlib.import_module("maxtext.utils.lora_utils")
model_creation_utils: Any = importlib.import_module("maxtext.utils.model_creation_utils")
CONFIGS = Path(importlib.import_module("maxtext.utils.globals").MAXTEXT_CONFIGS_DIR)

PAD_ID = 0
PROMPTS = [f"say e, {name}" for name in ("ann", "bob", "cem", "dia")]
"""What `train` trains on, all of one length."""


class Actor(NamedTuple):
    """An adapter, its mesh and MaxText's config."""

    model: Any
    mesh: Any
    config: Any


def make(*words: str, mesh: Any = None, pad_id: int | None = PAD_ID) -> Actor:
    """A model as MaxText makes it; `lora.enable_lora=True` gives it pairs.

    Args:
        *words: Overrides of MaxText's base.yml; later ones win.
        mesh: Of any axes; None lets MaxText make one.
        pad_id: Given to the adapter; Tunix's own command gives none.
    """
    given = (
        "run_name=tiny",
        "attention=dot_product",
        "convert_checkpoint_if_possible=False",
        "enable_checkpointing=False",
        "skip_jax_distributed_system=True",
        "hardware=cpu",
        "log_config=False",
        "jax_cache_dir=",
        "max_target_length=32",
        "per_device_batch_size=1",
        "remat_policy=full",
        *recipe.QWEN3,
        *words,
    )
    latest = {word.partition("=")[0]: word for word in given}
    config = pyconfig.initialize_pydantic(["", str(CONFIGS / "base.yml"), *latest.values()])
    made = model_creation_utils.from_pretrained(
        config, mesh=mesh, wrap_with_tunix_adapter=True, tokenizer_pad_id=pad_id
    )
    model, mesh = made if mesh is None else (made, mesh)
    if config.lora.enable_lora:
        # MaxText's function takes the model inside the adapter.
        model.base = lora_utils.apply_lora_to_model(model.base, mesh, config)
    return Actor(model, mesh, config)


def rollout_config(**changes: Any) -> RolloutConfig:
    """Samples as `recipe` does."""
    fields: dict[str, Any] = {
        "max_prompt_length": recipe.PROMPT,
        "max_tokens_to_generate": recipe.TOTAL - recipe.PROMPT,
        "kv_cache_size": recipe.TOTAL + 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
    }
    return RolloutConfig(**(fields | changes))


def make_rollout(actor: Actor, config: RolloutConfig | None = None, **options: Any) -> Any:
    """A rollout alone, on the actor's mesh, that samples no padding: the trainer would hide it."""
    return SglJaxMaxTextRollout(
        maxtext_config=actor.config,
        rollout_actor=actor.model,
        tokenizer=make_tokenizer(names_pad=True),
        mesh=actor.mesh,
        rollout_config=rollout_config() if config is None else config,
        sampling_params={"bad_token_ids": [PAD_ID]},
        **options,
    )


def train(
    actor: Actor,
    num_steps: int,
    learning_rate: float,
    prompt_length: int = recipe.PROMPT,
    **options: Any,
) -> Any:
    """Tunix's GRPO on the actor with our rollout; returns the cluster.

    Args:
        actor: The policy; it is the reference too, which a beta of 0 never asks.
        num_steps: Steps of `recipe.BATCH` prompts.
        learning_rate: Of Adam.
        prompt_length: To which the trainer pads `PROMPTS` on the left.
        **options: Of the rollout.
    """
    rules = logical_rules(actor.mesh.axis_names)
    roles = rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT
    engine: Any = functools.partial(SglJaxMaxTextRollout, maxtext_config=actor.config, **options)
    cluster = rl_cluster.RLCluster(
        actor=actor.model,
        reference=nnx.clone(actor.model),
        tokenizer=make_tokenizer(names_pad=True),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, actor.mesh),
            role_to_logical_axis_rule=dict.fromkeys(roles, rules),
            rollout_engine=engine,
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(learning_rate),
                eval_every_n_steps=num_steps + 1,
                max_steps=num_steps,
                mini_batch_size=recipe.BATCH,
                train_micro_batch_size=recipe.BATCH,
            ),
            rollout_config=rollout_config(max_prompt_length=prompt_length),
        ),
    )
    rows = [{"prompts": prompt} for prompt in PROMPTS]
    dataset = grain.MapDataset.source(rows).repeat().batch(recipe.BATCH)[:num_steps]
    learner = GRPOLearner(
        cluster,
        algo_config=GRPOConfig(num_generations=recipe.NUM_GENERATIONS, beta=0.0),
        reward_fns=_reward,
    )
    learner.train(dataset.to_iter_dataset())
    return cluster


def _reward(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    return task.share_of_e(prompts, completions, None)
