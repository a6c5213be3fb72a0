"""A config of a tiny run, as a mapping to change and write."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from tests.geometry import SMALL


def shape_of(family: str) -> dict[str, Any]:
    """The fields of a tiny model's `ModelConfig` in Tunix, with tied embeddings."""
    return {
        "num_layers": 2,
        "vocab_size": 64,
        "embed_dim": 32,
        "hidden_dim": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "weight_tying" if family == "llama3" else "use_tied_embedding": True,
    }


_CONFIG: dict[str, Any] = {
    "actor_model_config": {
        "family": "qwen3",
        "shape": shape_of("qwen3"),
    },
    "tokenizer_config": {"function": "tiny_task:Tokenizer"},
    "task": {
        "code_dir": str(Path(__file__).parent),
        "dataset": "tiny_task:rows",
        "dataset_args": {"num": 4},
        "reward_functions": ["tiny_task:share_of_even"],
    },
    "grpo_config": {"num_generations": 4},
    "num_batches": 2,
    "batch_size": 2,
    "rl_training_config": {"actor_optimizer_config": {"opt_type": "adam", "learning_rate": 1e-2}},
    "rollout_config": {"max_prompt_length": 8, "total_generation_steps": 8, "temperature": 1.0},
    "sgljax_config": {**SMALL},
}


def write_config(folder: Path, **changes: Any) -> Path:
    """Writes the tiny config with some values changed, `section__name=value`; returns its path."""
    config = copy.deepcopy(_CONFIG)
    config["output_dir"] = str(folder / "out")
    for key, value in changes.items():
        section: dict[str, Any] = config
        *path, name = key.split("__")
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
