"""Takes an engine's state out for a checkpoint, and in from one. Engine thread only."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sgljax_engine.checkpoint.prefix import PrefixCheckpoint
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.snapshot import (
    CopiedPages,
    PrefixSnapshot,
    RequestMark,
    Restoration,
    RestoredRequest,
    Snapshot,
)
from sgljax_engine.errors import (
    CheckpointError,
    CompileForbiddenError,
    EngineStepError,
    InvalidRequestError,
)
from sgljax_engine.processing.futures import reject
from sgljax_engine.types import PageStamp, Request

logger = logging.getLogger(__name__)


def take_snapshot(core: EngineCore, *, include_kv: bool) -> Snapshot:
    """Notes what belongs into a checkpoint; `copy_pages` takes the contents of KV pages."""
    weights = core.serving.digest
    if not core.runner.is_on_one_device:
        # No other thread may start programs there; see `weight_updates.WeightUpdater`.
        weights.digest()
    return Snapshot(
        marks=_mark_requests(core),
        new_token_ratio=core.scheduler.policy.new_token_ratio,
        weight_version=core.serving.version,
        weights=weights,
        prefix=_take_prefix(core) if include_kv else None,
    )


def _mark_requests(core: EngineCore) -> list[RequestMark]:
    unfinished = core.scheduler.requests()
    return [
        *(_mark(request, None) for request in unfinished),
        *(_mark(request, error) for request, error in core.groups.finished()),
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
    nodes = core.pool.cached_prefixes(core.scheduler.running)
    stamps = [core.pool.stamp(page) for _, _, page in nodes]
    return PrefixSnapshot(nodes, stamps, core.runner.kv_memory.geometry)


def copy_pages(core: EngineCore, stamps: Sequence[PageStamp]) -> CopiedPages:
    """Copies the first pages of a snapshot, a chunk of them, or all that sleep on the host.

    Raises:
        OffloadError: when that fails.
    """
    count, kv_memory = len(stamps), core.runner.kv_memory
    if kv_memory.is_allocated:
        count = min(count, kv_memory.pages_per_copy)
    pages = [stamp.page for stamp in stamps[:count] if core.pool.is_unchanged(stamp)]
    contents = core.sleep_manager.copy_pages(pages) if pages else None
    return CopiedPages(count, [] if contents is None else pages, contents)


def restore(core: EngineCore, restoration: Restoration) -> None:
    """Takes all requests in, behind those that are there; or none.

    Raises:
        EngineStateError: when requests are refused.
        CheckpointError: when an id is in use; see `RequestGroups.taken_names`.
    """
    taken = core.groups.taken_names(each.request for each in restoration.requests)
    if taken:
        raise CheckpointError(
            f"the checkpoint has ids of requests that are not all answered: {taken[:10]}; "
            "nothing was restored"
        )
    core.check_takes_requests()
    digest = core.serving.digest.digest()
    is_same = digest is not None and digest == restoration.weights_digest
    if not is_same:
        logger.warning(
            "the checkpoint's weights (version %d) are not known to be the engine's; its requests "
            "are prefilled again",
            restoration.weight_version,
        )
    was_idle = not core.scheduler.requests()
    core.serving.raise_version(restoration.weight_version + (not is_same))
    if is_same and restoration.prefix_cache is not None:
        _load_prefixes(core, restoration.prefix_cache)
    for each in restoration.requests:
        if not is_same and not each.request.output_ids:  # scored when it starts
            each.request.prompt_logprobs = None
    if was_idle:
        core.scheduler.policy.new_token_ratio = restoration.new_token_ratio
    _take_in(core, restoration.requests)


def _load_prefixes(core: EngineCore, prefix: PrefixCheckpoint) -> None:
    """Fills the prefix cache as far as there is room. Without, requests are prefilled again."""
    kv_memory = core.runner.kv_memory
    if kv_memory.is_deterministic:
        logger.warning(
            "the checkpoint's KV pages are left out: it does not say in which order their engine "
            "added up, and enable_deterministic_sampling is set"
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


def _take_in(core: EngineCore, restored: list[RestoredRequest]) -> None:
    calls: dict[int, list[RestoredRequest]] = {}
    for each in restored:
        try:
            if each.is_unfinished:
                core.check_can_serve(each.request)
        except (CompileForbiddenError, InvalidRequestError) as error:
            # A new one: the raised one holds this frame, and with it all pages.
            reject(each.answer.future, type(error)(str(error)))
        else:
            calls.setdefault(each.call, []).append(each)
    for call in calls.values():
        errors = {each.request.rid: each.error for each in call if each.error is not None}
        core.groups.add([each.request for each in call], errors)
    accepted = {each.request.rid for call in calls.values() for each in call}
    for each in restored:  # not call by call: the order of the queues counts
        request = each.request
        if request.rid not in accepted:
            continue
        if each.is_unfinished:
            request.num_retractions += each.had_pages
            core.take_in(request, each.answer)
        else:
            error = None if each.error is None else EngineStepError(each.error)
            core.outputs.answer_finished(request, each.answer, error)
