"""What `tunix-sgljax evaluate` does: a task's reward of a model, without training it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from tunix.rl import function_registry
from tunix.rl.algorithm_config import AlgorithmConfig
from tunix.rl.rl_cluster import Mode
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig
from tunix.sft.checkpoint_manager import CheckpointManager

from sgljax_engine import InvalidConfigError
from tunix_sgljax.checkpoints.tunix import find_latest, find_step, root_of, stored_shapes
from tunix_sgljax.observability.progress import Progress
from tunix_sgljax.reward_functions import checked
from tunix_sgljax.rollout import SglJaxRollout
from tunix_sgljax.training.cluster import (
    check_sections,
    end_tokens,
    make_algorithm,
    make_meshes,
    rollout_configs,
    rollout_engine,
)
from tunix_sgljax.training.lora import apply_lora, check_resume, checkpoint_root
from tunix_sgljax.training.models import (
    ModelSpec,
    check_shapes,
    find_model,
    load_policy,
    load_tokenizer,
)
from tunix_sgljax.training.schema import TrainConfig
from tunix_sgljax.training.task import Row, find_reward_functions, load_rows, to_columns

SPLITS = {"eval": "eval_dataset", "train": "dataset"}
"""Keys of the section `task` by the names of their rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """What to evaluate, beside a training's config: the options of the command, by their names.

    Without `checkpoint`, `step` and `model` it is the newest checkpoint of the config, or the
    weights that training starts with, which are step 0. None as `num_prompts` takes all rows, as
    `temperature` that of `eval_rollout_config`. `ks` are numbers of samples for pass@k.
    """

    checkpoint: Path | None = None
    step: int | None = None
    model: Path | None = None
    split: str = "eval"
    num_prompts: int | None = None
    num_samples: int = 1
    temperature: float | None = None
    ks: tuple[int, ...] = (1,)
    pass_reward: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("num_samples", 1), ("step", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                flag = "--" + name.replace("_", "-")
                raise InvalidConfigError(f"{flag} must be at least {least}, got {value}")
        for k in self.ks:
            if not 1 <= k <= self.num_samples:
                raise InvalidConfigError(
                    f"--k must be from 1 to the {self.num_samples} of --num-samples, got {k}"
                )
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise InvalidConfigError(f"--temperature must be at least 0, got {self.temperature}")
        if not math.isfinite(self.pass_reward):
            raise InvalidConfigError(f"--pass-reward must be finite, got {self.pass_reward}")
        if self.model is not None and (self.checkpoint is not None or self.step is not None):
            raise InvalidConfigError("--model goes without --checkpoint and --step")


class Weights(NamedTuple):
    """Whose weights were evaluated: a "checkpoint" of Tunix's, a "folder", a "file", or "random".

    `step` is a checkpoint's number of weight updates, else 0. Its LoRA pairs were added to the
    config's model.
    """

    kind: str
    path: str | None
    step: int = 0
    has_lora: bool = False

    def in_words(self) -> str:
        if self.kind == "checkpoint":
            pairs = "LoRA pairs of " if self.has_lora else ""
            return f"{pairs}step {self.step} of the checkpoints in {self.path}"
        return "random weights" if self.path is None else f"the {self.kind} {self.path}"


class Evaluation(NamedTuple):
    """The result of an evaluation: what evaluation.json holds.

    `standard_error` is that of the mean reward over prompts; None for one prompt. `pass_at_k` is
    the share of prompts of which at least one of k samples passes, by k. `num_cut` completions
    ended at the most tokens. `samples` has each prompt's text, completions and rewards.
    """

    weights: Weights
    data: dict[str, Any]
    sampling: dict[str, Any]
    mean_reward: float
    standard_error: float | None
    pass_at_k: dict[str, float]
    pass_reward: float
    num_cut: int
    samples: list[dict[str, Any]]


def run_evaluation(
    config: TrainConfig, options: EvaluationOptions, progress: Progress | None = None
) -> Evaluation:
    """Samples completions of a task's prompts as a training would, and rewards them."""
    config = _with_options(config, options)
    check_sections(config)
    algorithm = make_algorithm(config)
    reward_fns = [checked(function) for function in find_reward_functions(config.task)]
    tokenizer = load_tokenizer(config)
    rows, num = _rows(config, options, tokenizer), options.num_samples
    sampling = rollout_configs(config, end_tokens(config, tokenizer.eos_id()))[Mode.EVAL]
    if sampling.temperature == 0 and num > 1:
        raise InvalidConfigError(
            f"--num-samples {num} needs a temperature above 0: greedy completions "
            "of a prompt are all the same"
        )
    spec = find_model(config.actor_model_config)
    trainer_mesh, rollout_mesh = make_meshes(config)
    actor, weights = _load_weights(config, options, spec, trainer_mesh)
    worker = rollout_engine(config, progress)(
        rollout_actor=actor, tokenizer=tokenizer, mesh=rollout_mesh, rollout_config=sampling
    )
    repeated = [row for row in rows for _ in range(num)]
    prompts = [row["prompts"] for row in repeated]
    try:
        texts, num_cut = _generate(worker, prompts, sampling, config)
    finally:
        if isinstance(worker, SglJaxRollout):
            worker.close()
    rewards = sum_rewards(reward_fns, prompts, texts, to_columns(repeated), algorithm)
    rewards_PS = rewards.reshape(len(rows), num)
    num_passed = (rewards_PS >= options.pass_reward).sum(axis=1).tolist()
    error = rewards_PS.mean(axis=1).std(ddof=1) / math.sqrt(len(rows)) if len(rows) > 1 else None
    names = ("temperature", "top_p", "top_k", "max_tokens_to_generate")
    return Evaluation(
        weights=weights,
        data={
            "dataset": getattr(config.task, SPLITS[options.split]),
            "split": options.split,
            "reward_functions": config.task.reward_functions,
            "num_prompts": len(rows),
        },
        sampling={
            "rollout_engine": config.rollout_engine,
            "num_samples": num,
            **{name: getattr(sampling, name) for name in names},
            "seed": config.seed,
        },
        mean_reward=float(rewards.mean()),
        standard_error=None if error is None else float(error),
        pass_at_k={str(k): pass_at_k(num_passed, num, k) for k in options.ks},
        pass_reward=options.pass_reward,
        num_cut=num_cut,
        samples=[
            {
                "prompt": row["prompts"],
                "completions": texts[i * num : (i + 1) * num],
                "rewards": rewards_PS[i].tolist(),
            }
            for i, row in enumerate(rows)
        ],
    )


def sum_rewards(
    reward_fns: list[Callable[..., Any]],
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Any],
    algorithm: AlgorithmConfig | None = None,
) -> np.ndarray:
    """The rewards of completions, one of each prompt, by Tunix's reward manager.

    Shape: [R] float64.
    """
    algorithm = algorithm or AlgorithmConfig()
    manager = function_registry.get_reward_manager(algorithm.reward_manager)(
        reward_fns=reward_fns, algo_config=algorithm
    )
    own = {"mode": str(Mode.EVAL), "trajectory_ids": [f"{i}_0" for i in range(len(prompts))]}
    found = manager(prompts=list(prompts), completions=list(completions), **own, **columns)
    return np.asarray(found["rewards"], np.float64)


def pass_at_k(num_passed: Sequence[int], num_samples: int, k: int) -> float:
    """The chance that at least one of k samples of a prompt passes, as a mean over prompts.

    The unbiased estimate of Chen et al., 2021: 1 - C(n - c, k) / C(n, k) with c of n passed.
    """
    subsets = math.comb(num_samples, k)
    shares = [1 - math.comb(num_samples - passed, k) / subsets for passed in num_passed]
    return float(np.mean(shares))


def _with_options(config: TrainConfig, options: EvaluationOptions) -> TrainConfig:
    training = dict(config.rl_training_config)
    if options.checkpoint is not None:
        if not options.checkpoint.is_dir():
            raise InvalidConfigError(f"--checkpoint must be a folder, got {options.checkpoint}")
        training["checkpoint_root_directory"] = str(options.checkpoint)
    changes: dict[str, Any] = {"rl_training_config": training, "over_sampling": None}
    if options.model is not None:
        training["checkpoint_root_directory"] = None
        none = dict.fromkeys(("model_name", "family", "checkpoint", "lora_config"))
        changes["actor_model_config"] = dataclasses.replace(
            config.actor_model_config, model_path=str(options.model), shape={}, **none
        )
    if options.temperature is not None:
        sampling = {**config.eval_rollout_config, "temperature": options.temperature}
        changes["eval_rollout_config"] = sampling
    return dataclasses.replace(config, **changes)


def _rows(config: TrainConfig, options: EvaluationOptions, tokenizer: Any) -> list[Row]:
    key = SPLITS[options.split]
    rows = load_rows(config.task, key, tokenizer)
    if not rows:
        raise InvalidConfigError(
            "task.eval_dataset must be given, or --split train to evaluate on the rows that "
            "training sees"
        )
    if options.num_prompts is not None and options.num_prompts > len(rows):
        raise InvalidConfigError(
            f"--num-prompts must be at most the {len(rows)} rows of task.{key}, got "
            f"{options.num_prompts}"
        )
    return rows[: options.num_prompts]


def _load_weights(
    config: TrainConfig, options: EvaluationOptions, spec: ModelSpec, mesh: Any
) -> tuple[nnx.Module, Weights]:
    model, lora = config.actor_model_config, config.actor_model_config.lora_config
    folder = _checkpoint_folder(config, options)
    if folder is None:
        if model.model_path is not None:
            first = Weights("folder", model.model_path)
        else:
            first = Weights("random" if model.checkpoint is None else "file", model.checkpoint)
        return load_policy(model, spec, mesh), first
    step, training = int(folder.parent.name), dict(config.rl_training_config)
    training["checkpoint_root_directory"] = str(root_of(folder))
    check_resume(dataclasses.replace(config, rl_training_config=training), spec)
    if lora is None:
        check_shapes(f"checkpoint {folder}", stored_shapes(folder), nnx.state(spec.abstract()))
    actor = load_policy(model, spec, mesh)
    if lora is not None:
        actor = apply_lora(actor, lora, config.seed)
    manager = CheckpointManager(
        str(folder.parent.parent.absolute()), ocp.CheckpointManagerOptions(read_only=True)
    )
    try:
        manager.maybe_restore(actor, step=step, restore_only_lora_params=lora is not None)
    finally:
        manager.close()
    return actor, Weights("checkpoint", str(folder.parent.parent), step, lora is not None)


def _checkpoint_folder(config: TrainConfig, options: EvaluationOptions) -> Path | None:
    """The parameters of the checkpoint to evaluate; None for a training's first weights."""
    root = checkpoint_root(config)
    if options.step == 0:
        return None
    if options.checkpoint is None and options.step is None:
        return None if root is None else find_latest(root)
    if root is None:
        raise InvalidConfigError(
            f"--step {options.step} needs --checkpoint, since "
            "rl_training_config.checkpoint_root_directory is null"
        )
    return find_step(root, options.step)


def _generate(
    worker: BaseRollout, prompts: list[str], sampling: RolloutConfig, config: TrainConfig
) -> tuple[list[str], int]:
    """A completion of each prompt, and how many ended at the most tokens."""
    # Continuous batching wants all prompts at once; vanilla takes memory for all that it is given.
    is_ours = isinstance(worker, SglJaxRollout)
    size = len(prompts) if is_ours else config.batch_size * config.num_generations
    ends, texts, num_cut = set(sampling.eos_tokens or [worker.eos_id()]), [], 0
    for first in range(0, len(prompts), size):
        output = worker.generate(prompts[first : first + size], sampling)
        texts += output.text
        num_cut += sum(
            len(ids) >= sampling.max_tokens_to_generate and int(ids[-1]) not in ends
            for ids in output.tokens
        )
    return texts, num_cut
