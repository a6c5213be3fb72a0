"""A tiny model for Tunix's command line, which loads models of its registry, from a hub, alone.

Run as a program it is `tunix-sgljax` with that model: `python tests/cli/tunix_offline.py FOLDER
tunix grpo ...`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tunix.models.qwen3 import model as qwen3
from tunix.oss import utils as oss_utils

from addition_task import Tokenizer, new_model, save_checkpoint
from hf_folder import write_hf_folder
from tunix_sgljax.cli import main as cli

ROOT = Path(__file__).parents[2]
RECIPE = Path(__file__).parent / "tunix_recipe"


def tiny_config() -> qwen3.ModelConfig:
    """The shape of the recipe's "qwen3-tiny"."""
    return qwen3.ModelConfig(
        num_layers=2,
        vocab_size=Tokenizer.vocab_size,
        embed_dim=32,
        hidden_dim=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-6,
        rope_theta=1_000_000,
        use_tied_embedding=True,
    )


def write_model(folder: Path) -> Path:
    """Writes random weights and a tokenizer as a Hugging Face folder."""
    checkpoint = folder / "checkpoint.safetensors"
    save_checkpoint(checkpoint, new_model(0, tiny_config()), {})
    return write_hf_folder(folder / "model", checkpoint, tiny_config())


def serve_model(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Adds "qwen3-tiny" to Tunix's registry, "downloaded" to this folder."""
    patch.setattr(qwen3.ModelConfig, "qwen3_tiny", staticmethod(tiny_config), raising=False)
    patch.setattr(oss_utils, "hf_pipeline", lambda model_id, path: str(folder))


def arguments(folder: Path, *overrides: str) -> list[str]:
    """The command line of the recipe, in its folder."""
    return [
        "grpo",
        str(RECIPE / "base.yaml"),
        f"tokenizer_config.tokenizer_path={folder}",
        *overrides,
    ]


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as monkeypatch:
        serve_model(monkeypatch, Path(sys.argv[1]))
        sys.exit(cli.main(sys.argv[2:]))
