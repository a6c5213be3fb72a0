from __future__ import annotations

import dataclasses
from typing import Any

from sgljax_engine.checkpoint.request import RequestCheckpoint
from sgljax_engine.checkpoint.scalars import check_scalars
from sgljax_engine.errors import CheckpointError
from sgljax_engine.types import RequestStatus

CHECKPOINT_VERSION = 2
"""Version of the structures and files; others are refused."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCheckpoint:
    """All requests, in the order in which they continue.

    Attributes:
        requests: Requests by id.
        new_token_ratio: Ratio of the admission policy.
    """

    requests: dict[str, RequestCheckpoint]
    new_token_ratio: float

    def __post_init__(self) -> None:
        check_scalars(self, "scheduler_state")

    @property
    def waiting_queue(self) -> list[str]:
        """Ids of the requests that waited, in order."""
        return self._rids(RequestStatus.WAITING)

    @property
    def running_queue(self) -> list[str]:
        """Ids of the requests that ran, in order."""
        return self._rids(RequestStatus.RUNNING)

    @property
    def finished_req_ids(self) -> list[str]:
        """Ids of the requests that were finished."""
        return self._rids(RequestStatus.FINISHED)

    def _rids(self, status: RequestStatus) -> list[str]:
        return [rid for rid, request in self.requests.items() if request.status is status]

    def to_dict(self) -> dict[str, Any]:
        """JSON and the arrays of requests; `requests` becomes a list."""
        return {
            "new_token_ratio": self.new_token_ratio,
            "requests": [request.to_dict() for request in self.requests.values()],
        }

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> SchedulerCheckpoint:
        """The inverse of `to_dict`, for `EngineCheckpoint.from_dict`."""
        requests: dict[str, RequestCheckpoint] = {}
        for each in given["requests"]:
            request = RequestCheckpoint.from_dict(each)
            if request.rid in requests:
                raise CheckpointError(f"request {request.rid!r} is there twice")
            requests[request.rid] = request
        return cls(requests=requests, new_token_ratio=given["new_token_ratio"])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheckpoint:
    """An engine's state at one moment.

    Attributes:
        scheduler_state: Its requests.
        metadata: Facts about the engine, in plain JSON.
        timestamp: Seconds since 1970.
        version: `CHECKPOINT_VERSION`.
    """

    scheduler_state: SchedulerCheckpoint
    metadata: dict[str, Any]
    timestamp: float
    version: int = CHECKPOINT_VERSION

    def __post_init__(self) -> None:
        check_version(self.version, "the checkpoint")
        check_scalars(self, "checkpoint")
        if not isinstance(self.metadata, dict):
            raise CheckpointError(f"checkpoint: metadata must be a dict, got {self.metadata!r}")

    def to_dict(self) -> dict[str, Any]:
        """A dict of JSON and arrays; see `SchedulerCheckpoint.to_dict`."""
        return {
            "version": self.version,
            "timestamp": self.timestamp,
            "metadata": self.metadata,
            "scheduler_state": self.scheduler_state.to_dict(),
        }

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> EngineCheckpoint:
        """The inverse of `to_dict`. Raises CheckpointError."""
        try:
            check_version(given["version"], "the checkpoint")  # before the fields, which may differ
            state = SchedulerCheckpoint.from_dict(given["scheduler_state"])
            return cls(**{**given, "scheduler_state": state})
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"this is no checkpoint of an engine: {error!r}") from error


def check_version(version: object, where: str) -> None:
    if version != CHECKPOINT_VERSION or type(version) is not int:
        raise CheckpointError(
            f"{where} has version {version!r}; this engine reads version {CHECKPOINT_VERSION}"
        )
