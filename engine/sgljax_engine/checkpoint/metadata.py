"""Facts about the engine in a checkpoint's metadata."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgljax_engine.errors import CheckpointError
from sgljax_engine.model_config import ModelConfig

_MAX_VERSION = 2**30
"""Limit of a checkpoint's version: versions are C ints, so as many updates can follow."""

_FREE_FIELDS = ("eos_token_ids", "context_length")
"""Fields of a model's config that may differ where a checkpoint is restored."""


def check_metadata(metadata: Mapping[str, Any], model: ModelConfig, path: Path) -> None:
    """Raises CheckpointError unless a checkpoint is one of the same model."""
    saved = metadata.get("model")
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path}: the metadata names no model")
    version = metadata.get("weight_version")
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < _MAX_VERSION:
        raise CheckpointError(
            f"{path}: weight_version must be in [0, {_MAX_VERSION}), got {version!r}"
        )
    own = plain_model(model)
    names = sorted((own.keys() | saved.keys()) - set(_FREE_FIELDS))
    differing = [
        f"{name} {saved.get(name)!r}, not {own.get(name)!r}"
        for name in names
        if saved.get(name) != own.get(name)
    ]
    if differing:
        raise CheckpointError(f"{path} is of another model: {'; '.join(differing)}")


def plain_model(model: ModelConfig) -> dict[str, Any]:
    """A model's config as JSON would return it."""
    return json.loads(json.dumps(dataclasses.asdict(model)))
