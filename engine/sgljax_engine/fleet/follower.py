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
from sgljax_engine.fleet.config import ADAPTER, PAIRS
from sgljax_engine.fleet.reader import ReadVersion, VersionReader
from sgljax_engine.io_struct import PauseMode
from sgljax_engine.weights.peft_folder import peft_source


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Staged:
    """A version that was read; `weights` is None if the engine serves its weights already."""

    version: StagedVersion
    weights: StagedWeights | None
    adapter: _Adapter | None
    read: Mapping[str, np.ndarray]


class WeightFollower:
    """Has an engine serve what a trainer writes into a weight store, under the store's numbers.

    A version is staged beside the serving weights, which takes the memory of one more model, and
    published between two dispatches. A version with an adapter holds the weights below it too: they
    are served if the engine has others, and the pairs become the adapter `ADAPTER`.

    Any thread may call; calls are done one after another, and take as long as reading does.

    Attributes:
        is_broken: Whether only a part of a version was served, so that `reload` must come.
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
        self._staged: _Staged | None = None
        self._rules: tuple[str, Sequence[WeightRule]] | None = None
        self._serves_adapter = False
        self._served: Mapping[str, np.ndarray] = {}  # the model's tensors that the engine serves
        self.is_broken = False

    @property
    def adapter(self) -> str | None:
        """Name of the adapter that the serving version is; None for a model's weights."""
        return ADAPTER if self._serves_adapter else None

    @property
    def staged_version(self) -> int | None:
        """The version that is staged; None if none is."""
        staged = self._staged
        return None if staged is None else staged.version.version

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
        """
        with self._lock:
            self._discard()
            newest = self._reader.newest()
            if newest is None:
                raise WeightStoreError(f"weight store {self._store!r} has no version to reload")
            self._reader.forget()
            read = self._reader.read(newest)
            weights, adapter = self._split(read)
            self.is_broken = True
            self._engine.update_weights(
                weights, mode="abort", verify=True, version=newest, reload=True
            )
            if adapter is not None:
                self._load(adapter, "abort", newest, is_reload=True)
                differing = self._engine.find_differing_adapter(
                    ADAPTER, adapter.arrays, adapter.rules
                )
                if differing:
                    raise EngineStateError(
                        f"the reloaded adapter differs from the store's: {differing}"
                    )
            self._served, self._serves_adapter = weights, adapter is not None
            self.is_broken = False
            return newest

    def close(self) -> None:
        """Frees what is staged. Idempotent."""
        with self._lock:
            self._discard()

    # ------------------------------------------------------------------ under the lock

    def _stage(self, version: int) -> StagedVersion:
        if version <= self._engine.weight_version:
            return StagedVersion(version=version, num_bytes=0, is_delta=False)
        if self._staged is not None and self._staged.version.version == version:
            return dataclasses.replace(self._staged.version, num_bytes=0)
        self._discard()
        read = self._reader.read(version)
        weights, adapter = self._split(read)
        found = StagedVersion(version=version, num_bytes=read.num_bytes, is_delta=read.is_delta)
        # The reader keeps the arrays of what has not changed.
        is_served = adapter is not None and weights.keys() == self._served.keys()
        is_served = is_served and all(weights[name] is self._served[name] for name in weights)
        staged = None if is_served else self._engine.stage_weights(weights)
        self._staged = _Staged(version=found, weights=staged, adapter=adapter, read=weights)
        return found

    def _publish(self, version: int, mode: PauseMode) -> int:
        if version <= self._engine.weight_version:
            return self._engine.weight_version
        self._stage(version)
        staged = self._staged
        assert staged is not None
        if staged.adapter is None:
            assert staged.weights is not None
            self._engine.publish_weights(staged.weights, mode=mode, version=version)
        elif staged.weights is None:
            self._load(staged.adapter, mode, version)
        else:
            self._publish_both(staged.weights, staged.adapter, mode, version)
        self._served, self._serves_adapter = staged.read, staged.adapter is not None
        self._staged = None
        return version

    def _publish_both(
        self, weights: StagedWeights, adapter: _Adapter, mode: PauseMode, version: int
    ) -> None:
        """Serves weights and an adapter; no token is sampled between."""
        was_paused = self._engine.get_internal_state().is_paused
        if not was_paused:
            self._engine.pause_generation("retract" if mode == "in_place" else mode)
        try:
            self._engine.publish_weights(weights, version=version)
            self.is_broken = True
            self._load(adapter, "retract", version, is_reload=True)
            self.is_broken = False
        finally:
            if not was_paused:
                self._engine.continue_generation()

    def _load(
        self, adapter: _Adapter, mode: PauseMode, version: int, *, is_reload: bool = False
    ) -> None:
        self._engine.load_adapter(
            ADAPTER, adapter.arrays, adapter.rules, mode=mode, version=version, reload=is_reload
        )

    def _discard(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None and staged.weights is not None:
            self._engine.discard_weights(staged.weights)

    def _split(self, read: ReadVersion) -> tuple[dict[str, np.ndarray], _Adapter | None]:
        """The tensors of the model, and the adapter."""
        weights = {name: x for name, x in read.tensors.items() if not name.startswith(PAIRS)}
        if read.adapter is None:
            return weights, None
        pairs = {name: x for name, x in read.tensors.items() if name.startswith(PAIRS)}
        origin = f"version {read.version} of weight store {self._store!r}"
        source = peft_source(read.adapter, pairs, origin)
        config = json.dumps([read.adapter, sorted(pairs)], sort_keys=True)
        if self._rules is None or self._rules[0] != config:
            # The engine keeps what it compiled for the same objects.
            self._rules = config, (*hf_rules(self._engine.model_config), *source.rules)
        return weights, _Adapter(arrays=source.arrays, rules=self._rules[1])
