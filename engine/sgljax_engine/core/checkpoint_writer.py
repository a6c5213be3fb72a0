"""Checkpoints: the engine thread takes a snapshot, and a thread of its own writes it."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from sgljax_engine.checkpoint.manager import CheckpointManager, SaveReport
from sgljax_engine.checkpoint.prefix import PrefixCheckpoint, merge_prefixes
from sgljax_engine.checkpoint.structures import EngineCheckpoint, SchedulerCheckpoint
from sgljax_engine.core import commands as cmd
from sgljax_engine.core.command import Ask
from sgljax_engine.core.snapshot import (
    PrefixSnapshot,
    Restoration,
    RestoredRequest,
    Snapshot,
)
from sgljax_engine.errors import CheckpointError, InvalidRequestError
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.processing.futures import Answer, reject
from sgljax_engine.processing.input_processor import RequestFactory
from sgljax_engine.runner.saved_pages import SavedPages
from sgljax_engine.types import RequestStatus

logger = logging.getLogger(__name__)

_MAX_VERSION = 2**30
"""Versions of tokens are kept as C ints: from here on there is room for as many updates again."""

_FREE_FIELDS = ("eos_token_ids", "context_length")
"""Fields of a model's config that may differ where a checkpoint is restored."""


class SaveJob(NamedTuple):
    """One `save_checkpoint` call."""

    path: Path
    include_kv: bool
    compression: Literal["zstd"] | None
    future: Future[SaveReport]


class CheckpointWriter:
    """Writes checkpoints, on the thread of a `Worker`."""

    def __init__(self, model: ModelConfig, ask: Ask) -> None:
        """Writes nothing yet.

        Args:
            model: The engines', which a checkpoint names.
            ask: Asks the engines whose requests are written.
        """
        self._model = model
        self._ask = ask
        self._manager: tuple[tuple[Path, str | None], CheckpointManager] | None = None

    def save(self, job: SaveJob) -> SaveReport:
        """Has a snapshot taken, and writes what changed since the last one in the same folder."""
        snapshots = self._ask(functools.partial(cmd.TakeSnapshot, job.include_kv))
        checkpoint = self._checkpoint(snapshots)
        del snapshots
        key = (job.path.absolute(), job.compression)
        if self._manager is None or self._manager[0] != key:
            self._manager = (key, CheckpointManager(key[0], compression=job.compression))
        return self._manager[1].save(checkpoint)

    def _checkpoint(self, snapshots: Sequence[Snapshot]) -> EngineCheckpoint:
        first = snapshots[0]
        digest = first.weights.digest()  # before all else: until then it holds the weights
        copied = [
            self._copy_prefix(index, snapshot.prefix)
            for index, snapshot in enumerate(snapshots)
            if snapshot.prefix is not None
        ]
        prefix = merge_prefixes([each for each in copied if each is not None])
        now_s = time.perf_counter()
        marks = [mark for snapshot in snapshots for mark in snapshot.marks]
        requests = [mark.checkpoint(now_s) for mark in marks]
        rids = {
            status: [request.rid for request in requests if request.status is status]
            for status in RequestStatus
        }
        return EngineCheckpoint(
            scheduler_state=SchedulerCheckpoint(
                requests={request.rid: request for request in requests},
                running_queue=rids[RequestStatus.RUNNING],
                waiting_queue=rids[RequestStatus.WAITING],
                finished_req_ids=rids[RequestStatus.FINISHED],
                new_token_ratio=first.new_token_ratio,
                prefix_cache=prefix,
            ),
            metadata={
                "model": _plain(self._model),
                "weight_version": first.weight_version,
                "weights_digest": digest,
            },
            timestamp=time.time(),
        )

    def _copy_prefix(self, index: int, prefix: PrefixSnapshot) -> PrefixCheckpoint | None:
        """Has an engine's pages copied a few at a time, between its dispatches."""
        copied: set[int] = set()
        chunks: list[tuple[np.ndarray, Any]] = []
        done = 0
        while done < len(prefix.stamps):
            make = functools.partial(cmd.CopyPages, prefix.stamps[done:])
            part = self._ask(make, index)
            done += part.num_done
            copied.update(part.pages)
            chunks += part.contents.chunks if part.contents is not None else ()
        if len(copied) < len(prefix.stamps):
            logger.info(
                "%d of %d KV pages had other contents before they were copied, and are left out",
                len(prefix.stamps) - len(copied),
                len(prefix.stamps),
            )
        return prefix.checkpoint(copied, SavedPages(chunks))


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
    """A model's config as it comes back from JSON."""
    return json.loads(json.dumps(dataclasses.asdict(model)))


def load_checkpoint(path: Path, model: ModelConfig) -> EngineCheckpoint:
    """The checkpoint in a folder, all of it checked. Any thread.

    Raises:
        CheckpointError: there is none, it is damaged, of a newer version or of another model.
    """
    checkpoint = CheckpointManager(path).load()
    _check_metadata(checkpoint.metadata, model, path)
    return checkpoint


def make_restoration(
    checkpoint: EngineCheckpoint, requests: RequestFactory, answers: Mapping[str, Answer]
) -> Restoration:
    """What engines have to do to go on from a checkpoint. Any thread.

    A request that these engines would refuse is answered with the refusal, and left out.

    Args:
        checkpoint: From `load_checkpoint`.
        requests: Makes the requests.
        answers: One for each request, by its id.
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
        prefix_cache=state.prefix_cache,
    )
