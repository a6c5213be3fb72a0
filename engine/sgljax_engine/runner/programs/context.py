"""The static context of all programs of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from sgljax_engine.attention.base import (
    DecodeAttention,
    PagedAttention,
    PrefillAttention,
    PrepareHeads,
    ProjectionAttention,
    WriteKV,
)
from sgljax_engine.cache.kv_pages import write_kv
from sgljax_engine.layers.kernels import Kernels
from sgljax_engine.layers.tiles import Tiles, Together, tokens_in_tiles
from sgljax_engine.models.spec import ModelContext, ModelDefinition
from sgljax_engine.runner.programs.drafts import Search, search_text, verify_widths
from sgljax_engine.sampling.sampler import XLA, Sampler
from sgljax_engine.speculation.plan import TOKENS_PER_STEP


class ProgramContext(NamedTuple):
    """Static facts that all programs of an engine are compiled for. Hashable.

    Attributes:
        prefill_pass: Number of tokens that prefill takes through the layers in one pass. A larger
            bucket, of a whole number of passes, makes as many passes as its tokens need; None makes
            one pass of all.
        decode_attention: Attention of decode steps that read pages; None for `attention`.
        prefill_attention: Attention of prefill; None for `attention`.
        projection_attention: Attention of decode steps from projections on, for layers that it
            serves; None for `decode_attention`.
        prepare: What makes queries and keys of projections and writes the cache, in all passes;
            None where models do.
        write_kv: Writes the keys of prefill and decode into pages.
        sampler: Draws tokens and computes log-probs.
        sampler_width: Width of the sampler's tiles; None to take all rows together.
        is_deterministic: Whether bits must not depend on who computed them.
        num_vocab_shards: Devices that share the vocabulary.
        heads_per_row: Kv heads in a row of the pages, see `PageLayout`.
        has_windows: Whether sliding layers have window pages, see `cache.window`.
        num_drafts: Most draft tokens of a row in a step; 0 without speculation.
        max_step_tokens: Most tokens of a step with drafts.
        verifies_blocks: See `AttentionBackend`.
        search: Finds drafts in texts.
    """

    model: ModelDefinition
    context: ModelContext
    attention: PagedAttention
    page_size: int
    max_steps: int
    prefill_pass: int | None = None
    decode_attention: DecodeAttention | None = None
    prefill_attention: PrefillAttention | None = None
    projection_attention: ProjectionAttention | None = None
    prepare: PrepareHeads | None = None
    write_kv: WriteKV = write_kv
    sampler: Sampler = XLA
    sampler_width: int | None = None
    is_deterministic: bool = False
    num_vocab_shards: int = 1
    heads_per_row: int = 1
    has_windows: bool = False
    num_drafts: int = 0
    max_step_tokens: int = 0
    verifies_blocks: bool = True
    search: Search = search_text

    def sampler_tokens(self, num_rows: int, num_used: jax.Array) -> Together | Tiles:
        """How rows go through the sampler: the compiler orders sums over the vocabulary.

        The order may depend on the number of rows.
        """
        widths = () if self.sampler_width is None else (self.sampler_width,)
        return tokens_in_tiles(widths, num_rows, num_used)

    @property
    def recur_kernels(self) -> Kernels | None:
        """Kernels of recurrences token by token; None where bits may depend on a prompt's cuts."""
        context = self.context
        is_invariant = context.is_tiled or context.kernels.is_batch_invariant
        return context.kernels if is_invariant else None

    @property
    def max_row_tokens(self) -> int:
        """Most tokens of a row in a dispatch with drafts."""
        return TOKENS_PER_STEP * self.max_steps

    def verify_widths(self, num_rows: int) -> tuple[int, ...]:
        """Tokens of a step with drafts, see `drafts.verify_widths`."""
        return verify_widths(num_rows, self.num_drafts, self.max_step_tokens)

    def sizes_with_drafts(self, sizes: Sequence[int]) -> list[int]:
        """The batch sizes that may verify drafts; none without speculation."""
        return [size for size in sizes if len(self.verify_widths(size)) > 1]

    @property
    def in_windows(self) -> tuple[bool, ...]:
        """Whether each cached layer has window pages."""
        config = self.context.config
        return tuple(self.has_windows and config.attention.slides(i) for i in config.cached_layers)
