"""Architectures by Hugging Face class name."""

from __future__ import annotations

from sgljax_engine.errors import UnsupportedModelError
from sgljax_engine.models import qwen3
from sgljax_engine.models.spec import ModelDefinition

MODELS: dict[str, ModelDefinition] = {"Qwen3ForCausalLM": qwen3.MODEL}


def get_model(architecture: str) -> ModelDefinition:
    """The model of that name, or UnsupportedModelError naming those that exist."""
    if architecture not in MODELS:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(MODELS)}"
        )
    return MODELS[architecture]
