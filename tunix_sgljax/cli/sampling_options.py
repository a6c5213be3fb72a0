"""One option for each field of SamplingParams, with help from its docstring."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

from sgljax_engine import SamplingParams
from tunix_sgljax.cli.engine_options import parse_value

_PREFIX = "sampling_"
_ALIASES = {"max_new_tokens": ("--max-tokens",)}
"""More names of options: those of OpenAI's API and vLLM."""


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options. Options that are not given are absent from the parsed arguments."""
    group = parser.add_argument_group(
        "sampling", "What is not given is as the model's generation_config.json has it."
    )
    texts = _field_texts()
    for field in dataclasses.fields(SamplingParams):
        name = "--" + field.name.replace("_", "-")
        given: dict[str, Any] = {
            "dest": _PREFIX + field.name,
            "default": argparse.SUPPRESS,
            "help": texts[field.name].replace("%", "%%"),
        }
        kind = str(field.type)
        if kind == "bool":
            group.add_argument(name, action=argparse.BooleanOptionalAction, **given)
        elif kind == "tuple[str, ...]":
            group.add_argument(name, action="append", metavar="TEXT", **given)
        elif kind.startswith("tuple[str, str]"):
            group.add_argument(name, nargs=2, metavar=("OPEN", "CLOSE"), **given)
        elif kind.startswith("tuple[int"):
            group.add_argument(name, type=_ids, metavar="ID,ID,...", **given)
        elif kind.startswith("Mapping"):
            group.add_argument(name, type=_biases, metavar="ID=VALUE,...", **given)
        else:
            number: Callable[[str], Any] = float if kind.startswith("float") else _int_or_none
            names = (name, *_ALIASES.get(field.name, ()))
            group.add_argument(*names, type=number, metavar=field.name.upper(), **given)


def given_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that the command line sets."""
    return {
        name.removeprefix(_PREFIX): value
        for name, value in vars(args).items()
        if name.startswith(_PREFIX)
    }


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _biases(text: str) -> dict[int, float]:
    pairs = [pair.split("=") for pair in text.split(",")]
    return {int(key): float(value) for key, value in pairs}


def _int_or_none(text: str) -> int | None:
    value = parse_value(text)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}")
    return value


def _field_texts() -> dict[str, str]:
    """The docstring of SamplingParams for each field."""
    section = inspect.cleandoc(SamplingParams.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in entries}
    return {field.name: texts.get(field.name, "") for field in dataclasses.fields(SamplingParams)}
