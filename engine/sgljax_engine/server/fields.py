"""The base of all request bodies: strict types, and no unknown field."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from sgljax_engine import Engine, ForeignField, SamplingParams
from sgljax_engine.sampling_params import DEFAULT_MAX_NEW_TOKENS

UNKNOWN_FIELD, FOREIGN_FIELD = "unknown_field", "foreign_field"
"""Types of the errors of `Body`; their context has the field's `name`."""

_MAX_NAME_LEN = 64
"""Longer names of unknown fields are not compared with known ones."""


class FirstErrorOnly(FailFast):
    """Else 50,000 wrong ids make as many errors. Pydantic's has no hash: no union can hold it."""

    def __hash__(self) -> int:
        """All are equal."""
        return hash(FailFast)


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FirstErrorOnly()]
ListsOfTokenIds = Annotated[list[TokenIds], FirstErrorOnly()]
Texts = Annotated[list[str], FirstErrorOnly()]


class Body(BaseModel):
    """A JSON object. Nothing is converted: a number as text is refused.

    null stands for a field that is not given, unless the field is required.

    Attributes:
        foreign: Fields of other servers, by name. They are left out where they ask for nothing.
        empty_is_null: Own fields for which an empty text is null.
        nested: Own fields that a client may take for fields of this body, and where they are.
        only: Own fields with few of the values that other servers take: these values, and why only
            these.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    foreign: ClassVar[Mapping[str, ForeignField]] = {}
    empty_is_null: ClassVar[frozenset[str]] = frozenset()
    nested: ClassVar[Mapping[str, str]] = {}
    only: ClassVar[Mapping[str, tuple[Sequence[str], str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nothings(cls, data: Any) -> Any:
        """The fields that ask for something; refuses the first unknown one."""
        return {n: v for n, v in data.items() if cls._asks(n, v)} if type(data) is dict else data

    @classmethod
    def _asks(cls, name: str, value: Any) -> bool:
        own = cls.model_fields.get(name)
        if own is not None:
            is_null = value is None or (value == "" and name in cls.empty_is_null)
            values, why = cls.only.get(name, (None, ""))
            if values is not None and not is_null and value not in values:
                raise _not_supported(name, value, f"{why}; use {' or '.join(map(repr, values))}")
            return own.is_required() or not is_null
        foreign = cls.foreign.get(name)
        if foreign is None:
            raise PydanticCustomError(
                UNKNOWN_FIELD, "unknown field{hint}", {"name": name, "hint": cls._hint(name)}
            )
        if foreign.asks_for_nothing(value):
            return False
        raise _not_supported(name, value, foreign.instead)

    @classmethod
    def _hint(cls, name: str) -> str:
        if name in cls.nested:
            return f"; it is a field of {cls.nested[name]}"
        if len(name) > _MAX_NAME_LEN:
            return ""
        near = difflib.get_close_matches(name, cls.model_fields, n=1)
        return f"; did you mean {near[0]!r}?" if near else ""


def _not_supported(name: str, value: Any, instead: str) -> PydanticCustomError:
    context = {"name": name, "value": value, "instead": instead}
    return PydanticCustomError(FOREIGN_FIELD, "is not supported: {instead}", context)


class SamplingFields(Body):
    """`SamplingParams` by their own names; what is not given has its default."""

    empty_is_null: ClassVar[frozenset[str]] = frozenset({"stop"})

    n: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_k: int | None = Field(None, ge=-1)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_token_ids: TokenIds | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None

    def given(self) -> dict[str, Any]:
        """The sampling fields that are given, for `SamplingParams.from_dict`."""
        values = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return {name: value for name, value in values.items() if value is not None}


def default_params(engine: Engine, num_prompt_tokens: int) -> SamplingParams:
    """The model's parameters, with fewer new tokens where no more fit behind a prompt."""
    params = engine.get_default_sampling_params()
    most = params.max_new_tokens
    if most is None:
        most = max(DEFAULT_MAX_NEW_TOKENS, params.min_new_tokens)
    limit = max(1, engine.max_new_tokens(num_prompt_tokens))  # the engine refuses the prompt
    return params.override({"max_new_tokens": min(most, limit)})


def sampling_params(defaults: SamplingParams | None, given: dict[str, Any]) -> SamplingParams:
    """Parameters from the given fields, and else from the defaults.

    Raises:
        InvalidRequestError: names the field, its value and its limit.
    """
    return (defaults or SamplingParams()).override(given)
