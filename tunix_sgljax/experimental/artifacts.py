"""Weight sync through safetensors files, for samplers in other processes."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tunix.experimental.common.datatypes import (  # pyright: ignore[reportMissingImports]
    WorkerInfo,
)

from sgljax_engine import InvalidRequestError, WeightLoadError, flatten_named, read_safetensors
from tunix_sgljax.experimental.layout import (
    TransferResult,
    WeightSyncHandler,
    WorkUnitId,
    WorkUnitMetadata,
)
from tunix_sgljax.experimental.transport import unit_metadata

_FIELDS = ("artifact_uri", "artifact_path")
"""Fields of WorkUnitMetadata for what a source prepared; c7d8950f has neither."""

_SUFFIX = ".safetensors"


class WeightFolder(WeightSyncHandler):
    """Passes weights through a folder that a source and its samplers see, as a disk or a mount.

    A source writes a file for each round, and each sampler reads it where it stages: a transfer
    moves nothing. The coordinator's event loop and its executor call it.
    """

    def __init__(self) -> None:
        """Starts without registered units."""
        self._artifacts: dict[WorkUnitId, str | None] = {}

    def register_work_unit(self, metadata: WorkUnitMetadata) -> None:
        """Registers a work unit; a source's names its file."""
        self._artifacts[metadata.unit] = _artifact_of(metadata)

    def transfer(
        self,
        src_units: Sequence[WorkUnitId],
        dst_units: Sequence[WorkUnitId],
        req_id: str | None = None,
        generation: int | None = None,
    ) -> TransferResult:
        """Checks that one source has written a file."""
        del dst_units, generation
        artifacts = [self._artifacts.get(unit) for unit in src_units]
        problem = ""
        if len(artifacts) != 1:
            problem = f"one file holds all weights, got the sources {list(src_units)}"
        elif artifacts[0] is None:
            problem = f"{src_units[0]} names no file: its source must be a WeightFolderSource"
        return TransferResult(req_id=req_id or "", success=not problem, message=problem)


class WeightFolderSource:
    """The trainer's side of a `WeightFolder`: a `WeightSyncSource` that writes safetensors files.

    Attributes:
        folder: Where the files are written.
    """

    def __init__(
        self, folder: str | Path, read_params: Callable[[], Any], name: str = "trainer"
    ) -> None:
        """Makes the folder, and writes nothing yet.

        Args:
            folder: A folder that the samplers see under the same path.
            read_params: Returns the argument of `SglJaxRollout.update_params`, the actor's
                `nnx.State`.
            name: Name of the worker and of its work unit.
        """
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._read_params = read_params
        self._name = name
        self._file: Path | None = None

    def info(self) -> WorkerInfo:
        """A worker of the role "trainer"."""
        return WorkerInfo(worker_id=self._name, roles=frozenset({"trainer"}))

    async def prepare_weight_sync(self, sync_request: Any = None) -> list[WorkUnitMetadata]:
        """Writes the current parameters, by the actor's names, to a new file.

        Raises:
            InvalidRequestError: when there are none.
        """
        await self.release_weight_sync(sync_request)
        params = flatten_named(self._read_params())
        if not params:
            raise InvalidRequestError("read_params returned no parameters")
        self._file = self.folder / f"{self._name}-{uuid.uuid4().hex}{_SUFFIX}"
        await asyncio.to_thread(_write, params, self._file)
        return [_with_artifact(unit_metadata(WorkUnitId(job_name=self._name), params), self._file)]

    async def release_weight_sync(self, sync_request: Any = None) -> None:
        """Removes the round's file. Idempotent."""
        del sync_request
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None


def _write(params: Mapping[str, Any], file: Path) -> None:
    """Writes under another name first, so that a file with its name is whole."""
    unfinished = file.with_suffix(".unfinished")
    # Contiguous: safetensors writes an array's memory as it lies.
    save_file({name: np.ascontiguousarray(x) for name, x in params.items()}, unfinished)
    unfinished.replace(file)


def _with_artifact(metadata: WorkUnitMetadata, file: Path) -> WorkUnitMetadata:
    """Names the file in the field for it, or in the unit where this Tunix has none."""
    known = {field.name for field in dataclasses.fields(metadata)}
    for name in _FIELDS:
        if name in known:
            return dataclasses.replace(metadata, **{name: str(file)})
    unit = dataclasses.replace(metadata.unit, data_name=str(file))
    return dataclasses.replace(metadata, unit=unit)


def _artifact_of(metadata: Any) -> str | None:
    """The file that a source's metadata names, an object or a dict; None if there is none."""

    def get(holder: Any, name: str) -> Any:
        return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)

    named = [get(metadata, name) for name in _FIELDS]
    data_name = get(get(metadata, "unit"), "data_name")
    if isinstance(data_name, str) and data_name.endswith(_SUFFIX):
        named.append(data_name)
    return next((str(name) for name in named if name), None)


def find_artifact(sync_request: Any) -> str | None:
    """The file or folder of the weights that the source of a round prepared; None without one."""
    for metadata in getattr(sync_request, "source_metadata", None) or ():
        artifact = _artifact_of(metadata)
        if artifact is not None:
            return artifact
    return None


def read_artifact(artifact: str) -> dict[str, np.ndarray]:
    """The actor's parameters by name, of a safetensors file or a folder with model.safetensors.

    Raises:
        WeightLoadError: for anything else, such as a folder of Orbax, and a file that is not whole.
    """
    path = Path(artifact)
    file = path / f"model{_SUFFIX}" if path.is_dir() else path
    if file.suffix != _SUFFIX or not file.is_file():
        raise WeightLoadError(
            f"weights at {artifact!r} are neither a safetensors file nor a folder with "
            f"model{_SUFFIX}; other checkpoints are not read here"
        )
    return {name.removesuffix(".value"): x for name, x in read_safetensors(file).items()}
