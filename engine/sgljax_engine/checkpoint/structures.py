"""The parts of an engine's checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from sgljax_engine.checkpoint.codecs import (
    ANY,
    COUNT,
    NUMBER,
    TEXTS,
    Plain,
    check_numbers,
    from_dict,
    notes,
    to_dict,
)
from sgljax_engine.checkpoint.fields import Fields, plain_json
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
"""Version of the structures and files. Older ones are read, newer ones are refused."""


def _read_requests(fields: Fields, name: str) -> dict[str, RequestCheckpoint]:
    requests: dict[str, RequestCheckpoint] = {}
    for each in fields.list(name):
        request = RequestCheckpoint.from_dict(each)
        if request.rid in requests:
            raise CheckpointError(f"{fields.where}.{name}: {request.rid!r} is there twice")
        requests[request.rid] = request
    return requests


def _read_prefix(fields: Fields, name: str) -> PrefixCheckpoint | None:
    given = fields.value(name)
    return None if given is None else PrefixCheckpoint.from_dict(given)


_REQUESTS = Plain(
    _read_requests, lambda requests, where: [each.to_dict() for each in requests.values()]
)
_PREFIX = Plain(_read_prefix, lambda prefix, where: None if prefix is None else prefix.to_dict())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCheckpoint:
    """All requests, and the queue of each.

    Attributes:
        requests: Requests by id.
        waiting_queue: Ids of the requests with status WAITING, in order.
        running_queue: Ids of those RUNNING, in order.
        finished_req_ids: Ids of those FINISHED.
        new_token_ratio: Ratio of the admission policy.
        prefix_cache: Cached keys and values; None to compute them again.
    """

    requests: Annotated[dict[str, RequestCheckpoint], _REQUESTS]
    waiting_queue: Annotated[list[str], TEXTS, RequestStatus.WAITING]
    running_queue: Annotated[list[str], TEXTS, RequestStatus.RUNNING]
    finished_req_ids: Annotated[list[str], TEXTS, RequestStatus.FINISHED]
    new_token_ratio: Annotated[float, NUMBER]
    prefix_cache: Annotated[PrefixCheckpoint | None, _PREFIX] = None

    def __post_init__(self) -> None:
        """Raises CheckpointError unless each request is in the list of its status alone."""
        for rid, request in self.requests.items():
            if request.rid != rid:
                raise CheckpointError(f"requests[{rid!r}] is the request {request.rid!r}")
        places: dict[str, str] = {}
        for name, status in notes(SchedulerCheckpoint, RequestStatus).items():
            for rid in getattr(self, name):
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
        check_numbers(self, "scheduler_state")

    def to_dict(self) -> dict[str, Any]:
        """A dict of JSON and the arrays of requests and prefix cache; `requests` becomes a list."""
        return to_dict(self, "scheduler_state")

    @classmethod
    def from_dict(cls, given: object) -> SchedulerCheckpoint:
        """The inverse of `to_dict`. Raises CheckpointError."""
        return from_dict(cls, given, "scheduler_state")


_SCHEDULER = Plain(
    lambda fields, name: SchedulerCheckpoint.from_dict(fields.value(name)),
    lambda state, where: state.to_dict(),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheckpoint:
    """An engine's state at one moment.

    Attributes:
        scheduler_state: Its requests, queues and prefix cache.
        metadata: Facts about the engine, in plain JSON; tuples become lists.
        timestamp: Seconds since 1970.
        version: `CHECKPOINT_VERSION`.
    """

    scheduler_state: Annotated[SchedulerCheckpoint, _SCHEDULER]
    metadata: Annotated[dict[str, Any], ANY]
    timestamp: Annotated[float, NUMBER]
    version: Annotated[int, COUNT] = CHECKPOINT_VERSION

    def __post_init__(self) -> None:
        """Raises CheckpointError for another version and for metadata that is not JSON."""
        check_version(self.version, "the checkpoint")
        check_numbers(self, "checkpoint")
        if not isinstance(self.metadata, dict):
            raise CheckpointError(f"metadata must be a dict, got {self.metadata!r}")
        object.__setattr__(self, "metadata", plain_json(self.metadata, "metadata"))

    def to_dict(self) -> dict[str, Any]:
        """A dict of JSON and arrays; see `SchedulerCheckpoint.to_dict`."""
        return to_dict(self, "checkpoint")

    @classmethod
    def from_dict(cls, given: object) -> EngineCheckpoint:
        """The inverse of `to_dict`. Raises CheckpointError."""
        if isinstance(given, dict) and "version" in given:  # a newer one may have other fields
            check_version(given["version"], "the checkpoint")
        return from_dict(cls, given, "checkpoint")


def check_version(version: object, where: str) -> None:
    """Raises CheckpointError unless a version can be read; names both versions."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(f"{where} has version {version!r}, which never was")
    if version > CHECKPOINT_VERSION:
        raise CheckpointError(
            f"{where} has version {version}, newer than {CHECKPOINT_VERSION}, the newest that this "
            "engine reads"
        )
