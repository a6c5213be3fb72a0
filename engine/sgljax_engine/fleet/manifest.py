"""The manifest of a version: what its files hold, and the checksums that prove it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sgljax_engine.errors import WeightStoreError
from sgljax_engine.fleet.deltas import PIECE_LEN, Piece, num_code_bytes
from sgljax_engine.weights.safetensors_file import DTYPES

FORMAT = "sgljax-weight-version-1"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"\d{5}\.safetensors")
_NUM_SIGNED = len('{"sha256":"",') + 64

Form = Literal["same", "whole", "sparse"]
"""How a version stores a tensor: not at all, since it is that of the version before; all of it; or
the values and indices that changed."""


class VersionRef(NamedTuple):
    """A version of a store, and the checksum of its tensors."""

    version: int
    checksum: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file of a version.

    Attributes:
        name: Its name in the version's folder.
        num_bytes: Its size.
        sha256: Its checksum; None for a file of whole tensors, whose own checksums prove it.
    """

    name: str
    num_bytes: int
    sha256: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor of a version.

    Attributes:
        name: Its name.
        dtype: The dtype's name in safetensors files.
        shape: Its shape.
        sha256: Checksum of the whole tensor in this version, in whatever form it is stored.
        form: How it is stored.
        file: Index of the file that holds it; None for one that is the same.
        pieces: What a sparse one holds; else empty.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    form: Form
    file: int | None
    pieces: tuple[Piece, ...] = ()

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.num_elements * DTYPES[self.dtype].itemsize


class Part(NamedTuple):
    """A tensor of a safetensors file; `start` and `end` are its bytes in the file."""

    name: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """A version.

    Attributes:
        version: Its number.
        store: Random id of the store.
        writer: Random id of the writer's life.
        previous: The version that it changes; None for a base, which is whole.
        adapter: PEFT's adapter_config where the tensors are a LoRA adapter; None for a model's.
        files: Its files.
        tensors: Its tensors.
    """

    version: int
    store: str
    writer: str
    previous: VersionRef | None
    adapter: dict[str, Any] | None
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]

    @functools.cached_property
    def checksum(self) -> str:
        """Checksum of all tensors and the adapter, however they are stored."""
        tensors = sorted((each.name, each.dtype, each.shape, each.sha256) for each in self.tensors)
        return hashlib.sha256(dump([self.adapter, tensors])).hexdigest()

    @property
    def ref(self) -> VersionRef:
        """Its number and checksum."""
        return VersionRef(self.version, self.checksum)

    def entries(self, file: int) -> list[TensorEntry]:
        """The tensors of a file, in its order."""
        return [each for each in self.tensors if each.file == file]

    def to_bytes(self) -> bytes:
        """The file's contents."""
        fields = dataclasses.asdict(self)
        fields["tensors"] = [list(dataclasses.asdict(each).values()) for each in self.tensors]
        return signed({"format": FORMAT, "checksum": self.checksum, **fields})

    @classmethod
    def from_bytes(cls, data: bytes, shown: str) -> Manifest:
        """Reads and checks a manifest; `shown` names the file in messages.

        Raises:
            WeightStoreError: it is torn, damaged, of another format, or contradicts itself.
        """
        fields = read_signed(data, shown, FORMAT)
        try:
            names = [each.name for each in dataclasses.fields(TensorEntry)]
            manifest = cls(
                version=fields["version"],
                store=fields["store"],
                writer=fields["writer"],
                previous=VersionRef(*fields["previous"]) if fields["previous"] else None,
                adapter=fields["adapter"],
                files=tuple(FileEntry(**each) for each in fields["files"]),
                tensors=tuple(
                    _tensor(dict(zip(names, each, strict=True))) for each in fields["tensors"]
                ),
            )
            _check(manifest)
            checksum = manifest.checksum
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise WeightStoreError(f"{shown} is no manifest: {error!r}") from error
        if checksum != fields["checksum"]:
            raise WeightStoreError(
                f"{shown}: its tensors have the checksum {checksum}, expected {fields['checksum']}"
            )
        return manifest


def layout(entries: Sequence[TensorEntry]) -> tuple[bytes, list[Part]]:
    """The header of a safetensors file of these tensors, and where it has what.

    A sparse tensor is two of the format's: NAME.values and NAME.codes. The tensors of a file are
    all whole or all sparse, so the names are distinct.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    spans: list[tuple[str, int, int]] = []
    end = 0
    for entry in entries:
        if entry.form == "whole":
            stored = [(entry.name, entry.dtype, entry.shape, entry.num_bytes)]
        else:
            num_values = sum(piece.num_values for piece in entry.pieces)
            num_bytes, num_codes = (
                num_values * DTYPES[entry.dtype].itemsize,
                num_code_bytes(entry.pieces),
            )
            stored = [
                (f"{entry.name}.values", entry.dtype, (num_values,), num_bytes),
                (f"{entry.name}.codes", "U8", (num_codes,), num_codes),
            ]
        for name, dtype, shape, size in stored:
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            spans.append((name, end, end + size))
            end += size
    text = dump(header)
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    parts = [Part(name, first + start, first + stop) for name, start, stop in spans]
    return len(text).to_bytes(8, "little") + text, parts


def dump(tree: Any) -> bytes:
    """Compact JSON.

    Raises:
        TypeError, ValueError: a value is not plain JSON.
    """
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()


def _tensor(fields: Mapping[str, Any]) -> TensorEntry:
    pieces = tuple(Piece(*each) for each in fields["pieces"])
    return TensorEntry(**{**fields, "shape": tuple(fields["shape"]), "pieces": pieces})


def _check(manifest: Manifest) -> None:
    """Raises what an inconsistent manifest leads to; the caller catches it."""
    if len({each.name for each in manifest.tensors}) != len(manifest.tensors):
        raise ValueError("two tensors have one name")
    for file in manifest.files:
        if not _FILE_NAME.fullmatch(file.name):
            raise ValueError(f"file {file.name!r}")
    for each in manifest.tensors:
        limits = (PIECE_LEN, 4, PIECE_LEN)
        numbers = [*each.shape, *(number for piece in each.pieces for number in piece)]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"{each.name!r} has numbers {numbers}")
        if any(n > limit for piece in each.pieces for n, limit in zip(piece, limits, strict=True)):
            raise ValueError(f"{each.name!r} has pieces {each.pieces}")
        if each.dtype not in DTYPES or not _SHA256.fullmatch(each.sha256):
            raise ValueError(f"{each.name!r} has dtype {each.dtype!r}, sha256 {each.sha256!r}")
        if each.form not in ("same", "whole", "sparse"):
            raise ValueError(f"{each.name!r} has form {each.form!r}")
        if (each.file is None) != (each.form == "same") or each.file not in (
            None,
            *range(len(manifest.files)),
        ):
            raise ValueError(f"{each.name!r} is {each.form}, in file {each.file!r}")
        if manifest.previous is None and each.form != "whole":
            raise ValueError(f"{each.name!r} of a base is {each.form}")
        is_proven = each.file is None or manifest.files[each.file].sha256 is not None
        if each.form == "sparse" and not is_proven:
            raise ValueError(f"{manifest.files[each.file or 0].name!r} has no sha256")


def signed(tree: dict[str, Any]) -> bytes:
    """A JSON object that begins with the SHA-256 of all its other bytes."""
    rest = dump(tree)[1:]
    return b'{"sha256":"%b",%b' % (hashlib.sha256(rest).hexdigest().encode(), rest)


def read_signed(data: bytes, shown: str, expected: str) -> dict[str, Any]:
    """The object that `signed` got, of the expected format.

    Raises:
        WeightStoreError: it is torn, damaged, or of another format.
    """
    found = hashlib.sha256(data[_NUM_SIGNED:]).hexdigest()
    if data[:_NUM_SIGNED] != b'{"sha256":"%b",' % found.encode():
        begin = data[:_NUM_SIGNED][11:-2]
        raise WeightStoreError(
            f"{shown} is damaged: its {len(data)} bytes have the sha256 {found}, and it begins "
            f"with {begin!r}"
        )
    fields = json.loads(data)
    if fields.get("format") != expected:
        raise WeightStoreError(
            f"{shown} has format {fields.get('format')!r}, expected {expected!r}"
        )
    return fields
