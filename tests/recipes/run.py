"""Runs recipes, each with our engine named and nothing else changed: two steps, small.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.recipes.run 1 2 20

Writes a line of JSON for each: its number and what came out, "runs" or the error that stopped it.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import yaml
from flax import nnx
from tunix.cli.utils import model as model_lib
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl import rl_cluster as tunix_cluster
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig as AgenticConfig
from tunix.rl.agentic.agentic_grpo_learner import GRPOLearner as AgenticLearner
from tunix.rl.agentic.parser.chat_template_parser.parser import DefaultChatTemplateParser
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_cluster import ClusterConfig, Mode, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.utils import is_lora_enabled

from tests.recipes import models, rewards, task
from tests.recipes.recipes import RECIPES, Recipe
from tunix_sgljax import SglJaxRollout
from tunix_sgljax.cli import main as cli
from tunix_sgljax.maxtext.axes import logical_rules

NUM_STEPS = 2
BATCH = 4
GENERATIONS = 2
PROMPT = 96
LORA = {"rank": 4, "alpha": 4.0}
BASE = Path(__file__).parents[1] / "cli" / "tunix_recipe" / "base.yaml"


def run_recipe(recipe: Recipe, folder: Path) -> str:
    """Runs one; "runs", or the first line of the error that stopped it."""
    clusters: list[Any] = []
    init = RLCluster.__init__

    def remember(self: Any, **arguments: Any) -> None:
        clusters.append(self)
        init(self, **arguments)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RLCluster, "__init__", remember)
            if recipe.way == "cli" and recipe.learner != "ppo":
                _run_command(recipe, folder, patch)
            else:
                _run_program(recipe)
        _check(recipe, clusters[0])
    except Exception as error:
        if os.environ.get("RECIPES_DEBUG"):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1].line
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else where}"
    finally:
        for cluster in clusters:
            rollout = getattr(cluster, "_rollout", None)
            if isinstance(rollout, SglJaxRollout):
                rollout.close()
        clusters.clear()
    return "runs"


def _answer_length(recipe: Recipe) -> int:
    """Tokens of an episode at most, those that the environment says included."""
    return 64 if recipe.has_turns else 24


def _check(recipe: Recipe, cluster: Any) -> None:
    """Our rollout sampled, and got what the trainer made of the weights, after each step."""
    rollout = cluster.rollout
    assert isinstance(rollout, SglJaxRollout)
    assert cluster.global_steps == NUM_STEPS
    assert rollout.weight_version == NUM_STEPS
    assert rollout.dtype == recipe.dtype
    actor = cluster.actor_trainer.model
    assert is_lora_enabled(actor) == (recipe.lora is not None)
    kind = nnx.LoRAParam if recipe.lora else nnx.Param
    trained = nnx.state(actor, kind)
    assert rollout.find_differing_weights(trained) == []
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(trained))
    if recipe.lora:  # half of the leaves, B, began with zeros
        assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(trained))
    else:
        assert recipe.model is not None
        mesh = cluster.cluster_config.role_to_mesh[Role.ACTOR]
        first = nnx.state(models.make_model(recipe.model, mesh, recipe.dtype), kind)
        pairs = zip(jax.tree.leaves(trained), jax.tree.leaves(first), strict=True)
        assert any((np.asarray(now) != np.asarray(before)).any() for now, before in pairs)


# ---------------------------------------------------------------------- tunix.cli


def _run_command(recipe: Recipe, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Through `tunix-sgljax tunix grpo`; only the model is not read from where Tunix reads it."""

    def create_model(config: Any, tokenizer_config: Any, mesh: Any) -> tuple[Any, str]:
        assert recipe.model is not None
        return models.make_model(recipe.model, mesh, recipe.dtype), ""

    patch.setattr(model_lib, "create_model", create_model)
    patch.syspath_prepend(str(Path(__file__).parents[2]))
    path = folder / f"recipe_{recipe.number}.yaml"
    path.write_text(yaml.safe_dump(command_config(recipe, folder)))
    argv = ["tunix", "grpo", str(path), "rollout_engine=sgljax"]
    # Not `main`, which would make a line of text of an error.
    code = cli.find_command("tunix").run(cli.make_parser(argv).parse_args(argv))
    assert code == 0


def command_config(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The recipe's YAML: the sections of Tunix's base config with the recipe's values."""
    config = yaml.safe_load(BASE.read_text())
    trainer, own = recipe.meshes()
    names = "('fsdp','tp')"
    actor = {"mesh": {"shape": str(trainer), "axis_names": names}}
    if recipe.lora:
        actor["lora_config"] = {"module_path": recipe.lora, **LORA}
    config["actor_model_config"] |= actor
    if own is not None:
        config["rollout_model_config"]["mesh"] = {"shape": str(own), "axis_names": names}
    if recipe.elsewhere == "maxtext":
        for role in ("", "actor_", "reference_", "rollout_"):
            config[f"{role}model_config"]["model_source"] = "maxtext"
    names_pad = not recipe.pad_is_eos
    tokenizer = models.write_tokenizer(folder / f"tokenizer_{names_pad}", names_pad=names_pad)
    config["tokenizer_config"] |= {"tokenizer_path": str(tokenizer), "add_bos": False}
    training = config["rl_training_config"]
    training["actor_optimizer_config"]["weight_decay"] = 0.0
    for name in ("mini_batch_size", "train_micro_batch_size", "rollout_micro_batch_size"):
        training[name] = BATCH
    mode = "agentic_grpo" if recipe.learner == "agentic" else "grpo"
    algorithm = {"num_generations": GENERATIONS, "num_iterations": 1}
    config |= {
        "data_module": "tests.recipes.task",
        "data_config": {"num": NUM_STEPS * BATCH},
        "batch_size": BATCH,
        "num_batches": NUM_STEPS,
        "reward_functions": ["tests.recipes.rewards"],
        "rollout_engine": recipe.engine,
        "training_mode": mode,
        f"{mode}_config": {**algorithm, **recipe.algorithm},
        "rollout_config": {
            "max_prompt_length": PROMPT,
            "total_generation_steps": _answer_length(recipe),
            **recipe.rollout,
        },
    }
    if recipe.engine != "vanilla":
        config[f"{recipe.engine}_config"] = dict(recipe.section)
    if recipe.learner == "agentic":
        config["rollout_config"]["max_tokens_to_generate"] = _answer_length(recipe)
        config["prompt_key"] = "question"
    if recipe.has_turns:
        config["env_class_path"] = "tests.recipes.task.Turns"
    return config


# ---------------------------------------------------------------------- programs


def _run_program(recipe: Recipe) -> None:
    trainer, rollout = _make_meshes(recipe)
    assert recipe.model is not None
    reference = models.make_model(recipe.model, trainer, recipe.dtype)
    if recipe.lora:
        rule = {"module_path": recipe.lora, **LORA}
        actor = model_lib.apply_lora_to_model(reference, trainer, rule)
    else:
        actor = models.make_model(recipe.model, trainer, recipe.dtype)
    roles = {Role.ACTOR: trainer, Role.REFERENCE: trainer, Role.ROLLOUT: rollout}
    parts: dict[str, Any] = {"actor": actor, "reference": reference}
    if recipe.learner == "ppo":
        roles[Role.CRITIC] = trainer
        parts["critic"] = models.make_critic(trainer)
    tokenizer = models.make_tokenizer(names_pad=not recipe.pad_is_eos)
    cluster = tunix_cluster.RLCluster(
        **parts, tokenizer=tokenizer, cluster_config=_cluster_config(recipe, roles)
    )
    batch = BATCH * (GENERATIONS if recipe.learner == "ppo" else 1)
    dataset = task.create_dataset(NUM_STEPS * batch).batch(batch)
    make_learner = {"grpo": _make_grpo, "ppo": _make_ppo, "agentic": _make_agentic}
    learner = make_learner[recipe.learner](recipe, cluster, TokenizerAdapter(tokenizer))
    if recipe.evaluates:
        _evaluate(cluster)
    if recipe.eval_rollout is None:
        learner.train(dataset)
    else:
        learner.train(dataset, task.create_dataset(batch).batch(batch))
    if recipe.evaluates:
        _evaluate(cluster)


def _evaluate(cluster: Any) -> None:
    """Greedy answers by the sampler that Tunix's nightly script reads."""
    output = cluster._rollout._sampler(
        input_strings=["user: 3 + 4\nassistant: ", "user: 1\nassistant: "],
        max_generation_steps=24,
        temperature=1e-4,
        top_k=1,
        top_p=1.0,
        echo=False,
        seed=None,
    )
    assert len(output.text) == 2


def _make_meshes(recipe: Recipe) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
    devices = np.array(jax.devices())
    trainer, own = recipe.meshes()
    size = int(np.prod(trainer))
    mesh = jax.sharding.Mesh(devices[:size].reshape(trainer), recipe.axes)
    if own is None:
        return mesh, mesh
    first = 0 if recipe.shares_devices else size
    rest = devices[first : first + int(np.prod(own))]
    return mesh, jax.sharding.Mesh(rest.reshape(own), recipe.rollout_axes)


def _cluster_config(recipe: Recipe, roles: dict[Role, Any]) -> ClusterConfig:
    batch = BATCH * (GENERATIONS if recipe.learner == "ppo" else 1)
    # Without decay, nothing but a gradient changes a weight.
    optimizer = functools.partial(optax.adamw, 1e-3, weight_decay=0.0)
    training = RLTrainingConfig(
        actor_optimizer=optimizer(),
        critic_optimizer=optimizer() if recipe.learner == "ppo" else None,
        eval_every_n_steps=10 if recipe.eval_rollout is None else NUM_STEPS,
        max_steps=NUM_STEPS,
        mini_batch_size=batch,
        train_micro_batch_size=batch,
        rollout_micro_batch_size=batch,
        compute_logps_micro_batch_size=batch,
    )
    rules: dict[Role, Any] | None = None
    if recipe.elsewhere == "maxtext":
        rules = {role: logical_rules(mesh.axis_names) for role, mesh in roles.items()}
    return ClusterConfig(
        role_to_mesh=roles,
        role_to_logical_axis_rule=rules,
        rollout_engine=SglJaxRollout,
        training_config=training,
        rollout_config=_rollout_configs(recipe, roles[Role.ROLLOUT]),
    )


def _rollout_configs(recipe: Recipe, mesh: jax.sharding.Mesh) -> Any:
    sizes = dict(mesh.shape)
    fields = {
        name: sizes.get(value, value) if isinstance(value, str) else value
        for name, value in recipe.rollout.items()
    }
    lengths = {
        "max_prompt_length": PROMPT,
        "max_tokens_to_generate": _answer_length(recipe),
        "kv_cache_size": PROMPT + _answer_length(recipe) + 256,
    }
    training = RolloutConfig(**lengths, **fields)
    if recipe.eval_rollout is None:
        return training
    return {
        Mode.TRAIN: training,
        Mode.EVAL: RolloutConfig(**{**lengths, **fields, **recipe.eval_rollout}),
    }


def _make_grpo(recipe: Recipe, cluster: Any, tokenizer: Any) -> Any:
    config = GRPOConfig(num_generations=GENERATIONS, **recipe.algorithm)
    return GRPOLearner(cluster, algo_config=config, reward_fns=rewards.characters)


def _make_ppo(recipe: Recipe, cluster: Any, tokenizer: Any) -> Any:
    config = PPOConfig(num_iterations=1, **recipe.algorithm)
    return PPOLearner(cluster, config, rewards.characters)


def _make_agentic(recipe: Recipe, cluster: Any, tokenizer: Any) -> Any:
    config = AgenticConfig(
        num_generations=GENERATIONS, max_response_length=_answer_length(recipe), **recipe.algorithm
    )
    turns: dict[str, Any] = {"env_class": task.Turns} if recipe.has_turns else {}
    return AgenticLearner(
        cluster,
        config,
        reward_fns=None if recipe.has_turns else rewards.characters,
        chat_parser=DefaultChatTemplateParser(tokenizer),
        **turns,
    )


def main(numbers: list[int]) -> int:
    """Runs the recipes with these numbers."""
    by_number = {recipe.number: recipe for recipe in RECIPES}
    with tempfile.TemporaryDirectory() as folder:
        for index, number in enumerate(numbers):
            if index:
                jax.clear_caches()  # programs of one recipe are of no use to most others
                gc.collect()
            outcome = run_recipe(by_number[number], Path(folder))
            sys.stdout.write(json.dumps({"number": number, "outcome": outcome}) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]]))
