"""Plans how much memory the KV cache takes."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import NamedTuple

from sgljax_engine.attention.base import ContiguousKV
from sgljax_engine.cache.contiguous_kv import LANES, ContiguousShapes, contiguous_shapes
from sgljax_engine.cache.kv_pages import kv_bytes_per_token
from sgljax_engine.config import EngineConfig
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.observability.metrics import MemoryReport
from sgljax_engine.runner.placement import Placement

logger = logging.getLogger(__name__)


class MemoryPlan(NamedTuple):
    """The memory of an engine: the report, and the shapes of contiguous KV."""

    report: MemoryReport
    contiguous_shapes: ContiguousShapes | None


def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    placement: Placement,
    max_model_len: int,
    weights_bytes: int,
    *,
    contiguous_kv: ContiguousKV,
    are_loaded: bool = True,
) -> MemoryPlan:
    """Chooses the size of the KV cache.

    Args:
        model: The engine's model.
        config: The user's configuration.
        placement: The engine's placement.
        max_model_len: Maximum number of tokens of a sequence.
        weights_bytes: Bytes of the weights.
        contiguous_kv: As in `attention.registry.AttentionBackend`.
        are_loaded: Whether the weights are loaded, so that free memory excludes them already.

    Raises:
        InvalidConfigError: when the configuration does not fit; says what would fit.
    """
    cache = config.cache
    num_heads = model.num_kv_heads * placement.num_kv_copies
    per_page = cache.page_size * kv_bytes_per_token(
        model.num_layers, num_heads, model.head_dim, placement.dtype
    )
    free = free_bytes(placement)
    if free is not None and not are_loaded:
        free = max(free - weights_bytes, 0)
    fitting = None if free is None else free // per_page
    if cache.num_kv_tokens is not None:
        rule, num_pages = "num_kv_tokens", cache.num_kv_tokens // cache.page_size
        if fitting is not None and num_pages > fitting:
            raise InvalidConfigError(
                f"num_kv_tokens {cache.num_kv_tokens} takes {num_pages * per_page} bytes; at most "
                f"{fitting * cache.page_size} tokens fit the {free} bytes that are free"
            )
    else:
        rule = "max_running_requests x max_model_len"
        num_pages = config.scheduler.max_running_requests * -(-max_model_len // cache.page_size)
        if fitting is not None:
            affordable = _round_down(int(fitting * cache.mem_fraction_static))
            if affordable < 1:
                raise InvalidConfigError(
                    f"mem_fraction_static {cache.mem_fraction_static} of the {free} bytes that "
                    f"are free does not hold one KV page of {per_page} bytes; all of them hold "
                    f"{fitting}"
                )
            if affordable < num_pages:
                rule, num_pages = "mem_fraction_static", affordable
    rows, rows_bytes = _plan_rows(
        model,
        config,
        placement,
        max_model_len,
        contiguous_kv=contiguous_kv,
        free_bytes=free,
        kv_bytes=num_pages * per_page,
    )
    report = MemoryReport(
        weights_bytes=weights_bytes,
        kv_bytes=num_pages * per_page,
        contiguous_kv_bytes=rows_bytes,
        kv_tokens=num_pages * cache.page_size,
        page_size=cache.page_size,
        rule=rule,
        free_bytes=free,
    )
    logger.info(
        "weights take %d bytes; the KV cache takes %d for %d tokens in pages of %d, as %s says; "
        "copies of decode rows take %d",
        report.weights_bytes,
        report.kv_bytes,
        report.kv_tokens,
        report.page_size,
        rule,
        report.contiguous_kv_bytes,
    )
    return MemoryPlan(report, rows)


def _plan_rows(
    model: ModelConfig,
    config: EngineConfig,
    placement: Placement,
    max_model_len: int,
    *,
    contiguous_kv: ContiguousKV,
    free_bytes: int | None,
    kv_bytes: int,
) -> tuple[ContiguousShapes | None, int]:
    """Shapes and bytes of contiguous KV for decode attention on CPUs: all rows or none.

    Pages and rows together stay within `mem_fraction_static`. With "if_it_fits" there are also none
    if the rows exceed twice the pages, as with a small `num_kv_tokens`.
    """
    if contiguous_kv == "never":
        return None, 0
    num_rows = (config.runtime.batch_buckets or (config.scheduler.max_running_requests,))[-1]
    if model.head_dim % LANES:
        problem = f"needs a head_dim that is a multiple of {LANES}, got {model.head_dim}"
    else:
        shapes = contiguous_shapes(num_rows, max_model_len, model.num_kv_heads, model.head_dim)
        elements = sum(math.prod(shape) for shape in shapes) * model.num_layers
        size = elements * placement.dtype.itemsize * placement.num_kv_copies
        left = size
        if free_bytes is not None:
            left = max(int(free_bytes * config.cache.mem_fraction_static) - kv_bytes, 0)
        if size <= left and (contiguous_kv == "always" or size <= 2 * kv_bytes):
            return shapes, size
        problem = (
            f"takes {size} bytes for {num_rows} rows of {max_model_len} tokens; "
            f"mem_fraction_static leaves {left} beside the pages"
        )
    if contiguous_kv == "always":
        name = config.runtime.attention_backend
        raise InvalidConfigError(f"attention_backend {name!r} {problem}")
    logger.info("decode attention reads pages, since contiguous KV %s", problem)
    return None, 0


def _round_down(count: int) -> int:
    """Keeps three significant bits, so that program shapes do not change with every free byte."""
    shift = max(count.bit_length() - 3, 0)
    return count >> shift << shift


def free_bytes(placement: Placement) -> int | None:
    """Free memory of all devices that share a weight; None when they do not say.

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
