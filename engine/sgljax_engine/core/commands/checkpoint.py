"""Checkpoints: commands that take a snapshot of the requests and restore them, and the writer.

A snapshot only names requests and counts their tokens. Lists of a request only grow, so the
writer's thread may read them while the engine goes on.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from sgljax_engine.checkpoint.manager import CheckpointManager, SaveReport
from sgljax_engine.checkpoint.metadata import check_metadata, plain_model
from sgljax_engine.checkpoint.request import RequestCheckpoint
from sgljax_engine.checkpoint.structures import EngineCheckpoint, SchedulerCheckpoint
from sgljax_engine.core.calls import RequestGroups
from sgljax_engine.core.command import Ask, Recipients
from sgljax_engine.core.engine_core import EngineCore
from sgljax_engine.core.transaction import GroupCommand
from sgljax_engine.errors import (
    CheckpointError,
    CompileForbiddenError,
    EngineStepError,
    InvalidRequestError,
)
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.processing.futures import Answer, reject
from sgljax_engine.processing.input_processor import RequestFactory
from sgljax_engine.types import FinishReason, PromptLogprobs, Request, RequestStatus
from sgljax_engine.weights.checksum import WeightsDigest

logger = logging.getLogger(__name__)


class RequestMark(NamedTuple):
    """A request at one moment: copies of the values that may change other than by growing."""

    request: Request
    num_tokens: int
    status: RequestStatus
    prompt_logprobs: PromptLogprobs | None
    finish: FinishReason | None
    error: str | None

    def checkpoint(self, now_s: float) -> RequestCheckpoint:
        """The request for a checkpoint. Any thread."""
        return RequestCheckpoint.of(now_s=now_s, **self._asdict())


class Snapshot(NamedTuple):
    """An engine at one moment.

    `marks` are running requests, then waiting ones, both in order, then finished ones. `weights` is
    their digest, which any thread may make.
    """

    marks: list[RequestMark]
    new_token_ratio: float
    weight_version: int
    weights: WeightsDigest


class RestoredRequest(NamedTuple):
    """A waiting or finished request on its way back into an engine.

    `call` is its call in the checkpoint; `had_pages` says whether it was running.
    """

    request: Request
    answer: Answer
    call: int
    had_pages: bool
    error: str | None

    @property
    def is_unfinished(self) -> bool:
        return self.request.status is not RequestStatus.FINISHED


class Restoration(NamedTuple):
    """A checkpoint's contents to be restored, in the order in which requests continue."""

    requests: list[RestoredRequest]
    new_token_ratio: float
    weight_version: int
    weights_digest: str | None

    @property
    def unfinished(self) -> list[Request]:
        return [each.request for each in self.requests if each.is_unfinished]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TakeSnapshot(GroupCommand):
    """Take a snapshot of each engine for a checkpoint."""

    future: Future[list[Snapshot]]

    def prepare(self, core: EngineCore) -> Snapshot:
        weights = core.serving.digest
        if not core.runner.is_on_one_device:
            # No other thread may start programs there; see `weights_worker.WeightsWorker`.
            weights.digest()
        return Snapshot(
            marks=_mark_requests(core),
            new_token_ratio=core.scheduler.policy.new_token_ratio,
            weight_version=core.serving.version,
            weights=weights,
        )

    def commit(self, core: EngineCore, prepared: Snapshot) -> Snapshot:
        del core
        return prepared

    def combine(self, answers: Sequence[Snapshot]) -> list[Snapshot]:
        return list(answers)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Restore(GroupCommand):
    """Take in the requests of a checkpoint; all or none."""

    restoration: Restoration
    future: Future[None]

    def hand_out(self, group: Recipients) -> None:
        group.route(self.restoration.unfinished)
        GroupCommand.hand_out(self, group)

    def prepare(self, core: EngineCore) -> bool:
        """Whether the engine serves the checkpoint's weights."""
        core.check_takes_requests()
        digest = core.serving.digest.digest()
        return digest is not None and digest == self.restoration.weights_digest

    def together(self, cores: Sequence[EngineCore], prepared: Sequence[bool]) -> Sequence[bool]:
        _register(cores[0].groups, self.restoration)
        return prepared

    def commit(self, core: EngineCore, prepared: bool) -> None:
        """Queues the engine's requests behind those that are there."""
        restoration, is_same = self.restoration, prepared
        if not is_same:
            logger.warning(
                "the checkpoint's weights (version %d) are not known to be the engine's; its "
                "requests continue under a higher version",
                restoration.weight_version,
            )
        was_idle = not core.scheduler.requests()
        core.serving.raise_version(restoration.weight_version + (not is_same))
        if was_idle:
            core.scheduler.policy.new_token_ratio = restoration.new_token_ratio
        for each in restoration.requests:
            if each.request.engine == core.index:
                if not is_same and not each.request.output_ids:  # scored when it starts
                    each.request.prompt_logprobs = None
                _take_in(core, each)

    def rollback(self, core: EngineCore, prepared: bool | None, error: BaseException) -> None:
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


def _register(groups: RequestGroups, restoration: Restoration) -> None:
    """Adds the calls of all engines' requests; raises CheckpointError when an id is in use."""
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


class SaveJob(NamedTuple):
    path: Path
    future: Future[SaveReport]


class CheckpointWriter:
    def __init__(self, model: ModelConfig, ask: Ask) -> None:
        self._model = model
        self._ask = ask

    def save(self, job: SaveJob) -> SaveReport:
        return CheckpointManager(job.path).save(self._checkpoint(self._ask(TakeSnapshot)))

    def _checkpoint(self, snapshots: Sequence[Snapshot]) -> EngineCheckpoint:
        first = snapshots[0]
        digest = first.weights.digest()  # before all else: until then it holds the weights
        now_s = time.perf_counter()
        marks = [mark for snapshot in snapshots for mark in snapshot.marks]
        return EngineCheckpoint(
            scheduler_state=SchedulerCheckpoint(
                requests={mark.request.rid: mark.checkpoint(now_s) for mark in marks},
                new_token_ratio=first.new_token_ratio,
            ),
            metadata={
                "model": plain_model(self._model),
                "weight_version": first.weight_version,
                "weights_digest": digest,
            },
            timestamp=time.time(),
        )


def load_checkpoint(path: Path, model: ModelConfig) -> EngineCheckpoint:
    """Reads and checks the checkpoint in a folder. Any thread."""
    checkpoint = CheckpointManager(path).load()
    check_metadata(checkpoint.metadata, model, path)
    return checkpoint


def make_restoration(
    checkpoint: EngineCheckpoint, requests: RequestFactory, answers: Mapping[str, Answer]
) -> Restoration:
    """Makes the requests of a checkpoint for the engines to continue. Any thread.

    A request that the engines would refuse is left out; its answer is the refusal.
    """
    state, now_s = checkpoint.scheduler_state, time.perf_counter()
    restored: list[RestoredRequest] = []
    for rid in (*state.running_queue, *state.waiting_queue, *state.finished_req_ids):
        saved = state.requests[rid]
        try:
            request = requests.resume(saved, now_s)
        except InvalidRequestError as error:
            # The raised one holds this frame, and with it the checkpoint.
            refusal = InvalidRequestError(str(error))
            logger.warning("request %r of the checkpoint is not restored: %s", rid, refusal)
            reject(answers[rid].future, refusal)
            continue
        had_pages = saved.status is RequestStatus.RUNNING
        restored.append(RestoredRequest(request, answers[rid], saved.call, had_pages, saved.error))
    return Restoration(
        requests=restored,
        new_token_ratio=state.new_token_ratio,
        weight_version=checkpoint.metadata["weight_version"],
        weights_digest=checkpoint.metadata.get("weights_digest"),
    )
