"""What all programs of an engine are compiled for."""

from __future__ import annotations

from typing import NamedTuple

from sgljax_engine.attention.base import (
    DecodeAttention,
    PagedAttention,
    PrefillAttention,
    WriteKV,
)
from sgljax_engine.cache.kv_pages import write_kv
from sgljax_engine.models.spec import ModelContext, ModelDefinition
from sgljax_engine.sampling.sampler import XLA, Sampler


class ProgramContext(NamedTuple):
    """Static facts that all programs of an engine are compiled for. Hashable.

    Attributes:
        prefill_pass: Number of tokens that prefill takes through the layers in one pass. A larger
            bucket, of a whole number of passes, makes as many passes as its tokens need; None makes
            one pass of all.
        decode_attention: Attention of decode steps that read pages; None for `attention`.
        prefill_attention: Attention of prefill; None for `attention`.
        write_kv: Writes the keys of prefill and decode into pages.
        sampler: Draws tokens and computes log-probs.
        is_deterministic: Whether bits must not depend on who computed them.
        num_vocab_shards: Devices that share the vocabulary.
        heads_per_row: Kv heads in a row of the pages, see `PageLayout`.
        has_windows: Whether sliding layers have window pages, see `cache.window`.
    """

    model: ModelDefinition
    context: ModelContext
    attention: PagedAttention
    page_size: int
    max_steps: int
    prefill_pass: int | None = None
    decode_attention: DecodeAttention | None = None
    prefill_attention: PrefillAttention | None = None
    write_kv: WriteKV = write_kv
    sampler: Sampler = XLA
    is_deterministic: bool = False
    num_vocab_shards: int = 1
    heads_per_row: int = 1
    has_windows: bool = False

    @property
    def in_windows(self) -> tuple[bool, ...]:
        """Whether each cached layer has window pages."""
        config = self.context.config
        return tuple(self.has_windows and config.attention.slides(i) for i in config.cached_layers)
