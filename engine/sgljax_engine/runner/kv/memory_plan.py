from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

from sgljax_engine.cache.window import WindowSizes
from sgljax_engine.config import EngineConfig
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.registry import get_model
from sgljax_engine.observability.metrics import MemoryReport
from sgljax_engine.placement.shardings import Placement
from sgljax_engine.runner.kv.state_plan import plan_states
from sgljax_engine.runner.kv.window_plan import FITS, bytes_per_token, split_windows

logger = logging.getLogger(__name__)


class MemoryPlan(NamedTuple):
    """The memory of an engine, and the sizes of its window pages if it has some."""

    report: MemoryReport
    windows: WindowSizes | None


def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    placement: Placement,
    max_model_len: int,
    weights_bytes: int,
    *,
    heads_per_row: int = 1,
    program_bytes: int = 0,
    num_engines: int = 1,
    are_loaded: bool = True,
    device_bytes: int | None = None,
) -> MemoryPlan:
    """Chooses the size of one engine's KV cache; an error says what would fit.

    `program_bytes` are those of all the engine's devices that programs need beside weights and KV.
    If weights `are_loaded`, free memory excludes them already; not so with `device_bytes`.
    """
    cache = config.cache
    per_page = cache.page_size * sum(bytes_per_token(model, config, placement, heads_per_row))
    free = engine_free_bytes(placement, num_engines, device_bytes)
    if free is not None and not are_loaded:
        if free < weights_bytes:
            raise InvalidConfigError(f"the weights take {weights_bytes} bytes; {free} are free")
        free -= weights_bytes
    states = plan_states(model, config, placement, free)
    fitting = None if free is None else free // per_page
    # What programs and recurrent states leave.
    beside = program_bytes + states.num_bytes
    most = None if free is None else max(free - beside, 0) // per_page
    if cache.num_kv_tokens is not None:
        rule, num_pages = "num_kv_tokens", cache.num_kv_tokens // cache.page_size
        if most is not None and num_pages > most:
            programs = f", of which programs need {program_bytes}" if program_bytes else ""
            if states.num_bytes:
                programs += f", and recurrent states {states.num_bytes}"
            raise InvalidConfigError(
                f"num_kv_tokens {cache.num_kv_tokens} takes {num_pages * per_page} bytes; at most "
                f"{most * cache.page_size} tokens fit the {free} bytes that are free{programs}"
            )
    else:
        rule = FITS
        num_pages = config.scheduler.max_running_requests * -(-max_model_len // cache.page_size)
        if fitting is not None and most is not None:
            budget = int(fitting * cache.mem_fraction_static) - -(-states.num_bytes // per_page)
            affordable = _round_down(min(max(budget, 0), most))
            if affordable < 1:
                raise InvalidConfigError(
                    f"mem_fraction_static {cache.mem_fraction_static} of the {free} bytes that "
                    f"are free does not hold one KV page of {per_page} bytes; all of them hold "
                    f"{fitting}, and {most} beside the {beside} bytes that programs and states need"
                )
            if affordable < num_pages:
                rule, num_pages = "mem_fraction_static", affordable
    pools = split_windows(
        model,
        config,
        placement,
        max_model_len,
        heads_per_row=heads_per_row,
        num_pages=num_pages,
        rule=rule,
    )
    num_window_pages = 0 if pools.windows is None else pools.windows.num_pages
    report = MemoryReport(
        weights_bytes=weights_bytes,
        kv_bytes=pools.kv_bytes,
        kv_tokens=pools.num_pages * cache.page_size,
        window_kv_tokens=num_window_pages * cache.page_size,
        saved_window_bytes=pools.saved_bytes,
        state_bytes=states.num_bytes,
        state_slots=states.num_slots,
        page_size=cache.page_size,
        rule=pools.rule,
        free_bytes=free,
        program_bytes=program_bytes,
        tp_size=placement.mesh.size,
        kv_dtype=placement.kv_dtype.name,
    )
    logger.info(
        "weights take %d bytes; the KV cache takes %d for %d tokens in pages of %d, as %s says, "
        "and %d in sliding windows, in %s",
        report.weights_bytes,
        report.kv_bytes,
        report.kv_tokens,
        report.page_size,
        report.rule,
        report.window_kv_tokens,
        report.kv_dtype,
    )
    if states.num_slots:
        logger.info(
            "recurrent states take %d bytes, for %d requests and cached prefixes",
            states.num_bytes,
            states.num_slots,
        )
    return MemoryPlan(report, pools.windows)


def _round_down(count: int) -> int:
    """Keeps five significant bits, so that program shapes do not change with every free byte."""
    shift = max(count.bit_length() - 5, 0)
    return count >> shift << shift


def engine_free_bytes(
    placement: Placement, num_engines: int, device_bytes: int | None = None
) -> int | None:
    """Free memory of one engine of a group, in bytes; None when its devices do not say.

    Engines on a host's CPUs share its memory. `device_bytes` is that of one device with nothing in
    it, for devices that nobody has.
    """
    if device_bytes is not None:
        return device_bytes * placement.num_tensor_shards
    free = free_bytes(placement)
    return free if free is None or not placement.is_own_cpu else free // num_engines


def free_bytes(placement: Placement) -> int | None:
    """Free memory of all devices of an engine; None when they do not say.

    CPU devices of this process share the memory of the host.
    """
    if not placement.is_own_cpu:
        try:
            stats = placement.mesh.devices.flat[0].memory_stats()
        except RuntimeError:  # JAX's own, or NotImplementedError: not on this platform
            stats = None
        if not stats or not {"bytes_limit", "bytes_in_use"} <= stats.keys():
            return None
        return (stats["bytes_limit"] - stats["bytes_in_use"]) * placement.num_tensor_shards
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # unlike sysconf's free pages, it counts reclaimable caches
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def expected_weights_bytes(model: ModelConfig, placement: Placement) -> int:
    """Bytes of a model's weights on an engine's devices, before there are any."""
    targets = placement.weight_targets(get_model(model.architecture).param_specs(model))
    return placement.held_bytes(target.stored for target in targets.values())
