"""Checkpoints: the engine thread takes a snapshot, and a thread of its own writes it."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from sgljax_engine.checkpoint.manager import CheckpointManager, SaveReport
from sgljax_engine.checkpoint.structures import EngineCheckpoint, SchedulerCheckpoint
from sgljax_engine.core import commands as cmd
from sgljax_engine.core.command import Ask
from sgljax_engine.core.commands.checkpoint import Restoration, RestoredRequest, Snapshot
from sgljax_engine.errors import CheckpointError, InvalidRequestError
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.processing.futures import Answer, reject
from sgljax_engine.processing.input_processor import RequestFactory
from sgljax_engine.types import RequestStatus

logger = logging.getLogger(__name__)

_MAX_VERSION = 2**30
"""Limit of a checkpoint's version: versions are C ints, so as many updates can follow."""

_FREE_FIELDS = ("eos_token_ids", "context_length")
"""Fields of a model's config that may differ where a checkpoint is restored."""


class SaveJob(NamedTuple):
    path: Path
    future: Future[SaveReport]


class CheckpointWriter:
    def __init__(self, model: ModelConfig, ask: Ask) -> None:
        self._model = model
        self._ask = ask

    def save(self, job: SaveJob) -> SaveReport:
        return CheckpointManager(job.path).save(self._checkpoint(self._ask(cmd.TakeSnapshot)))

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
                "model": _plain(self._model),
                "weight_version": first.weight_version,
                "weights_digest": digest,
            },
            timestamp=time.time(),
        )


def _check_metadata(metadata: Mapping[str, Any], model: ModelConfig, path: Path) -> None:
    """Raises CheckpointError unless a checkpoint is one of the same model."""
    saved = metadata.get("model")
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path}: the metadata names no model")
    version = metadata.get("weight_version")
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < _MAX_VERSION:
        raise CheckpointError(
            f"{path}: weight_version must be in [0, {_MAX_VERSION}), got {version!r}"
        )
    own = _plain(model)
    names = sorted((own.keys() | saved.keys()) - set(_FREE_FIELDS))
    differing = [
        f"{name} {saved.get(name)!r}, not {own.get(name)!r}"
        for name in names
        if saved.get(name) != own.get(name)
    ]
    if differing:
        raise CheckpointError(f"{path} is of another model: {'; '.join(differing)}")


def _plain(model: ModelConfig) -> dict[str, Any]:
    """A model's config as JSON would return it."""
    return json.loads(json.dumps(dataclasses.asdict(model)))


def load_checkpoint(path: Path, model: ModelConfig) -> EngineCheckpoint:
    """Reads and checks the checkpoint in a folder. Any thread."""
    checkpoint = CheckpointManager(path).load()
    _check_metadata(checkpoint.metadata, model, path)
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
