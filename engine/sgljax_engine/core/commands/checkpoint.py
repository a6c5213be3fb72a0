"""Commands that save an engine's state to a checkpoint, and restore it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import ClassVar

from sgljax_engine.checkpoint.prefix import PrefixCheckpoint
from sgljax_engine.core.calls import RequestGroups
from sgljax_engine.core.command import PerEngineCommand, Recipients
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.snapshot import (
    CopiedPages,
    PrefixSnapshot,
    RequestMark,
    Restoration,
    RestoredRequest,
    Snapshot,
)
from sgljax_engine.core.transaction import GroupCommand
from sgljax_engine.errors import (
    CheckpointError,
    CompileForbiddenError,
    EngineStepError,
    InvalidRequestError,
)
from sgljax_engine.processing.futures import reject
from sgljax_engine.types import PageStamp, Request

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TakeSnapshot(GroupCommand):
    """Take a snapshot of each engine for a checkpoint, of KV pages too if asked for."""

    include_kv: bool
    future: Future[list[Snapshot]]

    def prepare(self, core: EngineCore) -> Snapshot:
        """Takes the snapshot; `CopyPages` takes the contents of KV pages."""
        weights = core.serving.digest
        if not core.runner.is_on_one_device:
            # No other thread may start programs there; see `weights_worker.WeightsWorker`.
            weights.digest()
        return Snapshot(
            marks=_mark_requests(core),
            new_token_ratio=core.scheduler.policy.new_token_ratio,
            weight_version=core.serving.version,
            weights=weights,
            prefix=_take_prefix(core) if self.include_kv else None,
        )

    def commit(self, core: EngineCore, prepared: Snapshot) -> Snapshot:
        """The engine's snapshot."""
        del core
        return prepared

    def combine(self, answers: Sequence[Snapshot]) -> list[Snapshot]:
        """The snapshots of all engines."""
        return list(answers)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CopyPages(PerEngineCommand):
    """Copy the first of these KV pages to the host: as many as take little time."""

    is_part_of_long_job: ClassVar[bool] = True

    stamps: Sequence[PageStamp]
    future: Future[CopiedPages]

    def run(self, core: EngineCore) -> CopiedPages:
        """Copies a chunk of the pages; all of them if they sleep on the host.

        Raises:
            OffloadError: when that fails.
        """
        count, kv_memory = len(self.stamps), core.runner.kv_memory
        if kv_memory.is_allocated:
            count = min(count, kv_memory.pages_per_copy)
        pages = [stamp.page for stamp in self.stamps[:count] if core.pool.is_unchanged(stamp)]
        contents = core.sleep_manager.copy_pages(pages) if pages else None
        return CopiedPages(count, [] if contents is None else pages, contents)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Restore(GroupCommand):
    """Take in the requests of a checkpoint; all or none.

    Attributes:
        restoration: The requests and pages of all engines.
        num_engines: Number of engines.
        future: Gets None.
    """

    restoration: Restoration
    num_engines: int
    future: Future[None]

    def hand_out(self, group: Recipients) -> None:
        """Gives each request an engine."""
        group.route(self.restoration.unfinished)
        GroupCommand.hand_out(self, group)

    def prepare(self, core: EngineCore) -> tuple[Restoration, bool]:
        """The engine's part, and whether it serves the checkpoint's weights.

        Raises:
            EngineStateError: when requests are refused.
        """
        part = self.restoration.part(core.index, self.num_engines)
        core.check_takes_requests()
        digest = core.serving.digest.digest()
        return part, digest is not None and digest == part.weights_digest

    def together(
        self, cores: Sequence[EngineCore], prepared: Sequence[tuple[Restoration, bool]]
    ) -> Sequence[tuple[Restoration, bool]]:
        """Adds the calls of all engines' requests."""
        _register(cores[0].groups, self.restoration)
        return prepared

    def commit(self, core: EngineCore, prepared: tuple[Restoration, bool]) -> None:
        """Queues all requests behind those that are there."""
        restoration, is_same = prepared
        if not is_same:
            logger.warning(
                "the checkpoint's weights (version %d) are not known to be the engine's; its "
                "requests are prefilled again",
                restoration.weight_version,
            )
        was_idle = not core.scheduler.requests()
        core.serving.raise_version(restoration.weight_version + (not is_same))
        if is_same and restoration.prefix_cache is not None:
            _load_prefixes(core, restoration.prefix_cache)
        if was_idle:
            core.scheduler.policy.new_token_ratio = restoration.new_token_ratio
        for each in restoration.requests:
            if not is_same and not each.request.output_ids:  # scored when it starts
                each.request.prompt_logprobs = None
            _take_in(core, each)

    def rollback(
        self,
        core: EngineCore,
        prepared: tuple[Restoration, bool] | None,
        error: BaseException,
    ) -> None:
        """Uncounts the requests from the engine's load."""
        del prepared, error
        for request in self.restoration.unfinished:
            if request.engine == core.index:
                core.groups.on_finished(request)


def _mark_requests(core: EngineCore) -> list[RequestMark]:
    unfinished = core.scheduler.requests()
    return [
        *(_mark(request, None) for request in unfinished),
        *(_mark(request, error) for request, error in core.groups.finished(core.index)),
    ]


def _mark(request: Request, error: str | None) -> RequestMark:
    return RequestMark(
        request,
        num_tokens=len(request.output_ids),
        status=request.status,
        prompt_logprobs=request.prompt_logprobs,
        finish=request.finish,
        error=error,
    )


def _take_prefix(core: EngineCore) -> PrefixSnapshot | None:
    if not core.pool.is_sharing:
        logger.warning("include_kv: with disable_radix_cache=True there are no pages to save")
    if core.pool.windows is not None:
        # Of many cached pages there are no keys of sliding layers, which a prefix ends with.
        logger.warning("include_kv: pages of sliding windows are not saved; they are computed anew")
        return None
    if core.pool.states is not None:
        logger.warning("include_kv: recurrent states are not saved; prefixes are computed anew")
        return None
    if core.runner.routed_reader is not None:
        logger.warning(
            "include_kv: with enable_return_routed_experts=True pages are not saved; they are "
            "computed anew"
        )
        return None
    nodes = core.pool.cached_prefixes(core.scheduler.running)
    stamps = [core.pool.stamp(page) for _, _, page in nodes]
    kv_memory = core.runner.kv_memory
    return PrefixSnapshot(nodes, stamps, kv_memory.geometry, kv_memory.layouts)


def _register(groups: RequestGroups, restoration: Restoration) -> None:
    """Adds the calls of all engines' requests.

    Raises:
        CheckpointError: when an id is in use; nothing was added.
    """
    calls: dict[int, list[Request]] = {}
    errors: dict[str, str] = {}
    for each in restoration.requests:
        calls.setdefault(each.call, []).append(each.request)
        if each.error is not None:
            errors[each.request.rid] = each.error
    taken = groups.add(list(calls.values()), errors)
    if taken:
        raise CheckpointError(
            f"the checkpoint has ids of requests that are not all answered: {taken[:10]}; "
            "nothing was restored"
        )


def _load_prefixes(core: EngineCore, prefix: PrefixCheckpoint) -> None:
    """Fills the prefix cache as far as there is room; other requests are prefilled again."""
    kv_memory = core.runner.kv_memory
    if core.pool.windows is not None:
        logger.warning("the checkpoint's KV pages are left out: this engine has sliding windows")
        return
    if core.pool.states is not None:
        logger.warning("the checkpoint's KV pages are left out: this engine has recurrent states")
        return
    if core.runner.routed_reader is not None:
        logger.warning(
            "the checkpoint's KV pages are left out: it does not say which experts their tokens "
            "went through, and enable_return_routed_experts is set"
        )
        return
    saved = {name: getattr(prefix, name) for name in kv_memory.geometry}
    if "kv_cache" in core.sleep_manager.asleep or saved != kv_memory.geometry:
        logger.warning(
            "the checkpoint's KV pages (%s) are left out: this engine has %s",
            saved,
            "none, since it sleeps" if core.sleep_manager.asleep else kv_memory.geometry,
        )
        return
    try:
        pages = core.pool.adopt_prefixes(prefix.nodes)
        if pages:
            kv_memory.load_rows(list(pages.values()), list(pages), prefix.pages)
    except Exception:
        logger.exception("the checkpoint's KV pages could not be loaded; they are computed again")
        core.lose_kv()
        return
    if len(pages) < len(prefix.nodes):
        logger.warning("%d of %d KV pages were loaded", len(pages), len(prefix.nodes))


def _take_in(core: EngineCore, each: RestoredRequest) -> None:
    request = each.request
    if not each.is_unfinished:
        error = None if each.error is None else EngineStepError(each.error)
        core.outputs.answer_finished(request, each.answer, error)
        return
    try:
        core.check_can_serve(request)
    except (CompileForbiddenError, InvalidRequestError) as error:
        core.groups.withdraw(request)
        # A new one: the raised one holds this frame, and with it all pages.
        reject(each.answer.future, type(error)(str(error)))
        return
    request.num_retractions += each.had_pages
    core.take_in(request, each.answer)
