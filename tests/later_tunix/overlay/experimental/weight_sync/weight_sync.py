"""What a coordinator, its transport and the two sides of a round exchange; with artifacts."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class WorkUnitId:
    """Who holds weights."""

    job_name: str
    job_replica_id: str = ""
    data_name: str = ""
    data_replica_idx: int = 0


@dataclasses.dataclass(frozen=True)
class TensorMetadata:
    """A tensor of a unit."""

    name: str
    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    layout: tuple[int, ...]
    item_size: int
    layer_idx: int = 0
    sharding_spec: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class WorkUnitMetadata:
    """A unit, its tensors, and what its source prepared."""

    unit: WorkUnitId
    artifact_uri: str = ""
    variables: tuple[TensorMetadata, ...] = ()


@dataclasses.dataclass(frozen=True)
class TransferResult:
    """How a transfer ended."""

    req_id: str
    success: bool
    message: str = ""


class WeightSyncHandler(abc.ABC):
    """A transport."""

    @abc.abstractmethod
    def register_work_unit(self, metadata: WorkUnitMetadata) -> None:
        """Registers a unit, or replaces it."""

    @abc.abstractmethod
    def transfer(
        self,
        src_units: Sequence[WorkUnitId],
        dst_units: Sequence[WorkUnitId],
        req_id: str | None = None,
        generation: int | None = None,
    ) -> TransferResult:
        """Moves the weights."""
