"""Plans the pool of window pages, for models of which some layers have a sliding window."""

from __future__ import annotations

from typing import NamedTuple

from sgljax_engine.cache.window import NUM_NULL, WindowSizes
from sgljax_engine.config import EngineConfig
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.placement.shardings import Placement

FITS = "max_running_requests x max_model_len"
"""The rule of a pool that holds the longest requests, all at once."""

_SPARE_PAGES = 4
"""Spare pages of a request: two shared with what comes before and behind, two of a copied tail."""


class KVPools(NamedTuple):
    """The pages of an engine: those of layers that have no others, and window pages.

    `kv_bytes` are those of both, `saved_bytes` what pages of all layers for as many tokens would
    take beside that. See `MemoryReport.rule`.
    """

    num_pages: int
    windows: WindowSizes | None
    kv_bytes: int
    saved_bytes: int
    rule: str


def bytes_per_token(
    model: ModelConfig, config: EngineConfig, placement: Placement, heads_per_row: int
) -> tuple[int, int]:
    """Bytes of a token on an engine's devices: in pages of full layers, and of sliding layers.

    The experts of the token, if they are kept, are in the former.
    """
    full, sliding = (
        placement.kv_bytes_per_token(model, heads_per_row, slides=slides)
        for slides in (False, True)
    )
    if config.cache.enable_return_routed_experts:
        full += placement.routed_bytes_per_token(model)
    return full, sliding


def split_windows(
    model: ModelConfig,
    config: EngineConfig,
    placement: Placement,
    max_model_len: int,
    *,
    heads_per_row: int,
    num_pages: int,
    rule: str,
) -> KVPools:
    """Shares the memory of `num_pages` pages of all layers out to pages and window pages.

    Window pages suffice for `max_running_requests`, and for as many windows again at the ends of
    cached prefixes, but take at most half of a limited memory. There are none if that is not less
    than before.
    """
    page_size = config.cache.page_size
    per_token = bytes_per_token(model, config, placement, heads_per_row)
    full, sliding = (page_size * num_bytes for num_bytes in per_token)
    one_pool = KVPools(num_pages, None, num_pages * (full + sliding), 0, rule)
    if not sliding or config.cache.disable_hybrid_swa_memory:
        return one_pool
    sizes = _wanted_sizes(model, config, max_model_len)
    if rule == "mem_fraction_static":
        affordable = one_pool.kv_bytes // (2 if full else 1) // sliding - NUM_NULL
        least = sizes.per_request + sizes.for_prefill
        sizes = sizes._replace(num_pages=max(min(sizes.num_pages, affordable), least))
        wanted = config.scheduler.max_running_requests * -(-max_model_len // page_size)
        left = one_pool.kv_bytes - (sizes.num_pages + NUM_NULL) * sliding
        # Pages that only have window pages take no memory.
        fitting = left // full if full else wanted
        num_pages, rule = (fitting, rule) if fitting < wanted else (wanted, FITS)
    if sizes.num_pages >= num_pages or num_pages < one_pool.num_pages:
        return one_pool
    kv_bytes = num_pages * full + (sizes.num_pages + NUM_NULL) * sliding
    saved = num_pages * (full + sliding) - kv_bytes
    return KVPools(num_pages, sizes, kv_bytes, saved, rule)


def _wanted_sizes(model: ModelConfig, config: EngineConfig, max_model_len: int) -> WindowSizes:
    """Sizes with room for every running request, and for as many cached prefixes."""
    page_size, scheduler = config.cache.page_size, config.scheduler
    window = model.attention.sliding_window
    assert window is not None

    def pages_for(num_tokens: int) -> int:
        return -(-num_tokens // page_size)

    longest = pages_for(max_model_len) + 1
    per_request = min(longest, pages_for(window + scheduler.decode_steps) + _SPARE_PAGES)
    for_prefill = min(
        pages_for(config.max_prefill_tokens), scheduler.max_running_requests * longest
    )
    per_prefix = min(longest, pages_for(window) + 1)
    count = scheduler.max_running_requests * (per_request + per_prefix) + for_prefill
    return WindowSizes(count, window, per_request, for_prefill)
