"""The config of a training run: nested dataclasses, read by `loading.load_config`.

Names are Tunix's where the meaning is the same. The docstring of each class describes its fields;
docs/training.md is tested against these classes.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """The shape of a model, by the names of Tunix's `ModelConfig`.

    Attributes:
        num_layers: Decoder layers.
        vocab_size: Rows of the embedding table.
        embed_dim: Width of the residual stream.
        hidden_dim: Width of the MLP.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        norm_eps: Added under the root of RMSNorm.
        rope_theta: Base of the rotary embedding; Tunix 0.1.7 ignores it for Qwen3 and Llama 3.
        use_tied_embedding: The output projection is the embedding table.
        num_experts: Experts of each layer, of width `hidden_dim`; null for a dense model.
        num_experts_per_tok: Experts that a token goes through; null for a dense model.
    """

    num_layers: int
    vocab_size: int
    embed_dim: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope_theta: int = 1_000_000
    use_tied_embedding: bool = True
    num_experts: int | None = None
    num_experts_per_tok: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The policy, which is also the reference, the base of LoRA and the start of the critic.

    Attributes:
        path: A Hugging Face folder: config.json and safetensors.
        name: A model that Tunix knows, for its shape: "qwen3-0.6b", "llama-3.2-3b". With `path`
            the two must agree.
        family: "qwen2", "qwen3" or "llama3", with `shape`, for a model that has no name.
        shape: See `family`.
        checkpoint: A safetensors file of parameters by their Tunix names, for a `name` or a
            `family`; without it and `path` the model starts with random weights.
        init_seed: Seed of random weights.
        dtype: "float32", "bfloat16" or "float16"; null takes Tunix's own dtype for the model.
        remat: What the trainer recomputes in its backward pass: "none", "block", "decoder".
    """

    path: str | None = None
    name: str | None = None
    family: str | None = None
    shape: ShapeConfig | None = None
    checkpoint: str | None = None
    init_seed: int = 0
    dtype: str | None = None
    remat: str = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraSection:
    """LoRA: a frozen base, and a trained low-rank pair beside each chosen weight.

    Attributes:
        rank: Rank of the pairs.
        alpha: Numerator of the pairs' scale, alpha / rank. Checkpoints do not hold it.
        module_path: A regular expression that must match the whole path of a module, such as
            "layers/0/attn/q_proj". The default takes all projections of the layers.
        mode: How the engine applies the pairs: "merged" adds them to the base at each sync;
            "adapter" keeps them apart, and the base in the engine is the reference of the run.
        weight_qtype: Quantise the frozen weights that have a pair (QLoRA): "int8", "int4" or "nf4";
            null leaves them.
    """

    rank: int
    alpha: float
    module_path: str = ".*(attn|mlp).*"
    mode: str = "merged"
    weight_qtype: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerSection:
    """The tokenizer.

    Attributes:
        path: A Hugging Face folder; null takes `model.path`.
        function: "module:function" instead: called without arguments, returns what Tunix's
            `TokenizerAdapter` takes.
        pad_token: A pad token instead of the tokenizer's; if there is none, Tunix uses the end
            token and hides end tokens from the loss.
    """

    path: str | None = None
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
        prompt_column: The column that is the prompt.
        prompt_template: Builds the prompt from a row instead: "Q: {question} A:".
        chat: Render the prompt as a user's message with the tokenizer's chat template.
        system_prompt: A system message before it.
        columns: Columns for the reward functions; null takes all but the prompt's.
        reward_functions: "module:function" or the name of a built-in one; rewards are added.
        shuffle: Draw the rows in another order each epoch.
        code_dir: A folder to import modules from, such as the task's.
    """

    dataset: str
    dataset_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    eval_dataset: str | None = None
    eval_dataset_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    prompt_column: str = "prompts"
    prompt_template: str | None = None
    chat: bool = False
    system_prompt: str | None = None
    columns: list[str] | None = None
    reward_functions: list[str] = dataclasses.field(default_factory=lambda: ["exact_match"])
    shuffle: bool = False
    code_dir: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoSection:
    """Fields of Tunix's `GRPOConfig`.

    Attributes:
        num_generations: Completions of a prompt.
        num_iterations: Updates with the same completions.
        beta: Weight of the KL divergence from the reference; 0 needs no reference.
        epsilon: Clip range of the policy ratio.
        kl_loss_mode: Which estimate of the divergence: "kl", "low_var_kl", "mse_kl".
        kl_clamp_value: Bound of a token's divergence.
        loss_algo: "grpo" or "gspo-token".
        loss_agg_mode: How token losses are averaged.
    """

    num_generations: int = 8
    num_iterations: int = 1
    beta: float = 0.04
    epsilon: float = 0.2
    kl_loss_mode: str = "kl"
    kl_clamp_value: float | None = None
    loss_algo: str = "grpo"
    loss_agg_mode: str = "sequence-mean-token-mean"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PpoSection:
    """Fields of Tunix's `PPOConfig`.

    Attributes:
        num_iterations: Updates with the same completions.
        gamma: Discount of later rewards.
        gae_lambda: Lambda of generalised advantage estimation.
        beta: Weight of the KL divergence from the reference; 0 needs no reference.
        epsilon: Clip range of the policy ratio.
        epsilon_low: Lower clip range; null takes `epsilon`.
        epsilon_high: Upper clip range; null takes `epsilon`.
        epsilon_c: Bound of dual-clip PPO, above 1; null clips once.
        entropy_coef: Weight of the entropy in the loss.
        clip_range_value: Clip range of the critic's values.
        kl_method: Which estimate of the divergence: "low_var_kl", "kl", "mse_kl".
        kl_clamp_value: Bound of a token's divergence.
    """

    num_iterations: int = 1
    gamma: float = 1.0
    gae_lambda: float = 0.95
    beta: float = 0.04
    epsilon: float = 0.2
    epsilon_low: float | None = None
    epsilon_high: float | None = None
    epsilon_c: float | None = None
    entropy_coef: float | None = None
    clip_range_value: float = 0.2
    kl_method: str = "low_var_kl"
    kl_clamp_value: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmSection:
    """The learner.

    Attributes:
        name: "grpo" or "ppo".
        grpo: Options of GRPO.
        ppo: Options of PPO.
    """

    name: str = "grpo"
    grpo: GrpoSection = GrpoSection()
    ppo: PpoSection = PpoSection()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """An optax optimizer.

    Attributes:
        opt_type: "adam", "adamw" or "sgd".
        learning_rate: The highest learning rate.
        schedule_type: "constant", "linear" (from `learning_rate` to `end_value`) or
            "warmup_cosine_decay".
        warmup_steps: Updates in which the rate rises from `init_value`.
        decay_steps: Updates until the rate reaches `end_value`, warm-up included; null takes all.
        init_value: Rate at which warm-up begins.
        end_value: Rate at which decay ends.
        b1: First decay rate of Adam.
        b2: Second decay rate of Adam.
        weight_decay: Weight decay of AdamW.
        max_grad_norm: Gradients are scaled down to this norm; null leaves them.
    """

    opt_type: str = "adam"
    learning_rate: float = 1e-6
    schedule_type: str = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    init_value: float = 0.0
    end_value: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """The loop. Batch sizes count prompts.

    Attributes:
        steps: Batches of prompts to train on, each followed by one weight sync.
        batch_size: Prompts of a step.
        mini_batch_size: Prompts of an update of the weights; null takes all.
        train_micro_batch_size: Prompts in the trainer at once; null takes the mini batch.
        rollout_micro_batch_size: Prompts per call of the engine; null takes all, as continuous
            batching needs.
        compute_logps_micro_batch_size: Prompts scored at once; null takes `train_micro_batch_size`.
        optimizer: Optimizer of the policy.
        critic_optimizer: Optimizer of PPO's critic; null takes `optimizer`.
        eval_every_n_steps: Updates between evaluations on `task.eval_dataset`.
        checkpoint_root_directory: Where Tunix keeps checkpoints; a run resumes from the newest.
        save_interval_steps: Updates between checkpoints.
        max_to_keep: Maximum number of checkpoints.
        metrics_log_dir: Where Tunix's metrics logger writes.
        output_dir: Where records.json and training.png are written.
    """

    steps: int = 100
    batch_size: int = 16
    mini_batch_size: int | None = None
    train_micro_batch_size: int | None = None
    rollout_micro_batch_size: int | None = None
    compute_logps_micro_batch_size: int | None = None
    optimizer: OptimizerSection = OptimizerSection()
    critic_optimizer: OptimizerSection | None = None
    eval_every_n_steps: int | None = None
    checkpoint_root_directory: str | None = None
    save_interval_steps: int = 50
    max_to_keep: int = 3
    metrics_log_dir: str | None = None
    output_dir: str = "outputs/train"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSampling:
    """How evaluation samples.

    Attributes:
        temperature: 0 is greedy.
        top_p: See `RolloutSection`.
        top_k: See `RolloutSection`.
    """

    temperature: float = 0.0
    top_p: float | None = 1.0
    top_k: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutSection:
    """Sampling: fields of Tunix's `RolloutConfig`.

    Attributes:
        max_prompt_length: Tokens that prompts are padded to.
        max_tokens_to_generate: Maximum number of tokens of a completion.
        temperature: 0 is greedy, and useless for training.
        top_p: Share of probability to keep.
        top_k: Number of tokens to keep; null keeps all.
        eos_tokens: Ids that end a completion; null takes the tokenizer's, and those of the model
            folder's generation_config.json.
        return_logprobs: Return log-probs of the sampled tokens.
        kv_cache_size: Tokens of a row in vanilla's cache; null takes the most that a row can need.
        eval: Sampling of evaluation; null samples as in training.
    """

    max_prompt_length: int = 64
    max_tokens_to_generate: int = 64
    temperature: float = 1.0
    top_p: float | None = 1.0
    top_k: int | None = None
    eos_tokens: list[int] | None = None
    return_logprobs: bool = False
    kv_cache_size: int | None = None
    eval: EvalSampling | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSection:
    """Options of `SglJaxRollout`.

    Attributes:
        options: Engine options by their flat names: `page_size`, `max_running_requests`.
        sampling_params: Sampling fields that `rollout` does not have: `min_p`, `stop`.
        logprobs_mode: Which log-probs a rollout returns.
        match_batch_size: Rows that "trainer_match" scores together.
        weight_update_mode: What an update does to completions in flight.
        release_kv_between_steps: Free the KV cache's memory while the trainer works.
        strict_config: Refuse fields of a RolloutConfig that have no meaning for the rollout.
    """

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sampling_params: dict[str, Any] = dataclasses.field(default_factory=dict)
    logprobs_mode: str = "trainer_logprobs"
    match_batch_size: int | None = None
    weight_update_mode: str = "retract"
    release_kv_between_steps: bool = False
    strict_config: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSection:
    """Devices.

    Attributes:
        shape: Devices along each axis.
        axis_names: Tunix shards parameters over "fsdp" and "tp"; the engine over "tp" alone.
        rollout_shape: A separate mesh for the rollout, on the devices after the trainer's; null
            shares the trainer's.
    """

    shape: list[int] = dataclasses.field(default_factory=lambda: [1, 1])
    axis_names: list[str] = dataclasses.field(default_factory=lambda: ["fsdp", "tp"])
    rollout_shape: list[int] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Attributes:
        title: Title of the plot.
        seed: Seed of data order, sampling, the critic's head and new LoRA pairs.
        rollout_engine: The sampler: "sgljax", or "vanilla", Tunix's own.
        offload_to_cpu: Keep models in host memory while they are not used.
        model: The policy.
        lora: Train low-rank pairs beside it; null trains all parameters.
        tokenizer: Its tokenizer.
        task: Data and rewards.
        algorithm: GRPO or PPO.
        training: The loop.
        rollout: Sampling.
        engine: Options of this engine.
        mesh: Devices.
    """

    title: str = "training"
    seed: int = 0
    rollout_engine: str = "sgljax"
    offload_to_cpu: bool = False
    model: ModelSection
    lora: LoraSection | None = None
    tokenizer: TokenizerSection = TokenizerSection()
    task: TaskSection
    algorithm: AlgorithmSection = AlgorithmSection()
    training: TrainingSection = TrainingSection()
    rollout: RolloutSection = RolloutSection()
    engine: EngineSection = EngineSection()
    mesh: MeshSection = MeshSection()
