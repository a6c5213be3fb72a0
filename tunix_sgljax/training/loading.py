"""Reads a config file into a `TrainConfig`, strictly."""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException, ValidationError

from sgljax_engine import InvalidConfigError
from tunix_sgljax.training.checks import check_config, value_of
from tunix_sgljax.training.schema import LoraSection, TrainConfig

INPUT_PATHS = ("model.path", "model.checkpoint", "tokenizer.path", "task.code_dir")
"""Input paths: relative to the config file, or if from the command line, to the working folder."""

_DATASETS = ("task.dataset", "task.eval_dataset")
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


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
    for part in (given, changes):
        check_names(OmegaConf.to_container(part, resolve=False))
    given = _make_absolute(given, path.resolve().parent)
    given = OmegaConf.merge(given, _make_absolute(changes, Path.cwd()))
    assert isinstance(given, DictConfig)
    config = _to_config(given)
    check_config(config, _changed_keys(config))
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


def _unknown_key(name: str, prefix: str, known: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"unknown key {prefix}{name}; did you mean {prefix}{near[0]}?"
    if "lora" in name.lower():  # Tunix has a lora_config in each model's section
        keys = ", ".join(_field_types(LoraSection))
        return f"unknown key {prefix}{name}; LoRA is the section lora, with the keys {keys}"
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


def is_function(value: str) -> bool:
    """Whether a dataset is "module:function" rather than a file."""
    module, colon, name = value.rpartition(":")
    return bool(colon) and name.isidentifier() and all(p.isidentifier() for p in module.split("."))


def _to_config(given: DictConfig) -> TrainConfig:
    try:
        merged = OmegaConf.merge(OmegaConf.structured(TrainConfig), given)
        # A merge with ??? in the file would keep the default.
        missing = sorted(OmegaConf.missing_keys(given) | OmegaConf.missing_keys(merged))
        if missing:
            raise InvalidConfigError(
                f"{missing[0]} must be given, in the file or as {missing[0]}=..."
            )
        config = OmegaConf.to_object(merged)
    except InterpolationKeyError as error:
        raise InvalidConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    except OmegaConfBaseException as error:
        raise InvalidConfigError(_wrong_type(error, given)) from None
    assert isinstance(config, TrainConfig)
    return config


def _wrong_type(error: OmegaConfBaseException, given: DictConfig) -> str:
    """Names the key, its value, and what is expected."""
    if error.full_key:
        key = error.full_key.partition("[")[0]
        expected = type_name(functools.reduce(_type_below, key.split("."), TrainConfig))
        value = error.value if isinstance(error, ValidationError) else None
        return f"{error.full_key} must be {expected}, got {value!r}"
    # OmegaConf does not say where a value stands in place of a section.
    container = OmegaConf.to_container(given, resolve=False)
    for key, value in _sections(container):
        if not isinstance(value, Mapping):
            return f"{key} must be keys and values, got {value!r}"
    return str(error).splitlines()[0]


def _type_below(kind: Any, name: str) -> Any:
    section = _section_of(kind)
    assert section is not None
    return _field_types(section)[name]


def _sections(given: Any, kind: type = TrainConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, annotation in _field_types(kind).items():
        section = _section_of(annotation)
        if section is None or name not in given:
            continue
        yield f"{prefix}{name}", given[name]
        if isinstance(given[name], Mapping):
            yield from _sections(given[name], section, f"{prefix}{name}.")


def _changed_keys(config: TrainConfig) -> list[str]:
    """Keys whose values are not their defaults."""
    return [key for key, _, default in field_rows() if value_of(config, key) != default]
