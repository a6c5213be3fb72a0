from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgljax_engine.errors import InvalidConfigError, UnsupportedModelError
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models import deepseek, gemma, gemma4, gpt_oss, llama, olmo, qwen, qwen_hybrid
from sgljax_engine.models.spec import ModelDefinition
from sgljax_engine.weights.hf_json import read_end_ids, read_json
from sgljax_engine.weights.hf_tables import holds_two_tables

logger = logging.getLogger(__name__)

MODELS: dict[str, ModelDefinition] = {
    "DeepseekV2ForCausalLM": deepseek.V2,
    "DeepseekV3ForCausalLM": deepseek.V3,
    "Gemma2ForCausalLM": gemma.GEMMA2,
    "Gemma3ForCausalLM": gemma.GEMMA3,
    "Gemma4ForCausalLM": gemma4.MODEL,
    "Gemma4ForConditionalGeneration": gemma4.MULTIMODAL,
    "Gemma4UnifiedForConditionalGeneration": gemma4.UNIFIED,
    "Gemma3ForConditionalGeneration": gemma.GEMMA3_MULTIMODAL,
    "GemmaForCausalLM": gemma.GEMMA,
    "GptOssForCausalLM": gpt_oss.MODEL,
    "LlamaForCausalLM": llama.LLAMA,
    "MistralForCausalLM": llama.MISTRAL,
    "MixtralForCausalLM": llama.MIXTRAL,
    "Olmo2ForCausalLM": olmo.OLMO2,
    "Olmo3ForCausalLM": olmo.OLMO3,
    "Qwen2ForCausalLM": qwen.QWEN2,
    "Qwen3ForCausalLM": qwen.QWEN3,
    "Qwen3NextForCausalLM": qwen_hybrid.QWEN3_NEXT,
    "Qwen3_5ForCausalLM": qwen_hybrid.QWEN3_5,
    "Qwen3_5ForConditionalGeneration": qwen_hybrid.QWEN3_5_MULTIMODAL,
    "Qwen3_5MoeForCausalLM": qwen_hybrid.QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": qwen_hybrid.QWEN3_5_MOE_MULTIMODAL,
    "Qwen3MoeForCausalLM": qwen.QWEN3_MOE,
    "SmolLM3ForCausalLM": llama.SMOLLM3,
}


_OF_TYPES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""Architecture of a config that names none, or the class without a head, by `model_type`."""


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
    architecture = _architecture(config)
    model = get_model(architecture)
    return model.config_from_hf({**config, "architectures": [architecture]})


def _architecture(config: Mapping[str, Any]) -> str | None:
    """The architecture that a config names; its model_type's, if that is none with a head."""
    names = config.get("architectures") or [None]
    if not isinstance(names, list):
        raise InvalidConfigError(f"architectures must be a list of names, got {names!r}")
    if names[0] is None or str(names[0]).endswith("Model"):
        return _OF_TYPES.get(str(config.get("model_type")), names[0])
    return names[0]


def load_model_config(folder: str | Path) -> ModelConfig:
    """Reads a model folder's config.json, and end-of-sequence ids from generation_config.json.

    Of the weights, if there are any, it reads whether a model tied by its config stores two
    different tables, and so is none.

    Raises:
        UnsupportedModelError: for an architecture or a setting that is not implemented.
        InvalidConfigError: for a file that cannot be read, or a missing or wrong field.
    """
    model = model_config_from_hf(read_json(Path(folder) / "config.json"))
    if model.tie_word_embeddings and holds_two_tables(folder):
        logger.warning(
            "%s ties embeddings and output projection, but stores two different tables: both are "
            "kept, as transformers 5 does",
            folder,
        )
        model = dataclasses.replace(model, tie_word_embeddings=False)
    eos = read_end_ids(folder)
    return model if eos is None else dataclasses.replace(model, eos_token_ids=eos)
