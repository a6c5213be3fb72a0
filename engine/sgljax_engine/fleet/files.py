"""The files of a weight store, in a folder or behind any other URL that fsspec knows.

Nothing is forced to the disk: after a crash of the machine a version may be torn, which its
checksums tell, and a trainer that starts again writes a base.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from sgljax_engine.errors import WeightStoreError

MANIFEST = "manifest.json"
STORE_FILE = "store.json"
_CLAIM = "writer.json"
_VERSIONS = "versions"
_WRITER = re.compile(rb"[0-9a-f]{32}")
_FOLDER = re.compile(r"\d{10}")
_WRITE_BLOCK_BYTES = 64 * 2**20
"""Bytes of a part of an upload; folders ignore it."""


class StoreFiles:
    """Reads and writes files by their paths below a store's root. Any thread may call.

    Every failure is a WeightStoreError that names the file.
    """

    def __init__(self, store: str | Path) -> None:
        """Touches nothing yet.

        Raises:
            WeightStoreError: fsspec knows no such URL, or needs a package for it.
        """
        self.url = str(store)
        try:
            self._fs, self._root = url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise WeightStoreError(f"weight store {self.url!r}: {error}") from error
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def path(self, version: int, name: str = "") -> str:
        """The path of a file in a version's folder, or of the folder."""
        return posixpath.join(_VERSIONS, f"{version:010}", name).rstrip("/")

    def shown(self, path: str) -> str:
        """A path as messages name it."""
        return posixpath.join(self.url, path)

    def versions(self) -> list[int]:
        """Numbers of all versions' folders, complete or not, rising."""
        names = self._list(_VERSIONS)
        return sorted(int(name) for name in names if _FOLDER.fullmatch(name))

    def has_manifest(self, version: int) -> bool:
        """Whether a version's folder has a manifest, valid or not."""
        return MANIFEST in self._list(self.path(version))

    def has_store_file(self) -> bool:
        """Whether the file that names the store is there, valid or not."""
        return STORE_FILE in self._list("")

    def num_bytes(self, path: str) -> int:
        """Size of a file."""
        with self._naming("read", path):
            return int(self._fs.size(self._full(path)))

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """The bytes of a file, or those from `start` to before `end`; fewer where it ends."""
        with self._naming("read", path):
            return self._fs.cat_file(self._full(path), start=start, end=end)

    def write(self, path: str, parts: Iterable[memoryview]) -> None:
        """Writes a file of these bytes, one part after the other."""
        with (
            self._naming("write", path),
            self._fs.open(self._full(path), "wb", block_size=_WRITE_BLOCK_BYTES) as file,
        ):
            for part in parts:
                _write_all(file, part)

    def replace(self, path: str, data: bytes) -> None:
        """Writes a file so that readers find the old one or the whole new one."""
        with self._naming("write", path):
            full = self._full(path)
            if self._is_local:
                with open(f"{full}.tmp", "wb") as file:
                    file.write(data)
                os.replace(f"{full}.tmp", full)
            else:  # a bucket shows a file when it is whole
                self._fs.pipe_file(full, data)

    def create(self, path: str, data: bytes) -> bool:
        """Writes a file unless there is one, which is decided in one piece; whether it did."""
        with self._naming("write", path):
            full = self._full(path)
            self._fs.makedirs(posixpath.dirname(full), exist_ok=True)
            try:
                if self._is_local:
                    with open(full, "xb") as file:
                        file.write(data)
                else:
                    self._fs.pipe_file(full, data, mode="create")
            except FileExistsError:
                return False
            # A file system that does not know the mode overwrites: then the last one has it.
            return self._fs.cat_file(full) == data

    def claim(self, version: int, writer: str) -> bool:
        """Takes a version's folder for a writer; whether no other has it."""
        return self.create(self.path(version, _CLAIM), writer.encode())

    def claimant(self, version: int) -> str | None:
        """The writer that claimed a version's folder; None if none did, or not to the end."""
        if _CLAIM not in self._list(self.path(version)):
            return None
        data = self.read(self.path(version, _CLAIM))
        return data.decode() if _WRITER.fullmatch(data) else None

    def delete_version(self, version: int) -> None:
        """Deletes a version's folder, its manifest first: what is left is no version."""
        folder = self.path(version)
        with self._naming("delete", folder):
            if self.has_manifest(version):
                self._fs.rm_file(self._full(self.path(version, MANIFEST)))
            self._fs.rm(self._full(folder), recursive=True)

    def _list(self, folder: str) -> set[str]:
        """Names in a folder, as they are now; of none if it is not there."""
        with self._naming("list", folder):
            full = self._full(folder).rstrip("/")
            self._fs.invalidate_cache(full)
            try:
                found: list[Any] = self._fs.ls(full, detail=False)
            except FileNotFoundError:
                return set()
            return {posixpath.basename(each.rstrip("/")) for each in found}

    def _full(self, path: str) -> str:
        return posixpath.join(self._root, path)

    @contextlib.contextmanager
    def _naming(self, action: str, path: str) -> Iterator[None]:
        try:
            yield
        except WeightStoreError:
            raise
        except FileNotFoundError as error:
            raise WeightStoreError(
                f"cannot {action} {self.shown(path)}: it is missing (deleted behind newer "
                "versions, or never written to its end)"
            ) from error
        except Exception as error:  # clients of buckets have classes of their own
            what = f"{type(error).__name__}: {error}"
            raise WeightStoreError(f"cannot {action} {self.shown(path)}: {what}") from error


def _write_all(file: Any, part: memoryview) -> None:
    while part.nbytes:
        part = part[file.write(part) :]
