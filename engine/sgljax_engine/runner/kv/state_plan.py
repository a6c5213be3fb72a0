"""Plans the pool of recurrent states, for models of which some layers have one."""

from __future__ import annotations

from typing import NamedTuple

from sgljax_engine.cache.layer_states import state_bytes
from sgljax_engine.config import EngineConfig
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.model_config import ModelConfig


class StatePool(NamedTuple):
    """The states of an engine.

    Attributes:
        num_slots: States that it holds.
        num_bytes: Bytes of them, and of as many rows as may decode together: a decode dispatch
            works on copies.
    """

    num_slots: int
    num_bytes: int


def plan_states(
    model: ModelConfig, config: EngineConfig, free_bytes: int | None, num_shards: int
) -> StatePool:
    """Chooses the number of slots.

    One for each of `max_running_requests`, and as many for cached prefixes, unless the
    configuration says otherwise. If memory is limited they take at most half of what
    `mem_fraction_static` leaves to states and pages.

    Args:
        model: The engine's model.
        config: The engine's configuration.
        free_bytes: Free memory beside the weights; None if the devices do not say.
        num_shards: Devices that share a state.

    Raises:
        InvalidConfigError: when the configuration does not fit; says what would fit.
    """
    per_slot, cache = state_bytes(model.linear_attention, num_shards), config.cache
    if not per_slot:
        if cache.num_state_slots is not None:
            raise InvalidConfigError(
                f"num_state_slots must be None for a model without recurrent states "
                f"({model.architecture}), got {cache.num_state_slots}"
            )
        return StatePool(0, 0)
    most_running = config.scheduler.max_running_requests
    wanted = most_running if cache.disable_radix_cache else 2 * most_running
    most_rows = (config.runtime.batch_buckets or (most_running,))[-1]

    def pool(num_slots: int) -> StatePool:
        return StatePool(num_slots, (num_slots + most_rows) * per_slot)

    asked = cache.num_state_slots
    if free_bytes is None:
        return pool(wanted if asked is None else asked)
    most = free_bytes // per_slot - most_rows
    if asked is not None:
        if asked > most:
            raise InvalidConfigError(
                f"num_state_slots {asked} and {most_rows} rows of decode take "
                f"{pool(asked).num_bytes} bytes; at most {max(most, 0)} slots fit the "
                f"{free_bytes} bytes that are free"
            )
        return pool(asked)
    fitting = int(free_bytes * cache.mem_fraction_static) // 2 // per_slot - most_rows
    if fitting < 1:
        raise InvalidConfigError(
            f"mem_fraction_static {cache.mem_fraction_static} of the {free_bytes} bytes that are "
            f"free does not hold the recurrent states of {most_rows} rows, {per_slot} bytes each, "
            "in half of it: set max_running_requests lower"
        )
    return pool(min(wanted, fitting))
