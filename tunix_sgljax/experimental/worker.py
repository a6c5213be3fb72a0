"""Tunix's RolloutWorker, which passes every event of a weight-sync round to a SglJaxSampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunix.experimental.common.datatypes import (  # pyright: ignore[reportMissingImports]
    WorkerState,
)
from tunix.experimental.worker.rollout_worker import (  # pyright: ignore[reportMissingImports]
    RolloutConfig,
    RolloutWorker,
)

from sgljax_engine import InvalidConfigError
from tunix_sgljax.experimental.sampler import SglJaxSampler


class SglJaxRolloutWorker(RolloutWorker):
    """A RolloutWorker with abortable rounds, and with the policy version of the serving weights.

    Tunix's own worker does not pass an abort to its sampler, which would stay closed; it counts a
    version when weights are staged, published or not; and it closes admission for calls of older
    rounds.
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
