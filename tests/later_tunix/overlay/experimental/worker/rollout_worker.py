"""A rollout worker's weight sync: it passes an abort on, and takes the version that it is told."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.experimental.common.datatypes import (  # pyright: ignore[reportMissingImports]
    WorkerInfo,
    WorkerState,
)
from tunix.rl.rollout import base_rollout


@dataclasses.dataclass
class RolloutConfig(base_rollout.RolloutConfig):
    """Tunix's config, with the worker's own fields."""

    sampler_type: str = "vanilla"


class RolloutWorker:
    """Calls its sampler in the order of a round."""

    def __init__(
        self,
        worker_id: str,
        config: RolloutConfig | None = None,
        sampler: Any = None,
        env_pool: Any = None,
        agent_factory: Any = None,
        max_concurrency: int = 64,
        tokenizer: Any = None,
        chat_parser: Any = None,
    ) -> None:
        """Keeps what a round needs; episodes are not played here."""
        del env_pool, agent_factory, max_concurrency
        if tokenizer is None or chat_parser is None:
            raise ValueError("a worker needs a tokenizer and a chat_parser")
        self.worker_id, self.config, self.sampler = worker_id, config, sampler
        self.state = WorkerState.PENDING
        self._policy_version = 0

    def info(self) -> WorkerInfo:
        """Names the worker and its policy."""
        resources = {"policy_version": self._policy_version}
        return WorkerInfo(
            worker_id=self.worker_id, roles=frozenset({"rollout"}), resources=resources
        )

    def initialize(self) -> None:
        """Makes the sampler ready."""
        self.sampler.initialize()
        self.state = WorkerState.READY

    def get_target_state(self) -> Any:
        """The sampler's."""
        return self.sampler.get_target_state()

    async def bind_weight_sync(self, **kwargs: Any) -> Any:
        """Passes it on."""
        return await self.sampler.bind_weight_sync(**kwargs)

    async def get_weight_sync_metadata(self, **kwargs: Any) -> Any:
        """Passes it on."""
        return await self.sampler.get_weight_sync_metadata(**kwargs)

    async def pre_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any:
        """Passes it on."""
        self.state = WorkerState.SYNCING
        return await self.sampler.pre_weight_sync(sync_request, **kwargs)

    async def weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any:
        """Passes it on, and takes the version that it returns."""
        result = await self.sampler.weight_sync(sync_request, **kwargs)
        self._policy_version = result
        return result

    async def post_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any:
        """Passes it on."""
        result = await self.sampler.post_weight_sync(sync_request, **kwargs)
        self.state = WorkerState.READY
        return result

    async def abort_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any:
        """Passes it on, unlike in c7d8950f."""
        result = await self.sampler.abort_weight_sync(sync_request, **kwargs)
        self.state = WorkerState.READY
        return result
