"""Weight updates: new weights are made beside the decode loop, then swapped in between dispatches.

One thread works for an engine, started by its first update, so updates are done one after another
in the order of their calls, and a caller's thread-local JAX contexts (a transfer guard, say, which
Tunix sets while it syncs weights) do not apply.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax

from sgljax_engine import commands as cmd
from sgljax_engine.detokenizer import reject, resolve
from sgljax_engine.errors import forget_locals
from sgljax_engine.io_struct import PauseMode
from sgljax_engine.weights import sync
from sgljax_engine.weights.rules import Rule
from sgljax_engine.weights.sync import SyncPlan, WeightMaker


class WeightSource(NamedTuple):
    """Named arrays and the rules that map them onto the engine's parameters."""

    arrays: Any
    rules: Sequence[Rule]


class UpdateJob(NamedTuple):
    """One `update_weights` call.

    Attributes:
        load: Reads the source; called on the worker's thread.
        mode: What becomes of requests that have begun.
        flush_cache: See `commands.SwapWeights`.
        donate: Make each weight in the place of the old one.
        verify: Compare checksums of the new weights and the source.
        future: Gets the new weight version.
    """

    load: Callable[[], WeightSource]
    mode: PauseMode
    flush_cache: bool
    donate: bool
    verify: bool
    future: Future[int]


class UpdateWorker:
    """Does updates one after another. `put` and `stop` may be called from any thread."""

    def __init__(
        self,
        maker: WeightMaker,
        submit: Callable[[cmd.Command], None],
        check_open: Callable[[], None],
        name: str,
    ) -> None:
        """Starts no thread yet.

        Args:
            maker: Plans; from now on used by this worker alone.
            submit: Queues a command for the engine thread.
            check_open: Raises once the engine is shut down.
            name: Of the thread.
        """
        self._maker = maker
        self._submit = submit
        self._check_open = check_open
        self._jobs: queue.SimpleQueue[UpdateJob | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, job: UpdateJob) -> None:
        """Queues an update. Not reentrant; the caller serialises."""
        if self.thread.ident is None:
            self.thread.start()
        self._jobs.put(job)

    def stop(self) -> None:
        """Ends the thread; waits for it. What is queued fails, since nobody takes its weights."""
        self._jobs.put(None)
        if self.thread.ident is not None:
            self.thread.join()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while self._take():
            pass

    def _take(self) -> bool:
        """Does one update; False at the end. Keeps nothing of it when it returns."""
        job = self._jobs.get()
        if job is None:
            return False
        future = job.future
        try:
            version = self._update(job)
        except BaseException as error:  # a user's hook may raise anything: the caller's to see
            forget_locals(error)
            del job  # a caller who has an answer may count on its weights being free
            reject(future, error)
        else:
            del job
            resolve(future, version)
        finally:
            del future  # the error refers to this frame, which must not refer to the error
        return True

    def _update(self, job: UpdateJob) -> int:
        self._check_open()
        source = job.load()
        plan, arrays = self._maker.plan(source.arrays, source.rules)
        del source
        build = self._prepare(plan, arrays, job)
        del arrays
        future: Future[int] = Future()
        self._submit(cmd.SwapWeights(build, job.mode, job.flush_cache, future))
        del build
        return future.result()

    def _prepare(
        self, plan: SyncPlan, arrays: Mapping[str, Any], job: UpdateJob
    ) -> cmd.BuildWeights:
        """Makes the weights, or leaves it to the engine thread where it has to be done there.

        That is so if old weights are taken apart on the way; and if weights are spread over
        devices, since programs that two threads start on the same devices may stand in different
        orders in their queues, and then wait for one another.
        """
        if job.donate:
            return lambda old: sync.apply_donating(plan, arrays, old, verify=job.verify)
        if not plan.is_on_one_device:
            return lambda old: sync.apply(plan, arrays, verify=job.verify)
        return _Made(sync.apply(plan, arrays, verify=job.verify)).take


class _Made:
    """Weights on their way to the engine thread, held by nobody once they are taken."""

    def __init__(self, weights: dict[str, jax.Array]) -> None:
        self._weights = weights

    def take(self, old: cmd.Weights) -> dict[str, jax.Array]:
        del old
        weights, self._weights = self._weights, {}
        return weights
