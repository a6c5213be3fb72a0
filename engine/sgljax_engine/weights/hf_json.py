"""Reads the JSON files of a Hugging Face model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sgljax_engine.errors import InvalidConfigError


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file, or raises InvalidConfigError naming the file."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidConfigError(f"no such file: {path}") from None
    except (OSError, ValueError) as error:
        raise InvalidConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(loaded, dict):
        raise InvalidConfigError(f"{path} must hold a JSON object, got {type(loaded).__name__}")
    return loaded


def read_generation_config(folder: str | Path) -> dict[str, Any]:
    """The contents of a model folder's generation_config.json; {} when there is none."""
    path = Path(folder) / "generation_config.json"
    return read_json(path) if path.exists() else {}
