"""Reads LoRA adapters as PEFT's `save_pretrained` writes them: a config and one safetensors file.

Only plain LoRA of linear layers is read. What PEFT would compute otherwise is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sgljax_engine.errors import InvalidConfigError, WeightLoadError
from sgljax_engine.weights.hf_json import read_json
from sgljax_engine.weights.rules import LoraRule, WeightSource
from sgljax_engine.weights.safetensors_file import read_safetensors

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HALF = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_READ: Mapping[str, tuple[tuple[type, ...], Any]] = {
    "r": ((int,), 8),
    "lora_alpha": ((int, float), 8),
    "use_rslora": ((bool,), False),
    "rank_pattern": ((dict,), {}),
    "alpha_pattern": ((dict,), {}),
    "target_modules": ((str, list), []),
    "exclude_modules": ((str, list), []),
    "layers_to_transform": ((int, list), []),
    "layers_pattern": ((str, list), []),
}
"""Types and defaults of the fields that are read; null is the default."""

_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Others change the base model's weights too, or draw pairs that the file lacks.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
"""The values of fields that leave an adapter plain; the first is the default."""

_WITHOUT_EFFECT = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "inference_mode",
        "lora_dropout",
        "loftq_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    ]
)
"""Fields that change nothing of what a plain adapter computes."""


def read_peft_folder(folder: str | Path) -> WeightSource:
    """The pairs of a PEFT folder, with a `LoraRule` each that names its weight as the file does.

    A is [in, rank] and B [rank, out], by their names in the file. The weights that they change are
    [out, in]: add the rules that map them, such as `hf_rules`. WeightLoadError names the file, and
    the field or tensor.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise WeightLoadError(f"no such folder of an adapter: {str(folder)!r}")
    try:
        config, tensors = read_json(folder / _CONFIG), read_safetensors(folder / _WEIGHTS)
    except (InvalidConfigError, ValueError) as error:
        raise WeightLoadError(f"{folder} is no adapter of plain LoRA: {error}") from error
    return peft_source(config, tensors, str(folder))


def peft_source(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], origin: str
) -> WeightSource:
    """`read_peft_folder` for a config and tensors that were read; errors name their origin."""
    try:
        checked = _checked(config)
        arrays = {name: x.T for name, x in tensors.items()}
        return WeightSource(arrays, tuple(_rules(checked, arrays)))
    except (ValueError, re.error) as error:
        raise WeightLoadError(f"{origin} is no adapter of plain LoRA: {error}") from error


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    config = {name: default for name, (_, default) in _READ.items()}
    for name, value in given.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name in _PLAIN:
            if not any(type(value) is type(each) and value == each for each in _PLAIN[name]):
                raise ValueError(f"{name}={value!r}; only {_PLAIN[name]} are read")
        elif name not in _READ:
            if value not in (False, [], {}):
                raise ValueError(f"{name}={value!r} is not supported")
        elif type(value) not in _READ[name][0]:
            raise ValueError(f"{name}={value!r} is no {_READ[name][0]}")
        else:
            config[name] = value
    if isinstance(config["target_modules"], str) and config["layers_to_transform"] != []:
        raise ValueError("layers_to_transform goes with a list as target_modules")
    for name in ("rank_pattern", "alpha_pattern"):
        for key, value in config[name].items():
            if type(value) not in (int, float):
                raise ValueError(f"{name}[{key!r}]={value!r} is no number")
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        if not all(isinstance(each, str) for each in config[name]):
            raise ValueError(f"{name}={config[name]!r} has more than strings")
    return config


def _rules(config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Iterator[LoraRule]:
    for name, array in arrays.items():
        match = _HALF.fullmatch(name)
        if match is None or array.ndim != 2:
            raise ValueError(
                f"{name!r} {list(array.shape[::-1])} is no half of a linear layer's pair"
            )
        start, module = name[: match.start("half")], match["module"]
        a, b = (f"{start}{half}.weight" for half in "AB")
        if not {a, b} <= arrays.keys():
            raise ValueError(f"{name!r} is alone: half a pair")
        if not _is_target(config, module):
            raise ValueError(f"target_modules and the fields beside it leave out {module!r}")
        if name == b:
            continue
        rank = _of_module(config["rank_pattern"], module, config["r"])
        if array.shape[1] != rank or rank < 1:
            raise ValueError(f"{name!r} has rank {array.shape[1]}, but r or rank_pattern is {rank}")
        alpha = _of_module(config["alpha_pattern"], module, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        yield LoraRule(f"{module}.weight", a, b, scale, in_axes=(1,))


def _of_module(pattern: Mapping[str, float], module: str, usual: float) -> float:
    """The value of the first key that is, as a regular expression, the end of a module's name."""
    keys = (key for key in pattern if re.match(rf"(.*\.)?({key})$", module))
    return pattern.get(next(keys, ""), usual)


def _is_target(config: Mapping[str, Any], module: str) -> bool:
    """Whether PEFT changes a module."""
    targets, layers = config["target_modules"], config["layers_to_transform"]
    if config["exclude_modules"] and _is_named(config["exclude_modules"], module):
        return False
    if isinstance(targets, str) and targets.lower() == "all-linear":
        return module.rpartition(".")[2] != "lm_head"
    if isinstance(targets, str) or layers == [] or not _is_named(targets, module):
        return _is_named(targets, module)
    patterns = config["layers_pattern"] or [r"[^.]*"]
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found = (re.match(rf"(?:^|.*?\.){each}\.(\d+)\.", module) for each in patterns)
    index = next((int(match[1]) for match in found if match), None)
    return index in ([layers] if isinstance(layers, int) else layers)


def _is_named(names: str | list[str], module: str) -> bool:
    """Whether a regular expression is a module's name, or one of several names its end."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)
