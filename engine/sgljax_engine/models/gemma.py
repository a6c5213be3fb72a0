"""Gemma (Gemma: Open Models Based on Gemini Research and Technology, 2024).

Llama's decoder with GeGLU, scaled embeddings and norm weights stored minus one. Gemma 2 and 3
build on the traits that are defined here.
"""

from __future__ import annotations

import functools
import logging

import jax

from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models import hf
from sgljax_engine.models.decoder import decoder
from sgljax_engine.models.decoder_params import DecoderTraits

logger = logging.getLogger(__name__)

GELU = "gelu_pytorch_tanh"
"""HF's name of the activation, the tanh approximation of GELU."""

TRAITS = DecoderTraits(
    activation=functools.partial(jax.nn.gelu, approximate=True),
    has_offset_norms=True,
    scales_embeddings=True,
)


def _config_from_hf(config: hf.HfConfig) -> ModelConfig:
    # transformers 4 reads `hidden_activation` where it is set, and `hidden_act` never.
    name = "hidden_act" if config.get("hidden_activation") is None else "hidden_activation"
    if name == "hidden_act" and config.get(name) == "gelu":
        logger.warning(
            "hidden_act='gelu', the slip of Gemma's first config.json, is read as %s", GELU
        )
    else:
        hf.check_settings(config, **{name: GELU})
    hf.check_full_attention(config)
    return hf.dense_config(config, rope=hf.read_rope(config), tied_by_default=True)


MODEL = decoder(TRAITS, _config_from_hf)
