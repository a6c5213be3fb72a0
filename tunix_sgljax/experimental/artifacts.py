"""Weight sync through safetensors files, for samplers in other processes."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
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
from tunix_sgljax.lora import is_lora_name

_FIELDS = ("artifact_uri", "artifact_path")
"""Fields of WorkUnitMetadata for what a source prepared; c7d8950f has neither."""

_SUFFIX = ".safetensors"


class WeightFolder(WeightSyncHandler):
    """Passes weights through a folder that a source and its samplers see, as a disk or a mount.

    A source writes a file for each round, and each sampler reads it: a transfer moves nothing.
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


class WeightFolderWriter:
    """Writes weights into a folder for samplers to read; one file at a time.

    It is what Tunix's PeftTrainer takes as `weight_sync_worker_factory`: for each sync it calls
    `bind`, `d2h` and `work_unit_metadata`, on one thread. Samplers see the folder under the same
    path.
    """

    def __init__(self, folder: str | Path, name: str = "trainer") -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._name = name
        self._params: dict[str, Any] = {}
        self._file: Path | None = None

    @property
    def bound(self) -> bool:
        return bool(self._params)

    def bind(self, state: Any) -> None:
        """Takes the parameters of a state or pytree to write; only the LoRA leaves if there are."""
        if isinstance(state, nnx.State):
            state = nnx.filter_state(state, nnx.Param)
        params = flatten_named(state)
        pairs = {name: x for name, x in params.items() if is_lora_name(name)}
        self._params = pairs or params
        if not self._params:
            raise InvalidRequestError("the state to sync holds no parameters")

    def d2h(self) -> None:
        """Writes the parameters to a new file, and removes the file of the round before."""
        self.remove()
        file = self._folder / f"{self._name}-{uuid.uuid4().hex}{_SUFFIX}"
        # Under another name first: a file with this name is whole. Contiguous, since safetensors
        # writes an array's memory as it lies.
        unfinished = file.with_suffix(".unfinished")
        arrays = {name: np.ascontiguousarray(x) for name, x in self._params.items()}
        save_file(arrays, unfinished)
        self._file = unfinished.replace(file)

    def work_unit_metadata(self) -> WorkUnitMetadata:
        assert self._file is not None, "d2h comes first"
        unit = unit_metadata(WorkUnitId(job_name=self._name), self._params)
        return _with_artifact(unit, self._file)

    def metrics(self) -> dict[str, Any]:
        return {"file": str(self._file)}

    def checksums(self) -> dict[str, float]:
        """The sum of each parameter, in float64; for Tunix's VERIFY_WEIGHTS."""
        return {name: float(np.asarray(x, np.float64).sum()) for name, x in self._params.items()}

    def remove(self) -> None:
        """Removes the round's file. Idempotent."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None


class WeightFolderSource:
    """The trainer's side of a `WeightFolder` beside a coordinator: a `WeightSyncSource`."""

    def __init__(
        self, folder: str | Path, read_params: Callable[[], Any], name: str = "trainer"
    ) -> None:
        """Makes the folder; arguments as for `WeightFolderWriter` and `InProcessSource`."""
        self._read_params = read_params
        self._name = name
        self._writer = WeightFolderWriter(folder, name)

    def info(self) -> WorkerInfo:
        """A worker of the role "trainer"."""
        return WorkerInfo(worker_id=self._name, roles=frozenset({"trainer"}))

    async def prepare_weight_sync(self, sync_request: Any = None) -> list[WorkUnitMetadata]:
        """Writes the current parameters, by the actor's names, to a new file.

        Raises:
            InvalidRequestError: when there are none.
        """
        del sync_request
        self._writer.bind(self._read_params())
        await asyncio.to_thread(self._writer.d2h)
        return [self._writer.work_unit_metadata()]

    async def release_weight_sync(self, sync_request: Any = None) -> None:
        """Removes the round's file. Idempotent."""
        del sync_request
        self._writer.remove()


def _with_artifact(metadata: WorkUnitMetadata, file: Path) -> WorkUnitMetadata:
    """Names the file in the field for it, or in the unit where this Tunix has none."""
    for name in _FIELDS:
        if hasattr(metadata, name):
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
    artifacts = map(_artifact_of, getattr(sync_request, "source_metadata", None) or ())
    return next((artifact for artifact in artifacts if artifact is not None), None)


def read_artifact(artifact: str) -> dict[str, np.ndarray]:
    """The actor's parameters by name, of a safetensors file or a folder with model.safetensors."""
    path = Path(artifact)
    file = path / f"model{_SUFFIX}" if path.is_dir() else path
    if file.suffix != _SUFFIX or not file.is_file():
        raise WeightLoadError(
            f"weights at {artifact!r} are neither a safetensors file nor a folder with "
            f"model{_SUFFIX}; other checkpoints are not read here"
        )
    return {name.removesuffix(".value"): x for name, x in read_safetensors(file).items()}
