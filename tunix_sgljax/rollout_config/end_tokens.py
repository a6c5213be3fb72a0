"""The tokens that end a completion: the tokenizer's and those of a model folder."""

from __future__ import annotations

import logging
from pathlib import Path

from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import load_model_config

logger = logging.getLogger(__name__)

_VERSIONS = ("rollout_sglang_jax_model_version", "rollout_vllm_model_version")
"""Fields that name the model for Tunix's other engines, which read its end tokens."""


def find_end_ids(config: RolloutConfig, eos_id: int | None) -> tuple[int, ...]:
    """End tokens of the tokenizer and of the folder that a training config names.

    vLLM and SGLang add the ids of generation_config.json to the tokenizer's: of instruct models
    there are often several. A warning says so where such a config names no local folder.
    """
    own = () if eos_id is None or eos_id < 0 else (int(eos_id),)
    named = {name: getattr(config, name) for name in _VERSIONS if getattr(config, name)}
    for folder in named.values():
        if (Path(folder) / "config.json").is_file():
            return tuple(dict.fromkeys((*own, *load_model_config(folder).eos_token_ids)))
    if named and config.eos_tokens is None:
        name, value = next(iter(named.items()))
        logger.warning(
            "RolloutConfig.%s=%r is no local folder, so that only the tokenizer's end token %s "
            "ends a completion. If the model's generation_config.json has more, which vLLM and "
            "SGLang read, name a local folder or set RolloutConfig.eos_tokens",
            name,
            value,
            eos_id,
        )
    return own
