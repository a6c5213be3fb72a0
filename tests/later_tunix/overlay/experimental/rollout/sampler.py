"""The Sampler protocol with `get_target_state`, an abort, and a request for `bind_weight_sync`."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import numpy as np
from tunix.experimental.common import datatypes  # pyright: ignore[reportMissingImports]

WeightSyncRequest = datatypes.WeightSyncRequest


@dataclasses.dataclass(kw_only=True)
class SamplingParams:
    """Sampling parameters of a request, with those of routed experts."""

    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    return_logprobs: bool = False
    return_logits: bool = False
    return_routed_experts: bool = False
    routed_experts_prompt_start: int = 0
    beam_size: int | None = None


@dataclasses.dataclass(kw_only=True)
class SamplingRequest(datatypes.Request):
    """A prompt: a text, token ids or a conversation."""

    prompt: Any
    sampling_params: SamplingParams | None = None


def _no_tokens() -> np.ndarray:
    return np.zeros(0, np.int32)


@dataclasses.dataclass(kw_only=True)
class SamplingResponse(datatypes.Response):
    """A completion."""

    text: str = ""
    prompt_token_ids: np.ndarray = dataclasses.field(default_factory=_no_tokens)
    token_ids: np.ndarray = dataclasses.field(default_factory=_no_tokens)
    logprobs: np.ndarray | None = None
    finish_reason: str = "stop"
    routed_experts: np.ndarray | None = None


@dataclasses.dataclass(kw_only=True)
class LoadInfo(datatypes.Response):
    """How busy a sampler is."""

    num_requests_waiting: int = 0
    num_requests_running: int = 0
    kv_cache_usage_perc: float = 0.0


@runtime_checkable
class Sampler(Protocol):
    """What a worker calls."""

    def initialize(self) -> None: ...
    async def start(self, **kwargs: Any) -> Any: ...
    async def stop(self, **kwargs: Any) -> Any: ...
    async def pause(self, **kwargs: Any) -> Any: ...
    async def resume(self, **kwargs: Any) -> Any: ...
    async def get_mesh(self, **kwargs: Any) -> Any: ...
    async def sample(self, sampling_requests: Any, **kwargs: Any) -> Any: ...
    def get_target_state(self) -> Any: ...
    async def get_weight_sync_metadata(self, **kwargs: Any) -> Any: ...
    async def bind_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any: ...
    async def pre_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any: ...
    async def weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any: ...
    async def post_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any: ...
    async def abort_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any: ...
    async def get_transfer_status(self, req_id: str, **kwargs: Any) -> Any: ...
    async def migrate_kv_cache(
        self, source_server_id: str, target_server_id: str, token_ids: list[int], **kwargs: Any
    ) -> bool: ...
    async def get_load_info(self, **kwargs: Any) -> Any: ...
