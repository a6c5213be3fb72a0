"""The config.json of models that Tunix trains; see README.md."""

from __future__ import annotations

import json
from pathlib import Path

from sgljax_engine import ModelConfig, model_config_from_hf


def real_config(name: str) -> ModelConfig:
    """The model of the file of that name."""
    text = (Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8")
    return model_config_from_hf(json.loads(text))
