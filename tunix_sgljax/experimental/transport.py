from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from tunix.experimental.common.datatypes import (  # pyright: ignore[reportMissingImports]
    WorkerInfo,
)

from sgljax_engine import EngineStateError, HomeProcess, InvalidRequestError, flatten_named
from tunix_sgljax.experimental.layout import (
    TensorMetadata,
    TransferResult,
    WeightSyncHandler,
    WorkUnitId,
    WorkUnitMetadata,
)


class InProcessTransport(WeightSyncHandler):
    """Passes the arrays of a source to the samplers of the same process. Any thread.

    A transfer moves only references. A sampler makes the only copy when it stages the weights, on
    its own devices and in its own layout.
    """

    def __init__(self) -> None:
        """Starts without registered units."""
        self._home = HomeProcess("transport")
        self._lock = threading.Lock()
        self._units: set[WorkUnitId] = set()
        self._offered: dict[WorkUnitId, Any] = {}
        self._arrived: dict[WorkUnitId, tuple[str | None, Any]] = {}

    def register_work_unit(self, metadata: WorkUnitMetadata) -> None:
        """Registers a work unit, of a source or of a sampler."""
        with self._lock:
            self._units.add(metadata.unit)

    def offer(self, unit: WorkUnitId, params: Any) -> None:
        """Offers a source's parameters; it must not change them until `withdraw`."""
        with self._lock:
            self._offered[unit] = params

    def withdraw(self, unit: WorkUnitId) -> None:
        """Withdraws a source's parameters, but not those already transferred."""
        with self._lock:
            self._offered.pop(unit, None)

    def transfer(
        self,
        src_units: Sequence[WorkUnitId],
        dst_units: Sequence[WorkUnitId],
        req_id: str | None = None,
        generation: int | None = None,
    ) -> TransferResult:
        """Transfers one source's parameters to all destinations, or to none."""
        del generation
        with self._lock:
            problem = self._problem(src_units, dst_units)
            if not problem:
                params = self._offered[src_units[0]]
                self._arrived.update((unit, (req_id, params)) for unit in dst_units)
        return TransferResult(req_id=req_id or "", success=not problem, message=problem)

    def _problem(self, src_units: Sequence[WorkUnitId], dst_units: Sequence[WorkUnitId]) -> str:
        if len(src_units) != 1:
            return f"one source holds all weights of a process, got {list(src_units)}"
        unknown = [unit for unit in (*src_units, *dst_units) if unit not in self._units]
        if unknown:
            return f"work units that are not registered: {unknown}"
        if src_units[0] not in self._offered:
            return f"{src_units[0]} offers no weights: prepare_weight_sync comes first"
        return ""

    def pop(self, unit: WorkUnitId, req_id: str | None) -> Any:
        """Removes and returns the parameters that arrived at a destination in a round.

        Raises:
            EngineStateError: when nothing arrived in that round.
        """
        with self._lock:
            found, params = self._arrived.get(unit, (None, None))
            if params is None or found != req_id:
                raise EngineStateError(
                    f"no weights arrived at {unit} in round {req_id!r}: transfer comes first"
                )
            del self._arrived[unit]
        return params

    def drop(self, unit: WorkUnitId) -> None:
        """Drops the parameters that arrived at a destination."""
        with self._lock:
            self._arrived.pop(unit, None)

    def close(self) -> None:
        """Drops everything; nothing in a forked child."""
        if not self._home.is_here:
            return
        with self._lock:
            self._units.clear()
            self._offered.clear()
            self._arrived.clear()


class InProcessSource:
    """The trainer's side of an `InProcessTransport`: a `WeightSyncSource` for a registry."""

    def __init__(
        self, transport: InProcessTransport, read_params: Callable[[], Any], name: str = "trainer"
    ) -> None:
        """Offers nothing yet.

        Args:
            transport: The transport, shared with the samplers.
            read_params: Returns the argument of `SglJaxRollout.update_params`, the actor's
                `nnx.State`. Its arrays must not be donated before the round ends.
            name: Name of the worker and of its work unit.
        """
        self._transport = transport
        self._read_params = read_params
        self._unit = WorkUnitId(job_name=name)

    def info(self) -> WorkerInfo:
        """A worker of the role "trainer"."""
        return WorkerInfo(worker_id=self._unit.job_name, roles=frozenset({"trainer"}))

    async def prepare_weight_sync(self, sync_request: Any = None) -> list[WorkUnitMetadata]:
        """Offers the current parameters.

        Raises:
            InvalidRequestError: when there are none.
        """
        del sync_request
        leaves, structure = jax.tree.flatten(self._read_params())
        if not leaves:
            raise InvalidRequestError("read_params returned no parameters")
        # The current arrays: Tunix's variables change with the model.
        params = jax.tree.unflatten(structure, leaves)
        self._transport.offer(self._unit, params)
        return [unit_metadata(self._unit, flatten_named(params))]

    async def release_weight_sync(self, sync_request: Any = None) -> None:
        """Releases the parameters. Idempotent."""
        del sync_request
        self._transport.withdraw(self._unit)


def unit_metadata(unit: WorkUnitId, params: dict[str, Any]) -> WorkUnitMetadata:
    """What a coordinator compares of arrays by name: their shapes and the bytes of an element."""
    return WorkUnitMetadata(
        unit=unit,
        variables=tuple(
            TensorMetadata(
                name=name,
                shape=tuple(x.shape),
                mesh_shape=(1,) * len(x.shape),  # whole: a reference has no parts
                layout=tuple(reversed(range(len(x.shape)))),
                item_size=jax.numpy.dtype(x.dtype).itemsize,
                layer_idx=index,
            )
            for index, (name, x) in enumerate(params.items())
        ),
    )
