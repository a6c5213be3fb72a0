"""Keeps the newest checkpoint of an engine in a folder."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import time
from pathlib import Path
from typing import Literal

from sgljax_engine.checkpoint.codecs import to_dict
from sgljax_engine.checkpoint.files import (
    TEMPORARY,
    check_compression,
    check_file,
    check_size,
    sync_folder,
)
from sgljax_engine.checkpoint.lock import locked
from sgljax_engine.checkpoint.manifest import (
    MANIFEST_NAME,
    ForeignManifestError,
    Manifest,
    StoredPrefix,
    StoredRequest,
    read_manifest,
)
from sgljax_engine.checkpoint.prefix_file import read_prefix, write_prefix
from sgljax_engine.checkpoint.segments import (
    PackedRequest,
    needs_compaction,
    pack,
    read_segment,
    write_segment,
)
from sgljax_engine.checkpoint.structures import CHECKPOINT_VERSION, EngineCheckpoint
from sgljax_engine.errors import CheckpointError

logger = logging.getLogger(__name__)

_IN_FILES = ("requests", "prefix_cache")
"""Fields of `SchedulerCheckpoint` that have files of their own; the others are in the manifest."""

_OWN_FILE = re.compile(r"(?:requests|prefix)-(\d{6,})\.(?:json|safetensors)(?:\.zst)?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """Facts about a save.

    Attributes:
        num_requests: Requests in the checkpoint.
        num_written: Written requests: the changed ones, or all if `is_compacted`.
        num_segments: Segments of the checkpoint.
        num_bytes: Bytes written, after compression.
        is_compacted: Whether all requests were written anew, to remove garbage.
        seconds: Seconds that it took.
    """

    num_requests: int
    num_written: int
    num_segments: int
    num_bytes: int
    is_compacted: bool
    seconds: float


class CheckpointManager:
    """Saves and loads the checkpoint of a folder, which holds only the last one saved.

    A save writes the requests whose digest has changed since the last one; a digest covers all
    contents. So requests of another process, a reused id, or a restored engine with other outputs
    are never mistaken for what is in the folder.

    Whenever the process or the machine dies, the folder holds the checkpoint before or the one
    after. Checksums find accidents, not an attacker who can write to the folder; but nothing in
    it is ever executed, and no name in it leads elsewhere. Not thread-safe. A lock is held while
    saving: of two savers into one folder, one gets an error.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, compression: Literal["zstd"] | None = None
    ) -> None:
        """Touches nothing yet.

        Args:
            path: The folder; made by the first save.
            compression: Compression of new files; existing files are read either way.

        Raises:
            InvalidConfigError: the compression is unknown or its package is not installed.
        """
        check_compression(compression)
        self._path = Path(path)
        self._compression: Literal["zstd"] | None = compression
        self._current: tuple[Manifest, tuple[int, ...]] | None = None

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    def has_checkpoint(self) -> bool:
        """Whether the folder has a checkpoint, valid or not."""
        return (self._path / MANIFEST_NAME).is_file()

    # ------------------------------------------------------------------ save

    def save(self, checkpoint: EngineCheckpoint) -> SaveReport:
        """Replaces the checkpoint in the folder.

        Raises:
            CheckpointError: the disk is full, the folder not writable, it holds a checkpoint of a
                newer version or other files, another process is saving there, or a value does not
                fit the format. The previous checkpoint is still there, with one exception: if only
                the last step failed, forcing the new manifest's name to the disk, the new
                checkpoint is there; after a crash of the machine it may be either. The manager can
                go on saving.
        """
        started = time.perf_counter()
        try:
            self._make_folder()
            with locked(self._path):
                report = self._replace(checkpoint)
        except OSError as error:
            raise CheckpointError(f"cannot save a checkpoint in {self._path}: {error}") from error
        return dataclasses.replace(report, seconds=time.perf_counter() - started)

    def _replace(self, checkpoint: EngineCheckpoint) -> SaveReport:
        previous, self._current = self._current, None  # until it is known what is on the disk
        is_known = previous is not None and previous[1] == self._stamp()
        found = previous[0] if previous is not None and is_known else self._read_previous()
        if found is not None:
            self._clean(found)  # before writing: the disk may be full of them
        sound = {} if found is None else self._sound_requests(found, is_known=is_known)
        manifest, report = self._write(checkpoint, found, sound)
        self._current = manifest, self._stamp()
        self._clean(manifest)
        return report

    def _stamp(self) -> tuple[int, ...]:
        """A value that changes when somebody else saves here."""
        try:
            found = os.stat(self._path / MANIFEST_NAME)
        except FileNotFoundError:
            return ()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def _make_folder(self) -> None:
        if not self._path.is_dir():
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_folder(self._path.parent)

    def _read_previous(self) -> Manifest | None:
        if not self.has_checkpoint():
            return None
        try:
            return read_manifest(self._path)
        except ForeignManifestError:
            raise  # it is not ours to replace
        except CheckpointError as error:
            logger.warning("the checkpoint before cannot be read, all is written anew: %s", error)
            return None

    def _sound_requests(self, previous: Manifest, *, is_known: bool) -> dict[str, StoredRequest]:
        """Stored requests that a new checkpoint may refer to: neither missing nor damaged."""
        sound = set()
        for segment in previous.segments.values():
            try:
                for file in segment.files:
                    if is_known:  # written by this object
                        check_size(self._path, file)
                    else:
                        check_file(self._path, file)
            except CheckpointError as error:
                logger.warning("its requests are written anew: %s", error)
            else:
                sound.add(segment.number)
        return {each.rid: each for each in previous.requests if each.segment in sound}

    def _write(
        self,
        checkpoint: EngineCheckpoint,
        previous: Manifest | None,
        stored: dict[str, StoredRequest],
    ) -> tuple[Manifest, SaveReport]:
        state = checkpoint.scheduler_state
        packed = [pack(request) for request in state.requests.values()]
        kept = {
            each.rid: stored[each.rid]
            for each in packed
            if each.rid in stored and stored[each.rid].digest == each.digest
        }
        segments = {} if previous is None else previous.segments
        segments = {
            number: segments[number] for number in sorted({e.segment for e in kept.values()})
        }
        is_compacted = needs_compaction(segments, len(kept), len(packed))
        if is_compacted:
            kept, segments = {}, {}
        changed = [each for each in packed if each.rid not in kept]
        number = self._next_number(previous)
        num_bytes = 0
        if changed:
            segments[number] = write_segment(self._path, number, changed, self._compression)
            num_bytes += segments[number].num_bytes
        prefix = None
        if state.prefix_cache is not None:
            file, sizes = write_prefix(self._path, number, state.prefix_cache, self._compression)
            prefix = StoredPrefix(number, self._compression, file, sizes)
            num_bytes += file.num_bytes
        manifest = Manifest(
            number=number,
            timestamp=checkpoint.timestamp,
            metadata=checkpoint.metadata,
            scheduler=to_dict(state, "scheduler_state", without=_IN_FILES),
            requests=_stored_requests(packed, kept, number),
            segments=segments,
            prefix=prefix,
        )
        sync_folder(self._path)  # the manifest must never name files that are not there
        num_bytes += manifest.write(self._path).num_bytes
        sync_folder(self._path)
        return manifest, SaveReport(
            num_requests=len(packed),
            num_written=len(changed),
            num_segments=len(segments),
            num_bytes=num_bytes,
            is_compacted=is_compacted,
            seconds=0.0,
        )

    def _next_number(self, previous: Manifest | None) -> int:
        """A number higher than that of any file, so that none is overwritten."""
        numbers = [int(match[1]) for match in map(_OWN_FILE.match, os.listdir(self._path)) if match]
        return 1 + max([*numbers, 0 if previous is None else previous.number], default=0)

    def _clean(self, manifest: Manifest) -> None:
        """Removes temporary files and those that the manifest does not name."""
        wanted = {MANIFEST_NAME, *(file.name for file in manifest.files)}
        try:
            names = [name for name in os.listdir(self._path) if name not in wanted]
            garbage = [name for name in names if _is_own(name)]
            if garbage:
                sync_folder(self._path)  # an older manifest, which names them, must not come back
            for name in garbage:
                (self._path / name).unlink(missing_ok=True)
        except OSError as error:  # they harm nobody, and the next save tries again
            logger.warning("cannot remove old files in %s: %s", self._path, error)

    # ------------------------------------------------------------------ load

    def load(self) -> EngineCheckpoint:
        """Reads and checks the checkpoint in the folder.

        Raises:
            CheckpointError: there is no checkpoint, a file is missing, truncated, damaged, of a
                newer version or inconsistent, or zstandard is needed and not installed.
        """
        if not self._path.exists():
            raise CheckpointError(f"no such folder of a checkpoint: {str(self._path)!r}")
        while True:
            manifest = read_manifest(self._path)
            try:
                return self._read(manifest)
            except CheckpointError:
                # Somebody may have saved meanwhile, and removed what the old manifest names.
                if read_manifest(self._path).number == manifest.number:
                    raise

    def _read(self, manifest: Manifest) -> EngineCheckpoint:
        records = {
            number: read_segment(self._path, segment)
            for number, segment in manifest.segments.items()
        }
        requests = []
        for stored in manifest.requests:
            record = records[stored.segment][stored.place]
            if record.get("rid") != stored.rid:
                raise CheckpointError(
                    f"{self._path}: the manifest takes request {record.get('rid')!r} for "
                    f"{stored.rid!r}"
                )
            requests.append(record | {"age_s": stored.age_s})
        prefix = None
        if manifest.prefix is not None:
            _, compression, file, sizes = manifest.prefix
            prefix = read_prefix(self._path, file, sizes, compression)
        own = dict(zip(_IN_FILES, (requests, prefix), strict=True))
        clash = own.keys() & manifest.scheduler.keys()
        if clash:
            raise CheckpointError(f"{self._path / MANIFEST_NAME}: scheduler has {sorted(clash)}")
        given = {
            "version": CHECKPOINT_VERSION,
            "timestamp": manifest.timestamp,
            "metadata": manifest.metadata,
            "scheduler_state": manifest.scheduler | own,
        }
        try:
            return EngineCheckpoint.from_dict(given)
        except CheckpointError as error:
            raise CheckpointError(f"{self._path}: {error}") from error


def _stored_requests(
    packed: list[PackedRequest], kept: dict[str, StoredRequest], number: int
) -> tuple[StoredRequest, ...]:
    requests, num_new = [], 0
    for each in packed:
        old = kept.get(each.rid)
        if old is None:
            requests.append(StoredRequest(each.rid, number, num_new, each.age_s, each.digest))
            num_new += 1
        else:
            requests.append(old._replace(age_s=each.age_s))
    return tuple(requests)


def _is_own(name: str) -> bool:
    whole = name.removesuffix(TEMPORARY)
    return bool(_OWN_FILE.fullmatch(whole)) or name == MANIFEST_NAME + TEMPORARY
