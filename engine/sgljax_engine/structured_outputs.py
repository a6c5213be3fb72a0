"""What a structured output may be: a JSON Schema, a regex, choices or a grammar. No JAX.

The names are those of vLLM's `structured_outputs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sgljax_engine.checks import check_text
from sgljax_engine.errors import InvalidRequestError, unknown_name_message

KINDS = ("json", "json_object", "regex", "choice", "grammar")

MAX_GRAMMAR_LEN = 1 << 18
"""Maximum number of characters of a schema, regex or grammar."""

MAX_CHOICES = 1024


def checked_outputs(given: Any) -> dict[str, Any] | None:
    """`structured_outputs` of a request with its one kind alone, a schema as a dict.

    Raises:
        InvalidRequestError: for another kind, none or several, and a wrong type or length.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        given = getattr(given, "__dict__", None) or _slots(given)
    for name in given:
        if name not in (*KINDS, *_WITHOUT_EFFECT):
            raise InvalidRequestError(unknown_name_message("structured_outputs", str(name), KINDS))
    asked = {kind: given[kind] for kind in KINDS if given.get(kind) not in (None, False)}
    if len(asked) != 1:
        raise InvalidRequestError(
            f"structured_outputs must have one of {', '.join(KINDS)}, got {list(asked)}"
        )
    for name in _WITHOUT_EFFECT:
        if given.get(name):
            raise InvalidRequestError(
                f"structured_outputs[{name!r}] must be None, got {given[name]!r}: the grammar "
                "decides"
            )
    kind, value = asked.popitem()
    return {kind: _CHECKS[kind](f"structured_outputs[{kind!r}]", value)}


_WITHOUT_EFFECT = (
    "disable_fallback",
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
    "structural_tag",
    "_backend",
    "_backend_was_auto",
)
"""Fields of vLLM's StructuredOutputsParams that must ask for nothing."""


def _slots(given: Any) -> Mapping[str, Any]:
    names = getattr(type(given), "__slots__", None)
    if not names:
        raise InvalidRequestError(
            f"structured_outputs must be a dict with one of {', '.join(KINDS)}, got {given!r}"
        )
    return {name: getattr(given, name) for name in names}


def _schema(name: str, value: Any) -> Any:
    if isinstance(value, str):
        _text(name, value)
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InvalidRequestError(f"{name} must be JSON, got {value[:64]!r}: {error}") from None
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name} must be a JSON Schema, a dict, got {value!r}")
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} must hold what JSON can: {error}") from None
    _text(name, text)
    check_text(json.dumps(value, ensure_ascii=False), name)
    return json.loads(text)


def _switch(name: str, value: Any) -> bool:
    if value is not True:
        raise InvalidRequestError(f"{name} must be True or False, got {value!r}")
    return True


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{name} must be a text, got {value!r}")
    if len(value) > MAX_GRAMMAR_LEN:
        raise InvalidRequestError(
            f"{name} must have at most {MAX_GRAMMAR_LEN} characters, got {len(value)}"
        )
    check_text(value, name)
    return value


def _choices(name: str, value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)) or not value or len(value) > MAX_CHOICES:
        raise InvalidRequestError(
            f"{name} must be a list of 1 to {MAX_CHOICES} texts, got {value!r}"
        )
    for each in value:
        _text(name, each)
    _text(name, "".join(value))
    return list(value)


_CHECKS = {
    "json": _schema,
    "json_object": _switch,
    "regex": _text,
    "choice": _choices,
    "grammar": _text,
}


_OTHER_NAMES = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
"""SGLang's sampling fields, and their kinds here."""

_OWN_NAMES = ("guided_decoding", "structured_outputs")
OTHER_NAMES = frozenset({*_OTHER_NAMES, "guided_decoding", "thinking_token_budget"})
"""All names that `with_own_names` replaces."""


def with_own_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling fields with SGLang's and vLLM's names of structured outputs replaced by ours.

    Raises:
        InvalidRequestError: if two of them are given.
    """
    given, outputs = dict(fields), []
    for name, kind in _OTHER_NAMES.items():
        if name in given and (value := given.pop(name)) not in (None, ""):
            outputs.append({kind: value})
    for name in _OWN_NAMES:
        if name in given and (value := given.pop(name)) not in (None, {}):
            outputs.append(value)
    if len(outputs) > 1:
        raise InvalidRequestError(f"structured_outputs must be given once, got {outputs}")
    if outputs:
        given["structured_outputs"] = outputs[0]
    budget = given.pop("thinking_token_budget", None)
    if budget not in (None, -1):
        given["max_thinking_tokens"] = budget
    return given


def has_grammar(sampling_params: Any) -> bool:
    """Whether sampling parameters, or a dict of them, ask for structured outputs."""
    if isinstance(sampling_params, Mapping):
        return any(sampling_params.get(name) for name in (*_OTHER_NAMES, *_OWN_NAMES))
    return getattr(sampling_params, "structured_outputs", None) is not None
