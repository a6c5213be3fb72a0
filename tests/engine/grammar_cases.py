"""Random JSON Schemas, regexes and choices, and whether a text is one that they describe.

What judges is `jsonschema` and Python's `re`.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from typing import Any

import jsonschema

_LETTERS = "abcxyz019 _-"
_FORMATS = ("date", "time", "uuid", "ipv4", "email")


@dataclasses.dataclass(frozen=True)
class GrammarCase:
    """A value of `SamplingParams.structured_outputs`."""

    kind: str
    value: Any

    @property
    def outputs(self) -> dict[str, Any]:
        """As a request has it."""
        return {self.kind: self.value}

    def check(self, text: str) -> None:
        """Fails if a finished output does not follow the grammar."""
        if self.kind == "regex":
            assert re.fullmatch(self.value, text), (self.value, text)
        elif self.kind == "choice":
            assert text in self.value
        else:
            schema = {"type": "object"} if self.kind == "json_object" else self.value
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.validate(
                json.loads(text),
                schema,
                cls=jsonschema.Draft202012Validator,
                format_checker=checker,
            )


def random_case(seed: int) -> GrammarCase:
    """Mostly schemas and regexes."""
    rng = random.Random(seed)
    kind = rng.choices(("json", "regex", "choice", "json_object"), (10, 8, 1, 1))[0]
    if kind == "json":
        return GrammarCase(kind, random_schema(rng))
    if kind == "regex":
        return GrammarCase(kind, random_regex(rng))
    if kind == "choice":
        return GrammarCase(kind, sorted({_word(rng) for _ in range(rng.randint(1, 5))}))
    return GrammarCase(kind, True)


def random_regex(rng: random.Random, depth: int = 3) -> str:
    """A pattern that Python and Rust read alike, of texts that are not very long."""
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(
            (
                re.escape(_word(rng)),
                f"[{rng.choice(('a-f', '0-9', 'xyz', '^a-z', 'A-Z_', '^0'))}]",
                rng.choice(("[ -~]", r"\.", r"\n", ".")),
            )
        )
    parts = [random_regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    whole = "".join(parts) if rng.random() < 0.6 else f"(?:{'|'.join(parts)})"
    if rng.random() < 0.4:
        low = rng.randint(0, 2)
        repeat = rng.choice(("?", "*", "+", f"{{{low},{low + rng.randint(0, 3)}}}"))
        return f"(?:{whole}){repeat}"
    return whole


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema of keywords that llguidance knows, of values that are not very long."""
    if depth == 2 and rng.random() < 0.1:
        inner = random_schema(rng, 1)
        return {
            "$defs": {"it": inner},
            "type": "array",
            "items": {"$ref": "#/$defs/it"},
            "maxItems": 2,
        }
    makers = [_string, _integer, _number, _enum]
    if depth:
        makers += [_array, _object, _object, _object, _any_of]
    return rng.choice(makers)(rng, depth)


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(_LETTERS + '"\\\u00e9', k=rng.randint(1, 6)))


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    del depth
    if rng.random() < 0.2:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    if rng.random() < 0.3:
        return {"type": "string", "pattern": f"^{random_regex(rng, 1)}$"}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 5)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    del depth
    low = rng.randint(-50, 50)
    found: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 99)}
    if rng.random() < 0.2:
        found = {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1000}
    if rng.random() < 0.2:
        found["multipleOf"] = 1
    return found


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    del depth
    low = rng.randint(-9, 9)
    return {"type": "number", "minimum": low, "maximum": low + rng.choice((0.5, 1, 7.25))}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    del depth
    values = [_word(rng), rng.randint(-9, 9), None, True, [1, "a"], {"k": 1}]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    if rng.random() < 0.3:
        return {"type": rng.choice(("boolean", "null", ["boolean", "null"]))}
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    found: dict[str, Any] = {
        "type": "array",
        "items": random_schema(rng, depth - 1),
        "minItems": low,
        "maxItems": low + rng.randint(0, 2),
    }
    if rng.random() < 0.3:
        found["prefixItems"] = [random_schema(rng, 0)]
    return found


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = sorted({_word(rng) for _ in range(rng.randint(0, 3))})
    found: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": rng.choice((False, False, False, {"type": "integer"})),
    }
    return found


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
