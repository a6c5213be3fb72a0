"""Reads a config file into a `TrainConfig`, strictly."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import logging
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sgljax_engine import InvalidConfigError
from tunix_sgljax.training.checks import check_config
from tunix_sgljax.training.schema import (
    MeshConfig,
    ModelSection,
    RolloutModelSection,
    TokenizerSection,
    TrainConfig,
)

logger = logging.getLogger(__name__)

_MODEL, _TOKENIZER, _TASK = "actor_model_config", "tokenizer_config", "task"
_DATASETS = ((_TASK, "dataset"), (_TASK, "eval_dataset"))
_INPUT_PATHS = (
    *((_MODEL, "model_path"), (_MODEL, "checkpoint"), (_TOKENIZER, "tokenizer_path")),
    *((_TASK, "code_dir"), *_DATASETS),
)
"""Input paths: relative to the config file, or if from the command line, to the working folder."""

_TYPE_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "keys and values",
    list: "a list of strings",
}
_UNREAD: dict[type, tuple[str, ...]] = {
    ModelSection: (
        *("model_id", "model_source", "model_download_path", "intermediate_ckpt_dir"),
        *("model_display", "same_mesh_as"),
    ),
    TokenizerSection: ("tokenizer_type", "add_bos", "add_eos"),
    MeshConfig: ("allocation_policy",),
}
_UNREAD[RolloutModelSection] = (
    *_UNREAD[ModelSection],
    *(field.name for field in dataclasses.fields(ModelSection) if field.name != "mesh"),
)
"""Keys of Tunix's sections that say how Tunix finds a model of its registry."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Returns the config in a YAML file.

    Args:
        path: The file.
        overrides: `key=value` with dotted keys, which override the file; values are YAML.

    Raises:
        InvalidConfigError: names the key, its value and what is expected; for an unknown key, the
            nearest known one.
    """
    path = Path(path)
    try:
        given = OmegaConf.load(path)
    except OSError as error:
        raise InvalidConfigError(f"cannot read the config {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise InvalidConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(given, DictConfig):
        raise InvalidConfigError(f"{path} must hold keys and values, got {type(given).__name__}")
    changes = _parse_overrides(overrides)
    try:
        _make_absolute(given, path.resolve().parent)
        _make_absolute(changes, Path.cwd())
        merged = OmegaConf.to_container(OmegaConf.merge(given, changes), resolve=True)
    except OmegaConfBaseException as error:
        raise InvalidConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    config = _build(TrainConfig, merged)
    check_config(config)
    return config


def to_yaml(config: TrainConfig) -> str:
    """The whole config, defaults included, as a file that `load_config` reads."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def field_keys(kind: type = TrainConfig, prefix: str = "") -> Iterator[str]:
    """Every key of the schema, sections in its order."""
    for name, annotation in field_types(kind).items():
        section = section_of(annotation)
        if section is None:
            yield f"{prefix}{name}"
        else:
            yield from field_keys(section, f"{prefix}{name}.")


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def section_of(annotation: Any) -> type | None:
    """The dataclass of a field that holds one or null."""
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return kind
    return None


def type_name(annotation: Any) -> str:
    if isinstance(annotation, types.UnionType):
        return f"{type_name(typing.get_args(annotation)[0])} or null"
    if annotation == list[int]:
        return "a list of integers"
    return _TYPE_NAMES[typing.get_origin(annotation) or annotation]


def is_function(value: str) -> bool:
    """Whether a dataset is "module:function" rather than a file."""
    module, colon, name = value.rpartition(":")
    return bool(colon) and name.isidentifier() and all(p.isidentifier() for p in module.split("."))


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    for text in overrides:
        key, is_pair, _ = text.partition("=")
        if not is_pair or not key:
            raise InvalidConfigError(f"an override must be key=value, got {text!r}")
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        raise InvalidConfigError(f"cannot read the overrides {list(overrides)}: {text}") from None


def _make_absolute(given: DictConfig, folder: Path) -> None:
    for key in _INPUT_PATHS:
        section, name = key
        node = given.get(section)
        if not isinstance(node, DictConfig) or OmegaConf.is_missing(node, name):
            continue
        value = node.get(name)
        is_path = isinstance(value, str) and value != ""
        if is_path and not (key in _DATASETS and is_function(value)):
            node[name] = os.path.normpath(folder / Path(value).expanduser())


def _build(kind: type, given: Any, prefix: str = "") -> Any:
    """A section from keys and values, read as Tunix's files have them."""
    if not isinstance(given, Mapping):
        raise InvalidConfigError(f"{prefix[:-1]} must be keys and values, got {given!r}")
    annotations, values = field_types(kind), {}
    for name, value in given.items():
        if name in _UNREAD.get(kind, ()):
            if value:
                text = "%s%s=%r is not read: it is for Tunix's own loader of models"
                logger.warning(text, prefix, name, value)
        elif name not in annotations:
            raise InvalidConfigError(_unknown_key(str(name), prefix, list(annotations)))
        else:
            value = None if value == "" and kind in _UNREAD else value
            values[name] = _convert(annotations[name], value, f"{prefix}{name}")
    for field in dataclasses.fields(kind):
        is_required = field.default is field.default_factory is dataclasses.MISSING
        if is_required and field.name not in values:
            raise _missing(f"{prefix}{field.name}")
    return kind(**values)


def _convert(annotation: Any, value: Any, key: str) -> Any:
    """The value of a key: meshes may be text, and no LoRA {}."""
    is_optional = isinstance(annotation, types.UnionType)
    section = section_of(annotation)
    if value == "???":
        raise _missing(key)
    if is_optional and (value is None or (section is not None and value == {})):
        return None
    if section is not None:
        return _build(section, value, f"{key}.")
    kind = typing.get_args(annotation)[0] if is_optional else annotation
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(value, str) and value.startswith("(") and typing.get_origin(kind) is list:
        with contextlib.suppress(SyntaxError, TypeError, ValueError):
            value = list(ast.literal_eval(value))
    is_right = type(value) is (typing.get_origin(kind) or kind)
    if is_right and isinstance(value, list):
        is_right = all(type(item) is typing.get_args(kind)[0] for item in value)
    if not is_right:
        raise InvalidConfigError(f"{key} must be {type_name(annotation)}, got {value!r}")
    return value


def _missing(key: str) -> InvalidConfigError:
    return InvalidConfigError(f"{key} must be given, in the file or as {key}=...")


def _unknown_key(name: str, prefix: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"unknown key {prefix}{name}; did you mean {prefix}{near[0]}?"
    everywhere = {key.rpartition(".")[2]: key for key in field_keys()}
    near = difflib.get_close_matches(name, everywhere, n=1, cutoff=0.8)
    if near:
        return f"unknown key {prefix}{name}; did you mean {everywhere[near[0]]}?"
    return f"unknown key {prefix}{name}; known here: {', '.join(known)}"
