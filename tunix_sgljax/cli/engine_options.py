"""Options shared by several commands: the model's folder, and the engine's own options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgljax_engine import EngineConfig, InvalidConfigError, check_model_folder


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the engine, as often as needed: max_model_len=4096, dtype=bfloat16, ... "
        "(all of EngineConfig's)",
    )


def model_folder(path: str, option: str = "--model") -> Path:
    """The folder of a Hugging Face model that an option names."""
    folder = check_model_folder(option, path)
    if not (folder / "config.json").is_file():
        raise InvalidConfigError(f"{option} must be a folder with a config.json, got {path!r}")
    return folder


def read_pairs(option: str, pairs: Sequence[str]) -> dict[str, Any]:
    """`key=value` arguments as a dict; values are JSON if possible, else text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, is_pair, text = pair.partition("=")
        if not is_pair or not key:
            raise InvalidConfigError(f"{option} must be key=value, got {pair!r}")
        if key in values:
            raise InvalidConfigError(f"{option} {key} is given twice")
        values[key] = parse_value(text)
    return values


def parse_value(text: str) -> Any:
    """A number, true, false, null or a list, as in JSON or Python; else the text itself."""
    python = {"True": True, "False": False, "None": None}
    if text in python:
        return python[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def engine_config(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> EngineConfig:
    """The configuration that `--engine` asks for."""
    return EngineConfig.from_options({**(defaults or {}), **read_pairs("--engine", args.engine)})
