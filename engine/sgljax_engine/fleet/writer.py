"""Writes the versions of a trainer's weights into a store."""

from __future__ import annotations

import dataclasses
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from sgljax_engine.errors import InvalidConfigError, WeightStoreError
from sgljax_engine.fleet.changes import (
    DTYPE_NAMES,
    Change,
    assign_files,
    checked,
    plain,
    write_file,
)
from sgljax_engine.fleet.config import PAIRS
from sgljax_engine.fleet.deltas import bits, replace, sha256, update
from sgljax_engine.fleet.files import MANIFEST, STORE_FILE, StoreFiles
from sgljax_engine.fleet.manifest import Form, Manifest, TensorEntry, VersionRef
from sgljax_engine.fleet.versions import (
    load_manifest,
    newest_manifest,
    parse_store_file,
    store_file,
)

logger = logging.getLogger(__name__)

_KEPT_ADAPTERS = 4
"""Versions with an adapter that stay above a base."""

_MIN_THREADED_BYTES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenVersion:
    """A version that is whole in the store.

    Attributes:
        version: Its number.
        is_base: Whether it is read without any other version.
        num_bytes: Bytes that were written.
        whole_bytes: Bytes of all its tensors.
        num_changed: Elements that differ in bits from the version before; of a base, all.
    """

    version: int
    is_base: bool
    num_bytes: int
    whole_bytes: int
    num_changed: int


class VersionWriter:
    """Writes versions into a store, as *bases* or as *deltas* of the version before.

    A version is there once its manifest is, which is written last; so a writer may be killed at any
    moment, and a reader finds whole versions only. A writer begins with a base, behind the highest
    number that the store has seen.

    A store has one writer. The last one that began to write wins: an earlier one that is still
    there, such as that of a trainer which hung and was replaced, gets a WeightStoreError at its
    next `write`, and writes no more.

    A version with an adapter holds the model's tensors too, so that it can be read alone. It is a
    delta of the last base, without those between: the pairs whole, and of the model nothing new. So
    it takes the adapter's bytes, and one base serves any number of them.

    It keeps a copy of the last version in host memory, to compare with. One thread at a time may
    call.
    """

    def __init__(
        self,
        store: str | Path,
        *,
        base_every: int = 16,
        max_file_bytes: int = 2 * 2**30,
        keep: int = 2,
    ) -> None:
        """Touches nothing yet.

        Args:
            store: A folder, which need not exist, or a URL that fsspec knows.
            base_every: Most versions from one base to the next; 1 writes bases only.
            max_file_bytes: Maximum size of a file's tensors, unless a single one is larger.
            keep: Bases that stay, with their deltas; older ones are deleted.

        Raises:
            InvalidConfigError: a number is below 1.
            WeightStoreError: fsspec does not know the URL.
        """
        given = {"base_every": base_every, "max_file_bytes": max_file_bytes, "keep": keep}
        for name, value in given.items():
            if value < 1:
                raise InvalidConfigError(f"{name} must be at least 1, got {value!r}")
        self._files = StoreFiles(store)
        self._base_every = base_every
        self._max_file_bytes = max_file_bytes
        self._keep = keep
        self._id = uuid.uuid4().hex
        self._store_id: str | None = None
        self._last: int | None = None  # the highest number that this writer has claimed
        self._previous: Manifest | None = None  # of `_held`
        self._held: dict[str, np.ndarray] = {}
        self._digests: dict[str, str] = {}
        self._base: int | None = None
        self._base_ref: VersionRef | None = None  # while the model's tensors are that base's
        self._adapters: list[int] = []  # versions with an adapter above that base
        self._is_replaced = False

    @property
    def newest(self) -> int | None:
        """The newest whole version in the store; None if there is none."""
        manifest = newest_manifest(self._files)
        return None if manifest is None else manifest.version

    def write(
        self,
        tensors: Mapping[str, np.ndarray],
        *,
        adapter: Mapping[str, Any] | None = None,
        as_base: bool = False,
    ) -> WrittenVersion:
        """Writes the next version.

        It is a base if it must be: the first of this writer, the first behind a failed write, one
        of other names, dtypes, shapes or another adapter, one of which everything changed.

        Args:
            tensors: The weights in Hugging Face's names, or the adapter's in PEFT's. They are
                copied, and compared in bits with those of the version before.
            adapter: PEFT's adapter_config if the tensors are a LoRA adapter's.
            as_base: Whether to write a base though a delta would do.

        Raises:
            WeightStoreError: a tensor has a dtype that the files lack, the store cannot be written,
                or another writer has taken it over. The store has the versions that it had.
        """
        adapter = plain(adapter)
        arrays = {name: checked(name, array) for name, array in tensors.items()}
        if not arrays:
            raise WeightStoreError("tensors must not be empty: a version without any")
        try:
            return self._write(arrays, adapter, as_base)
        except BaseException:
            # What is held may be of neither version, and the version may be there all the same.
            self._previous = None
            raise

    def _write(
        self, arrays: Mapping[str, np.ndarray], adapter: dict[str, Any] | None, as_base: bool
    ) -> WrittenVersion:
        versions = self._files.versions()
        self._check_alone(versions)
        store = self._identify()
        version = max([0, self._last or 0, *versions]) + 1
        before = None if as_base else self._delta_of(arrays, adapter, versions, version)
        self._claim(version, versions)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            # Threads cost more than they save where there is little to do.
            num_bytes = sum(array.nbytes for array in arrays.values())
            run = pool.map if num_bytes > _MIN_THREADED_BYTES else map

            def change(name: str) -> Change:
                of = None if name.startswith(PAIRS) else before
                return self._change(name, arrays[name], of)

            changes, groups = assign_files(list(run(change, arrays)), self._max_file_bytes)
            numbers = range(len(groups))
            files = tuple(
                pool.map(lambda i: write_file(self._files, version, i, groups[i]), numbers)
            )
        tensors = tuple(change.entry for change in changes)
        is_base = all(each.form == "whole" for each in tensors)
        manifest = Manifest(
            version=version,
            store=store,
            writer=self._id,
            previous=None if is_base else before,
            adapter=adapter,
            files=files,
            tensors=tensors,
        )
        num_written = sum(file.num_bytes for file in files) + self._publish(manifest)
        self._previous = manifest
        if is_base:
            self._base, self._base_ref, self._adapters = version, manifest.ref, []
            self._delete_old()
        elif any(each.form != "same" and not each.name.startswith(PAIRS) for each in tensors):
            self._base_ref = None
        elif adapter is not None:
            self._adapters.append(version)
            self._delete_adapters()
        return WrittenVersion(
            version=version,
            is_base=is_base,
            num_bytes=num_written,
            whole_bytes=num_bytes,
            num_changed=sum(change.delta.num_changed for change in changes),
        )

    def _claim(self, version: int, versions: Sequence[int]) -> None:
        """Takes a number, and frees the disk of what has not become a version."""
        self._last = version  # first, since a claim that fails may be there
        if not self._files.claim(version, self._id):
            self._refuse(version)
        if self._previous is None:  # the first of this life, or behind a failure
            for each in versions:
                if not self._files.has_manifest(each):
                    self._delete(each)

    def _publish(self, manifest: Manifest) -> int:
        """Writes the manifest, with which the version is there; returns its bytes."""
        data, version = manifest.to_bytes(), manifest.version
        newest = self._files.versions()[-1:]
        if newest != [version] or self._files.claimant(version) != self._id:
            self._refuse(version)
        self._files.replace(self._files.path(version, MANIFEST), data)
        return len(data)

    def _check_alone(self, versions: Sequence[int]) -> None:
        """Refuses to write if another writer has claimed a number behind, or in place of, ours."""
        if self._is_replaced or (self._last and versions and versions[-1] > self._last):
            self._refuse(versions[-1] if versions else 0)
        has_failed = self._previous is None  # maybe at its claim
        if self._last and has_failed and self._files.claimant(self._last) not in (None, self._id):
            self._refuse(self._last)

    def _refuse(self, version: int) -> None:
        self._is_replaced = True
        raise WeightStoreError(
            f"{self._files.shown(self._files.path(version))} is another writer's: a second trainer "
            f"writes to this store. This one (writer {self._id}) wrote up to version "
            f"{self._last or 0} and writes no more; give each trainer a store of its own"
        )

    def _identify(self) -> str:
        """The store's id: made by its first writer, made good if its file is damaged."""
        path = self._files.shown(STORE_FILE)
        new = self._store_id or uuid.uuid4().hex
        if not self._files.has_store_file():
            self._files.create(STORE_FILE, store_file(new))
        data = self._files.read(STORE_FILE)
        try:
            found = parse_store_file(data, path)
        except WeightStoreError as error:
            logger.warning("%s is written anew: %s", path, error)
            self._files.replace(STORE_FILE, store_file(new))
            found = new
        if self._store_id not in (None, found):
            self._is_replaced = True
            raise WeightStoreError(f"{path} has the id {found}, expected {self._store_id}")
        self._store_id = found
        return found

    def _delta_of(
        self,
        arrays: Mapping[str, np.ndarray],
        adapter: dict[str, Any] | None,
        versions: Sequence[int],
        version: int,
    ) -> VersionRef | None:
        """The version that this one can be a delta of."""
        before = self._previous
        if before is None or self._base is None or before.version not in versions:
            return None
        if adapter is None and (version - self._base >= self._base_every or before.adapter):
            return None
        specs = {name: (DTYPE_NAMES[x.dtype], x.shape) for name, x in arrays.items()}
        known = {each.name: (each.dtype, each.shape) for each in before.tensors}
        if _of_model(specs) != _of_model(known):
            return None
        return before.ref if adapter is None else self._base_ref

    def _change(self, name: str, array: np.ndarray, before: VersionRef | None) -> Change:
        """Takes a tensor over into what is held, and says how it is stored. Runs on a thread."""
        held = self._held.get(name)
        if before is not None and held is not None:
            delta = update(bits(held), bits(array))
        else:
            if held is None or (held.dtype, held.shape) != (array.dtype, array.shape):
                held = self._held[name] = np.empty_like(array)
            delta = replace(bits(held), bits(array))
        form: Form = "whole" if delta.is_whole else "sparse"
        if before is not None and delta.num_changed == 0:
            form = "same"
        entry = TensorEntry(
            name=name,
            dtype=DTYPE_NAMES[array.dtype],
            shape=array.shape,
            sha256=self._digests[name] if form == "same" else sha256(bits(held)),
            form=form,
            file=None,
            pieces=delta.pieces if form == "sparse" else (),
        )
        self._digests[name] = entry.sha256
        return Change(entry, delta)

    def _delete_old(self) -> None:
        """Deletes versions behind the bases that stay."""
        versions = [each for each in self._files.versions() if each <= (self._base or 0)]
        bases = [each for each in versions if self._is_base(each)]
        for version in versions:
            if len(bases) > self._keep and version < bases[-self._keep]:
                self._delete(version)

    def _delete_adapters(self) -> None:
        """Deletes versions with an adapter behind the newest ones: nothing is made of them."""
        while len(self._adapters) > _KEPT_ADAPTERS:
            self._delete(self._adapters.pop(0))

    def _is_base(self, version: int) -> bool:
        try:
            return load_manifest(self._files, version).previous is None
        except WeightStoreError:  # damaged: deleted with its neighbours
            return False

    def _delete(self, version: int) -> None:
        try:
            self._files.delete_version(version)
        except WeightStoreError as error:  # it harms nobody, and the next base tries again
            logger.warning("an old version stays: %s", error)


def _of_model(specs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: spec for name, spec in specs.items() if not name.startswith(PAIRS)}
