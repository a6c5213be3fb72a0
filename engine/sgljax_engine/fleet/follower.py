"""Serves the versions of a weight store with one engine."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sgljax_engine import (
    Engine,
    EngineStateError,
    StagedWeights,
    WeightRule,
    WeightStoreError,
    hf_rules,
)
from sgljax_engine.fleet.reader import ReadVersion, VersionReader
from sgljax_engine.io_struct import PauseMode
from sgljax_engine.weights.adapters import A_SUFFIX, B_SUFFIX
from sgljax_engine.weights.peft_folder import peft_source

ADAPTER = "policy"
"""Name under which an adapter of a store is loaded."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StagedVersion:
    """What staging a version took.

    Attributes:
        version: Its number.
        num_bytes: Bytes that were read from the store; 0 if it was staged or served before.
        is_delta: Whether changes of the version before were read, and not a base.
    """

    version: int
    num_bytes: int
    is_delta: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Adapter:
    """An adapter that was read, in host memory: an engine loads adapters in one step."""

    arrays: Mapping[str, np.ndarray]
    rules: Sequence[WeightRule]


class WeightFollower:
    """Has an engine serve what a trainer writes into a weight store, under the store's numbers.

    A version is staged beside the serving weights, which takes the memory of one more model, and
    published between two dispatches. A version of an adapter becomes the adapter `ADAPTER`.

    Any thread may call; calls are done one after another, and take as long as reading does.
    """

    def __init__(self, engine: Engine, store: str | Path) -> None:
        """Touches nothing yet.

        Args:
            engine: The engine; only this follower should change its weights.
            store: A folder or a URL that fsspec knows.

        Raises:
            WeightStoreError: fsspec does not know the URL.
        """
        self._engine = engine
        self._store = str(store)
        self._reader = VersionReader(store)
        self._lock = threading.Lock()
        self._staged: tuple[StagedVersion, StagedWeights | _Adapter] | None = None
        self._rules: tuple[str, Sequence[WeightRule]] | None = None
        self._base_checksums: dict[str, str] | None = None
        self._serves_adapter = False

    @property
    def adapter(self) -> str | None:
        """Name of the adapter that the serving version is; None for a model's weights."""
        return ADAPTER if self._serves_adapter else None

    @property
    def staged_version(self) -> int | None:
        """The version that is staged; None if none is."""
        staged = self._staged
        return None if staged is None else staged[0].version

    def newest(self) -> int | None:
        """The newest whole version in the store; None if there is none.

        Raises:
            WeightStoreError: the store cannot be listed.
        """
        return self._reader.newest()

    def stage(self, version: int) -> StagedVersion:
        """Reads a version and makes its weights beside the serving ones.

        Does nothing for a version that is staged, or not above the serving one. Another staged
        version is discarded.

        Raises:
            WeightStoreError: names the file that is missing or damaged; the engine serves on.
            WeightSyncError: the version does not fit the model.
        """
        with self._lock:
            return self._stage(version)

    def publish(self, version: int, mode: PauseMode = "retract") -> int:
        """Serves a version, staged before or now; returns the serving version.

        An engine that serves this version, or a newer one, is left as it is.

        Args:
            version: Its number.
            mode: What happens to started requests; see `Engine.update_weights`.

        Raises:
            EngineError: as `stage` and `Engine.publish_weights`; the engine serves on.
        """
        with self._lock:
            return self._publish(version, mode)

    def catch_up(self, mode: PauseMode = "retract") -> int:
        """Publishes the newest version if the engine serves an older one; see `publish`."""
        with self._lock:
            newest = self._reader.newest()
            return self._engine.weight_version if newest is None else self._publish(newest, mode)

    def reload(self) -> int:
        """Reads the newest version as a whole and serves it, under its number once more.

        For weights that were found damaged. What serves afterwards is compared with what was read.
        Started requests are aborted, since wrong weights computed their tokens.

        Raises:
            WeightStoreError: there is no version, or it cannot be read.
            EngineStateError: the weights below an adapter are damaged, and the store has none.
        """
        with self._lock:
            self._discard()
            newest = self._reader.newest()
            if newest is None:
                raise WeightStoreError(f"weight store {self._store!r} has no version to reload")
            self._reader.forget()
            read = self._reader.read(newest)
            if read.adapter is not None:
                return self._reload_adapter(self._adapter_of(read), newest)
            version = self._engine.update_weights(
                read.tensors, mode="abort", verify=True, version=newest, reload=True
            )
            self._serves_adapter, self._base_checksums = False, None
            return version

    def close(self) -> None:
        """Frees what is staged. Idempotent."""
        with self._lock:
            self._discard()

    # ------------------------------------------------------------------ under the lock

    def _stage(self, version: int) -> StagedVersion:
        if version <= self._engine.weight_version:
            return StagedVersion(version=version, num_bytes=0, is_delta=False)
        if self._staged is not None and self._staged[0].version == version:
            return dataclasses.replace(self._staged[0], num_bytes=0)
        self._discard()
        read = self._reader.read(version)
        found = StagedVersion(version=version, num_bytes=read.num_bytes, is_delta=read.is_delta)
        if read.adapter is None:
            self._staged = found, self._engine.stage_weights(read.tensors)
        else:
            self._staged = found, self._adapter_of(read)
        return found

    def _publish(self, version: int, mode: PauseMode) -> int:
        if version <= self._engine.weight_version:
            return self._engine.weight_version
        self._stage(version)
        assert self._staged is not None
        _, staged = self._staged
        if isinstance(staged, _Adapter):
            self._note_base()
            served = self._engine.load_adapter(
                ADAPTER, staged.arrays, staged.rules, mode=mode, version=version
            )
        else:
            served = self._engine.publish_weights(staged, mode=mode, version=version)
            self._base_checksums = None
        self._serves_adapter = isinstance(staged, _Adapter)
        self._staged = None
        return served

    def _discard(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None and isinstance(staged[1], StagedWeights):
            self._engine.discard_weights(staged[1])

    def _adapter_of(self, read: ReadVersion) -> _Adapter:
        assert read.adapter is not None
        origin = f"version {read.version} of weight store {self._store!r}"
        source = peft_source(read.adapter, read.tensors, origin)
        config = json.dumps([read.adapter, sorted(read.tensors)], sort_keys=True)
        if self._rules is None or self._rules[0] != config:
            # The engine keeps what it compiled for the same objects.
            self._rules = config, (*hf_rules(self._engine.model_config), *source.rules)
        return _Adapter(arrays=source.arrays, rules=self._rules[1])

    def _note_base(self) -> None:
        """Takes the checksums of the weights below the adapters, before the first one."""
        if self._base_checksums is None:
            self._base_checksums = {
                name: checksum
                for name, checksum in self._engine.get_weights_checksum().items()
                if not name.endswith((A_SUFFIX, B_SUFFIX))
            }

    def _reload_adapter(self, adapter: _Adapter, version: int) -> int:
        serving = self._engine.get_weights_checksum()
        before = self._base_checksums or {}
        damaged = sorted(name for name, checksum in before.items() if serving[name] != checksum)
        if damaged:
            raise EngineStateError(
                f"the weights below the adapter are damaged, and the store has none of them: "
                f"restart the server; {damaged[:4]}"
            )
        served = self._engine.load_adapter(
            ADAPTER, adapter.arrays, adapter.rules, mode="abort", version=version, reload=True
        )
        self._serves_adapter = True
        differing = self._engine.find_differing_adapter(ADAPTER, adapter.arrays, adapter.rules)
        if differing:
            raise EngineStateError(f"the reloaded adapter differs from the store's: {differing}")
        return served
