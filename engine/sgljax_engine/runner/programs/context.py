"""The static context of all programs of an engine."""

from __future__ import annotations

from typing import NamedTuple

from sgljax_engine.attention.base import Attention
from sgljax_engine.cache.kv_pages import PageLayout
from sgljax_engine.layers.kernels import CpuKernels
from sgljax_engine.models.spec import ModelContext, ModelDefinition
from sgljax_engine.runner.programs.drafts import Search, search_text
from sgljax_engine.sampling.sampler import XLA, Sampler
from sgljax_engine.speculation.plan import TOKENS_PER_STEP, row_tokens


class DraftContext(NamedTuple):
    """Static facts of decode steps with drafts: limits of a row and of a step."""

    num_drafts: int = 0
    max_step_tokens: int = 0
    search: Search = search_text


class ProgramContext(NamedTuple):
    """Static facts that all programs of an engine are compiled for. Hashable.

    `prefill_pass` is the number of tokens that prefill and scores take through the layers in one
    pass. A larger bucket, of a whole number of passes, makes as many passes as its tokens need;
    None makes one pass of all. `num_vocab_shards` devices share the vocabulary. `has_windows`:
    sliding layers have window pages.
    """

    model: ModelDefinition
    context: ModelContext
    attention: Attention
    page_size: int
    page_layouts: tuple[PageLayout, ...]
    max_steps: int
    prefill_pass: int | None = None
    sampler: Sampler = XLA
    num_vocab_shards: int = 1
    has_windows: bool = False
    drafts: DraftContext = DraftContext()

    @property
    def recur_kernels(self) -> CpuKernels | None:
        """Kernels of recurrences token by token; None where bits may depend on a prompt's cuts."""
        kernels = self.context.kernels
        return kernels if isinstance(kernels, CpuKernels) else None

    @property
    def max_row_tokens(self) -> int:
        return TOKENS_PER_STEP * self.max_steps

    def row_tokens(self, num_rows: int) -> tuple[int, ...]:
        """Tokens of a row in a step, see `plan.row_tokens`."""
        return row_tokens(num_rows, self.drafts.num_drafts, self.drafts.max_step_tokens)

    @property
    def in_windows(self) -> tuple[bool, ...]:
        """Whether each cached layer has window pages."""
        config = self.context.config
        return tuple(self.has_windows and config.attention.slides(i) for i in config.cached_layers)
