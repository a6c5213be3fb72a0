"""The config of a training run: what `loading.load_config` reads.

Sections that Tunix's command line has, have its names and words. Those whose fields are Tunix's own
are mappings, which Tunix's classes check; the docstrings below describe the rest, and
docs/training.md shows them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix_sgljax.checkpoints.lora_settings import LoraSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices.

    Attributes:
        shape: Devices along each axis; also as text, "(1,4)".
        axis_names: "fsdp" and "tp", over which Tunix shards parameters; the engine takes "tp".
    """

    shape: list[int] = dataclasses.field(default_factory=lambda: [1, 1])
    axis_names: list[str] = dataclasses.field(default_factory=lambda: ["fsdp", "tp"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The policy, which is also the reference, the base of LoRA and the start of the critic.

    Attributes:
        model_path: A Hugging Face folder: config.json and safetensors.
        model_name: A model that Tunix knows, for its shape: "qwen3-0.6b". With `model_path` the two
            must agree.
        family: "qwen2", "qwen3" or "llama3", with `shape`, for a model that has no name.
        shape: Fields of the family's `ModelConfig` in Tunix.
        checkpoint: A safetensors file of parameters by their Tunix names, for a `model_name` or a
            `family`; without it and `model_path` the model starts with random weights.
        rng_seed: Seed of random weights.
        dtype: "float32", "bfloat16" or "float16"; null takes Tunix's own dtype for the model.
        remat: What the trainer recomputes in its backward pass: "none", "block", "decoder".
        lora_config: See below; null trains all weights.
        mesh: The trainer's devices.
    """

    model_path: str | None = None
    model_name: str | None = None
    family: str | None = None
    shape: dict[str, Any] = dataclasses.field(default_factory=dict)
    checkpoint: str | None = None
    rng_seed: int = 0
    dtype: str | None = None
    remat: str = "none"
    lora_config: LoraSettings | None = None
    mesh: MeshConfig = MeshConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutModelSection:
    """The rollout's copy of the policy.

    Attributes:
        mesh: Its devices, after the trainer's; null shares the trainer's.
    """

    mesh: MeshConfig | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerSection:
    """The tokenizer.

    Attributes:
        tokenizer_path: A Hugging Face folder; null takes the model's.
        function: "module:function" instead: called without arguments, returns what Tunix's
            `TokenizerAdapter` takes.
        pad_token: A pad token instead of the tokenizer's; if there is none, Tunix uses the end
            token and hides end tokens from the loss.
    """

    tokenizer_path: str | None = None
    function: str | None = None
    pad_token: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSection:
    """The data and the rewards.

    Attributes:
        dataset: A .jsonl or .parquet file, or "module:function" which returns a sequence of rows.
        dataset_args: Keywords of that function.
        eval_dataset: Held-out rows, likewise.
        eval_dataset_args: Likewise.
        prompt_template: Builds the prompt from the columns of a row: "Q: {question} A:".
        chat: Render the prompt as a user's message with the tokenizer's chat template.
        system_prompt: A system message before it.
        columns: Columns for the reward functions; null takes all but `prompts`.
        reward_functions: "module:function" or the name of a built-in one; rewards are added.
        shuffle: Draw the rows in another order each epoch.
        code_dir: A folder to import modules from, such as the task's.
    """

    dataset: str
    dataset_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    eval_dataset: str | None = None
    eval_dataset_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    prompt_template: str = "{prompts}"
    chat: bool = False
    system_prompt: str | None = None
    columns: list[str] | None = None
    reward_functions: list[str] = dataclasses.field(default_factory=lambda: ["exact_match"])
    shuffle: bool = False
    code_dir: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverSamplingSection:
    """More groups in work than a step trains on, for GRPO with our engine.

    Attributes:
        factor: Groups in work, in multiples of those that a step trains on; 1 to 2, to drop 1 to
            16.
        unfinished: What happens to groups that a step does not wait for: "carry" goes on with them
            in the next step, "drop" throws them away, "abort" asks their prompts again.
        max_age: Most weight updates that a carried group lives through, or most times that a prompt
            is asked again.
        known_rewards: "module:function" that ends groups early whose rewards are known and equal.
    """

    factor: float = 1.25
    unfinished: str = "carry"
    max_age: int = 1
    known_rewards: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Attributes:
        seed: Seed of data order, sampling, the critic's head and new LoRA pairs.
        training_mode: "grpo" or "ppo".
        rollout_engine: The sampler: "sgljax", or "vanilla", Tunix's own.
        offload_to_cpu: Keep models in host memory while they are not used.
        batch_size: Prompts of a step.
        num_batches: Batches of prompts to train on, each followed by one weight sync.
        output_dir: Where records.json is written, and samples.jsonl: each completion with its
            prompt, reward and step.
        show_sample_every_n_steps: Steps from one completion that is printed to the next; 0 prints
            none.
        grpo_config: Fields of Tunix's `GRPOConfig`.
        ppo_config: Fields of Tunix's `PPOConfig`.
        rl_training_config: Fields of Tunix's `RLTrainingConfig`, with `actor_optimizer_config` and
            `critic_optimizer_config`.
        rollout_config: Fields of Tunix's `RolloutConfig`, or `total_generation_steps`.
        eval_rollout_config: Those that evaluation changes.
        sgljax_config: Keywords of `SglJaxRollout`, engine options among them.
        over_sampling: See below; null waits for all groups of a step.
    """

    seed: int = 0
    training_mode: str = "grpo"
    rollout_engine: str = "sgljax"
    offload_to_cpu: bool = False
    batch_size: int = 16
    num_batches: int = 100
    output_dir: str = "outputs/train"
    show_sample_every_n_steps: int = 10
    actor_model_config: ModelSection
    rollout_model_config: RolloutModelSection = RolloutModelSection()
    tokenizer_config: TokenizerSection = TokenizerSection()
    task: TaskSection
    grpo_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    ppo_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    rl_training_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    rollout_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    eval_rollout_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    sgljax_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    over_sampling: OverSamplingSection | None = None

    @property
    def rollout_mesh(self) -> MeshConfig:
        """The rollout's own mesh, or the trainer's."""
        return self.rollout_model_config.mesh or self.actor_model_config.mesh

    @property
    def algorithm(self) -> dict[str, Any]:
        """The section of the learner that `training_mode` names."""
        return self.ppo_config if self.training_mode == "ppo" else self.grpo_config

    @property
    def num_generations(self) -> int:
        """Completions of a prompt."""
        return 1 if self.training_mode == "ppo" else self.grpo_config.get("num_generations", 2)

    @property
    def mini_batch_size(self) -> int:
        """Prompts of an update of the weights."""
        return self.rl_training_config.get("mini_batch_size") or self.batch_size

    @property
    def micro_batch_size(self) -> int:
        """Prompts in the trainer at once."""
        return self.rl_training_config.get("train_micro_batch_size") or self.mini_batch_size

    @property
    def updates_per_step(self) -> int:
        """Number of weight updates with the completions of a step."""
        num_mini = self.batch_size // self.mini_batch_size
        return max(num_mini, 1) * self.algorithm.get("num_iterations", 1)

    @property
    def num_updates(self) -> int:
        """Number of weight updates in the whole run, as Tunix counts them."""
        given = self.rl_training_config.get("max_steps")
        return given or self.num_batches * self.updates_per_step

    @property
    def num_steps(self) -> int:
        """Number of batches that the run trains on."""
        return -(-self.num_updates // self.updates_per_step)

    @property
    def max_tokens(self) -> tuple[int, int]:
        """Maximum tokens of a prompt and of a completion."""
        given = self.rollout_config
        new = given.get("total_generation_steps", given.get("max_tokens_to_generate", 64))
        return given.get("max_prompt_length", 64), new

    @property
    def has_reference_model(self) -> bool:
        """Whether a run holds a reference model: not without a penalty, or if the base is it."""
        is_adapter = self.rollout_engine == "sgljax" and self.sgljax_config.get("lora") == "adapter"
        has_base = is_adapter and self.actor_model_config.lora_config is not None
        return self.algorithm.get("beta", 0.04) > 0 and not has_base
