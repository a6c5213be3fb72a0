"""lora.json: what a LoRA checkpoint of Tunix does not hold, kept beside it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from sgljax_engine import WeightLoadError

FILE = "lora.json"
"""In the folder that is given to Tunix as `checkpoint_root_directory`."""


class LoraSettings(NamedTuple):
    """How the pairs of a checkpoint were made.

    Attributes:
        rank: Of all pairs.
        alpha: Their scale is alpha / rank.
        module_path: Which modules have one.
        weight_qtype: What the base was quantised to; None if it was not.
    """

    rank: int
    alpha: float
    module_path: str
    weight_qtype: str | None


def write_settings(root: Path, settings: LoraSettings) -> None:
    """Writes the file into a checkpoint root, which is made if it is not there."""
    root.mkdir(parents=True, exist_ok=True)
    text = json.dumps(settings._asdict(), indent=2) + "\n"
    (root / FILE).write_text(text, encoding="utf-8")


def read_settings(root: Path) -> LoraSettings | None:
    """What the file in a checkpoint root says; None if there is none.

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
