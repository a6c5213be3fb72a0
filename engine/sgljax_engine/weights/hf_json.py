"""Reads the JSON files of a Hugging Face model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sgljax_engine.errors import InvalidConfigError, WeightLoadError
from sgljax_engine.sampling_params import MAX_STOP_TOKEN_IDS


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file, or raises InvalidConfigError naming the file."""
    if path.exists() and not path.is_file():  # a pipe without a writer never ends
        raise InvalidConfigError(f"cannot read {path}: it is no regular file")
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidConfigError(f"no such file: {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(loaded, dict):
        raise InvalidConfigError(f"{path} must hold a JSON object, got {type(loaded).__name__}")
    return loaded


def read_weight_map(path: Path) -> dict[str, str]:
    """The file of each tensor, as an index of safetensors names them."""
    try:
        found = read_json(path).get("weight_map")
    except InvalidConfigError as error:
        raise WeightLoadError(str(error)) from error
    if not isinstance(found, dict):
        raise WeightLoadError(f"{path}: weight_map must be an object, got {type(found).__name__}")
    for file in found.values():
        if not isinstance(file, str) or not file or Path(file).name != file or "\0" in file:
            raise WeightLoadError(f"{path.parent}: the index names {file!r}, not a file beside it")
    return found


def read_generation_config(folder: str | Path) -> dict[str, Any]:
    """The contents of a model folder's generation_config.json; {} when there is none."""
    path = Path(folder) / "generation_config.json"
    return read_json(path) if path.exists() else {}


def read_end_ids(folder: str | Path) -> tuple[int, ...] | None:
    """`eos_token_id` of a folder's generation_config.json, one id or a list; None without it."""
    value = read_generation_config(folder).get("eos_token_id")
    try:
        return None if value is None else end_ids(value)
    except InvalidConfigError as error:
        raise InvalidConfigError(f"{Path(folder) / 'generation_config.json'}: {error}") from None


def end_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` of a config: one id, several or none."""
    ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not all(type(each) is int for each in ids) or len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidConfigError(
            f"eos_token_id must be a token id, a list of at most {MAX_STOP_TOKEN_IDS} or null, got "
            f"{value!r}"
        )
    return ids
