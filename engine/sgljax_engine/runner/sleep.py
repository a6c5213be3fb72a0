"""Frees the device memory of an engine for others, and takes it back. Engine thread only.

Two things of an engine can sleep, named by vLLM's and SGLang's tags: weights and KV cache. Each can
be woken by itself. Copies are complete on the host before device memory is given back, and complete
on the device before they leave the host. So a failure half-way changes nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from sgljax_engine.cache.pool import PagePool
from sgljax_engine.errors import OffloadError, forget_locals
from sgljax_engine.io_struct import SLEEP_TAGS, SleepTag
from sgljax_engine.observability.metrics import EngineCounters
from sgljax_engine.runner.kv.host_arrays import HostArray, num_bytes, to_device
from sgljax_engine.runner.kv.kv_memory import SavedStates
from sgljax_engine.runner.kv.saved_pages import SavedPages
from sgljax_engine.runner.runner import ModelRunner


class HostCopies(NamedTuple):
    """Copies on the host; None for what is not kept."""

    weights: Mapping[str, HostArray] | None
    pages: SavedPages | None
    states: SavedStates | None = None


class SleepManager:
    """Puts weights and KV cache to sleep, and holds their copies.

    `asleep` has tags in the order of `SLEEP_TAGS`. `refuses_requests`: new ones are not queued.
    """

    def __init__(self, runner: ModelRunner, pool: PagePool, counters: EngineCounters) -> None:
        self._counters = counters
        self._runner = runner
        self._kv_memory = runner.kv_memory
        self._pool = pool
        self._copies = HostCopies(None, None)
        self.asleep: tuple[SleepTag, ...] = ()
        self.refuses_requests = False

    @property
    def kept_weights(self) -> Mapping[str, HostArray]:
        return self._copies.weights or {}

    @property
    def keeps_weights(self) -> bool:
        return bool(self.kept_weights)

    @property
    def host_bytes(self) -> int:
        weights, pages, states = self._copies
        in_pages = 0 if pages is None else pages.nbytes
        in_states = sum(num_bytes(contents) for _, contents in states or ())
        return in_pages + in_states + (0 if weights is None else num_bytes(dict(weights)))

    def keep(self, *, weights: bool, pages: bool) -> HostCopies:
        """Makes the copies to keep during a sleep, or raises OffloadError; changes nothing else.

        What sleeps already stays as it is, kept or not.
        """
        kept_weights, kept_pages, kept_states = self._copies
        with _copying():
            if weights and "weights" not in self.asleep:
                kept_weights = self._runner.weights_to_host()
            if pages:
                kept_pages = self._copy_pages()
                kept_states = self._copy_states()
        return HostCopies(kept_weights, kept_pages, kept_states)

    def _copy_states(self) -> SavedStates | None:
        """Copies the recurrent states of running requests; None without any."""
        slots = self._pool.states
        if "kv_cache" in self.asleep:
            return self._copies.states
        if slots is None or not self._kv_memory.is_allocated:
            return None
        return self._kv_memory.save_states(slots.used)

    def _copy_pages(self) -> SavedPages | None:
        """Copies the used pages to the host; None without contents."""
        if "kv_cache" in self.asleep:
            return self._copies.pages
        if not self._kv_memory.is_allocated:  # the cache was released, and is empty
            return None
        return self._kv_memory.save_pages(self._pool.used_pages, self._window_pages)

    def sleep(self, copies: HostCopies, tags: Sequence[SleepTag], *, refuses_requests: bool) -> int:
        """Frees the memory of what the tags name; returns the bytes. Cannot fail."""
        freed = 0
        if "weights" in tags:
            freed += self._runner.weights_bytes
            self._runner.swap_weights({})
        if "kv_cache" in tags:
            freed += self._kv_memory.release()
        self._copies = copies
        self.asleep = tuple(tag for tag in SLEEP_TAGS if tag in (*tags, *self.asleep))
        self.refuses_requests = refuses_requests
        return freed

    def load_weights(self) -> dict[str, jax.Array]:
        """Copies the kept weights to the devices, or raises OffloadError; copies stay."""
        started_s = time.perf_counter()
        try:
            return to_device(dict(self.kept_weights))
        except Exception as error:
            forget_locals(error)
            raise _waking_failed(["weights"], error) from error
        finally:
            self._counters.wake_s += time.perf_counter() - started_s

    @property
    def _window_pages(self) -> np.ndarray | None:
        return None if self._pool.windows is None else self._pool.windows.by_page

    def prepare_wake_up(self, tags: Sequence[SleepTag]) -> int:
        """Allocates the memory of all these tags and returns its bytes, or raises OffloadError.

        Then everything stays asleep and can be woken later. `wake_up` or `undo_wake_up` must
        follow.
        """
        started_s = time.perf_counter()
        runner, copies = self._runner, self._copies
        taken = 0
        try:
            if "weights" in tags and copies.weights is not None:
                runner.weights_from_host(copies.weights)
                taken += runner.weights_bytes
            if "kv_cache" in tags:
                taken += self._kv_memory.allocate()
                if copies.pages is not None:
                    self._kv_memory.load_pages(
                        copies.pages, self._pool.used_pages, self._window_pages
                    )
                if copies.states is not None:
                    self._kv_memory.load_states(copies.states)
        except Exception as error:
            self.undo_wake_up(tags)
            forget_locals(error)
            raise _waking_failed(tags, error) from error
        self._counters.wake_s += time.perf_counter() - started_s
        return taken

    def undo_wake_up(self, tags: Sequence[SleepTag]) -> None:
        if "weights" in tags:
            self._runner.swap_weights({})
        if "kv_cache" in tags:
            self._kv_memory.release()

    def wake_up(self, tags: Sequence[SleepTag]) -> None:
        self._woke(tags)

    def weights_came(self) -> None:
        """Drops kept weights, after other weights were put on the device."""
        self._woke(("weights",))

    def release(self) -> None:
        self._woke(SLEEP_TAGS)

    def _woke(self, tags: Sequence[SleepTag]) -> None:
        self._copies = HostCopies(
            None if "weights" in tags else self._copies.weights,
            None if "kv_cache" in tags else self._copies.pages,
            None if "kv_cache" in tags else self._copies.states,
        )
        self.asleep = tuple(tag for tag in self.asleep if tag not in tags)
        self.refuses_requests &= bool(self.asleep)


def _waking_failed(tags: Sequence[SleepTag], error: Exception) -> OffloadError:
    return OffloadError(
        f"taking back the memory of {list(tags)} failed: {error!r}; the engine sleeps on, "
        "and nothing that it kept is lost"
    )


@contextlib.contextmanager
def _copying() -> Iterator[None]:
    try:
        yield
    except OffloadError:
        raise
    except Exception as error:
        forget_locals(error)
        raise OffloadError(
            f"copying weights or KV pages to the host failed: {error!r}; nothing has changed"
        ) from error
