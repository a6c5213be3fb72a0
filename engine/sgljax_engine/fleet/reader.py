"""Reads the versions of a store, and proves what it read."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sgljax_engine.errors import WeightStoreError
from sgljax_engine.fleet.deltas import apply, bits, sha256
from sgljax_engine.fleet.files import MANIFEST, StoreFiles
from sgljax_engine.fleet.manifest import (
    FileEntry,
    Manifest,
    Part,
    TensorEntry,
    VersionRef,
    layout,
)
from sgljax_engine.fleet.versions import load_manifest, newest_manifest
from sgljax_engine.weights.safetensors_file import DTYPES

_NUM_THREADS = 8
_MAX_READ_BYTES = 64 * 2**20
"""Files up to this size are read in one go, since each request to a bucket takes its time."""

_MIN_THREADED_BYTES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReadVersion:
    """A version, proven to be what the writer got.

    Attributes:
        version: Its number.
        tensors: All its tensors by name, in host memory; read-only.
        adapter: PEFT's adapter_config if they are a LoRA adapter's; None for a model's weights.
        num_bytes: Bytes of the tensors' files that were read, without manifests.
        is_delta: Whether it was reached from the version that was held, not from a base.
    """

    version: int
    tensors: dict[str, np.ndarray]
    adapter: dict[str, Any] | None
    num_bytes: int
    is_delta: bool


class _Held(NamedTuple):
    ref: VersionRef
    tensors: dict[str, np.ndarray]
    digests: dict[str, str]
    adapter: dict[str, Any] | None


class VersionReader:
    """Reads versions, and keeps the last one in host memory, for deltas to change.

    A failed read changes nothing: the version that was held still is. While it reads, both the old
    version and the new one are in memory, less the tensors that are the same.

    One thread at a time may call; `newest` any.
    """

    def __init__(self, store: str | Path) -> None:
        """Touches nothing yet.

        Args:
            store: A folder or a URL that fsspec knows.

        Raises:
            WeightStoreError: fsspec does not know the URL.
        """
        self._files = StoreFiles(store)
        self._held: _Held | None = None
        self._base: _Held | None = None  # below an adapter; its arrays are those that are held

    def newest(self) -> int | None:
        """The newest whole version in the store; None if there is none.

        Raises:
            WeightStoreError: the store cannot be listed.
        """
        manifest = newest_manifest(self._files)
        return None if manifest is None else manifest.version

    def read(self, version: int) -> ReadVersion:
        """Reads a version: from the one that is held if deltas lead from it, else from a base.

        Raises:
            WeightStoreError: names the file that is missing, cut, damaged, or of another version or
                store, with what was expected and found.
        """
        target = load_manifest(self._files, version)
        known = {held.ref: held for held in (self._base, self._held) if held is not None}
        start, road = self._road(target, known)
        try:
            return self._follow(target, start, road)
        except _UnprovenError:
            if start is None:
                raise
        # Each file was what was written, so it is the held tensors that are not.
        return self._follow(target, *self._road(target, {}))

    def forget(self) -> None:
        """Drops the held version: the next one is read from a base."""
        self._held = self._base = None

    def _road(
        self, target: Manifest, known: Mapping[VersionRef, _Held]
    ) -> tuple[_Held | None, list[Manifest]]:
        """The held version to start from, None for a base, and those to read, oldest first."""
        if target.ref in known:
            return known[target.ref], []
        road = [target]
        while (previous := road[0].previous) is not None:
            if previous in known:
                return known[previous], road
            manifest = load_manifest(self._files, previous.version)
            if manifest.ref != previous:
                path = self._files.shown(self._files.path(previous.version, MANIFEST))
                raise WeightStoreError(
                    f"{path} has the checksum {manifest.checksum}, expected {previous.checksum} by "
                    f"version {road[0].version}, which changes it"
                )
            road.insert(0, manifest)
        return None, road

    def _follow(
        self, target: Manifest, start: _Held | None, road: Sequence[Manifest]
    ) -> ReadVersion:
        tensors = {} if start is None else dict(start.tensors)
        digests = {} if start is None else dict(start.digests)
        num_bytes, base = 0, self._base if start is self._held else start
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            for manifest in road:
                num_bytes += _VersionFiles(self._files, manifest).read_into(tensors, digests, pool)
                if manifest.ref == target.previous:
                    base = _Held(manifest.ref, dict(tensors), dict(digests), manifest.adapter)
            shown = self._files.shown(self._files.path(target.version, MANIFEST))
            _prove(target, shown, tensors, digests, pool)
        tensors = {each.name: tensors[each.name] for each in target.tensors}
        digests = {each.name: each.sha256 for each in target.tensors}
        if start is not None and start.ref == target.previous:
            base = start
        self._held = _Held(target.ref, tensors, digests, target.adapter)
        # A model's deltas change all that is held: to hold their base too would take its memory.
        self._base = base if target.adapter is not None else None
        return ReadVersion(
            version=target.version,
            tensors=dict(tensors),
            adapter=target.adapter,
            num_bytes=num_bytes,
            is_delta=start is not None,
        )


class _UnprovenError(WeightStoreError):
    """All files are as they were written, but a tensor is not what it should be."""


class _VersionFiles:
    """The files of one version."""

    def __init__(self, files: StoreFiles, manifest: Manifest) -> None:
        self._files = files
        self._manifest = manifest

    def read_into(
        self, tensors: dict[str, np.ndarray], digests: dict[str, str], pool: ThreadPoolExecutor
    ) -> int:
        """Applies the version to the tensors before it; returns the bytes that it read.

        A tensor that it changes is replaced by another array, and has a digest only if that is
        known.
        """
        for index, file in enumerate(self._manifest.files):
            entries = self._manifest.entries(index)
            header, parts = layout(entries)
            self._check_size(file, parts[-1].end if parts else len(header))
            is_small = file.num_bytes <= _MAX_READ_BYTES
            data = b""
            if is_small or file.sha256 is not None:
                data = self._read(file, 0, file.num_bytes)
            if file.sha256 is not None:
                self._check_digest(file, "", hashlib.sha256(data).hexdigest(), file.sha256)
            found = data[: len(header)] or self._read(file, 0, len(header))
            if found != header:
                raise self._error(file, f"expected the header {header!r:.200}, got {found!r:.200}")
            job = functools.partial(self._tensor, file, data, tensors)
            num_parts = len(parts) // max(1, len(entries))
            spans = [parts[i : i + num_parts] for i in range(0, len(parts), num_parts)]
            # Threads cost more than they save where there is little to do.
            run = pool.map if file.num_bytes > _MIN_THREADED_BYTES else map
            for entry, array in zip(entries, run(job, entries, spans), strict=True):
                tensors[entry.name] = array
                digests.pop(entry.name, None)
                if entry.form == "whole":
                    digests[entry.name] = entry.sha256
        return sum(file.num_bytes for file in self._manifest.files)

    def _tensor(
        self,
        file: FileEntry,
        data: bytes,
        before: Mapping[str, np.ndarray],
        entry: TensorEntry,
        parts: list[Part],
    ) -> np.ndarray:
        """A tensor after this version. `data` is the file, or empty if it is not in memory yet."""
        if entry.form == "sparse":
            values, codes = parts
            return self._changed(file, entry, before.get(entry.name), data, values, codes)
        (part,) = parts
        some = data[part.start : part.end] if data else self._read(file, part.start, part.end)
        found = hashlib.sha256(some).hexdigest()
        self._check_digest(file, f"tensor {entry.name!r}", found, entry.sha256)
        return np.frombuffer(some, DTYPES[entry.dtype]).reshape(entry.shape)

    def _changed(
        self,
        file: FileEntry,
        entry: TensorEntry,
        before: np.ndarray | None,
        data: bytes,
        values: Part,
        codes: Part,
    ) -> np.ndarray:
        if before is None or (before.dtype, before.shape) != (DTYPES[entry.dtype], entry.shape):
            raise self._error(file, f"it changes {entry.name!r}, which the version before lacks")
        array = before.copy()
        some = np.frombuffer(data[values.start : values.end], f"u{array.dtype.itemsize}")
        try:
            apply(bits(array), entry.pieces, some, data[codes.start : codes.end])
        except ValueError as error:
            raise self._error(file, f"tensor {entry.name!r}: {error}") from error
        array.flags.writeable = False
        return array

    def _read(self, file: FileEntry, start: int, end: int) -> bytes:
        data = self._files.read(self._path(file), start, end)
        if len(data) != end - start:
            raise self._error(file, f"expected {end} bytes, it ends at {start + len(data)}")
        return data

    def _check_size(self, file: FileEntry, by_header: int) -> None:
        found = self._files.num_bytes(self._path(file))
        if not found == file.num_bytes == by_header:
            raise self._error(file, f"expected {file.num_bytes} bytes, found {found}")

    def _check_digest(self, file: FileEntry, what: str, found: str, expected: str) -> None:
        if found != expected:
            raise self._error(file, f"{what} expected sha256 {expected}, found {found}".lstrip())

    def _path(self, file: FileEntry) -> str:
        return self._files.path(self._manifest.version, file.name)

    def _error(self, file: FileEntry, problem: str) -> WeightStoreError:
        return WeightStoreError(f"{self._files.shown(self._path(file))}: {problem}")


def _prove(
    target: Manifest,
    shown: str,
    tensors: dict[str, np.ndarray],
    digests: dict[str, str],
    pool: ThreadPoolExecutor,
) -> None:
    """Raises _UnprovenError unless all tensors of a version are there, with their checksums.

    `shown` names the version in messages.
    """

    def digest(entry: TensorEntry) -> str | None:
        array = tensors.get(entry.name)
        if array is None or (array.dtype, array.shape) != (DTYPES[entry.dtype], entry.shape):
            return None
        known = digests.get(entry.name)
        return known or sha256(bits(array))

    num_bytes = sum(each.num_bytes for each in target.tensors)
    run = pool.map if num_bytes > _MIN_THREADED_BYTES else map
    for entry, found in zip(target.tensors, run(digest, target.tensors), strict=True):
        if found != entry.sha256:
            raise _UnprovenError(
                f"{shown}: tensor {entry.name!r} expected sha256 {entry.sha256}, found {found}"
            )
