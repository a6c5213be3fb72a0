"""What all request bodies share: strict types, and no unknown field."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field

from sgljax_engine import SamplingParams


class FirstErrorOnly(FailFast):
    """Else 50,000 wrong ids make as many errors. Pydantic's has no hash: no union can hold it."""

    def __hash__(self) -> int:
        """All are equal."""
        return hash(FailFast)


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FirstErrorOnly()]
ListsOfTokenIds = Annotated[list[TokenIds], FirstErrorOnly()]
Texts = Annotated[list[str], FirstErrorOnly()]


class Body(BaseModel):
    """A JSON object. Nothing is converted: a number as text is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class SamplingFields(Body):
    """`SamplingParams` by their own names; what is not given has its default."""

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
    seed: int | None = Field(None, ge=0, lt=2**63)
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


def sampling_params(defaults: SamplingParams | None, given: dict[str, Any]) -> SamplingParams:
    """Parameters from the given fields, and else from the defaults.

    Raises:
        InvalidRequestError: names the field, its value and its limit.
    """
    base = {} if defaults is None else dataclasses.asdict(defaults)
    return SamplingParams.from_dict(base | given)
