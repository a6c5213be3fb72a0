"""Reads a config file into a `TrainConfig`, strictly."""

from __future__ import annotations

import ast
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
from omegaconf.errors import OmegaConfBaseException, ValidationError

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

INPUT_PATHS = (
    "actor_model_config.model_path",
    "actor_model_config.checkpoint",
    "tokenizer_config.tokenizer_path",
    "task.code_dir",
)
"""Input paths: relative to the config file, or if from the command line, to the working folder."""

_DATASETS = ("task.dataset", "task.eval_dataset")
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
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
    parts = []
    for part, folder in (
        (given, path.resolve().parent),
        (_parse_overrides(overrides), Path.cwd()),
    ):
        read = _read_tunix(OmegaConf.to_container(part, resolve=False))
        check_names(read)
        parts.append(_make_absolute(OmegaConf.create(read), folder))
    config = _to_config(OmegaConf.merge(*parts))
    check_config(config)
    return config


def to_yaml(config: TrainConfig) -> str:
    """The whole config, defaults included, as a file that `load_config` reads."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def check_names(given: Any, kind: type = TrainConfig, prefix: str = "") -> None:
    """Refuses keys that the schema does not have.

    Raises:
        InvalidConfigError: names the key with its path and the nearest known one.
    """
    if not isinstance(given, Mapping):
        return  # a wrong type, or null; found later
    fields = _field_types(kind)
    for name, value in given.items():
        if name not in fields:
            raise InvalidConfigError(_unknown_key(str(name), prefix, list(fields)))
        section = _section_of(fields[name])
        if section is not None:
            check_names(value, section, f"{prefix}{name}.")


def field_rows(kind: type = TrainConfig, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every key with its type, in words, and its default; sections in the order of the schema."""
    types_of = _field_types(kind)
    for field in dataclasses.fields(kind):
        section = _section_of(types_of[field.name])
        if section is not None:
            yield from field_rows(section, f"{prefix}{field.name}.")
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield f"{prefix}{field.name}", type_name(types_of[field.name]), default


def type_name(annotation: Any) -> str:
    """A field's type in words."""
    args = [arg for arg in typing.get_args(annotation) if arg is not types.NoneType]
    if isinstance(annotation, types.UnionType):
        return f"{type_name(args[0])} or null"
    origin = typing.get_origin(annotation)
    if origin is list:
        return {int: "a list of integers", str: "a list of strings"}[args[0]]
    if origin is dict or dataclasses.is_dataclass(annotation):
        return "keys and values"
    return _TYPE_NAMES[annotation]


def is_function(value: str) -> bool:
    """Whether a dataset is "module:function" rather than a file."""
    module, colon, name = value.rpartition(":")
    return bool(colon) and name.isidentifier() and all(p.isidentifier() for p in module.split("."))


@functools.cache
def _field_types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _section_of(annotation: Any) -> type | None:
    """The dataclass of a field that holds one or null."""
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return kind
    return None


def _read_tunix(given: Any, kind: type = TrainConfig, prefix: str = "") -> Any:
    """Reads what Tunix's files say otherwise: meshes as text, no LoRA as {}, "" for null."""
    if not isinstance(given, Mapping):
        return given
    fields, read = _field_types(kind), {}
    for name, value in given.items():
        if name in _UNREAD.get(kind, ()):
            if value:
                text = "%s%s=%r is not read: it is for Tunix's own loader of models"
                logger.warning(text, prefix, name, value)
            continue
        section = _section_of(fields.get(name))
        if section is not None:
            value = _read_tunix(value, section, f"{prefix}{name}.")
            if value == {} and type(None) in typing.get_args(fields[name]):
                value = None
        elif kind is MeshConfig and isinstance(value, str) and value.startswith("("):
            try:
                value = list(ast.literal_eval(value))
            except (SyntaxError, ValueError, TypeError):
                raise InvalidConfigError(f"{prefix}{name} {value!r} is no tuple") from None
        elif value == "" and kind in _UNREAD:
            value = None
        read[name] = value
    return read


def _unknown_key(name: str, prefix: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"unknown key {prefix}{name}; did you mean {prefix}{near[0]}?"
    everywhere = {key.rpartition(".")[2]: key for key, _, _ in field_rows()}
    near = difflib.get_close_matches(name, everywhere, n=1, cutoff=0.8)
    if near:
        return f"unknown key {prefix}{name}; did you mean {everywhere[near[0]]}?"
    return f"unknown key {prefix}{name}; known here: {', '.join(known)}"


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


def _make_absolute(given: DictConfig, folder: Path) -> DictConfig:
    for key in (*INPUT_PATHS, *_DATASETS):
        section, _, name = key.partition(".")
        node = given.get(section)
        if not isinstance(node, DictConfig) or OmegaConf.is_missing(node, name):
            continue
        value = node.get(name)
        if isinstance(value, str) and not (key in _DATASETS and is_function(value)):
            node[name] = os.path.normpath(folder / Path(value).expanduser())
    return given


def _to_config(given: Any) -> TrainConfig:
    try:
        merged = OmegaConf.merge(OmegaConf.structured(TrainConfig), given)
        # A merge with ??? in the file would keep the default.
        missing = sorted(OmegaConf.missing_keys(given) | OmegaConf.missing_keys(merged))
        if missing:
            raise InvalidConfigError(
                f"{missing[0]} must be given, in the file or as {missing[0]}=..."
            )
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise InvalidConfigError(_wrong_value(error, given)) from None
    assert isinstance(config, TrainConfig)
    return config


def _wrong_value(error: OmegaConfBaseException, given: Any) -> str:
    """Names the key, its value, and what is expected."""
    key = (error.full_key or "").partition("[")[0]
    if not key:
        # OmegaConf does not say where a value stands in place of a section.
        container: Any = OmegaConf.to_container(given, resolve=False)
        for name, annotation in _field_types(TrainConfig).items():
            value = container.get(name, {})
            if type_name(annotation) == "keys and values" and not isinstance(value, Mapping):
                return f"{name} must be keys and values, got {value!r}"
        return str(error).splitlines()[0]
    kind: Any = TrainConfig
    for name in key.split("."):
        section = _section_of(kind)
        if section is None:
            break
        kind = _field_types(section)[name]
    if not isinstance(error, ValidationError):
        return f"{error.full_key}: {str(error).splitlines()[0]}"
    return f"{error.full_key} must be {type_name(kind)}, got {error.value!r}"
