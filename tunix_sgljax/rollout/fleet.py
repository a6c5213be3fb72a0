"""A rollout worker whose engines are servers in other processes and on other machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import jax
from flax import nnx
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import EngineStateError
from tunix_sgljax.rollout.worker import SglJaxRollout

if TYPE_CHECKING:
    from sgljax_engine.fleet import FleetConfig


class SglJaxFleetRollout(SglJaxRollout):
    """A rollout worker that samples on a fleet of `tunix-sgljax serve`, over HTTP.

    It does what `SglJaxRollout` does, with the same samples for the same seeds, and needs no memory
    of the trainer's devices. `update_params` writes a version of the weights into a store, from
    which the workers read it; a sample comes from no older version than the newest when it was
    asked for. A worker that ends, hangs or fails is left out: its requests go to others.
    """

    def __init__(
        self,
        *,
        fleet: FleetConfig | Mapping[str, Any],
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: RolloutConfig | None = None,
        **options: Any,
    ) -> None:
        """Checks the configuration; the first call waits for the workers.

        Args:
            fleet: Addresses of the servers or of a router, and the weight store: a `FleetConfig`,
                or a mapping of its fields.
            rollout_actor: As in `SglJaxRollout`, also for the arguments below.
            tokenizer: See there. Texts are made with it, not with the workers' own.
            mesh: The trainer's; the workers have devices of their own.
            rollout_config: See there. Engine options that are a worker's are named in a warning.
            **options: See there. Of the engine's options `max_model_len`, `dtype`, `random_seed`
                and those of LoRA are taken, all others are the workers'.

        Raises:
            InvalidConfigError: as `SglJaxRollout`; also without the packages of the extra `fleet`.
        """
        super().__init__(
            rollout_actor=rollout_actor,
            tokenizer=tokenizer,
            mesh=mesh,
            rollout_config=rollout_config,
            fleet=_read(fleet),
            **options,
        )

    def serve(self, **options: Any) -> NoReturn:
        """Refuses: the workers serve already."""
        del options
        raise EngineStateError("the workers of the fleet serve the policy already")


def _read(fleet: Any) -> FleetConfig:
    from sgljax_engine.fleet import FleetConfig

    return FleetConfig.of(fleet)
