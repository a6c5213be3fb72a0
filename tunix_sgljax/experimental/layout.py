"""Where Tunix keeps what this package implements: main moved it after c7d8950f.

A part is found by what can be imported, not by Tunix's version, which both layouts share.
"""

from __future__ import annotations

import importlib
from types import ModuleType

_WEIGHT_SYNC_PACKAGES = ("tunix.experimental.weight_sync", "tunix.experimental.orchestrator")
"""Packages of the weight sync, the newest first."""


def _weight_sync_module(name: str) -> ModuleType:
    """Imports a module of the weight sync from the first package that has it."""
    tried = [f"{package}.{name}" for package in _WEIGHT_SYNC_PACKAGES]
    for full_name in tried:
        try:
            return importlib.import_module(full_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{full_name}.".startswith(f"{error.name}."):
                raise  # it is there, and a package that it needs is not
    raise ImportError(
        f"this Tunix has none of {tried}, one of which tunix_sgljax.experimental needs"
    )


_contracts = _weight_sync_module("weight_sync")
_coordinator = _weight_sync_module("weight_sync_coordinator")

TensorMetadata = _contracts.TensorMetadata
TransferResult = _contracts.TransferResult
WeightSyncHandler = _contracts.WeightSyncHandler
WorkUnitId = _contracts.WorkUnitId
WorkUnitMetadata = _contracts.WorkUnitMetadata
StaleRoundError = _coordinator.StaleRoundError
WorkerRoundTracker = _coordinator.WorkerRoundTracker
