"""Tunix's RolloutWorker, which passes every event of a weight-sync round to a SglJaxSampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunix.experimental.common.datatypes import (  # pyright: ignore[reportMissingImports]
    RolloutRequest,
    WorkerState,
)
from tunix.experimental.rollout.sampler import (  # pyright: ignore[reportMissingImports]
    SamplingResponse,
)
from tunix.experimental.worker.rollout_worker import (  # pyright: ignore[reportMissingImports]
    RolloutConfig,
    RolloutWorker,
)

from sgljax_engine import InvalidConfigError
from tunix_sgljax.experimental.artifacts import read_artifact
from tunix_sgljax.experimental.sampler import SglJaxSampler


class SglJaxRolloutWorker(RolloutWorker):
    """A RolloutWorker with abortable rounds, and with the policy version of the serving weights.

    Tunix's own worker does not pass an abort to its sampler, which would stay closed; it counts a
    version when weights are staged, published or not; it closes admission for calls of older
    rounds; and its episodes have version 0, which `max_staleness` drops after the first update.
    Here an episode has the oldest version that sampled one of its tokens.
    """

    def __init__(
        self,
        worker_id: str,
        sampler: SglJaxSampler,
        *,
        tokenizer: Any,
        chat_parser: Any,
        config: RolloutConfig | None = None,
        env_pool: Any = None,
        agent_factory: Any = None,
        max_concurrency: int = 64,
    ) -> None:
        """Takes the arguments of Tunix's worker.

        Raises:
            InvalidConfigError: for another sampler.
        """
        if not isinstance(sampler, SglJaxSampler):
            raise InvalidConfigError(
                f"SglJaxRolloutWorker needs a SglJaxSampler, got {type(sampler).__name__}"
            )
        super().__init__(
            worker_id=worker_id,
            config=config,
            sampler=sampler,
            env_pool=env_pool,
            agent_factory=agent_factory,
            max_concurrency=max_concurrency,
            tokenizer=tokenizer,
            chat_parser=chat_parser,
        )
        self._sampler = sampler
        self._policy_version = sampler.policy_version
        self._episodes: dict[str, int | None] = {}  # oldest version by id; None without tokens
        sampler.on_response = self._note_version

    def close(self) -> None:
        """Stops the worker and shuts its engine down. Any thread."""
        self.stop()
        self._sampler.close()

    def find_differing_weights(self, artifact: str) -> list[str]:
        """Names of serving weights that are not those of a safetensors file, see `WeightFolder`.

        Raises:
            WeightLoadError: for no such file.
        """
        return self._sampler.find_differing_weights(read_artifact(artifact))

    async def generate(self, requests: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Samples prompts or plays episodes, as Tunix's worker does."""
        given = requests if isinstance(requests, (list, tuple)) else [requests]
        ids = [each.traj_id for each in given if isinstance(each, RolloutRequest)]
        self._episodes.update((traj_id, None) for traj_id in ids)
        try:
            return await super().generate(requests, *args, **kwargs)
        finally:
            for traj_id in ids:
                self._episodes.pop(traj_id, None)

    def _note_version(self, response: SamplingResponse) -> None:
        """Takes the policy version of a turn of an episode."""
        if response.request_id not in self._episodes:
            return
        before, version = self._episodes[response.request_id], response.metadata["policy_version"]
        self._episodes[response.request_id] = version if before is None else min(before, version)

    def _to_rollout_response(self, item: Any, *args: Any, **kwargs: Any) -> Any:
        response = super()._to_rollout_response(item, *args, **kwargs)
        version = self._episodes.get(getattr(item, "trajectory_id", ""))
        if version is not None:
            holders: list[Any] = [response, getattr(response, "payload", None)]
            for holder in holders:
                if hasattr(holder, "policy_version"):
                    holder.policy_version = version
        return response

    async def pre_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any:
        """Drains episodes, then calls `SglJaxSampler.pre_weight_sync`."""
        self._sampler.check_round(sync_request)
        return await super().pre_weight_sync(sync_request, **kwargs)

    async def weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any:
        """Calls `SglJaxSampler.weight_sync`."""
        self._sampler.check_round(sync_request)
        result = await super().weight_sync(sync_request, **kwargs)
        self._policy_version = self._sampler.policy_version
        return result

    async def post_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any:
        """Calls `SglJaxSampler.post_weight_sync`."""
        self._sampler.check_round(sync_request)
        result = await super().post_weight_sync(sync_request, **kwargs)
        self._policy_version = self._sampler.policy_version
        return result

    async def abort_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any:
        """Calls `SglJaxSampler.abort_weight_sync`; episodes continue."""
        await self._sampler.abort_weight_sync(sync_request, **kwargs)
        self._policy_version = self._sampler.policy_version
        if self.state == WorkerState.SYNCING:
            return await super().abort_weight_sync(sync_request)
        return None

    async def get_weight_sync_status(self, **kwargs: Any) -> Mapping[str, Any]:
        """Calls `SglJaxSampler.get_weight_sync_status`."""
        del kwargs  # a coordinator gives none
        return self._sampler.get_weight_sync_status()
