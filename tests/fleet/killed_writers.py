"""Kills a writer at each of its calls of the file system, and looks at what is left.

    python killed_writers.py FOLDER

A writer of fixed weights runs in a forked process, which ends without any cleaning up before call
N, or in the middle of it where the call writes; N is 1, 2, ... until the writer comes to its end.
Each time the store must hold whole versions only, and another writer must go on. Prints the number
of kills.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from fsspec.implementations.local import LocalFileOpener

from sgljax_engine import WeightStoreError
from sgljax_engine.fleet import VersionReader, VersionWriter

NUM_VERSIONS = 5
WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
KILLED = 9


def weights_of(version: int) -> dict[str, np.ndarray]:
    """Half of "a" changes each time, "b" never."""
    a = np.arange(40, dtype=np.float32)
    a[version::2] = version
    return {"a": a, "b": np.ones(3, np.float16), "c": np.full(4, version, np.int8)}


def new_writer(folder: Path) -> VersionWriter:
    return VersionWriter(folder, base_every=2, keep=1, max_file_bytes=100)


def write_and_die(folder: Path, at_call: int) -> None:
    """Writes all versions; ends the process at that call."""
    num_calls = 0

    def die_if_due() -> bool:
        nonlocal num_calls
        num_calls += 1
        return num_calls == at_call

    def hook(event: str, args: tuple) -> None:
        is_watched = event in WATCHED and (event != "open" or "r" not in str(args[1]))
        if is_watched and str(folder) in str(args[0]) and die_if_due():
            os._exit(KILLED)

    write = LocalFileOpener.write

    def write_half(self: LocalFileOpener, data: memoryview) -> int:
        if die_if_due():
            write(self, data[: len(data) // 2])
            self.flush()
            os._exit(KILLED)
        return write(self, data)

    sys.addaudithook(hook)
    LocalFileOpener.write = write_half
    writer = new_writer(folder)
    for version in range(1, NUM_VERSIONS + 1):
        assert writer.write(weights_of(version)).version == version


def check_version(reader: VersionReader, version: int) -> None:
    found, expected = reader.read(version).tensors, weights_of(version)
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == expected[name].tobytes() for name in found), version


def check_store(folder: Path) -> None:
    """The newest version is whole, no other is wrong, and a writer goes on behind all of them."""
    reader = VersionReader(folder)
    newest = reader.newest()
    for version in range(1, NUM_VERSIONS + 1):
        try:
            check_version(VersionReader(folder), version)
        except WeightStoreError:
            assert version != newest
    numbers = [int(path.name) for path in folder.glob("versions/*")]
    if newest is not None:
        check_version(reader, newest)
    writer = new_writer(folder)
    for expected in (True, False):
        done = writer.write(weights_of(max(numbers, default=0) + 1))
        numbers.append(max(numbers, default=0) + 1)
        assert (done.version, done.is_base) == (numbers[-1], expected)
        check_version(reader, done.version)
    left = sorted(int(path.name) for path in folder.glob("versions/*"))
    assert left == numbers[-2:], left  # what was torn is gone


def main() -> None:
    """Kills it everywhere."""
    for at_call in range(1, 1000):
        folder = Path(sys.argv[1]) / str(at_call)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                write_and_die(folder, at_call)
                status = 0
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, KILLED), status
        check_store(folder)
        if status == 0:
            sys.stdout.write(f"{at_call - 1}\n")
            return


if __name__ == "__main__":
    main()
