"""lora.json: LoRA settings that a Tunix checkpoint lacks, kept beside it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from sgljax_engine import WeightLoadError

FILE = "lora.json"
"""File name, in the folder that Tunix gets as `checkpoint_root_directory`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """A low-rank pair beside each chosen weight, whose own values stay as they are.

    Attributes:
        rank: Rank of the pairs.
        alpha: Numerator of the pairs' scale, alpha / rank. Checkpoints do not hold it.
        module_path: Regular expression for the whole path of a module: "layers/0/attn/q_proj".
        weight_qtype: Quantise the frozen weights that have a pair: "int8", "int4" or "nf4".
    """

    rank: int
    alpha: float
    module_path: str = ".*(attn|mlp).*"
    weight_qtype: str | None = None


def write_settings(root: Path, settings: LoraSettings) -> None:
    root.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(settings), indent=2) + "\n"
    (root / FILE).write_text(text, encoding="utf-8")


def read_settings(root: Path) -> LoraSettings | None:
    """Reads the file in a checkpoint root; None if there is none."""
    path = root / FILE
    if not path.is_file():
        return None
    try:
        settings = LoraSettings(**json.loads(path.read_text(encoding="utf-8")))
        is_right = settings.rank >= 1 and math.isfinite(settings.alpha)
    except (ValueError, TypeError) as error:
        raise WeightLoadError(f"{path} cannot be read: {error}") from None
    if not is_right:
        raise WeightLoadError(f"{path} must hold a rank >= 1 and a finite alpha, got {settings}")
    return settings
