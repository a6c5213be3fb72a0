"""Writes the table of docs/models.md: every model that Tunix lists, as this code reads it.

    python docs/make_models_table.py

Reads the config.json of each in tests/real_configs, and Tunix's own configs. A test compares the
page with `render(page)`.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunix.models import registry

from sgljax_engine import (
    ModelConfig,
    RopeConfig,
    UnsupportedModelError,
    model_config_from_hf,
    preview_engine,
)
from tunix_sgljax.model_config import to_model_config
from tunix_sgljax.training.models import named_config

OUTPUT = Path(__file__).with_name("models.md")
_CONFIGS = Path(__file__).parents[1] / "tests" / "real_configs"
_BEGIN, _END = "<!-- models: made by docs/make_models_table.py -->\n", "<!-- end of models -->\n"
_HEAD = ("| models | parameters | refused, or different |", "|---|---:|---|")
_SHAPES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention",
    "final_logit_softcap",
)


def render(text: str) -> str:
    """The text of docs/models.md with its table regenerated."""
    head, _, rest = text.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    return head + _BEGIN + "\n" + "\n".join(_sections()) + "\n" + _END + tail


def _sections() -> Iterator[str]:
    files, counts = _read("models"), _read("parameters")
    file_of = {name: file for file, names in files.items() for name in names}
    rows: dict[str, list[str]] = {}
    for model in registry.MODEL_CATALOG:
        name = str(model.model_name)
        cells = _cells(name, _read(file_of[name]), counts[file_of[name]])
        rows.setdefault(cells, []).append(f"`{name}`")
    yield f"Read from google-tunix {importlib.metadata.version('google-tunix')}.\n"
    lines = [f"| {', '.join(names)} | {cells} |" for cells, names in rows.items()]
    yield "\n".join([*_HEAD, *lines, ""])


def _read(name: str) -> dict[str, Any]:
    return json.loads((_CONFIGS / f"{name}.json").read_text(encoding="utf-8"))


def _cells(name: str, config: dict[str, Any], count: int) -> str:
    """Size, how the engine refuses a folder or Tunix's model, and where those differ.

    Args:
        name: Tunix's name of the model.
        config: The contents of its config.json.
        count: Its parameters, where the engine cannot count them.
    """
    folder, tunix = _from_folder(config), _from_tunix(name)
    if isinstance(folder, ModelConfig):
        count = preview_engine(folder).num_parameters
    if isinstance(folder, ModelConfig) and isinstance(tunix, ModelConfig):
        notes = list(_differences(folder, tunix))
    else:  # an error ends with what is supported instead
        sides = {"the folder": folder, "Tunix's model": tunix}.items()
        notes = [
            f"{side} is refused: {error.partition(';')[0]}"
            for side, error in sides
            if isinstance(error, str)
        ]
    return f"{count:,} | {'; '.join(notes)}"


def _from_folder(config: dict[str, Any]) -> ModelConfig | str:
    try:
        return model_config_from_hf(config)
    except UnsupportedModelError as error:
        return str(error)


def _from_tunix(name: str) -> ModelConfig | str:
    try:
        return to_model_config(named_config(name), context_length=1)
    except UnsupportedModelError as error:
        return str(error)


def _differences(folder: ModelConfig, tunix: ModelConfig) -> Iterator[str]:
    if folder.rope != tunix.rope:
        yield f"rope of {_rope(tunix.rope)}, not of {_rope(folder.rope)}"
    for name in _SHAPES:
        ours, theirs = getattr(folder, name), getattr(tunix, name)
        if ours != theirs:
            yield f"{name} {theirs}, not {ours}"
    if folder.moe is not None and folder.moe != tunix.moe:
        yield "the router reads the experts' normalised input, not the hidden states"


def _rope(rope: RopeConfig) -> str:
    text = f"base {rope.theta:.0e}".replace("e+0", "e")
    if rope.linear_factor != 1.0:
        text += f" divided by {rope.linear_factor:g}"
    if rope.llama3 is not None:
        text += f" stretched {rope.llama3.factor:g} times"
    return text


if __name__ == "__main__":
    OUTPUT.write_text(render(OUTPUT.read_text(encoding="utf-8")), encoding="utf-8")
