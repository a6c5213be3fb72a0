"""Wrappers of rollout workers, and how to find the engine's worker inside them."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import PyTree
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from sgljax_engine import InvalidConfigError
from tunix_sgljax.rollout import SglJaxRollout


class RolloutWrapper(BaseRollout):
    """Forwards everything to another worker; subclasses add to it.

    Attributes:
        inner: The wrapped worker.
        mesh: The worker's mesh, which Tunix adopts unless it is None.
    """

    def __init__(self, inner: BaseRollout) -> None:
        self.inner = inner
        self.mesh: jax.sharding.Mesh | None = getattr(inner, "mesh", None)

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        return self.inner.generate(prompts, rollout_config, **kwargs)

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        return self.inner.get_per_token_logps(prompt_tokens, completion_tokens)

    def update_params(self, params: PyTree, filter_types: tuple[Any, ...] | None = None) -> None:
        self.inner.update_params(params, filter_types)

    def pad_id(self) -> int:
        return self.inner.pad_id()

    def eos_id(self) -> int:
        return self.inner.eos_id()

    def model(self) -> Any:
        return self.inner.model()


def find_sgljax_rollout(worker: BaseRollout) -> SglJaxRollout | None:
    """The worker, or the one that it wraps; None if that belongs to another engine."""
    while isinstance(worker, RolloutWrapper):
        worker = worker.inner
    return worker if isinstance(worker, SglJaxRollout) else None


def require_sgljax_rollout(cluster: Any, what: str) -> SglJaxRollout:
    """The rollout of a cluster that samples with it."""
    rollout = find_sgljax_rollout(cluster.rollout)
    if rollout is None:
        raise InvalidConfigError(
            f"{what} needs a cluster whose rollout is a SglJaxRollout, got "
            f"{type(cluster.rollout).__name__}"
        )
    return rollout
