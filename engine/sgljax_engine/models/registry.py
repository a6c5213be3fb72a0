"""Architectures by Hugging Face class name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgljax_engine.errors import UnsupportedModelError
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models import gemma, gemma4, llama, qwen, qwen_hybrid
from sgljax_engine.models.spec import ModelDefinition
from sgljax_engine.weights.hf_json import read_end_ids, read_json

MODELS: dict[str, ModelDefinition] = {
    "Gemma2ForCausalLM": gemma.GEMMA2,
    "Gemma3ForCausalLM": gemma.GEMMA3,
    "Gemma4ForCausalLM": gemma4.MODEL,
    "Gemma4ForConditionalGeneration": gemma4.MULTIMODAL,
    "Gemma4UnifiedForConditionalGeneration": gemma4.UNIFIED,
    "Gemma3ForConditionalGeneration": gemma.GEMMA3_MULTIMODAL,
    "GemmaForCausalLM": gemma.GEMMA,
    "LlamaForCausalLM": llama.LLAMA,
    "MistralForCausalLM": llama.MISTRAL,
    "Qwen2ForCausalLM": qwen.QWEN2,
    "Qwen3ForCausalLM": qwen.QWEN3,
    "Qwen3NextForCausalLM": qwen_hybrid.QWEN3_NEXT,
    "Qwen3_5ForCausalLM": qwen_hybrid.QWEN3_5,
    "Qwen3_5ForConditionalGeneration": qwen_hybrid.QWEN3_5_MULTIMODAL,
    "Qwen3_5MoeForCausalLM": qwen_hybrid.QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": qwen_hybrid.QWEN3_5_MOE_MULTIMODAL,
    "Qwen3MoeForCausalLM": qwen.QWEN3_MOE,
}


def get_model(architecture: str | None) -> ModelDefinition:
    """The model of that name; raises UnsupportedModelError with the known names."""
    if architecture not in MODELS:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(MODELS)}"
        )
    return MODELS[architecture]


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Builds a ModelConfig from the contents of a Hugging Face config.json.

    Raises:
        UnsupportedModelError: for an architecture or a setting that is not implemented.
        InvalidConfigError: for a missing or wrong field.
    """
    architecture = (config.get("architectures") or [None])[0]
    return get_model(architecture).config_from_hf(config)


def load_model_config(folder: str | Path) -> ModelConfig:
    """Reads a model folder's config.json, and end-of-sequence ids from generation_config.json.

    Raises:
        UnsupportedModelError: for an architecture or a setting that is not implemented.
        InvalidConfigError: for a file that cannot be read, or a missing or wrong field.
    """
    model = model_config_from_hf(read_json(Path(folder) / "config.json"))
    eos = read_end_ids(folder)
    return model if eos is None else dataclasses.replace(model, eos_token_ids=eos)
