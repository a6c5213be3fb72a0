"""Sources of an engine's first weights, and the checks of arguments that name them."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sgljax_engine.checks import check_model_folder, require
from sgljax_engine.config import DTYPES, EngineConfig
from sgljax_engine.errors import EngineError, InvalidConfigError, WeightLoadError
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.registry import get_model, load_model_config
from sgljax_engine.models.spec import ParamKind
from sgljax_engine.models.weight_rules import hf_rules, hf_source, logical_rules
from sgljax_engine.observability.progress import ProgressListener, reporting
from sgljax_engine.weights import loader, mxfp4
from sgljax_engine.weights.hf_json import read_json
from sgljax_engine.weights.hf_layout import find_weight_files
from sgljax_engine.weights.hf_tables import HEADS, TABLES, first_dtype, untie_tables
from sgljax_engine.weights.rules import Rule, RuleTable, WeightRule, WeightSource, check_rules

LOAD_FORMATS = ("auto", "safetensors", "dummy")


_FILLS = {
    ParamKind.NORM: 1.0,
    ParamKind.OFFSET_NORM: 0.0,
    ParamKind.BIAS: 0.0,
    ParamKind.SCALE: 1.0,
}
"""Values of vectors in a model of random weights."""


def check_sources(
    model_path: str | Path | None,
    model_config: ModelConfig | None,
    weights: Any,
    weight_rules: Sequence[WeightRule] | None,
    load_format: str,
) -> None:
    """Refuses arguments that contradict one another; none is ever ignored."""
    if (model_path is None) == (model_config is None):
        raise InvalidConfigError("give exactly one of model_path and model_config")
    _check_types(model_path, model_config, weights)
    if load_format not in LOAD_FORMATS:
        raise InvalidConfigError(f"load_format must be one of {LOAD_FORMATS}, got {load_format!r}")
    if weights is not None and load_format != "auto":
        raise InvalidConfigError(f"load_format={load_format!r} goes without weights")
    if weights is None and weight_rules is not None:
        raise InvalidConfigError("weight_rules goes with weights")
    if load_format == "safetensors" and model_path is None:
        raise InvalidConfigError("load_format='safetensors' needs model_path")


def _check_types(
    model_path: str | Path | None, model_config: ModelConfig | None, weights: Any
) -> None:
    if isinstance(weights, (str, os.PathLike)):
        raise InvalidConfigError(
            f"weights must be arrays, got {str(weights)!r}; a folder goes into model_path"
        )
    if model_config is not None:
        kind = type(model_config).__name__
        expected = "a ModelConfig (model_config_from_hf makes one of a config.json's contents)"
        require(isinstance(model_config, ModelConfig), "model_config", kind, expected)
        return
    assert model_path is not None
    check_model_folder("model_path", model_path)


def pick_dtype(config: EngineConfig, folder: str | Path | None) -> str:
    """The dtype asked for, else that of the folder, else float32.

    A folder's dtype is what transformers' dtype="auto" takes: what config.json names outside of
    text_config, else that of the first weight. A folder without weights has that of text_config.
    """
    if config.runtime.dtype is not None:
        return config.runtime.dtype
    if folder is None:
        return "float32"
    named = read_json(Path(folder) / "config.json")
    inside = named.get("text_config") or {}
    found = _named_dtype(named) or first_dtype(folder) or _named_dtype(inside) or "float32"
    if found not in DTYPES:
        raise InvalidConfigError(
            f"the dtype of {folder} must be one of {', '.join(DTYPES)}, got {found!r}; the option "
            "dtype overrides it"
        )
    return found


def _named_dtype(config: Mapping[str, Any]) -> Any:
    return config.get("dtype") or config.get("torch_dtype")


def pick_weights(
    model: ModelConfig,
    config: EngineConfig,
    folder: str | Path | None,
    weights: Any,
    rules: Sequence[WeightRule] | None,
    load_format: str,
    progress: ProgressListener | None,
) -> WeightSource:
    if weights is not None:
        return hf_source(model, weights, rules)
    if load_format == "dummy" or folder is None:
        return dummy_weights(model, config.runtime.random_seed or 0)
    return folder_weights(model, folder, progress)


def folder_weights(
    model: ModelConfig,
    folder: str | Path,
    progress: ProgressListener | None = None,
    rules: Sequence[WeightRule] | None = None,
) -> WeightSource:
    """The weights of a Hugging Face folder that the rules take, still on the host.

    What they ignore is not read: the vision tower of a multimodal model, and a head that is tied to
    the embeddings, which `load_model_config` has compared.
    """
    used = hf_rules(model) if rules is None else check_rules(rules)
    table = RuleTable([rule for rule in used if isinstance(rule, Rule)])
    files = find_weight_files(folder)
    with reporting(progress, "read weights", files.num_bytes(), "B") as advance:
        arrays = loader.read_hf_folder(files, advance, table.ignores)
        if rules is None and arrays.keys().isdisjoint(TABLES):  # then the head serves as both
            arrays |= loader.read_hf_folder(files, ignores=lambda name: name not in HEADS)
        if rules is None:
            mxfp4.join_blocks(arrays)  # here, where nothing else holds the blocks
        return hf_source(model, arrays, rules)


def update_source(
    model: ModelConfig, source: Any, rules: Sequence[WeightRule] | None
) -> Callable[[], WeightSource]:
    """What reads the source of an update: a folder's path, or arrays."""
    if isinstance(source, (str, os.PathLike)):
        return functools.partial(same_model_weights, model, Path(source), rules)
    if rules is not None:
        return functools.partial(WeightSource, source, check_rules(rules))
    return functools.partial(hf_source, model, source, None)


def same_model_weights(
    model: ModelConfig, folder: str | Path, rules: Sequence[WeightRule] | None
) -> WeightSource:
    """`folder_weights` of a folder that must describe the same model.

    It may differ in its end-of-sequence ids and context length. A folder with one table for
    embeddings and output projection fills both of an engine's that has two.
    """
    if not Path(folder).is_dir():
        if Path(folder).exists():
            raise WeightLoadError(f"weights must be arrays or a folder, got the file {folder}")
        raise WeightLoadError(f"no such folder of weights: {str(folder)!r}")
    if not (Path(folder) / "config.json").exists():
        raise WeightLoadError(
            f"{folder} has no config.json, so nothing tells whether it is of the same model; give "
            "arrays instead, sgljax_engine.read_safetensors reads them"
        )
    try:
        found = load_model_config(folder)
    except EngineError as error:
        raise WeightLoadError(f"{folder}: {error}") from error
    fills_both = rules is None and found.tie_word_embeddings and not model.tie_word_embeddings
    if fills_both:
        found = dataclasses.replace(found, tie_word_embeddings=False)
    differing = [
        f"{field.name} {getattr(found, field.name)!r}, not {getattr(model, field.name)!r}"
        for field in dataclasses.fields(model)
        if field.name not in ("eos_token_ids", "context_length")
        and getattr(found, field.name) != getattr(model, field.name)
    ]
    if differing:
        raise WeightLoadError(f"{folder} holds another model: {'; '.join(differing)}")
    source = folder_weights(model, folder, rules=rules)
    return source._replace(arrays=untie_tables(source.arrays)) if fills_both else source


def dummy_weights(model: ModelConfig, seed: int) -> WeightSource:
    specs = get_model(model.architecture).param_specs(model)
    shapes = {name: spec.shape for name, spec in specs.items()}
    fills = {name: _FILLS[spec.kind] for name, spec in specs.items() if spec.kind in _FILLS}
    return WeightSource(loader.random_weights(shapes, fills, seed), logical_rules(model))
