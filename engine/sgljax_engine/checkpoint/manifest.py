"""The manifest: the one file that says what a checkpoint consists of.

It is replaced last, in one step; files that it does not name are no part of the checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from sgljax_engine.checkpoint.fields import Fields, dump_json, parse_json
from sgljax_engine.checkpoint.files import Compression, FileEntry, opened, write_file
from sgljax_engine.checkpoint.prefix_file import prefix_name
from sgljax_engine.checkpoint.segments import Segment, segment_names
from sgljax_engine.checkpoint.structures import CHECKPOINT_VERSION, check_version
from sgljax_engine.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
_FORMAT = "sgljax-engine-checkpoint"
_MAX_NUMBER = 10**12


class ForeignManifestError(CheckpointError):
    """The folder has a sound manifest of a newer version, or of something else."""


class StoredRequest(NamedTuple):
    """The position of a stored request.

    Attributes:
        rid: Its id.
        segment: The number of its segment.
        place: Its own there.
        age_s: Its age when the checkpoint was made.
        digest: Of its contents.
    """

    rid: str
    segment: int
    place: int
    age_s: float
    digest: str


class StoredPrefix(NamedTuple):
    """The files of a stored prefix cache.

    Attributes:
        number: Of the save that wrote it.
        compression: Of its file.
        file: Its name, size and checksum.
        sizes: See `prefix_file.write_prefix`.
    """

    number: int
    compression: Compression
    file: FileEntry
    sizes: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of the file.

    Attributes:
        number: Of the save; later ones have higher numbers.
        timestamp, metadata: As of `EngineCheckpoint`.
        scheduler: The queues and numbers of `SchedulerCheckpoint`.
        requests: In order.
        segments: Those that a request is in, by number.
        prefix: None without one.
    """

    number: int
    timestamp: float
    metadata: dict[str, Any]
    scheduler: dict[str, Any]
    requests: tuple[StoredRequest, ...]
    segments: dict[int, Segment]
    prefix: StoredPrefix | None

    @property
    def files(self) -> list[FileEntry]:
        """All files that belong to the checkpoint, this one excepted."""
        files = [file for segment in self.segments.values() for file in segment.files]
        return files if self.prefix is None else [*files, self.prefix.file]

    def write(self, folder: Path) -> FileEntry:
        """Replaces the manifest in a folder; `sync_folder` has to follow."""
        body = {name: getattr(self, name) for name in _FIELDS}  # tuples become lists
        body["segments"] = [dataclasses.asdict(segment) for segment in self.segments.values()]
        body["prefix"] = None if self.prefix is None else self.prefix._asdict()
        body = {"format": _FORMAT, "version": CHECKPOINT_VERSION, **body}
        data = dump_json(_signed(body))
        return write_file(folder, MANIFEST_NAME, [data])


_FIELDS = tuple(field.name for field in dataclasses.fields(Manifest))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        ForeignManifestError: it is of a newer version or no manifest of a checkpoint.
        CheckpointError: there is none, or what is wrong with it.
    """
    path = folder / MANIFEST_NAME
    with opened(path) as file:
        data = file.read()
    loaded = parse_json(data, str(path))
    if not isinstance(loaded, dict) or loaded.get("format") != _FORMAT:
        raise ForeignManifestError(f"{path} is not the manifest of an engine checkpoint")
    try:
        check_version(loaded.get("version"), str(path))  # before the fields, which may be others
    except CheckpointError as error:
        raise ForeignManifestError(str(error)) from None
    fields = Fields(loaded, str(path), ("format", "version", *_FIELDS, "sha256"))
    # Compared as bytes, so that no two files have the same checksum.
    body = {name: value for name, value in loaded.items() if name != "sha256"}
    try:
        expected = dump_json(_signed(body))
    except (ValueError, RecursionError):  # an infinite number
        expected = b""
    if expected != data:
        raise CheckpointError(f"{path} is damaged: its contents do not fit its SHA-256")
    segments = [_segment(each, f"{path}: segment") for each in fields.list("segments")]
    by_number = {segment.number: segment for segment in segments}
    if len(by_number) < len(segments):
        raise CheckpointError(f"{path}: a segment is there twice")
    metadata = fields.value("metadata")
    scheduler = fields.value("scheduler")
    for name in ("metadata", "scheduler"):
        if not isinstance(fields.value(name), dict):
            raise fields.error(name, "a dict")
    return Manifest(
        number=fields.count("number", high=_MAX_NUMBER),
        timestamp=fields.number("timestamp"),
        metadata=metadata,
        scheduler=scheduler,
        requests=tuple(_stored(each, by_number, path) for each in fields.list("requests")),
        segments=by_number,
        prefix=_prefix(fields.value("prefix"), f"{path}: prefix"),
    )


def _signed(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"sha256": hashlib.sha256(dump_json(body)).hexdigest()}


def _segment(given: object, where: str) -> Segment:
    fields = Fields(given, where, [field.name for field in dataclasses.fields(Segment)])
    number, compression = fields.count("number", high=_MAX_NUMBER), _compression(fields)
    names = segment_names(number, compression)
    files = fields.list("files")
    if len(files) != len(names):
        raise fields.error("files", f"{len(names)} files")
    return Segment(
        number=number,
        num_requests=fields.count("num_requests", low=1),
        compression=compression,
        files=tuple(_file(each, name, where) for each, name in zip(files, names, strict=True)),
    )


def _prefix(given: object, where: str) -> StoredPrefix | None:
    if given is None:
        return None
    fields = Fields(given, where, StoredPrefix._fields)
    number, compression = fields.count("number", high=_MAX_NUMBER), _compression(fields)
    file = _file(fields.list("file"), prefix_name(number, compression), where)
    return StoredPrefix(number, compression, file, fields.value("sizes"))


def _compression(fields: Fields) -> Compression:
    match fields.value("compression"):
        case None:
            return None
        case "zstd":
            return "zstd"
    raise fields.error("compression", "null or 'zstd'")


def _file(given: object, name: str, where: str) -> FileEntry:
    """A name is never taken from a file: it could lead out of the folder."""
    values = given if isinstance(given, list) else []
    fields = Fields(dict(zip(FileEntry._fields, values, strict=False)), where, FileEntry._fields)
    if fields.text("name") != name:
        raise fields.error("name", repr(name))
    if not re.fullmatch(r"[0-9a-f]{64}", fields.text("sha256")):
        raise fields.error("sha256", "64 hexadecimal digits")
    return FileEntry(name, fields.count("num_bytes"), fields.text("sha256"))


def _stored(given: object, segments: dict[int, Segment], path: Path) -> StoredRequest:
    values = given if isinstance(given, list) else []
    names = StoredRequest._fields
    fields = Fields(dict(zip(names, values, strict=False)), f"{path}: request", names)
    number, place = fields.count("segment"), fields.count("place")
    if number not in segments or place >= segments[number].num_requests:
        raise CheckpointError(f"{path}: request {fields.text('rid')!r} is in no segment")
    return StoredRequest(
        fields.text("rid"), number, place, fields.number("age_s"), fields.text("digest")
    )
