"""A run of MaxText's RL trainer in small: its files, and the words of its command."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import datasets

from tests.recipes.models import VOCAB_SIZE, write_tokenizer

NUM_GENERATIONS = 8
BATCH = 2
PROMPT, TOTAL = 16, 32
"""Tokens of a prompt, and of a prompt with its completion."""

_NAMES = ("ann", "bob", "cem", "dia")

ONE_MACHINE = (
    "use_pathways=False",
    "chips_per_vm=1",
    "trainer_devices_fraction=1.0",
    "sampler_devices_fraction=1.0",
    "rollout_tensor_parallelism=1",
    "attention=dot_product",
    "remat_policy=full",
    "convert_checkpoint_if_possible=False",
    "enable_checkpointing=False",
    "num_test_batches=0",
)
"""What of MaxText's rl.yml must change without Pathways, on any hardware."""

QWEN3 = (
    "model_name=qwen3-0.6b",
    "override_model_config=True",
    "base_emb_dim=32",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "base_mlp_dim=64",
    "base_num_decoder_layers=3",
    "head_dim=8",
    "logits_via_embedding=False",
    f"vocab_size={VOCAB_SIZE}",
    "dtype=float32",
    "weight_dtype=float32",
)
"""Qwen3, tiny, with a head of its own: one that is the embedding repeats its input at first."""

HYBRID = (
    "base_num_decoder_layers=2",
    "inhomogeneous_layer_cycle_interval=2",
    "base_moe_mlp_dim=32",
    "num_experts=4",
    "num_experts_per_tok=2",
    "gdn_num_key_heads=2",
    "gdn_num_value_heads=4",
    "gdn_key_head_dim=8",
    "gdn_value_head_dim=8",
    "gdn_chunk_size=8",
    "sparse_matmul=False",
    "capacity_factor=-1.0",
)
"""Behind `QWEN3` and the name of a hybrid: a gated delta net, and a layer with attention."""


_EXPERTS = ("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=64")
MIXTRAL = ("model_name=mixtral-8x7b", *_EXPERTS)
OLMO3 = ("model_name=olmo3-7b", "base_num_decoder_layers=4", "sliding_window_size=8")
GPT_OSS = (
    "model_name=gpt-oss-20b",
    *_EXPERTS,
    "base_num_decoder_layers=4",
    "sliding_window_size=8",
    # Of its yarn: a prompt with its completion is beyond the original context.
    "original_max_position_embeddings=16",
    "rope_factor=4",
    # As in MaxText's run_gptoss_20b_rl.sh, without its machines, paths and sizes.
    "checkpoint_storage_use_ocdbt=False",
    "checkpoint_storage_use_zarr3=False",
    "hbm_utilization_vllm=0.8",
    f"train_micro_batch_size={BATCH}",
    f"rollout_micro_batch_size={BATCH}",
    "enable_dp_attention=False",
    "async_scheduling=True",
    "chat_template_path=maxtext/examples/chat_templates/gpt_oss_rl.json",
    "enable_tunix_perf_metrics=True",
)
"""Behind `QWEN3`, whose sizes they take: two whole cycles of layers, or one of OLMo 3."""


def words(
    folder: Path, num_steps: int, *overrides: str, without: Collection[str] = ()
) -> list[str]:
    """What follows `maxtext rl`, with files written into the folder; later words win.

    Args:
        folder: For files and results.
        num_steps: Steps of training.
        *overrides: Further words.
        without: Keys that are left to MaxText's rl.yml.
    """
    tokenizer = write_tokenizer(folder / "tokenizer", names_pad=True)
    rows = [{"question": f"say e, {_NAMES[i % 4]}", "answer": f"#### {i}"} for i in range(64)]
    datasets.Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    here = Path(__file__).parent
    given = (
        "run_name=tiny",
        f"base_output_directory={folder / 'out'}",
        f"tokenizer_path={tokenizer}",
        "dataset_name=tiny",
        "eval_dataset_name=tiny",
        f"hf_train_files={folder / 'train.parquet'}",
        f"hf_eval_files={folder / 'train.parquet'}",
        f"dataset_processor_path={here / 'task.py'}",
        f"reward_functions_path={here / 'task.py'}",
        "reward_functions=share_of_e",
        f"batch_size={BATCH}",
        f"num_batches={num_steps}",
        f"rl.num_generations={NUM_GENERATIONS}",
        "rl.grpo_beta=0.0",
        f"max_prefill_predict_length={PROMPT}",
        f"max_target_length={TOTAL}",
        "kv_cache_buffer=8",
        "learning_rate=0.01",
        "warmup_steps_fraction=0.0",
        "gradient_clipping_threshold=1.0",
        "decode_sampling_temperature=1.0",
        "decode_sampling_top_k=-1",
        "enable_tensorboard=False",
        "jax_cache_dir=",
        *ONE_MACHINE,
        *QWEN3,
        *overrides,
    )
    latest = {word.partition("=")[0]: word for word in given}
    return ["rl.yml", *(word for key, word in latest.items() if key not in without)]
