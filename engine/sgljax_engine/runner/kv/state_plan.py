"""Plans the pool of recurrent states, for models of which some layers have one."""

from __future__ import annotations

from typing import NamedTuple

from sgljax_engine.cache.layer_states import state_bytes
from sgljax_engine.config import EngineConfig
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.placement.shardings import Placement
from sgljax_engine.runner.batches.batch import pick_bucket
from sgljax_engine.runner.compile.shapes import default_batch_buckets


class StatePool(NamedTuple):
    """The states of an engine, and their bytes with those of the largest batch that may decode.

    A decoding batch works on copies.
    """

    num_slots: int
    num_bytes: int


def plan_states(
    model: ModelConfig, config: EngineConfig, placement: Placement, free_bytes: int | None
) -> StatePool:
    """Chooses the number of slots.

    One for each of `max_running_requests`, and as many for cached prefixes, unless the
    configuration says otherwise. If memory is limited they take at most half of what
    `mem_fraction_static` leaves to states and pages.
    """
    per_slot = state_bytes(model.linear_attention, placement.num_tensor_shards)
    cache, most_running = config.cache, config.scheduler.max_running_requests
    asked = cache.num_state_slots
    if not per_slot:
        if asked is not None:
            raise InvalidConfigError(
                f"num_state_slots must be None for a model without recurrent states "
                f"({model.architecture}), got {asked}"
            )
        return StatePool(0, 0)
    buckets = config.runtime.batch_buckets or default_batch_buckets(
        most_running, placement.platform
    )

    def pool(num_slots: int) -> StatePool:
        num_rows = pick_bucket(buckets, min(num_slots, most_running, buckets[-1]))
        return StatePool(num_slots, (num_slots + num_rows) * per_slot)

    wanted = most_running if cache.disable_radix_cache else 2 * most_running
    if free_bytes is None:
        return pool(asked or wanted)
    if asked is not None:
        if pool(asked).num_bytes > free_bytes:
            raise InvalidConfigError(
                f"num_state_slots {asked} takes {pool(asked).num_bytes} bytes with the rows of "
                f"decode, {per_slot} a state; {free_bytes} are free"
            )
        return pool(asked)
    limit = int(free_bytes * cache.mem_fraction_static) // 2
    for num_slots in range(wanted, 0, -1):
        if pool(num_slots).num_bytes <= limit:
            return pool(num_slots)
    raise InvalidConfigError(
        f"half of mem_fraction_static {cache.mem_fraction_static} of the {free_bytes} bytes that "
        f"are free does not hold the recurrent state of one request and the rows of the smallest "
        f"batch, {pool(1).num_bytes} bytes"
    )
