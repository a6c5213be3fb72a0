"""Bodies of `/generate` for requests, and the outputs in its replies. Host only."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from sgljax_engine.model_config import MoEConfig
from sgljax_engine.outputs import RequestOutput
from sgljax_engine.processing.detokenizer import Detokenizer, num_text_tokens
from sgljax_engine.sampling_params import LogprobOptions, SamplingParams
from sgljax_engine.types import FinishReason, Request

_DEFAULTS = SamplingParams()


def generate_body(request: Request, min_weight_version: int) -> dict[str, Any]:
    """The body that makes a server sample what an engine in process would for a request.

    What public routers do not know, `seed` among it, they leave out without a word, except from
    `session_params`.
    """
    params = _sampling_fields(request.params) | {"seed": request.seed}
    params.pop("n", None)  # each sample is a request of its own
    if not request.params.stop:
        params["detokenize"] = False  # the text is made here, with the trainer's tokenizer
    body: dict[str, Any] = {
        "input_ids": request.prompt_ids,
        "return_logprob": True,
        "session_params": {"min_weight_version": min_weight_version, "sampling_params": params},
    }
    return body if request.lora is None else body | {"lora_path": request.lora}


def _sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not at their defaults, as JSON holds them."""
    fields: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(params)):
        value = getattr(params, name)
        if value == getattr(_DEFAULTS, name):
            continue
        if name == "logit_bias":
            value = {str(token): float(bias) for token, bias in value.items()}
        fields[name] = list(value) if isinstance(value, tuple) else value
    return fields


def with_text(output: RequestOutput, request: Request, detokenizer: Detokenizer) -> RequestOutput:
    """A whole output with the text that the trainer's own tokenizer makes of its tokens."""
    assert output.finish is not None
    request.output_ids = output.output_ids
    if not request.params.stop:
        return dataclasses.replace(output, text=detokenizer.text(request, output.finish))
    stream = detokenizer.stream(request)
    if stream is None:
        return dataclasses.replace(output, text="")
    stream.add(output.output_ids[: num_text_tokens(request, output.finish)])
    return dataclasses.replace(output, text=stream.finish())


def read_output(reply: Mapping[str, Any], request: Request, moe: MoEConfig | None) -> RequestOutput:
    """What an engine in process would have returned, without text.

    Raises KeyError, TypeError or ValueError for a reply that is not one of our servers'.
    """
    meta, ids = reply["meta_info"], [int(token) for token in reply["output_ids"]]
    output = RequestOutput(
        rid=request.rid,
        text="",
        output_ids=ids,
        logprobs=_logprobs(meta, "output_token_logprobs"),
        processed_logprobs=_logprobs(meta, "output_processed_logprobs"),
        scaled_logprobs=_logprobs(meta, "output_scaled_logprobs"),
        extra_logprobs=[],
        prompt_logprobs=None,
        logprob_options=LogprobOptions(enabled=True),
        prompt_ids=request.prompt_ids,
        finish=_finish(meta["finish_reason"]),
        num_cached_tokens=int(meta["cached_tokens"]),
        num_completion_tokens=int(meta["completion_tokens"]),
        num_cache_misses=int(meta["cache_miss_count"]),
        e2e_latency_s=float(meta["e2e_latency"]),
        time_to_first_token_s=meta["time_to_first_token"],
        num_retractions=0,
        token_weight_versions=[int(version) for version in meta["token_weight_versions"]],
        routed_experts=_experts(meta.get("routed_experts"), moe),
        draft_sources=[int(source) for source in meta.get("draft_sources", ())],
        sampling_masks=[
            np.asarray(mask, np.int32) for mask in meta.get("output_token_sampling_mask", ())
        ],
        replica_id=meta.get("replica_id"),
    )
    for name in ("logprobs", "processed_logprobs", "scaled_logprobs", "token_weight_versions"):
        if len(getattr(output, name)) != len(ids):
            raise ValueError(f"{len(ids)} tokens with {len(getattr(output, name))} {name}")
    return output


def _logprobs(meta: Mapping[str, Any], name: str) -> list[float]:
    return [float(logprob) for logprob, _, _ in meta[name]]


def _finish(reason: Mapping[str, Any] | None) -> FinishReason | None:
    if reason is None:
        return None
    return FinishReason(reason["type"], reason.get("matched"), reason.get("message", ""))


def _experts(encoded: str | None, moe: MoEConfig | None) -> np.ndarray | None:
    """The experts [tokens, layers, experts of a token], which come as base64 of int32."""
    if encoded is None or moe is None:
        return None
    flat = np.frombuffer(base64.b64decode(encoded), "<i4").astype(moe.id_dtype)
    return flat.reshape(-1, moe.num_experts_per_token)
