"""Requests, responses and states, which workers and their callers exchange."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(kw_only=True)
class ErrorInfo:
    """Why a request failed."""

    error_type: str
    message: str
    retryable: bool = False
    traceback: str = ""


@dataclasses.dataclass(kw_only=True)
class Request:
    """What all requests have."""

    request_id: str = ""
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class Response:
    """What all responses have."""

    request_id: str = ""
    error: ErrorInfo | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class WeightSyncRequest(Request):
    """A round of the weight sync; its key is in `extra_config`."""

    controller_id: str = ""
    policy_version: int = 0
    source_metadata: Any = None
    extra_config: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class RolloutRequest(Request):
    """An episode to play."""

    prompt: Any = None
    traj_id: str = ""


class WorkerState(enum.StrEnum):
    """States of a worker."""

    PENDING = "PENDING"
    READY = "READY"
    SYNCING = "SYNCING"
    STOPPED = "STOPPED"


@dataclasses.dataclass(kw_only=True)
class WorkerInfo:
    """What a registry knows of a worker."""

    worker_id: str
    roles: frozenset[str] = frozenset()
    resources: Mapping[str, Any] = dataclasses.field(default_factory=dict)
