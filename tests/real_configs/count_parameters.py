"""Writes parameters.json: the parameters of each config.json here, counted by transformers.

Run by hand, never by the test suite, which needs no torch; any CPU build of torch will do:

    python tests/real_configs/count_parameters.py

Models are built on torch's meta device, which allocates nothing. Of a multimodal model the language
model counts, with its output projection. Tied embeddings count once, and stored buffers (the scales
of Gemma 4's layers) with the parameters.
"""

# The development environment has no torch.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

HERE = Path(__file__).parent
OUTPUT = HERE / "parameters.json"
MODELS = HERE / "models.json"


def text_config(path: Path) -> Any:
    """transformers' config of the language model that a file describes."""
    contents = json.loads(path.read_text(encoding="utf-8"))
    model_type = contents.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **contents)
    return config.get_text_config(decoder=True)


def count(path: Path) -> int:
    """Parameters of the model that a file describes."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(text_config(path))
    # What a checkpoint stores; tied tensors are the same object.
    stored = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() for tensor in stored.values())


def main() -> None:
    """Counts all of them."""
    files = json.loads(MODELS.read_text(encoding="utf-8"))
    counts = {name: count(HERE / f"{name}.json") for name in files}
    OUTPUT.write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
