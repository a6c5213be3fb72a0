"""lora.json: LoRA settings that a Tunix checkpoint lacks, kept beside it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from sgljax_engine import WeightLoadError

FILE = "lora.json"
"""File name, in the folder that Tunix gets as `checkpoint_root_directory`."""


class LoraSettings(NamedTuple):
    """How the pairs of a checkpoint were made.

    Attributes:
        rank: Rank of all pairs.
        alpha: Alpha of all pairs; their scale is alpha / rank.
        module_path: Which modules have a pair.
        weight_qtype: Quantised type of the base; None if it is not quantised.
    """

    rank: int
    alpha: float
    module_path: str
    weight_qtype: str | None


def write_settings(root: Path, settings: LoraSettings) -> None:
    """Writes the file into a checkpoint root, which is created if missing."""
    root.mkdir(parents=True, exist_ok=True)
    text = json.dumps(settings._asdict(), indent=2) + "\n"
    (root / FILE).write_text(text, encoding="utf-8")


def read_settings(root: Path) -> LoraSettings | None:
    """Reads the file in a checkpoint root; None if there is none.

    Raises:
        WeightLoadError: it is damaged.
    """
    path = root / FILE
    if not path.is_file():
        return None
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        settings = LoraSettings(**content)
        is_right = settings.rank >= 1 and math.isfinite(settings.alpha)
    except (ValueError, TypeError) as error:
        raise WeightLoadError(f"{path} cannot be read: {error}") from None
    if not is_right:
        raise WeightLoadError(f"{path} must hold a rank >= 1 and a finite alpha, got {settings}")
    return settings
