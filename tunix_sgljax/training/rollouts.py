"""Two rollout workers for `functools.partial`: one measures another, one seeds Tunix's own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
from tunix.rl.rollout.base_rollout import BaseRollout, CacheConfig, RolloutConfig, RolloutOutput
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

from tunix_sgljax.checkpoints.run_state import keep_state, restored_state
from tunix_sgljax.in_flight.wrapping import RolloutWrapper, find_sgljax_rollout
from tunix_sgljax.rollout_config.modes import find_cluster

_NUM_CALLS = "vanilla_calls"
"""Names the calls so far in a checkpoint."""


class TimedRollout(RolloutWrapper):
    """Wraps another rollout worker, and measures the time of `generate`.

    `on_generate` gets the seconds from the call to the finished tokens; their number without end
    tokens, which only some engines return; and the version of the weights, if the engine counts it.
    """

    def __init__(
        self,
        *,
        engine: Callable[..., BaseRollout],
        on_generate: Callable[[float, int, int | None], None],
        rollout_actor: Any,
        tokenizer: Any,
        mesh: jax.sharding.Mesh,
        rollout_config: RolloutConfig,
    ) -> None:
        super().__init__(
            engine(
                rollout_actor=rollout_actor,
                tokenizer=tokenizer,
                mesh=mesh,
                rollout_config=rollout_config,
            )
        )
        self._on_generate = on_generate

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        start = time.perf_counter()
        output = self.inner.generate(prompts, rollout_config, **kwargs)
        seconds = time.perf_counter() - start
        end = set(rollout_config.eos_tokens or [self.eos_id()])
        num_tokens = sum(len(ids) - (len(ids) > 0 and int(ids[-1]) in end) for ids in output.tokens)
        # Behind it: the rollout may take newer weights first.
        rollout = find_sgljax_rollout(self.inner)
        version = None if rollout is None else rollout.weight_version
        self._on_generate(seconds, num_tokens, version)
        return output

    def close(self) -> None:
        rollout = find_sgljax_rollout(self.inner)
        if rollout is not None:
            rollout.close()


class SeededVanillaRollout(VanillaRollout):
    """Tunix's own sampler, with a key for each call; a resumed run goes on with the next.

    Tunix draws the same noise at every call of a config.
    """

    def __init__(
        self,
        *,
        seed: int,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: jax.sharding.Mesh,
        rollout_config: RolloutConfig,
    ) -> None:
        del mesh  # It samples where the actor lives.
        config = rollout_actor.config
        super().__init__(
            rollout_actor,
            tokenizer,
            CacheConfig(
                cache_size=rollout_config.kv_cache_size,
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
            ),
        )
        self._key = jax.random.key_data(jax.random.key(seed))
        self._num_calls = 0
        self._cluster = find_cluster()  # whose trainer restores a checkpoint later

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        if self._cluster is not None:
            trainer, self._cluster = self._cluster.actor_trainer, None
            for _ in range(restored_state(trainer, _NUM_CALLS) or 0):
                self._next_key()
            keep_state(trainer, _NUM_CALLS, lambda: self._num_calls)
        call_key = self._next_key()
        config = dataclasses.replace(rollout_config, seed=call_key)
        return super().generate(prompts, config, **kwargs)

    def _next_key(self) -> jax.Array:
        self._num_calls += 1
        self._key, key = jax.random.split(self._key)
        return key
