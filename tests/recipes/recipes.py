"""The recipes of Tunix's own repository, one record each, and how they are shrunk to be run.

What a record says of its recipe was read in the recipe itself, at commit c7d8950f of google/tunix.
Lengths, batches, ranks and models are small here; the rest is as the recipe has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

NUM_DEVICES = 8

_EINSUMS = ".*q_einsum|.*kv_einsum|.*gate_proj|.*down_proj|.*up_proj|.*attn_vec_einsum"
_PROJECTIONS = ".*q_proj|.*k_proj|.*v_proj|.*o_proj|.*gate_proj|.*down_proj|.*up_proj"
_GSM8K: dict[str, Any] = {"temperature": 0.9, "top_p": 1.0, "top_k": 50}
_GRPO = "examples/rl/grpo/gsm8k"
_PPO = "examples/rl/ppo/gsm8k"
_VLLM_KWARGS = {
    "kv_cache_metrics": True,
    "disable_log_stats": False,
    "enable_prefix_caching": True,
}


_FROZENLAKE: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": 0,
    "return_logprobs": True,
}
_FROZENLAKE_KWARGS: dict[str, Any] = {
    **_VLLM_KWARGS,
    "enable_prefix_caching": False,
    "dtype": "bfloat16",
    "hf_overrides": {
        "final_logit_softcapping": 30.0,
        "text_config": {"final_logit_softcapping": 30.0},
        "architectures": ["Gemma4ForCausalLM"],
    },
}
_FROZENLAKE_GRPO: dict[str, Any] = {
    "beta": 0.0,
    "epsilon": 0.003,
    "epsilon_high": 0.005,
    "loss_algo": "gspo-token",
    "loss_agg_mode": "sequence-mean-token-mean",
    "kl_loss_mode": "low_var_kl",
    "advantage_estimator": "rloo",
    "sampler_is": "token",
    "sampler_is_threshold": 2.0,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe.

    Attributes:
        number: Its row in the list of recipes.
        title: What it trains.
        source: Its file in Tunix's repository.
        way: Whether it is a YAML for `tunix.cli` or a program.
        learner: GRPOLearner, PPOLearner, or the agentic GRPOLearner.
        model: A key of `models.MODELS`, which has the recipe's family and its ratio of heads to
            kv heads; None for one that is not run here.
        engine: What it names as `rollout_engine`.
        lora: The module path of its LoRA rule; None trains all weights.
        mesh: Of the trainer and, if there is no `rollout_mesh`, of the rollout: fsdp, tp.
        rollout_mesh: Of the rollout, if it differs: on devices of its own, or on the trainer's.
        axes, rollout_axes: Names of the axes of those.
        shares_devices: Whether the rollout's mesh is made of the trainer's devices.
        rollout: Fields of RolloutConfig but lengths.
        eval_rollout: Those that differ in its evaluation config, if it has one.
        section: The section for the engine that its YAML fills in.
        pad_is_eos: Whether its tokenizer names no padding token.
        dtype: What its model computes in; weights are stored in float32.
        algorithm: Fields of its GRPOConfig or PPOConfig.
        has_turns: Whether episodes have several turns.
        evaluates: Whether it evaluates the rollout before and after its training, by itself.
        elsewhere: The environment that it needs: "tunix", a checkout of Tunix's main, or "maxtext".
        stops_at: What of it does not run, though its training does.
        remark: What a reader should know about a recipe that runs.
    """

    number: int
    title: str
    source: str
    way: Literal["cli", "script"]
    learner: Literal["grpo", "ppo", "agentic"]
    model: str | None
    engine: Literal["vanilla", "vllm", "sglang_jax"]
    lora: str | None = None
    mesh: tuple[int, int] = (2, 4)
    rollout_mesh: tuple[int, int] | None = None
    axes: tuple[str, str] = ("fsdp", "tp")
    rollout_axes: tuple[str, str] = ("fsdp", "tp")
    shares_devices: bool = False
    rollout: Mapping[str, Any] = dataclasses.field(default_factory=lambda: _GSM8K)
    eval_rollout: Mapping[str, Any] | None = None
    section: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pad_is_eos: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    algorithm: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    has_turns: bool = False
    evaluates: bool = False
    elsewhere: Literal["", "tunix", "maxtext"] = ""
    stops_at: str = ""
    remark: str = ""

    @property
    def runs_here(self) -> bool:
        """Whether the project's own environment is enough."""
        return self.model is not None and not self.elsewhere

    def meshes(self) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """The meshes it is run on: the longest axes are halved until `NUM_DEVICES` are enough."""
        shapes = [list(self.mesh)] + ([list(self.rollout_mesh)] if self.rollout_mesh else [])
        count = max if self.shares_devices else sum
        while count(fsdp * tp for fsdp, tp in shapes) > NUM_DEVICES:
            for shape in shapes:
                longest = shape.index(max(shape))
                shape[longest] = max(shape[longest] // 2, 1)
        trainer, *rest = [(fsdp, tp) for fsdp, tp in shapes]
        return trainer, rest[0] if rest else None


def _grpo(number: int, title: str, model: str, source: str, **fields: Any) -> Recipe:
    return Recipe(
        number=number,
        title=f"GRPO, {title}",
        source=f"{_GRPO}/{source}",
        way="cli",
        learner="grpo",
        model=model,
        engine=fields.pop("engine", "vanilla"),
        **fields,
    )


def _ppo(number: int, title: str, model: str, source: str, **fields: Any) -> Recipe:
    return Recipe(
        number=number,
        title=f"PPO, {title}",
        source=f"{_PPO}/{source}",
        way="cli",
        learner="ppo",
        model=model,
        engine="vanilla",
        **fields,
    )


_DISAGG_8B: dict[str, Any] = {
    "hbm_utilization": 0.4,
    "tpu_backend_type": "jax",
    "server_mode": True,
    "async_scheduling": True,
    "max_num_seqs": 32,
    "kwargs": _VLLM_KWARGS,
}
_VLLM_FIELDS: dict[str, Any] = {
    "rollout_vllm_tpu_backend_type": "jax",
    "rollout_vllm_server_mode": True,
    "rollout_vllm_kwargs": _VLLM_KWARGS,
}

RECIPES = (
    _grpo(1, "Gemma 2 2B", "gemma2", "configs/gemma2_2b.yaml", lora=_EINSUMS),
    _grpo(
        2,
        "Gemma 3 1B",
        "gemma3_mqa",
        "configs/gemma3_1b.yaml",
        lora=_EINSUMS,
        rollout={**_GSM8K, "eos_tokens": [2, 98]},
    ),
    _grpo(3, "Gemma 3 4B", "gemma3", "configs/gemma3_4b.yaml", lora=_EINSUMS),
    _grpo(4, "Gemma 3 12B", "gemma3", "configs/gemma3_12b.yaml", lora=_EINSUMS),
    _grpo(5, "Gemma 7B", "gemma_mha", "run_gemma_7b.sh", lora=_EINSUMS),
    _grpo(
        6,
        "Llama 3.1 8B",
        "llama3",
        "configs/llama3.1_8b.yaml",
        lora=_PROJECTIONS,
        pad_is_eos=True,
    ),
    _grpo(
        7,
        "Llama 3.2 1B",
        "llama3_tied",
        "configs/llama3.2_1b.yaml",
        lora=_PROJECTIONS,
        pad_is_eos=True,
    ),
    _grpo(
        8,
        "Llama 3.2 1B, rewards as verl has them",
        "llama3_tied",
        "verl_compatible/run_llama3.2_1b.sh",
        mesh=(4, 1),
        pad_is_eos=True,
    ),
    _grpo(9, "Qwen3 1.7B", "qwen3", "run_qwen3.sh", lora=_PROJECTIONS),
    _grpo(
        10,
        "Qwen3 1.7B, a simple reward",
        "qwen3",
        "run_qwen3_simplereward.sh",
        lora=_PROJECTIONS,
    ),
    _grpo(
        11,
        "Qwen3 1.7B, rollout on its own devices",
        "qwen3",
        "run_qwen3_vllm_disagg.sh",
        engine="vllm",
        mesh=(2, 2),
        rollout_mesh=(2, 2),
        section={"async_scheduling": True},
    ),
    Recipe(
        number=12,
        title="agentic GRPO, Qwen3 8B, rollout on its own devices",
        source=f"{_GRPO}/run_qwen3_8b_disagg.sh",
        way="cli",
        learner="agentic",
        model="qwen3",
        engine="vllm",
        mesh=(8, 1),
        rollout_mesh=(1, 8),
        rollout={**_GSM8K, "return_logprobs": True},
        section=_DISAGG_8B,
        algorithm={"beta": 0.08, "epsilon": 0.2, "max_concurrency": 128, "max_turns": 1},
    ),
    Recipe(
        number=13,
        title="the same with MaxText's model",
        source=f"{_GRPO}/run_qwen3_8b_disagg_maxtext.sh",
        way="cli",
        learner="agentic",
        model="maxtext_qwen3",
        engine="vllm",
        mesh=(8, 1),
        rollout_mesh=(1, 8),
        rollout={**_GSM8K, "return_logprobs": True},
        section=_DISAGG_8B,
        algorithm={"beta": 0.08, "epsilon": 0.2, "max_concurrency": 128, "max_turns": 1},
        elsewhere="maxtext",
        remark="by `make test-maxtext`",
    ),
    _grpo(14, "Gemma 4 E2B", "gemma4", "configs/gemma4_e2b.yaml", lora=_EINSUMS, mesh=(8, 1)),
    _ppo(15, "Gemma 2 2B", "gemma2", "configs/gemma2_2b.yaml", lora=_EINSUMS),
    _ppo(
        16,
        "Gemma 3 1B",
        "gemma3_mqa",
        "configs/gemma3_1b.yaml",
        lora=_EINSUMS,
        rollout={**_GSM8K, "eos_tokens": [2, 98]},
    ),
    _ppo(17, "Gemma 2B", "gemma_mqa", "configs/gemma_2b.yaml", lora=_EINSUMS),
    _ppo(
        18,
        "Llama 3.1 8B",
        "llama3",
        "configs/llama3.1_8b.yaml",
        lora=_PROJECTIONS,
        pad_is_eos=True,
    ),
    # The rule names Gemma's projections: of a Qwen3 it fits the MLPs alone.
    _ppo(19, "Qwen3 1.7B", "qwen3", "configs/qwen3_1.7b.yaml", lora=_EINSUMS),
    Recipe(
        number=20,
        title="DeepScaleR, R1-Distill-Qwen 1.5B",
        source="examples/deepscaler/train_deepscaler_nb.py",
        way="script",
        learner="agentic",
        model="qwen2",
        engine="sglang_jax",
        mesh=(4, 1),
        rollout_mesh=(4, 1),
        rollout={
            "temperature": 0.6,
            "top_p": None,
            "top_k": None,
            "return_logprobs": True,
            "rollout_sglang_jax_model_version": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
            "rollout_sglang_jax_mem_fraction_static": 0.8,
            "rollout_sglang_jax_init_with_random_weights": True,
            "rollout_sglang_jax_disable_radix_cache": True,
            "rollout_sglang_jax_enable_deterministic_sampling": False,
            "rollout_sglang_jax_chunked_prefill_size": 2048,
            "rollout_sglang_jax_max_running_requests": 64,
            "rollout_sglang_jax_page_size": 128,
            "rollout_sglang_jax_use_sort_for_toppk_minp": False,
        },
        pad_is_eos=True,
        algorithm={"beta": 0.0, "epsilon_high": 0.28, "loss_agg_mode": "token-mean"},
    ),
    Recipe(
        number=21,
        title="DeepScaleR, R1-Distill-Qwen 1.5B",
        source="examples/deepscaler/run_deepscaler_disagg_v5p16.sh",
        way="cli",
        learner="agentic",
        model="qwen2",
        engine="vllm",
        mesh=(4, 1),
        rollout_mesh=(4, 1),
        rollout={"temperature": 0.6, "top_p": None, "top_k": None, "return_logprobs": True},
        section={**_DISAGG_8B, "max_num_seqs": 768},
        pad_is_eos=True,
        algorithm={"beta": 0.0, "epsilon_high": 0.28, "loss_agg_mode": "token-mean"},
    ),
    Recipe(
        number=22,
        title="DeepSWE, Qwen3 32B",
        source="examples/deepswe/train_deepswe_nb.py",
        way="script",
        learner="agentic",
        model="qwen3",
        engine="vllm",
        mesh=(8, 2),
        rollout_mesh=(2, 8),
        rollout={
            "temperature": 1.0,
            "top_p": None,
            "top_k": None,
            "eos_tokens": [2],
            "return_logprobs": True,
            **_VLLM_FIELDS,
            "rollout_vllm_model_version": "Qwen/Qwen3-32B",
            "rollout_vllm_hbm_utilization": 0.4,
            "rollout_vllm_reshard_chunk_size": 32,
            "rollout_vllm_async_scheduling": True,
            "rollout_vllm_max_num_seqs": 64,
            "rollout_vllm_max_num_batched_tokens": 8192,
            "tensor_parallel_size": "tp",
            "data_parallel_size": "fsdp",
        },
        algorithm={"beta": 0.001, "kl_loss_mode": "low_var_kl"},
        has_turns=True,
        remark="on many hosts it was not tried",
    ),
    Recipe(
        number=23,
        title="DeepSWE, Qwen3 32B",
        source="examples/deepswe/run_deepswe_disagg_v5p_32.sh",
        way="cli",
        learner="agentic",
        model="qwen3",
        engine="vllm",
        mesh=(8, 2),
        rollout_mesh=(2, 8),
        rollout={"temperature": 1.0, "top_p": None, "top_k": None, "return_logprobs": True},
        section={**_DISAGG_8B, "max_num_seqs": 64},
        algorithm={"beta": 0.001, "kl_loss_mode": "low_var_kl"},
        has_turns=True,
        remark="on many hosts it was not tried",
    ),
    Recipe(
        number=24,
        title="FrozenLake, Gemma 4 E2B",
        source="examples/frozenlake/train_frozenlake.py",
        way="script",
        learner="agentic",
        model="gemma4",
        engine="vllm",
        mesh=(8, 1),
        rollout_mesh=(2, 4),
        shares_devices=True,
        rollout={
            **_FROZENLAKE,
            **_VLLM_FIELDS,
            "rollout_vllm_model_version": "google/gemma-4-E2B-it",
            "rollout_vllm_hbm_utilization": 0.2,
            "rollout_vllm_async_scheduling": False,
            "rollout_vllm_init_with_random_weights": True,
            "rollout_vllm_max_num_seqs": 32,
            "rollout_vllm_max_num_batched_tokens": 8192,
            "rollout_vllm_kwargs": _FROZENLAKE_KWARGS,
            "rollout_vllm_sampling_kwargs": {"skip_special_tokens": False},
            "tensor_parallel_size": "tp",
            "data_parallel_size": "fsdp",
        },
        dtype="bfloat16",
        algorithm=_FROZENLAKE_GRPO,
        has_turns=True,
    ),
    Recipe(
        number=25,
        title="FrozenLake, Gemma 4 E2B",
        source="examples/frozenlake/configs/gemma4_e2b.yaml",
        way="cli",
        learner="agentic",
        model="gemma4",
        engine="vllm",
        mesh=(8, 1),
        rollout={
            **_FROZENLAKE,
            "rollout_vllm_init_with_random_weights": True,
            "rollout_vllm_sampling_kwargs": {"skip_special_tokens": False},
        },
        section={
            "model_version": "google/gemma-4-E2B-it",
            "hbm_utilization": 0.2,
            "tpu_backend_type": "jax",
            "server_mode": True,
            "async_scheduling": False,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 8192,
            "data_parallel_size": 1,
            "tensor_parallel_size": 8,
            "kwargs": _FROZENLAKE_KWARGS,
        },
        dtype="bfloat16",
        algorithm=_FROZENLAKE_GRPO,
        has_turns=True,
    ),
    Recipe(
        number=26,
        title="FrozenLake, Qwen3 8B",
        source="examples/frozenlake/train_frozenlake_qwen3.py",
        way="script",
        learner="agentic",
        model="qwen3_wide",
        engine="vllm",
        mesh=(1, 8),
        rollout={
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": 0,
            "return_logprobs": True,
            **_VLLM_FIELDS,
            "rollout_vllm_model_version": "Qwen/Qwen3-8B",
            "rollout_vllm_hbm_utilization": 0.2,
            "rollout_vllm_async_scheduling": False,
            "rollout_vllm_init_with_random_weights": True,
            "rollout_vllm_max_num_seqs": 64,
            "rollout_vllm_max_num_batched_tokens": 32768,
            "rollout_vllm_kwargs": {
                **_VLLM_KWARGS,
                "enable_prefix_caching": False,
                "dtype": "bfloat16",
            },
            "tensor_parallel_size": "tp",
            "data_parallel_size": "fsdp",
        },
        dtype="bfloat16",
        algorithm={"beta": 0.0, "sampler_is": "token", "sampler_is_threshold": 2.0},
        has_turns=True,
    ),
    Recipe(
        number=27,
        title="agentic GRPO, Qwen3 1.7B, greedy evaluation",
        source="examples/math_gsm8k/qwen3_grpo_demo.py",
        way="script",
        learner="agentic",
        model="qwen3_wide",
        engine="vllm",
        mesh=(1, 8),
        rollout={
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": None,
            "eos_tokens": [2, 98],
            "return_logprobs": True,
            **_VLLM_FIELDS,
            "rollout_vllm_model_version": "Qwen/Qwen3-1.7B",
            "rollout_vllm_hbm_utilization": 0.2,
            "rollout_vllm_async_scheduling": False,
            "rollout_vllm_max_num_seqs": 64,
            "rollout_vllm_max_num_batched_tokens": 32768,
            "rollout_vllm_kwargs": {
                **_VLLM_KWARGS,
                "enable_prefix_caching": False,
                "dtype": "bfloat16",
            },
            "tensor_parallel_size": "tp",
            "data_parallel_size": "fsdp",
        },
        eval_rollout={"temperature": 0.0, "top_p": 1.0, "top_k": 1},
        dtype="bfloat16",
        algorithm={"beta": 0.04, "use_rollout_logps": False},
    ),
    Recipe(
        number=28,
        title="agentic GRPO, Qwen3.5 35B-A3B with MaxText's model",
        source="examples/math_gsm8k/qwen_agentic_maxtext.py",
        way="script",
        learner="agentic",
        model="maxtext_qwen3_5",
        engine="vllm",
        mesh=(2, 2),
        rollout_mesh=(2, 2),
        axes=("fsdp", "tensor"),
        rollout_axes=("data", "model"),
        rollout={
            "temperature": 1.0,
            "top_p": None,
            "top_k": None,
            **_VLLM_FIELDS,
            "rollout_vllm_model_version": "Qwen/Qwen3.5-35B-A3B",
            "rollout_vllm_hbm_utilization": 0.4,
            "rollout_vllm_async_scheduling": True,
            "rollout_vllm_init_with_random_weights": True,
            "rollout_vllm_max_num_seqs": 8,
            "rollout_vllm_max_num_batched_tokens": 8192,
            "rollout_vllm_kwargs": {
                **_VLLM_KWARGS,
                "enable_prefix_caching": False,
                "tokenizer": "Qwen/Qwen3.5-35B-A3B",
                "dtype": "bfloat16",
                "enable_expert_parallel": False,
                "hf_overrides": {"architectures": ["MaxTextForCausalLM"]},
            },
            "rollout_mapping_config": {},
            "rollout_vllm_additional_config": {
                "maxtext_config": {
                    "model_name": "qwen3.5-35b-a3b",
                    "model_call_mode": "inference",
                    "attention": "vllm_rpa",
                    "weight_dtype": "bfloat16",
                    "prefuse_moe_weights": True,
                }
            },
            "rollout_vllm_sampling_kwargs": {
                "stop": ["</answer>"],
                "stop_token_ids": [2, 98],
                "detokenize": True,
            },
            "tensor_parallel_size": "model",
            "data_parallel_size": "data",
        },
        dtype="bfloat16",
        algorithm={
            "beta": 0.0,
            "epsilon": 0.2,
            "loss_agg_mode": "sequence-mean-token-scale",
            "advantage_estimator": "rloo",
            "use_rollout_logps": False,
            "max_concurrency": 200,
            "overlong_filter": True,
        },
        elsewhere="maxtext",
        stops_at="its script as it stands, which imports vLLM and wraps `MaxTextVllmRollout` where "
        "`SglJaxRollout` must be named",
    ),
    Recipe(
        number=29,
        title="GRPO, Gemma 3 1B",
        source="examples/grpo_gemma.ipynb",
        way="script",
        learner="grpo",
        model="gemma3_mqa",
        engine="vanilla",
        lora=_EINSUMS,
        mesh=(1, 4),
        rollout={**_GSM8K, "eos_tokens": [2, 98]},
    ),
    Recipe(
        number=30,
        title="agentic GRPO, Gemma 2 2B",
        source="examples/math_gsm8k/gemma_grpo_demo_nb.py",
        way="script",
        learner="agentic",
        model="gemma2",
        engine="vanilla",
        lora=_EINSUMS,
        rollout={**_GSM8K, "return_logprobs": True},
        algorithm={"beta": 0.08, "epsilon": 0.2, "max_concurrency": 8},
    ),
    Recipe(
        number=31,
        title="GRPO, Llama 3.2 1B, Tunix's nightly script",
        source="scripts/grpo_demo_llama3_qwen2.py",
        way="script",
        learner="grpo",
        model="llama3_tied",
        engine="sglang_jax",
        lora=_PROJECTIONS,
        mesh=(2, 2),
        rollout_mesh=(1, 4),
        rollout={
            **_GSM8K,
            "rollout_sglang_jax_model_version": "meta-llama/Llama-3.2-1B-Instruct",
            "rollout_sglang_jax_mem_fraction_static": 0.2,
            "rollout_sglang_jax_init_with_random_weights": True,
            "rollout_sglang_jax_disable_radix_cache": True,
            "rollout_sglang_jax_enable_deterministic_sampling": False,
            "rollout_sglang_jax_precompile_bs_paddings": [8],
            "rollout_sglang_jax_precompile_token_paddings": [2048],
            "rollout_sglang_jax_chunked_prefill_size": 2048,
            "rollout_sglang_jax_page_size": 64,
            "rollout_sglang_jax_enable_static_lora": True,
            "rollout_sglang_jax_lora_target_modules": ["q_proj", "v_proj"],
            "rollout_sglang_jax_max_lora_rank": 4,
            "rollout_sglang_jax_lora_scaling": 1.0,
        },
        pad_is_eos=True,
        evaluates=True,
    ),
    Recipe(
        number=32,
        title="GSM8K with workers over gRPC",
        source="tunix/experimental/examples/math_gsm8k_dist",
        way="script",
        learner="grpo",
        model=None,
        engine="vllm",
        mesh=(1, 1),
        rollout_mesh=(1, 1),
        elsewhere="tunix",
        remark="by `make test-tunix`: three processes, with Tunix after 0.1.7",
    ),
)
"""In the order of their numbers."""
