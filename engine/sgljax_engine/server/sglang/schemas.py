"""Bodies of SGLang's routes, with its names of fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from sgljax_engine import ForeignField
from sgljax_engine.server.fields import Body, ListsOfTokenIds, SamplingFields, Texts, TokenIds
from sgljax_engine.server.foreign import GENERATE, SAMPLING

_ENGINE_NAMES = (
    "max_new_tokens",
    "min_new_tokens",
    "detokenize",
    "decode_behind_prompt",
    "reasoning_tags",
)
_OWN_NAMES = (("sampling_seed", "seed"), ("no_stop_trim", "include_stop_str_in_output"))


class SGLangSampling(SamplingFields):
    """SGLang's sampling parameters, and those that are the engine's own."""

    foreign: ClassVar[Mapping[str, ForeignField]] = SAMPLING

    max_new_tokens: int | None = Field(None, ge=0)
    min_new_tokens: int | None = Field(None, ge=0)
    sampling_seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="the same as `seed`")
    no_stop_trim: bool | None = Field(None, description="the same as `include_stop_str_in_output`")
    detokenize: bool | None = None
    decode_behind_prompt: bool | None = None
    reasoning_tags: list[str] | None = Field(None, min_length=2, max_length=2)

    def given(self) -> dict[str, Any]:
        """The given fields; both names of a field may be given if they agree."""
        values = super().given()
        for name in _ENGINE_NAMES:
            if getattr(self, name) is not None:
                values[name] = getattr(self, name)
        for name, own in _OWN_NAMES:
            value = getattr(self, name)
            if value is None:
                continue
            if values.setdefault(own, value) != value:
                raise ValueError(f"{name}={value!r} contradicts {own}={values[own]!r}")
        return values


class GenerateReqInput(Body):
    """Body of `/generate`."""

    foreign: ClassVar[Mapping[str, ForeignField]] = GENERATE
    empty_is_null: ClassVar[frozenset[str]] = frozenset({"model", "rid", "lora_path"})
    nested: ClassVar[Mapping[str, str]] = dict.fromkeys(
        SGLangSampling.model_fields, "sampling_params"
    )

    text: str | Texts | None = Field(None, description="one prompt or several")
    input_ids: TokenIds | ListsOfTokenIds | None = Field(
        None, description="token ids instead, of one prompt or several"
    )
    add_special_tokens: bool = Field(
        True, description="tokenize a text with BOS; false for a text that has it"
    )
    sampling_params: SGLangSampling | list[SGLangSampling] | None = Field(
        None, description="for all prompts, or one for each"
    )
    rid: str | Texts | None = Field(None, description="the client's id of each prompt")
    return_logprob: bool | list[bool] = Field(False, description="log-probs of the output's tokens")
    logprob_start_len: int | list[int] | None = Field(
        None, description="log-probs of the prompt too, from this position on; -1 for none"
    )
    top_logprobs_num: int | list[int] | None = Field(
        None, description="log-probs of so many likely tokens at each position"
    )
    token_ids_logprob: TokenIds | ListsOfTokenIds | None = Field(
        None, description="log-probs of these tokens at each position"
    )
    return_text_in_logprobs: bool = Field(False, description="the text of each token there")
    return_routed_experts: bool = Field(
        False, description="needs a server with enable_return_routed_experts"
    )
    stream: bool = Field(False, description="answer with server-sent events")
    stream_output: bool | None = Field(
        None,
        description="true streams what is new in each event, false all so far; null takes true "
        "with log-probs, which must not be repeated, and else false, as SGLang does",
    )
    lora_path: str | list[str | None] | None = Field(None, description="name of a loaded adapter")
    model: str | None = Field(
        None, description="the model's name, or a loaded adapter's, as sglang-router sends it"
    )


class PauseGeneration(Body):
    """Body of `/pause_generation`."""

    mode: Literal["abort", "retract", "in_place", "wait"] = "abort"


class Empty(Body):
    """A body without fields."""


class AbortRequest(Body):
    """Body of `/abort_request`."""

    rid: str | None = None
    abort_all: bool = False
    finished_reason: dict[str, Any] | None = None
    aborted_message: str | None = None


class UpdateWeightsFromDisk(Body):
    """Body of `/update_weights_from_disk`."""

    model_path: str = Field(description="a folder of safetensors below weights_root")
    load_format: Literal["auto", "safetensors"] | None = None
    mode: Literal["abort", "retract", "in_place", "wait"] | None = None
    flush_cache: bool | None = None
    block_generation: bool | None = Field(
        None,
        description="instead of mode: false lets started requests finish first, true interrupts "
        "them, and flush_cache then says whether they are prefilled anew",
    )
    abort_all_requests: bool = Field(False, description='the same as mode "abort"')
    weight_version: str | None = Field(None, description="a label of the new version")


class MemoryOccupation(Body):
    """Body of `/release_memory_occupation` and `/resume_memory_occupation`."""

    tags: list[Literal["weights", "kv_cache"]] | None = None
