"""LoRA pairs of a checkpoint in the form of Hugging Face and PEFT: A [rank, in], B [out, rank]."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from sgljax_engine import HfTensor, WeightSyncError
from tunix_sgljax.lora import is_lora_name
from tunix_sgljax.mappings import built_in_targets, lora_factor, lora_in_axes

_A, _B = "_lora_a", "_lora_b"
_WEIGHT = ".weight"


class HfPair(NamedTuple):
    """A pair of one Hugging Face tensor: A [rank, in], B [out, rank], and the factor of B A."""

    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def alpha(self) -> float:
        """PEFT's alpha; the scale is alpha / rank."""
        return self.scale * self.rank


class LoraScale(NamedTuple):
    """The scale of all pairs: alpha / rank, or alpha, which is divided by each pair's rank."""

    scaling: float | None
    alpha: float | None

    def for_rank(self, rank: int) -> float:
        if self.scaling is not None:
            return self.scaling
        assert self.alpha is not None
        return self.alpha / rank


def hf_pairs(
    weights: Mapping[str, np.ndarray],
    architecture: str,
    scale: LoraScale,
    base: Mapping[str, HfTensor],
) -> dict[str, HfPair]:
    """The pairs of a checkpoint by the names of their tensors.

    A pair of a fused weight becomes one pair per part, all with the same A. WeightSyncError names
    all pairs that are incomplete, belong to no tensor, or do not fit it.
    """
    found: dict[str, HfPair] = {}
    problems: list[str] = []
    names = {name.removesuffix(_A).removesuffix(_B) for name in weights if is_lora_name(name)}
    for name in sorted(names):
        missing = [half for half in (name + _A, name + _B) if half not in weights]
        if missing:
            problems.append(f"{missing[0]!r} is missing: half a pair")
            continue
        try:
            for target, a, b in _split(name, weights[name + _A], weights[name + _B], architecture):
                shape = None if target not in base else base[target].shape
                if shape is None:
                    problems.append(f"{name!r} is {target!r} there, which the model does not have")
                elif (b.shape[0], a.shape[1]) != shape:
                    problems.append(
                        f"{name!r}: A and B make {[b.shape[0], a.shape[1]]}, but {target!r} is "
                        f"{list(shape)}"
                    )
                else:
                    factor = lora_factor(name, num_in=a.shape[1])
                    found[target] = HfPair(a, b, scale.for_rank(a.shape[0]) / factor)
        except ValueError as error:
            problems.append(f"{name!r}: {error}")
    if problems:
        raise WeightSyncError(
            f"the LoRA pairs of these weights do not fit ({len(problems)} problem(s)):\n  "
            + "\n  ".join(problems)
        )
    return found


def _split(
    name: str, a: np.ndarray, b: np.ndarray, architecture: str
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The tensors that a pair belongs to, each with its A and B."""
    targets = built_in_targets(name, architecture)
    if not targets:
        raise ValueError(f"no weight of a {architecture} is called so")
    in_axes = lora_in_axes(name)
    where = f"A {list(a.shape)} and B {list(b.shape)}"
    if a.ndim != len(in_axes) + 1 or b.ndim < 2 or b.shape[0] != a.shape[-1]:
        raise ValueError(f"{where}; A must be [{len(in_axes)} axes, rank], and B [rank, ...]")
    rank = a.shape[-1]
    for target, rule in targets:
        part = b
        if isinstance(rule.part, int):  # a fused weight, whose parts are outputs
            (axis,) = rule.part_axes
            if axis in in_axes or b.shape[1 + axis] != len(targets):
                raise ValueError(f"{where}; the second axis of B must be {len(targets)}")
            part = b.take(rule.part, axis=1 + axis)
        yield target, a.reshape(-1, rank).T, part.reshape(rank, -1).T


def merge_pairs(
    tensors: Mapping[str, HfTensor], pairs: Mapping[str, HfPair], dtype: np.dtype | None = None
) -> dict[str, HfTensor]:
    """The tensors with each pair added to its own, in float32; then of a dtype, or as before."""
    return {
        name: _merged(tensor, pairs[name], dtype or tensor.dtype) if name in pairs else tensor
        for name, tensor in tensors.items()
    }


def _merged(tensor: HfTensor, pair: HfPair, dtype: np.dtype) -> HfTensor:
    def load() -> np.ndarray:
        b = pair.b.astype(np.float32) * np.float32(pair.scale)
        return (tensor.load().astype(np.float32) + b @ pair.a.astype(np.float32)).astype(dtype)

    return HfTensor(tensor.shape, dtype, load)


def write_peft(
    folder: Path,
    pairs: Mapping[str, HfPair],
    base: Iterable[str],
    *,
    base_name: str,
    dtype: np.dtype | None = None,
) -> list[Path]:
    """Writes an adapter as PEFT's `save_pretrained` does; returns the paths of its two files.

    The folder exists. `base` has the names of all tensors; without a dtype pairs keep theirs.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, pair in pairs.items():
        module = f"base_model.model.{name.removesuffix(_WEIGHT)}"
        for letter, array in (("A", pair.a), ("B", pair.b)):
            cast = array if dtype is None else array.astype(dtype)
            arrays[f"{module}.lora_{letter}.weight"] = np.ascontiguousarray(cast)
    weights_path = folder / "adapter_model.safetensors"
    save_file(arrays, weights_path, metadata={"format": "pt"})
    config_path = folder / "adapter_config.json"
    text = json.dumps(peft_config(pairs, base, base_name), indent=2, sort_keys=True) + "\n"
    config_path.write_text(text, encoding="utf-8")
    return [config_path, weights_path]


def peft_config(pairs: Mapping[str, HfPair], base: Iterable[str], base_name: str) -> dict[str, Any]:
    """The contents of adapter_config.json.

    Rank and alpha are those of most pairs; `rank_pattern` and `alpha_pattern` have the others.
    """
    modules = {name.removesuffix(_WEIGHT): pair for name, pair in pairs.items()}
    everywhere = [name.removesuffix(_WEIGHT) for name in base if name.endswith(_WEIGHT)]
    rank = Counter(pair.rank for pair in modules.values()).most_common(1)[0][0]
    alpha = Counter(pair.alpha for pair in modules.values()).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted(_short_names(dict.fromkeys(modules, True), everywhere)),
        "rank_pattern": _others({name: pair.rank for name, pair in modules.items()}, rank),
        "alpha_pattern": _others({name: pair.alpha for name, pair in modules.items()}, alpha),
    }


def _others(values: Mapping[str, float], usual: float) -> dict[str, float]:
    short = _short_names(values, list(values))
    return {name: value for name, value in sorted(short.items()) if value != usual}


def _short_names(values: Mapping[str, Any], everywhere: Sequence[str]) -> dict[str, Any]:
    """Values by last names such as "q_proj" if equal in all such modules; else by full names."""
    by_last: dict[str, set[Any]] = {}
    for name in everywhere:
        by_last.setdefault(name.rpartition(".")[2], set()).add(values.get(name))
    short = {}
    for name, value in values.items():
        last = name.rpartition(".")[2]
        short[last if by_last[last] == {value} else name] = value
    return short
