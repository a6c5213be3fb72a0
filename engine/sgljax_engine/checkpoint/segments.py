"""Segments: files with the requests that one save wrote.

`requests-000003.json` holds a record for each request, `requests-000003.safetensors` all of their
tokens and log-probs: each kind is one tensor, the requests' own behind one another.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from sgljax_engine.checkpoint.codecs import entries
from sgljax_engine.checkpoint.fields import MAX_COUNT, Fields, dump_json, parse_json
from sgljax_engine.checkpoint.files import Compression, FileEntry, read_file, write_file
from sgljax_engine.checkpoint.request import RequestCheckpoint
from sgljax_engine.errors import CheckpointError

_MAX_GARBAGE = 0.5
"""Share of the stored requests; with more garbage, all requests are written anew."""

_MAX_SEGMENTS = 32

_MAX_RECORD_BYTES = 16 << 20
"""Limit of a request's JSON: a bias for each of a million tokens."""

_MAX_HEADER_BYTES = 1 << 16
"""Limit of the header of safetensors with these few arrays."""

_DTYPES = {name: dtypes for name, dtypes in entries(RequestCheckpoint).items() if dtypes}
"""Dtypes of the arrays of a request, by name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The entry in a manifest for the files of one save.

    Attributes:
        number: Of the save; in the files' names.
        num_requests: Records in it, whether or not anybody still wants them.
        compression: Of its files.
        files: Their names, sizes and checksums.
    """

    number: int
    num_requests: int
    compression: Compression
    files: tuple[FileEntry, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.num_bytes for file in self.files)


class PackedRequest(NamedTuple):
    """A request as it is stored.

    Attributes:
        rid: Its id.
        age_s: Kept in the manifest, since it changes when nothing else does.
        record: All else that is no array, as JSON.
        columns: Its arrays.
        digest: Of record and arrays: the same if and only if nothing changed.
    """

    rid: str
    age_s: float
    record: bytes
    columns: dict[str, np.ndarray]
    digest: str


def segment_names(number: int, compression: Compression) -> tuple[str, str]:
    """The files of a segment: records and arrays."""
    end = "" if compression is None else ".zst"
    return f"requests-{number:06}.json{end}", f"requests-{number:06}.safetensors{end}"


def pack(request: RequestCheckpoint) -> PackedRequest:
    """Takes a request apart."""
    record = request.to_dict()
    columns = {name: record.pop(name) for name in _DTYPES}
    columns = {name: array for name, array in columns.items() if array is not None}
    age_s = record.pop("age_s")
    record["shapes"] = {name: list(array.shape) for name, array in columns.items()}
    text = dump_json(record)
    digest = hashlib.blake2b(text, digest_size=16)
    for array in columns.values():
        digest.update(array.dtype.char.encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return PackedRequest(request.rid, age_s, text, columns, digest.hexdigest())


def write_segment(
    folder: Path, number: int, requests: Sequence[PackedRequest], compression: Compression
) -> Segment:
    """Writes requests to two files; `sync_folder` has to follow."""
    joined: dict[str, np.ndarray] = {}
    for name, allowed in _DTYPES.items():
        parts = [each.columns[name].ravel() for each in requests if name in each.columns]
        joined[name] = np.concatenate(parts) if parts else np.empty(0, allowed[0])
    dtypes = dump_json({name: array.dtype.name for name, array in joined.items()})
    records = b",\n".join(each.record for each in requests)
    text = b'{"dtypes":%b,"requests":[\n%b\n]}\n' % (dtypes, records)
    names = segment_names(number, compression)
    files = (
        write_file(folder, names[0], [text], compression),
        write_file(folder, names[1], [save(joined)], compression),
    )
    return Segment(number=number, num_requests=len(requests), compression=compression, files=files)


def read_segment(folder: Path, segment: Segment) -> list[dict[str, Any]]:
    """The dicts of its requests, all but `age_s`; their arrays are views.

    Raises:
        CheckpointError: names the file that is missing, truncated, damaged or inconsistent.
    """
    first, second = segment.files
    path = folder / first.name
    most = _MAX_RECORD_BYTES * segment.num_requests
    loaded = parse_json(read_file(folder, first, segment.compression, most), str(path))
    fields = Fields(loaded, str(path), ("dtypes", "requests"))
    dtypes = Fields(fields.value("dtypes"), f"{path}: dtypes", _DTYPES)
    for name, allowed in _DTYPES.items():
        if dtypes.value(name) not in allowed:
            raise dtypes.error(name, f"one of {', '.join(allowed)}")
    records = fields.list("requests")
    if len(records) != segment.num_requests:
        raise CheckpointError(
            f"{path} has {len(records)} requests, the manifest says {segment.num_requests}"
        )
    shapes = [_take_shapes(record, f"{path}: request {i}") for i, record in enumerate(records)]
    sizes = [{name: math.prod(shape) for name, shape in each.items()} for each in shapes]
    expected = {
        name: (dtypes.text(name), (sum(each.get(name, 0) for each in sizes),)) for name in _DTYPES
    }
    most = _MAX_HEADER_BYTES + sum(
        np.dtype(dtype).itemsize * count for dtype, (count,) in expected.values()
    )
    data = read_file(folder, second, segment.compression, most)
    columns = _load(folder / second.name, bytes(data))
    if {name: (array.dtype.name, array.shape) for name, array in columns.items()} != expected:
        raise CheckpointError(f"{folder / second.name} does not hold the arrays of {first.name}")
    starts = dict.fromkeys(_DTYPES, 0)
    for record, shape_of, size_of in zip(records, shapes, sizes, strict=True):
        for name in _DTYPES:
            record[name] = None
            if name in shape_of:
                end = starts[name] + size_of[name]
                record[name] = columns[name][starts[name] : end].reshape(shape_of[name])
                starts[name] = end
    return records


def _load(path: Path, data: bytes) -> dict[str, np.ndarray]:
    try:
        return load(data)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that numpy has not
        raise CheckpointError(f"{path} is no safetensors file of numpy arrays: {error}") from error


def needs_compaction(segments: dict[int, Segment], num_kept: int, num_requests: int) -> bool:
    """Whether too much of what would be stored is garbage.

    Args:
        segments: Old ones that are still needed.
        num_kept: Requests in them that are.
        num_requests: Of the new checkpoint.
    """
    num_stored = sum(segment.num_requests for segment in segments.values())
    num_garbage = num_stored - num_kept
    num_all = num_garbage + num_requests
    return num_garbage > _MAX_GARBAGE * num_all or len(segments) >= _MAX_SEGMENTS


def _take_shapes(record: Any, where: str) -> dict[str, tuple[int, ...]]:
    """Removes the shapes of a record's arrays from it."""
    if not isinstance(record, dict) or not isinstance(record.get("shapes"), dict):
        raise CheckpointError(f"{where} must be a dict with the shapes of its arrays")
    shapes = {}
    for name, shape in record.pop("shapes").items():
        is_list = name in _DTYPES and isinstance(shape, list) and 1 <= len(shape) <= 2
        if not is_list or not all(type(n) is int and 0 <= n <= MAX_COUNT for n in shape):
            raise CheckpointError(f"{where}: no array {name!r} can have the shape {shape!r}")
        shapes[name] = tuple(shape)
    given = [name for name in _DTYPES if name in record]
    if given:
        raise CheckpointError(f"{where}: {given} must not be in the JSON")
    return shapes
