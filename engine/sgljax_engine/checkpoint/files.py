"""Files that are either whole or not there, with their checksums."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import stat
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

from sgljax_engine.errors import CheckpointError, InvalidConfigError

Compression = Literal["zstd"] | None
Buffer = bytes | memoryview

TEMPORARY = ".tmp"
_CHUNK_BYTES = 1 << 22


class FileEntry(NamedTuple):
    """A file's entry in a manifest.

    Attributes:
        name: Without a folder.
        num_bytes: As stored, compressed or not.
        sha256: Of the stored bytes, in hexadecimal.
    """

    name: str
    num_bytes: int
    sha256: str


def check_compression(compression: Compression) -> None:
    """Raises InvalidConfigError for an unknown compression, or without its package."""
    if compression not in (None, "zstd"):
        raise InvalidConfigError(f"compression must be 'zstd' or None, got {compression!r}")
    if compression is not None:
        try:
            _zstandard()
        except CheckpointError as error:
            raise InvalidConfigError(f"compression={compression!r}: {error}") from error


def write_file(
    folder: Path, name: str, buffers: Iterable[Buffer], compression: Compression = None
) -> FileEntry:
    """Writes a file under a temporary name, forces it to the disk, and gives it its name.

    Its name is on the disk for sure only after `sync_folder`.
    """
    temporary = folder / f"{name}{TEMPORARY}"
    digest, num_bytes = hashlib.sha256(), 0
    try:
        # Prompts and outputs are nobody else's to read.
        with open(temporary, "wb", opener=_open_private) as file:
            for buffer in _compressed(buffers, compression):
                digest.update(buffer)
                file.write(buffer)
                num_bytes += len(buffer)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / name)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return FileEntry(name, num_bytes, digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """Forces the names in a folder to the disk, where the system has a way to."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_file(
    folder: Path, entry: FileEntry, compression: Compression, max_bytes: int
) -> bytes | bytearray:
    """The contents of a file, checked and decompressed; CheckpointError names what is wrong.

    Args:
        folder: Where it is.
        entry: What the manifest knows of it.
        compression: Of the file.
        max_bytes: Decompressed contents that are larger are refused before they take memory.
    """
    path = folder / entry.name
    with opened(path) as file:
        _check_size(path, os.fstat(file.fileno()).st_size, entry)
        data = file.read()
    _check_digest(path, hashlib.sha256(data).hexdigest(), entry)
    if compression is None:
        return data
    zstd, contents = _zstandard(), bytearray()
    try:
        # Not `decompress`: the frame of a stream does not say how long its contents are.
        with zstd.ZstdDecompressor().stream_reader(data) as reader:
            while piece := reader.read(_CHUNK_BYTES):
                contents += piece
                if len(contents) > max_bytes:
                    raise CheckpointError(f"{path} holds more than {max_bytes} bytes")
    except zstd.ZstdError as error:
        raise CheckpointError(f"{path} cannot be decompressed: {error}") from error
    return contents


def check_file(folder: Path, entry: FileEntry) -> None:
    """Raises CheckpointError unless a file has the contents that a manifest says."""
    path = folder / entry.name
    with opened(path) as file:
        _check_size(path, os.fstat(file.fileno()).st_size, entry)
        _check_digest(path, hashlib.file_digest(file, "sha256").hexdigest(), entry)


def check_size(folder: Path, entry: FileEntry) -> None:
    """Raises CheckpointError unless a file has the size that a manifest says."""
    with opened(folder / entry.name) as file:
        _check_size(folder / entry.name, os.fstat(file.fileno()).st_size, entry)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """A file to read; what the system says against it becomes a CheckpointError."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path} is no regular file")
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"no such file: {path}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _open_at_once(path: str, flags: int) -> int:
    """Without waiting for somebody who writes to a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_into(file: BufferedReader, target: memoryview) -> bool:
    """Reads into a buffer; whether the contents fill it exactly."""
    return file.readinto(target) == len(target) and not file.read(1)


def decompress_into(file: BufferedReader, target: memoryview) -> bool:
    """Decompresses into a buffer; whether the contents fill it exactly."""
    zstd = _zstandard()
    try:
        with zstd.ZstdDecompressor().stream_reader(file, closefd=False) as reader:
            filled = 0
            while filled < len(target):
                count = reader.readinto(target[filled : filled + _CHUNK_BYTES])
                if count == 0:
                    return False
                filled += count
            return not reader.read(1)
    except zstd.ZstdError:
        return False


def _check_size(path: Path, num_bytes: int, entry: FileEntry) -> None:
    if num_bytes != entry.num_bytes:
        raise CheckpointError(
            f"{path} has {num_bytes} bytes, the manifest says {entry.num_bytes} (truncated?)"
        )


def _check_digest(path: Path, sha256: str, entry: FileEntry) -> None:
    if sha256 != entry.sha256:
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 is {sha256}, the manifest says {entry.sha256}"
        )


def _compressed(buffers: Iterable[Buffer], compression: Compression) -> Iterator[Buffer]:
    """Pieces small enough that compressing one takes little memory."""
    compressor = None if compression is None else _zstandard().ZstdCompressor().compressobj()
    for buffer in buffers:
        for start in range(0, len(buffer), _CHUNK_BYTES):
            piece = buffer[start : start + _CHUNK_BYTES]
            yield piece if compressor is None else compressor.compress(piece)
    if compressor is not None:
        yield compressor.flush()


def _zstandard() -> ModuleType:
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise CheckpointError("zstd needs the package zstandard: pip install zstandard") from None
