"""A trainer's side of a fleet of servers, and what its servers know of it: a shed of the engine.

A *weight store* is a folder, or a bucket behind a URL of fsspec, that one trainer writes and any
number of servers read. `RemoteEngine` is what a trainer has in the place of an engine. It needs the
extra `fleet`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgljax_engine.fleet.config import FleetConfig, FleetError
    from sgljax_engine.fleet.reader import ReadVersion, VersionReader
    from sgljax_engine.fleet.remote import RemoteEngine
    from sgljax_engine.fleet.writer import VersionWriter, WrittenVersion

_LAZY = {
    "FleetConfig": "sgljax_engine.fleet.config",
    "FleetError": "sgljax_engine.fleet.config",
    "ReadVersion": "sgljax_engine.fleet.reader",
    "RemoteEngine": "sgljax_engine.fleet.remote",
    "VersionReader": "sgljax_engine.fleet.reader",
    "VersionWriter": "sgljax_engine.fleet.writer",
    "WrittenVersion": "sgljax_engine.fleet.writer",
}

__all__ = [
    "FleetConfig",
    "FleetError",
    "ReadVersion",
    "RemoteEngine",
    "VersionReader",
    "VersionWriter",
    "WrittenVersion",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
