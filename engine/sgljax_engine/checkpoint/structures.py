"""What a checkpoint of an engine consists of."""

from __future__ import annotations

import dataclasses
from typing import Any

from sgljax_engine.checkpoint.fields import Fields, check_number, plain_json
from sgljax_engine.checkpoint.prefix import LayerPages, PrefixCheckpoint
from sgljax_engine.checkpoint.request import RequestCheckpoint
from sgljax_engine.errors import CheckpointError
from sgljax_engine.types import RequestStatus

__all__ = [
    "CHECKPOINT_VERSION",
    "EngineCheckpoint",
    "LayerPages",
    "PrefixCheckpoint",
    "RequestCheckpoint",
    "SchedulerCheckpoint",
]

CHECKPOINT_VERSION = 1
"""Of the structures and of the files. Older versions are read, newer ones are refused."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCheckpoint:
    """All requests, and where each of them is.

    Attributes:
        requests: By request id.
        waiting_queue: Ids of the requests with status WAITING, in order.
        running_queue: Those RUNNING, in order.
        finished_req_ids: Those FINISHED.
        new_token_ratio: What the admission policy has learned.
        prefix_cache: Cached keys and values; None to compute them again.
    """

    requests: dict[str, RequestCheckpoint]
    waiting_queue: list[str]
    running_queue: list[str]
    finished_req_ids: list[str]
    new_token_ratio: float
    prefix_cache: PrefixCheckpoint | None = None

    def __post_init__(self) -> None:
        """Raises CheckpointError unless each request is in just the one list of its status."""
        for rid, request in self.requests.items():
            if request.rid != rid:
                raise CheckpointError(f"requests[{rid!r}] is the request {request.rid!r}")
        places: dict[str, str] = {}
        for name, rids, status in (
            ("waiting_queue", self.waiting_queue, RequestStatus.WAITING),
            ("running_queue", self.running_queue, RequestStatus.RUNNING),
            ("finished_req_ids", self.finished_req_ids, RequestStatus.FINISHED),
        ):
            for rid in rids:
                if rid in places:
                    raise CheckpointError(f"{name}: {rid!r} is in {places[rid]} already")
                if rid not in self.requests:
                    raise CheckpointError(f"{name}: there is no request {rid!r}")
                if self.requests[rid].status is not status:
                    raise CheckpointError(f"{name}: {rid!r} is {self.requests[rid].status.value}")
                places[rid] = name
        lost = [rid for rid in self.requests if rid not in places]
        if lost:
            raise CheckpointError(f"requests in no queue: {lost[:10]}")
        check_number("scheduler_state", "new_token_ratio", self.new_token_ratio)

    def to_dict(self) -> dict[str, Any]:
        """JSON but for the arrays of requests and prefix cache; `requests` becomes a list."""
        return {
            "requests": [request.to_dict() for request in self.requests.values()],
            "waiting_queue": list(self.waiting_queue),
            "running_queue": list(self.running_queue),
            "finished_req_ids": list(self.finished_req_ids),
            "new_token_ratio": self.new_token_ratio,
            "prefix_cache": None if self.prefix_cache is None else self.prefix_cache.to_dict(),
        }

    @classmethod
    def from_dict(cls, given: object) -> SchedulerCheckpoint:
        """The inverse of `to_dict`. Raises CheckpointError."""
        fields = Fields(given, "scheduler_state", [f.name for f in dataclasses.fields(cls)])
        requests: dict[str, RequestCheckpoint] = {}
        for each in fields.list("requests"):
            request = RequestCheckpoint.from_dict(each)
            if request.rid in requests:
                raise CheckpointError(f"scheduler_state.requests: {request.rid!r} is there twice")
            requests[request.rid] = request
        prefix = fields.value("prefix_cache")
        return cls(
            requests=requests,
            waiting_queue=fields.texts("waiting_queue"),
            running_queue=fields.texts("running_queue"),
            finished_req_ids=fields.texts("finished_req_ids"),
            new_token_ratio=fields.number("new_token_ratio"),
            prefix_cache=None if prefix is None else PrefixCheckpoint.from_dict(prefix),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheckpoint:
    """An engine's state at one moment.

    Attributes:
        scheduler_state: Its requests, queues and prefix cache.
        metadata: What the engine wants to find again, plain JSON; tuples become lists.
        timestamp: Seconds since 1970.
        version: `CHECKPOINT_VERSION`.
    """

    scheduler_state: SchedulerCheckpoint
    metadata: dict[str, Any]
    timestamp: float
    version: int = CHECKPOINT_VERSION

    def __post_init__(self) -> None:
        """Raises CheckpointError for another version and for metadata that is not JSON."""
        check_version(self.version, "the checkpoint")
        check_number("checkpoint", "timestamp", self.timestamp)
        if not isinstance(self.metadata, dict):
            raise CheckpointError(f"metadata must be a dict, got {self.metadata!r}")
        object.__setattr__(self, "metadata", plain_json(self.metadata, "metadata"))

    def to_dict(self) -> dict[str, Any]:
        """JSON but for arrays; see `SchedulerCheckpoint.to_dict`."""
        return {
            "version": self.version,
            "timestamp": self.timestamp,
            "metadata": self.metadata,
            "scheduler_state": self.scheduler_state.to_dict(),
        }

    @classmethod
    def from_dict(cls, given: object) -> EngineCheckpoint:
        """The inverse of `to_dict`. Raises CheckpointError."""
        if isinstance(given, dict) and "version" in given:  # a newer one may have other fields
            check_version(given["version"], "the checkpoint")
        fields = Fields(given, "checkpoint", [f.name for f in dataclasses.fields(cls)])
        return cls(
            scheduler_state=SchedulerCheckpoint.from_dict(fields.value("scheduler_state")),
            metadata=fields.value("metadata"),
            timestamp=fields.number("timestamp"),
            version=fields.count("version"),
        )


def check_version(version: object, where: str) -> None:
    """Raises CheckpointError unless a version can be read; names both versions."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(f"{where} has version {version!r}, which never was")
    if version > CHECKPOINT_VERSION:
        raise CheckpointError(
            f"{where} has version {version}, newer than {CHECKPOINT_VERSION}, the newest that this "
            "engine reads"
        )
