"""The device's memory for keys and values, and the copying of its contents. Engine thread only."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgljax_engine.cache.kv_pages import (
    KVPages,
    allocate_kv_pages,
    routed_width,
)
from sgljax_engine.cache.layer_states import allocate_states
from sgljax_engine.cache.zeros import MakeZeros
from sgljax_engine.placement.shardings import Placement
from sgljax_engine.runner.batches.page_ids import page_ids
from sgljax_engine.runner.compile.compiled import ProgramCache, ProgramCall, ProgramState, takes_kv
from sgljax_engine.runner.kv.host_arrays import HostMemory, host_memory, to_device, to_host
from sgljax_engine.runner.kv.saved_pages import SavedPages, chunk_ids, chunk_size
from sgljax_engine.runner.programs.context import ProgramContext

logger = logging.getLogger(__name__)

SavedStates = list[tuple[np.ndarray, Any]]
"""Recurrent states on the host: the slots of each chunk, int32 [N], those beyond the pool padding,
and the `HostArray`s of their states in each layer."""


class KVMemory:
    """Pages and recurrent states: allocates and frees their memory, and copies their contents.

    Window pages include the null page, see `cache.window`. `kv` is empty while nothing is
    allocated.
    """

    def __init__(
        self,
        programs: ProgramCache,
        *,
        static: ProgramContext,
        placement: Placement,
        num_pages: int,
        num_window_pages: int,
        num_state_slots: int,
        make_zeros: MakeZeros,
    ) -> None:
        self._make_zeros = make_zeros
        self._programs = programs
        self._static = static
        self._placement = placement
        self._host_memory: HostMemory = host_memory(placement.mesh.devices.flat[0])
        self.kv = KVPages()
        self.num_pages = num_pages
        self.num_window_pages = num_window_pages
        self.num_state_slots = num_state_slots
        self._allocate()

    @property
    def _shardings(self) -> list[jax.sharding.NamedSharding]:
        return list(map(self._placement.kv_sharding, self._static.context.config.cached_kv))

    # ------------------------------------------------------------------ programs

    def run_program(self, call: ProgramCall, weights: Mapping[str, jax.Array]) -> Any:
        if takes_kv(call.name):
            self.allocate()
        state, result = self._programs.run_program(call, self.state(weights))
        self.kv = state.kv
        return result

    def state(self, weights: Mapping[str, jax.Array]) -> ProgramState:
        return ProgramState(weights, self.kv)

    def check(self) -> None:
        """Waits for all programs that write pages; raises their errors."""
        jax.block_until_ready(self.kv)

    def wait(self) -> None:
        """Waits for all dispatched programs; the next step finds their errors."""
        with contextlib.suppress(Exception):
            self.check()

    # ------------------------------------------------------------------ memory

    @property
    def is_allocated(self) -> bool:
        """False after `release`, until a program needs the pages."""
        return bool(self.kv.layers)

    def allocate(self) -> int:
        """Allocates the pages, unless they are; returns the bytes."""
        if self.is_allocated:
            return 0
        self._allocate()
        return self._num_bytes

    def release(self) -> int:
        num_bytes = self._num_bytes
        self.wait()  # memory that a program still writes is not free
        self.drop()
        return num_bytes

    def drop(self) -> None:
        self.kv = KVPages()

    def recover(self) -> bool:
        """Drops the pages if a failed program consumed or spoilt them; returns whether it did.

        The next program allocates them anew. Pages donated to a failed program are deleted. Those
        that a failed asynchronous program was to return raise when waited for. `load_pages` drops
        them by itself.
        """
        if self.is_allocated:
            try:
                self.check()
            except Exception:
                self.drop()
            else:
                return False
        logger.warning("the KV pages were lost in a failed step; they are allocated anew")
        return True

    @property
    def _num_bytes(self) -> int:
        return self._placement.held_bytes(jax.tree.leaves(self.kv))

    def _allocate(self) -> None:
        placement = self._placement
        pages = allocate_kv_pages(
            self._static.page_layouts,
            self._shardings,
            num_pages=[
                self.num_window_pages if in_window else self.num_pages
                for in_window in self._static.in_windows
            ],
            page_size=self._static.page_size,
            dtype=placement.dtype,
            make_zeros=self._make_zeros,
        )
        routed = self._allocate_routed()
        states = allocate_states(
            self._static.context.config.linear_attention,
            placement.state_shardings,
            num_slots=self.num_state_slots,
            make_zeros=self._make_zeros,
        )
        self.kv = KVPages(pages, routed, states)

    def _allocate_routed(self) -> jax.Array | None:
        if not self._static.context.returns_routed:
            return None
        config = self._static.context.config
        assert config.moe is not None
        width = routed_width(config.num_layers * config.moe.num_experts_per_token)
        shape = (self.num_pages, self._static.page_size, width)
        dtype = jnp.dtype(config.moe.id_dtype)
        return self._make_zeros(shape, dtype, self._placement.replicated)

    # ------------------------------------------------------------------ contents

    def save_pages(self, pages: Sequence[int], windows: np.ndarray | None = None) -> SavedPages:
        """Copies pages, and their window pages if there are some, to the host; waits for it."""
        chunks: list[tuple[np.ndarray, Any]] = []
        for ids in chunk_ids(pages, self.pages_per_copy, self.num_pages):
            call = ProgramCall("read_pages", (page_ids(ids, windows),))
            state, _ = self._programs.run_program(call, self.state({}))
            chunks.append((ids, to_host(state.moved, self._host_memory)))
        return SavedPages(chunks)

    def load_pages(
        self, saved: SavedPages, pages: Collection[int], windows: np.ndarray | None = None
    ) -> None:
        """Restores those of these pages that were saved. A failure leaves no pages at all.

        `windows` has the current window page of each page, or -1. A page that had none when it was
        saved must have none.
        """
        self.allocate()
        try:
            for ids, contents in saved.only(pages, self.num_pages):
                state = self.state({})._replace(moved=to_device(contents))
                state, _ = self._programs.run_program(
                    ProgramCall("write_pages", (page_ids(ids, windows),)), state
                )
                self.kv = state.kv
            self.check()
        except BaseException:
            self.drop()
            raise

    def save_states(self, slots: Sequence[int]) -> SavedStates:
        """Copies the recurrent states in these slots to the host; waits for it."""
        return [
            (
                ids,
                to_host(
                    self.run_program(ProgramCall("read_states", (ids,)), {}), self._host_memory
                ),
            )
            for ids in chunk_ids(slots, self._states_per_copy, self.num_state_slots)
        ]

    def load_states(self, saved: SavedStates) -> None:
        """Restores states into their slots. A failure leaves no pages at all, nor states."""
        self.allocate()
        try:
            for ids, contents in saved:
                self.run_program(ProgramCall("write_states", (to_device(contents), ids)), {})
            self.check()
        except BaseException:
            self.drop()
            raise

    @property
    def _states_per_copy(self) -> int:
        size = sum(array.nbytes for array in jax.tree.leaves(self.kv.states))
        return chunk_size(size // self.num_state_slots, self.num_state_slots)

    @property
    def pages_per_copy(self) -> int:
        """Pages that are copied together, to the host or back; `is_allocated` must hold."""
        pages = jax.tree.leaves(self.kv._replace(states=()))
        size = sum(array.nbytes for array in pages) // self.num_pages
        return chunk_size(size, self.num_pages)
