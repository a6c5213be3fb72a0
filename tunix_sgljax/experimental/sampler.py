from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from tunix.experimental.rollout.sampler import (  # pyright: ignore[reportMissingImports]
    LoadInfo,
    SamplingResponse,
)

from sgljax_engine import (
    EngineStateError,
    InvalidConfigError,
    InvalidRequestError,
    StagedWeights,
)
from tunix_sgljax.experimental import requests
from tunix_sgljax.experimental.artifacts import find_artifact, read_artifact
from tunix_sgljax.experimental.layout import WorkUnitId, WorkUnitMetadata
from tunix_sgljax.experimental.rounds import SyncRounds
from tunix_sgljax.experimental.transport import InProcessTransport, unit_metadata
from tunix_sgljax.in_flight.policy_versions import PolicyVersions
from tunix_sgljax.rollout import SglJaxRollout

_TRANSFER_STATUS = {
    "idle": "PENDING",
    "prepared": "IN_PROGRESS",
    "h2d_done": "SUCCESS",
    "committed": "SUCCESS",
    "aborted": "FAILED",
}
"""Transfer status by the phase of a round."""


class SglJaxSampler:
    """A `tunix.experimental.rollout.sampler.Sampler` over a SglJaxRollout.

    A weight sync is a round of phases: `pre_weight_sync`, `weight_sync`, `post_weight_sync`, or
    `abort_weight_sync` before the last has published. A coordinator's round has a key, which makes
    each phase idempotent; late calls of older rounds raise Tunix's StaleRoundError.

    One event loop calls it. Phases are serialised; `sample` may be called concurrently, and all
    requests are batched together.

    Attributes:
        server_id: The sampler's name.
        on_response: Called with each response, on the event loop; or None.
    """

    def __init__(
        self,
        server_id: str,
        rollout: SglJaxRollout,
        transport: InProcessTransport | None = None,
        *,
        policy_version: int = 0,
    ) -> None:
        """Builds no engine yet.

        Args:
            server_id: The sampler's name.
            rollout: The rollout that samples and maps weights, see `create_sgljax_rollout`. `stop`
                closes it.
            transport: Transport of the weights in this process. None takes them from each request:
                `weights` in its `extra_config`, parameters as for `SglJaxRollout.update_params` or
                the path of a Hugging Face folder; or the safetensors file that its
                `source_metadata` names, see `WeightFolder`.
            policy_version: Version of the rollout's current weights.

        Raises:
            InvalidConfigError: for a rollout with `weight_update_mode="in_place"`, which keeps the
                pages that a sync must free, with `logprobs_mode="trainer_match"`, which needs the
                trainer's arrays, or with `lora="adapter"`.
        """
        needed = ""
        if rollout.weight_update_mode == "in_place":
            needed = "whose weight_update_mode is not 'in_place': a weight sync frees the KV cache"
        elif rollout.logprobs_mode == "trainer_match":
            needed = (
                "whose logprobs_mode is not 'trainer_match': weights are staged, and the trainer's "
                "arrays are not kept"
            )
        elif rollout.adapter is not None:
            needed = "with lora='merged': it stages whole weights"
        if needed:
            raise InvalidConfigError(f"SglJaxSampler needs a rollout {needed}")
        self.server_id = server_id
        self.on_response: Callable[[SamplingResponse], None] | None = None
        self._rollout = rollout
        self._transport = transport
        self._unit = WorkUnitId(job_name="rollout", job_replica_id=server_id)
        self._rounds = SyncRounds()
        self._phases = asyncio.Lock()
        self._versions = PolicyVersions(rollout.weight_version, policy_version)
        self._staged: StagedWeights | None = None
        self._staged_params: Any = None  # its source; None for a folder
        self._pending_version = policy_version
        self._is_paused = False  # by `pause`
        self._is_quiesced = False  # by a round
        self._is_draining = False
        self._num_aborts = 0  # under way

    # ------------------------------------------------------------------ life

    def initialize(self) -> None:
        """Builds the engine if needed. Idempotent.

        Raises:
            EngineShutdownError: after `stop`.
        """
        self._rollout.engine  # noqa: B018

    async def start(self) -> bool:
        """`initialize`, without blocking the event loop."""
        await asyncio.to_thread(self.initialize)
        return True

    async def stop(self) -> bool:
        """Shuts the engine down; unfinished requests fail. Idempotent."""
        await asyncio.to_thread(self.close)
        return True

    def close(self) -> None:
        """Does what `stop` does, from any thread."""
        self._rollout.close()

    async def pause(self) -> bool:
        """Stops generating until `resume`; requests keep their tokens, and new ones wait."""
        self._is_paused = True
        if not self._is_quiesced:
            await self._rollout.engine.async_pause_generation("in_place")
        return True

    async def resume(self) -> bool:
        """Ends a `pause`. A running weight sync still holds requests."""
        self._is_paused = False
        if not self._is_quiesced:
            await self._rollout.engine.async_continue_generation()
        return True

    async def get_mesh(self) -> jax.sharding.Mesh | None:
        """The rollout's mesh; None for JAX's first device."""
        return self._rollout.mesh

    @property
    def policy_version(self) -> int:
        """Policy version of the serving weights."""
        version = np.array([self._rollout.weight_version], np.int32)
        return int(self._versions.translate(version)[0])

    # ------------------------------------------------------------------ sampling

    async def sample(
        self, sampling_requests: Any, **kwargs: Any
    ) -> SamplingResponse | list[SamplingResponse]:
        """Samples a completion for each request; while paused or syncing, afterwards.

        Cancelling the task aborts its requests.

        Args:
            sampling_requests: A SamplingRequest, or a prompt (a text, token ids or a conversation),
                or a list of those. A request without `sampling_params` uses the rollout's
                RolloutConfig. A `seed` makes a run reproducible; requests and calls with the same
                seed draw different samples.
            **kwargs: Fields of SamplingParams for all requests, which override the requests' own.

        Returns:
            A response, or a list of them. See `requests.to_response` for `metadata`. `token_ids`
            includes a sampled end token. Aborted requests have finish_reason "cancelled", their
            output so far, and `error`.

        Raises:
            InvalidRequestError: names the field and its value.
            EngineError: when requests fail; responses do not carry failures, since Tunix's workers
                do not check for them.
        """
        wanted, is_single = requests.as_requests(sampling_requests)
        if not wanted:
            return []
        rollout = self._rollout
        configs = [
            requests.request_config(rollout.rollout_config, request.sampling_params, kwargs)
            for request in wanted
        ]
        names = ["prompt"] if is_single else [f"prompts[{row}]" for row in range(len(wanted))]
        ids = [
            rollout.encode(request.prompt, config, name=name)
            for name, request, config in zip(names, wanted, configs, strict=True)
        ]
        routed = [
            requests.routed_options(
                request.sampling_params, kwargs, are_kept=rollout.engine.returns_routed_experts
            )
            for request in wanted
        ]
        params = [rollout.request_params(config) for config in configs]
        outputs = await rollout.async_generate_ids(ids, params)
        responses = [
            requests.to_response(
                request,
                output,
                self._versions.translate(np.asarray(output.token_weight_versions, np.int32)),
                policy_version=self.policy_version,
                logprobs_mode=rollout.logprobs_mode,
                return_logprobs=config.return_logprobs,
                routed=own,
            )
            for request, config, own, output in zip(wanted, configs, routed, outputs, strict=True)
        ]
        if self.on_response is not None:
            for response in responses:
                self.on_response(response)
        return responses[0] if is_single else responses

    # ------------------------------------------------------------------ weight sync

    def get_target_state(self) -> dict[str, Any]:
        """The actor's parameters, or only its LoRA leaves, as `jax.ShapeDtypeStruct`s in dicts."""
        return unflatten_dict(self._rollout.weight_specs, sep=".")

    async def bind_weight_sync(self, sync_request: Any = None) -> None:
        """Builds the engine. Idempotent; later releases of Tunix pass the round's request."""
        del sync_request
        await asyncio.to_thread(self.initialize)

    async def get_weight_sync_metadata(self) -> list[WorkUnitMetadata]:
        """One work unit: names and shapes of the trainer's parameters, as for `update_params`."""
        return [unit_metadata(self._unit, self._rollout.weight_specs)]

    async def pre_weight_sync(self, sync_request: Any = None) -> bool:
        """Opens a round: new requests wait, and the KV cache is freed, prefix cache included.

        Started requests are handled by the rollout's `weight_update_mode`: retract, wait or abort.

        Raises:
            EngineStateError: when the round was aborted in the meantime, or another user of the
                engine continues generation.
        """
        async with self._phases:
            if not self._rounds.admit(sync_request, "prepared"):
                return True
            await self._drop_weights()  # from a round that this one supersedes
            await self._quiesce()
            self._rounds.complete(sync_request, "prepared")
        return True

    async def weight_sync(self, sync_request: Any = None) -> int:
        """Stages the received weights beside the serving ones, which do not change.

        Returns:
            The policy version to publish them as: the request's, or else the next one.

        Raises:
            WeightSyncError: names every missing, extra or mis-shaped parameter.
            EngineStateError: before `pre_weight_sync`, and when nothing arrived.
        """
        async with self._phases:
            if not self._rounds.admit(sync_request, "h2d_done"):
                return self._pending_version
            if not self._is_quiesced:
                raise EngineStateError("weight_sync needs pre_weight_sync first, in the same round")
            if self._staged is not None:  # from an earlier try
                await self._rollout.engine.async_discard_weights(self._staged)
            self._staged = await self._stage(sync_request)
            self._pending_version = self._wanted_version(sync_request)
            self._rounds.complete(sync_request, "h2d_done")
            return self._pending_version

    async def post_weight_sync(self, sync_request: Any = None) -> bool:
        """Publishes the staged weights, all or none, and opens admission. Idempotent.

        Raises:
            EngineStateError: when nothing is staged.
        """
        async with self._phases:
            if not self._rounds.admit(sync_request, "committed"):
                return True
            if self._staged is None:
                raise EngineStateError(
                    "post_weight_sync needs weight_sync first: nothing is staged"
                )
            with self._rollout.observers.updating():
                await self._publish(self._staged)
            await self._open()
            # Last, so that a cancelled call can be repeated with the same result.
            self._staged = self._staged_params = None
            self._rounds.complete(sync_request, "committed")
        return True

    async def abort_weight_sync(self, sync_request: Any = None) -> None:
        """Ends a round without its weights: drops them, and opens admission on the old ones.

        `SglJaxRolloutWorker` calls it, which is not in Tunix's protocol. Idempotent, at any phase;
        does nothing once the round's weights serve.
        """
        self._rounds.check(sync_request)
        self._num_aborts += 1
        try:
            if self._is_draining:  # the phase would hold the lock until all requests finish
                await self._rollout.engine.async_continue_generation()
            async with self._phases:
                await self._abort(sync_request)
        finally:
            self._num_aborts -= 1

    def get_weight_sync_status(self) -> dict[str, Any]:
        """The current round: `req_id`, `uuid`, `phase`; and the serving `policy_version`."""
        return self._rounds.report() | {"policy_version": self.policy_version}

    def check_round(self, sync_request: Any) -> None:
        """Raises StaleRoundError for a call of an older round; changes nothing."""
        self._rounds.check(sync_request)

    async def get_transfer_status(self, req_id: str) -> str:
        """The transfer of the current round: `_TRANSFER_STATUS`; "UNKNOWN" for others."""
        report = self._rounds.report()
        if report["req_id"] is None or req_id != report["req_id"]:
            return "UNKNOWN"
        return _TRANSFER_STATUS[report["phase"]]

    async def migrate_kv_cache(
        self, source_server_id: str, target_server_id: str, token_ids: list[int]
    ) -> bool:
        """Raises NotImplementedError: the engine's KV pages cannot leave this process."""
        raise NotImplementedError(
            f"SglJaxSampler {self.server_id!r} cannot migrate KV ({len(token_ids)} tokens from "
            f"{source_server_id!r} to {target_server_id!r}): its pages are in one process; sample "
            "the tokens again as a prompt where they are needed"
        )

    async def get_load_info(self) -> LoadInfo:
        """The engine's queues and pages, read between two dispatches.

        `kv_cache_usage_perc` is the fraction of tokens that requests hold, as in vLLM; pages that
        only the prefix cache holds count as free.
        """
        state = await self._rollout.engine.async_get_internal_state()
        used = state.total_kv_tokens - state.available_kv_tokens
        return LoadInfo(
            num_requests_waiting=state.waiting_queue_size,
            num_requests_running=state.running_batch_size,
            kv_cache_usage_perc=used / state.total_kv_tokens,
            metadata={
                "policy_version": self.policy_version,
                "is_paused": self._is_paused,
                "is_syncing": self._is_quiesced,
                "total_kv_tokens": state.total_kv_tokens,
            },
        )

    def find_differing_weights(self, params: Any) -> list[str]:
        """Names of serving weights that are not these, as of `SglJaxRollout`."""
        return self._rollout.find_differing_weights(params)

    # ------------------------------------------------------------------ the parts of phases

    async def _quiesce(self) -> None:
        """Stops all requests, and lets none begin until `_open`."""
        engine, mode = self._rollout.engine, self._rollout.weight_update_mode
        if self._num_aborts:
            raise EngineStateError("the weight sync was called off before it began")
        self._is_quiesced, self._is_draining = True, mode == "wait"
        try:
            await engine.async_pause_generation(mode)
        finally:
            self._is_draining = False
        await asyncio.to_thread(engine.release_kv_cache)

    async def _open(self) -> None:
        """Lets requests continue, unless `pause` holds them."""
        self._is_quiesced = False
        if not self._is_paused:
            await self._rollout.engine.async_continue_generation()

    async def _abort(self, sync_request: Any) -> None:
        if not self._rounds.admit(sync_request, "aborted"):
            return
        staged, params = self._staged, self._staged_params
        await self._drop_weights()
        await self._open()
        # A publication whose caller stopped waiting is valid.
        is_published = staged is not None and staged.weight_version is not None
        if is_published and params is not None:
            self._rollout.accept_source(params)
        self._rounds.complete(sync_request, "committed" if is_published else "aborted")

    async def _stage(self, sync_request: Any) -> StagedWeights:
        engine = self._rollout.engine
        params = await asyncio.to_thread(self._arrived, sync_request)  # may read a file
        if isinstance(params, str):
            if self._rollout.lora_report is not None:
                raise InvalidRequestError(
                    f"weights={params!r}: those of a LoRA actor come as parameters, not as a folder"
                )
            self._staged_params = None
            return await engine.async_stage_weights(params)
        source, rules = self._rollout.weight_source(params)
        self._staged_params = params
        return await engine.async_stage_weights(source, rules)

    def _arrived(self, sync_request: Any) -> Any:
        extra = getattr(sync_request, "extra_config", None) or {}
        if extra.get("weights") is not None:
            return extra["weights"]
        artifact = find_artifact(sync_request)
        if artifact is not None:
            return read_artifact(artifact)
        if self._transport is None:
            raise InvalidRequestError(
                "weight_sync needs weights: give the sampler a transport, the source a "
                "WeightFolder, or the request extra_config={'weights': parameters or the path of a "
                "folder}; Tunix's transfer between devices (Raiden) is not supported"
            )
        return self._transport.pop(self._unit, extra.get("req_id"))

    def _wanted_version(self, sync_request: Any) -> int:
        wanted = int(getattr(sync_request, "policy_version", 0) or 0)
        return wanted if wanted > 0 else self.policy_version + 1

    async def _publish(self, staged: StagedWeights) -> None:
        engine = self._rollout.engine
        next_version = engine.weight_version + 1
        if staged.weight_version is None:
            # Before they serve, so that no one looks up their tokens too early.
            self._versions.announce(next_version, self._pending_version)
        version = await engine.async_publish_weights(staged)
        if self._staged_params is not None:
            self._rollout.accept_source(self._staged_params)
        if version > next_version:  # another caller updated the engine just before
            self._versions.announce(version, self._pending_version)

    async def _drop_weights(self) -> None:
        """Drops received weights and frees staged ones."""
        if self._transport is not None:
            self._transport.drop(self._unit)
        staged, self._staged, self._staged_params = self._staged, None, None
        if staged is not None:
            await self._rollout.engine.async_discard_weights(staged)
