"""Prompts from arguments, files and stdin."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sgljax_engine import InvalidRequestError

STDIN = "-"
_KINDS = ("prompt", "messages", "input_ids")
_OTHER_KEYS = ("id", "sampling_params")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """What to complete: exactly one of `text`, `messages` and `input_ids`.

    `id` is copied into the output; `label` names the prompt in messages.
    """

    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    input_ids: Sequence[int] | None = None
    id: Any = None
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    label: str = ""


def read_prompts(arguments: Sequence[str], path: str | None, is_jsonl: bool) -> list[Prompt]:
    """All prompts of a command line.

    Without arguments `path` is read, one prompt per line; "-" or None is stdin. Lines may be JSON
    objects, as always in a file called *.jsonl. InvalidRequestError has a bad line's number.
    """
    if arguments:
        if path is not None or is_jsonl:
            raise InvalidRequestError("give prompts as arguments or with --input, not both")
        return [Prompt(text=text, label=f"prompt {i}") for i, text in enumerate(arguments)]
    source = "stdin" if path in (None, STDIN) else str(path)
    is_jsonl = is_jsonl or source.endswith(".jsonl")
    prompts = list(_parse(_lines(path), source, is_jsonl))
    if not prompts:
        raise InvalidRequestError(f"no prompts: {source} is empty")
    return prompts


def as_chat(prompt: Prompt, system: str | None) -> Prompt:
    """The prompt as the user's message in a conversation."""
    if prompt.messages is not None and system is None:
        return prompt
    if prompt.text is None:
        raise InvalidRequestError(f"{prompt.label}: --chat and --system need a text to send")
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt.text})
    return dataclasses.replace(prompt, text=None, messages=messages)


def _lines(path: str | None) -> Iterator[str]:
    if path not in (None, STDIN):
        with Path(path).open(encoding="utf-8") as file:
            yield from file
    else:
        yield from sys.stdin


def _parse(lines: Iterable[str], source: str, is_jsonl: bool) -> Iterator[Prompt]:
    for number, line in enumerate(lines, start=1):
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        label = f"{source}:{number}"
        yield _from_json(line, label) if is_jsonl else Prompt(text=line, label=label)


def _from_json(line: str, label: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidRequestError(f"{label} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise InvalidRequestError(f"{label} must be a JSON object, got {type(row).__name__}")
    given = [kind for kind in _KINDS if kind in row]
    if len(given) != 1:
        raise InvalidRequestError(
            f"{label} must have one of {list(_KINDS)}, got {given or sorted(row)}"
        )
    unknown = sorted(set(row) - {*_KINDS, *_OTHER_KEYS})
    if unknown:
        raise InvalidRequestError(
            f"{label} has the unknown key {unknown[0]!r}; known: {', '.join(_KINDS + _OTHER_KEYS)}"
        )
    sampling = row.get("sampling_params", {})
    if not isinstance(sampling, dict):
        raise InvalidRequestError(f"{label}: sampling_params must be an object, got {sampling!r}")
    if "prompt" in row and not isinstance(row["prompt"], str):
        raise InvalidRequestError(f"{label}: prompt must be a text, got {row['prompt']!r}")
    return Prompt(
        text=row.get("prompt"),
        messages=row.get("messages"),
        input_ids=row.get("input_ids"),
        id=row.get("id"),
        sampling=sampling,
        label=label,
    )
