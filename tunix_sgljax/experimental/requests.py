"""Converts Tunix's sampling requests to the rollout's terms, and responses back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tunix.experimental.common.datatypes import (  # pyright: ignore[reportMissingImports]
    ErrorInfo,
)
from tunix.experimental.rollout.sampler import (  # pyright: ignore[reportMissingImports]
    SamplingParams,
    SamplingRequest,
    SamplingResponse,
)
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import InvalidRequestError, RequestOutput
from tunix_sgljax.rollout.prompts import is_conversation, is_ids
from tunix_sgljax.sampling import pick_logprobs

_FIELDS = {
    "max_tokens": "max_tokens_to_generate",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "return_logprobs": "return_logprobs",
}
"""Fields of `SamplingParams` and keywords of `sample`, by their names in a RolloutConfig."""

_ALIASES = {"max_generation_steps": "max_tokens"}
"""Names of fields in Tunix's workers; a field's own name has priority."""

_ROUTED_FIELDS = ("return_routed_experts", "routed_experts_prompt_start")
"""Fields about the experts of tokens, which later releases of Tunix have."""


def as_requests(given: Any) -> tuple[list[SamplingRequest], bool]:
    """The requests of a `sample` call, and whether the caller gave a single one."""
    if isinstance(given, SamplingRequest):
        return [given], True
    if isinstance(given, str) or is_ids(given) or is_conversation(given):
        return [SamplingRequest(prompt=given)], True
    if not isinstance(given, Sequence):
        raise InvalidRequestError(
            "sampling_requests must be a SamplingRequest, a prompt or a list of those, got "
            f"{type(given).__name__}"
        )
    return [
        x if isinstance(x, SamplingRequest) else SamplingRequest(prompt=x) for x in given
    ], False


class RoutedOptions(NamedTuple):
    """Whether a request wants the experts of its tokens, and from which token of its prompt.

    None, for releases of Tunix whose requests do not say, follows the engine.
    """

    is_wanted: bool | None = None
    start: int = 0

    def experts_of(self, output: RequestOutput) -> np.ndarray | None:
        """The experts of an output, int32 [tokens, num_layers, k]; None if they are not wanted."""
        if self.is_wanted is False or output.routed_experts is None:
            return None
        return output.routed_experts[self.start :].astype(np.int32)


def routed_options(
    params: SamplingParams | None, options: Mapping[str, Any], *, are_kept: bool
) -> RoutedOptions:
    """What a request wants to know about experts, which the engine keeps if it was told to."""
    given = _given(params, options)
    is_wanted, start = given.get(_ROUTED_FIELDS[0]), given.get(_ROUTED_FIELDS[1], 0)
    if is_wanted and not are_kept:
        raise InvalidRequestError(
            "return_routed_experts=True needs a rollout with enable_return_routed_experts=True"
        )
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise InvalidRequestError(f"routed_experts_prompt_start must be a count, got {start!r}")
    return RoutedOptions(None if is_wanted is None else bool(is_wanted), start)


def _given(params: SamplingParams | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """All fields that a request or its call gives, by their names in `SamplingParams`."""
    given: dict[str, Any] = {}
    if params is not None:
        given = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    for name, value in options.items():
        field = _ALIASES.get(name, name)
        if field == name or field not in options:
            given[field] = value
    return given


def request_config(
    base: RolloutConfig, params: SamplingParams | None, options: Mapping[str, Any]
) -> RolloutConfig:
    """The sampling settings of one request, as a RolloutConfig.

    The rollout's config has what the request does not say. Keywords of the `sample` call have
    priority: Tunix's workers pass on their caller's, but omit some from the params.
    """
    wanted = _given(params, options)
    for name in _ROUTED_FIELDS:  # see `routed_options`
        wanted.pop(name, None)
    for name, ignored in (("return_logits", (False, None)), ("beam_size", (1, None))):
        if (value := wanted.pop(name, None)) not in ignored:
            raise InvalidRequestError(f"{name}={value!r} is not supported by SglJaxSampler")
    unknown = sorted(wanted.keys() - _FIELDS.keys())
    if unknown:
        raise InvalidRequestError(
            f"SglJaxSampler.sample takes no option {unknown}; give sampling fields that Tunix's "
            "requests do not have to the rollout (sampling_params=)"
        )
    return dataclasses.replace(base, **{_FIELDS[name]: value for name, value in wanted.items()})


def to_response(
    request: SamplingRequest,
    output: RequestOutput,
    policy_versions: np.ndarray,
    *,
    policy_version: int,
    logprobs_mode: str,
    return_logprobs: bool,
    routed: RoutedOptions,
) -> SamplingResponse:
    """Builds Tunix's response to a request.

    `metadata` always has `policy_version` (the oldest policy of any token, or the one given for an
    answer without tokens), `policy_versions` (of each token, int32) and `logprobs` (float32).
    """
    finish = output.finish
    assert finish is not None
    logprobs = np.asarray(pick_logprobs(output, logprobs_mode), np.float32)
    is_aborted = finish.type == "abort"
    experts = routed.experts_of(output)
    return SamplingResponse(
        request_id=request.request_id,
        text=output.text,
        prompt_token_ids=np.asarray(output.prompt_ids, np.int32),
        token_ids=np.asarray(output.output_ids, np.int32),
        logprobs=logprobs if return_logprobs else None,
        finish_reason="cancelled" if is_aborted else finish.type,
        error=ErrorInfo(error_type="abort", message=finish.message) if is_aborted else None,
        metadata={
            "policy_version": int(min(policy_versions, default=policy_version)),
            "policy_versions": policy_versions,
            "logprobs": logprobs,
        },
        **({} if experts is None else {"routed_experts": experts}),
    )
