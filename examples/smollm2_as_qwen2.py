"""SmolLM2, a Llama, as the Qwen2 that is the same function: for training with Tunix 0.1.7.

Tunix's Llama 3 rotates with base 1e6 whatever its config says; its Qwen2 takes the config's base. A
Qwen2 is a Llama with biases beside q, k and v, which are zeros here. The new folder shares the
other's weights by hard links, where the file system has them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

WEIGHTS, BIASES, INDEX = "model.safetensors", "biases.safetensors", "model.safetensors.index.json"


def as_qwen2(folder: Path) -> Path:
    """Returns the folder of the same model as a Qwen2, beside the given one; made if need be.

    Args:
        folder: A Llama without biases, as `get_smollm2` returns it.
    """
    target = folder.parent / f"{folder.name}-as-Qwen2"
    source = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = source | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    config["use_sliding_window"] = False
    if _is_complete(target, folder, config):
        return target
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=folder.parent))
    try:
        made = work / "model"
        made.mkdir()
        for path in folder.iterdir():
            if path.name != "config.json":
                _link(path, made / path.name)
        biases = zero_biases(source)
        save_file(biases, made / BIASES, {"format": "np"})
        with safe_open(folder / WEIGHTS, framework="numpy") as file:
            files = dict.fromkeys(file.keys(), WEIGHTS) | dict.fromkeys(biases, BIASES)
        _write_json(made / INDEX, {"metadata": {}, "weight_map": files})
        _write_json(made / "config.json", config)
        if target.exists():  # of an older conversion
            target.rename(work / "older")
        made.rename(target)
    finally:
        shutil.rmtree(work)
    return target


def zero_biases(config: dict[str, int]) -> dict[str, np.ndarray]:
    """The biases that a Qwen2 has and a Llama lacks, by their Hugging Face names."""
    head_dim = config["head_dim"]
    sizes = {
        "q": config["num_attention_heads"] * head_dim,
        "k": config["num_key_value_heads"] * head_dim,
        "v": config["num_key_value_heads"] * head_dim,
    }
    return {
        f"model.layers.{layer}.self_attn.{name}_proj.bias": np.zeros(size, np.float32)
        for layer in range(config["num_hidden_layers"])
        for name, size in sizes.items()
    }


def _is_complete(target: Path, folder: Path, config: dict[str, object]) -> bool:
    try:
        known = json.loads((target / "config.json").read_text(encoding="utf-8"))
        old, new = ((each / WEIGHTS).stat() for each in (target, folder))
    except FileNotFoundError:
        return False
    return known == config and (old.st_size, old.st_mtime_ns) == (new.st_size, new.st_mtime_ns)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
