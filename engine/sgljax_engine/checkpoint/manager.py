from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from sgljax_engine.checkpoint.structures import EngineCheckpoint, check_version
from sgljax_engine.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger(__name__)

REQUESTS_NAME = "requests.json"
_FORMAT = "sgljax-engine-checkpoint"
_LOCK_NAME = ".lock"
_NUM_SIGNED = len('{"sha256":"",') + 64
_OWN_FILE = re.compile(r"(?:requests\.json|arrays-[0-9a-f]{16}\.safetensors)(?:\.tmp)?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    num_requests: int
    num_bytes: int
    seconds: float


class CheckpointManager:
    """Saves and loads the checkpoint of a folder, which holds only the last one saved.

    It consists of `requests.json` and the safetensors file that this names. Each is written beside
    and renamed; renaming `requests.json`, the last, replaces the checkpoint. So whenever the
    process or the machine dies, the folder holds the checkpoint before or the one after.

    Checksums find accidents, not an attacker who can write to the folder; but nothing in it is ever
    executed, and no name in it leads elsewhere. A lock is held while saving: of two savers into one
    folder, one gets an error.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Touches nothing yet.

        Args:
            path: The folder; made by the first save.
        """
        self._path = Path(path)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    def has_checkpoint(self) -> bool:
        """Whether the folder has a checkpoint, valid or not."""
        return (self._path / REQUESTS_NAME).is_file()

    # ------------------------------------------------------------------ save

    def save(self, checkpoint: EngineCheckpoint) -> SaveReport:
        """Replaces the checkpoint in the folder.

        Raises:
            CheckpointError: the disk is full, the folder not writable, its `requests.json` is of
                another version or program, another process is saving there, or a value does not
                fit the format. The previous checkpoint is still there, with one exception: if only
                the last step failed, forcing the new name to the disk, the new checkpoint is there;
                after a crash of the machine it may be either.
        """
        started = time.perf_counter()
        tree, tensors = checkpoint.to_dict(), {}
        for index, record in enumerate(tree["scheduler_state"]["requests"]):
            for name in [name for name, value in record.items() if isinstance(value, np.ndarray)]:
                tensors[f"{index}.{name}"] = record.pop(name)
        arrays = save(tensors)
        tree = {"format": _FORMAT, **tree, "arrays": hashlib.sha256(arrays).hexdigest()}
        try:
            requests = _signed(_dump(tree))
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"metadata must be plain JSON: {error}") from error
        try:
            self._make_folder()
            with _locked(self._path):
                previous = self._named_arrays()
                if previous is not None:
                    self._clean(previous)  # before writing: the disk may be full of the others
                self._write(_arrays_name(tree), arrays)
                _sync_folder(self._path)  # a name must never be on the disk before its contents
                self._write(REQUESTS_NAME, requests)
                _sync_folder(self._path)
                self._clean(_arrays_name(tree))
        except OSError as error:
            raise CheckpointError(f"cannot save a checkpoint in {self._path}: {error}") from error
        return SaveReport(
            num_requests=len(checkpoint.scheduler_state.requests),
            num_bytes=len(arrays) + len(requests),
            seconds=time.perf_counter() - started,
        )

    def _make_folder(self) -> None:
        if not self._path.is_dir():
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _sync_folder(self._path.parent)

    def _named_arrays(self) -> str | None:
        """The safetensors file of the checkpoint that a save replaces, if that can be read."""
        if not self.has_checkpoint():
            return None
        path = self._path / REQUESTS_NAME
        try:
            found = _parse(self._read(REQUESTS_NAME), path)
        except CheckpointError as error:
            logger.warning("the checkpoint before cannot be read, and is replaced: %s", error)
            return None
        _check_format(found, path)
        with contextlib.suppress(CheckpointError):  # damaged, which a load tells
            return _arrays_name(found)
        return None

    def _write(self, name: str, data: bytes) -> None:
        """Writes a file under a temporary name, forces it to the disk, and gives it its name."""
        temporary = self._path / f"{name}.tmp"
        try:
            # Prompts and outputs are nobody else's to read.
            with open(temporary, "wb", opener=_open_private) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path / name)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _clean(self, arrays_name: str) -> None:
        """Removes temporary files, and arrays other than these."""
        wanted = {REQUESTS_NAME, arrays_name}
        try:
            names = [name for name in os.listdir(self._path) if _OWN_FILE.fullmatch(name)]
            garbage = [name for name in names if name not in wanted]
            if garbage:
                _sync_folder(self._path)  # what names them must not come back after a crash
            for name in garbage:
                (self._path / name).unlink(missing_ok=True)
        except OSError as error:  # they harm nobody, and the next save tries again
            logger.warning("cannot remove old files in %s: %s", self._path, error)

    # ------------------------------------------------------------------ load

    def load(self) -> EngineCheckpoint:
        """Reads and checks the checkpoint in the folder.

        Raises:
            CheckpointError: there is no checkpoint, or it is truncated, damaged or of another
                version or program.
        """
        while True:
            requests = self._read(REQUESTS_NAME)
            try:
                return self._load(requests)
            except CheckpointError:
                # Somebody may have saved meanwhile, and removed what the old file names.
                if self._read(REQUESTS_NAME) == requests:
                    raise

    def _load(self, requests: bytes) -> EngineCheckpoint:
        path = self._path / REQUESTS_NAME
        tree = _parse(requests, path)
        _check_format(tree, path)
        if requests != _signed(b"{" + requests[_NUM_SIGNED:]):
            raise CheckpointError(f"{path} is damaged: its contents do not fit its SHA-256")
        name = _arrays_name(tree)
        arrays = self._read(name)
        if hashlib.sha256(arrays).hexdigest() != tree["arrays"]:
            raise CheckpointError(f"{self._path / name} is damaged: it does not fit its SHA-256")
        try:
            records = tree["scheduler_state"]["requests"]
            for key, array in load(arrays).items():
                index, _, field = key.partition(".")
                records[int(index)][field] = array
            tree = {name: tree[name] for name in tree.keys() - {"sha256", "format", "arrays"}}
            return EngineCheckpoint.from_dict(tree)
        except (SafetensorError, KeyError, IndexError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self._path} holds no checkpoint: {error}") from error

    def _read(self, name: str) -> bytes:
        path = self._path / name
        try:
            if not path.is_file():  # reading a pipe would never end
                raise CheckpointError(f"no checkpoint in {self._path}: there is no file {name}")
            return path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error


def _check_format(tree: Any, path: Path) -> None:
    if not isinstance(tree, dict) or tree.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not of an engine's checkpoint")
    check_version(tree.get("version"), str(path))


def _arrays_name(tree: dict[str, Any]) -> str:
    """The safetensors file of a checkpoint; no name is taken from a file, it could lead away."""
    if not re.fullmatch(r"[0-9a-f]{64}", str(tree.get("arrays"))):
        raise CheckpointError(f"arrays must be a SHA-256, got {tree.get('arrays')!r}")
    return f"arrays-{tree['arrays'][:16]}.safetensors"


def _signed(body: bytes) -> bytes:
    """A JSON object that begins with the SHA-256 of all its other bytes."""
    rest = body[1:]
    return b'{"sha256":"%b",%b' % (hashlib.sha256(rest).hexdigest().encode(), rest)


def _dump(tree: Any) -> bytes:
    """Compact JSON in UTF-8. Strings may hold lone surrogates, as Python's may."""
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "surrogatepass")


def _parse(data: bytes, path: Path) -> Any:
    try:
        return json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_folder(folder: Path) -> None:
    """Forces the names in a folder to the disk, where the system has a way to."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, which the system releases when the process dies.

    A file is locked, since network file systems lock only what is open for writing. It stays: two
    processes could hold two files of one name.
    """
    with open(folder / _LOCK_NAME, "ab", opener=_open_private) as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"cannot save a checkpoint in {folder}: another process or engine is saving one "
                "there. Each engine needs a folder of its own"
            ) from None
        except OSError:
            logger.warning("%s cannot be locked: only one engine may save there", folder)
        yield
