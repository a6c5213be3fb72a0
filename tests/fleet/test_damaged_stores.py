"""Folders damaged in every way that files can be: no read returns a wrong tensor."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from sgljax_engine import WeightStoreError
from sgljax_engine.fleet import VersionReader, VersionWriter, deltas, reader
from sgljax_engine.weights.safetensors_file import SafetensorsFile
from tests.fleet.weight_stores import (
    DTYPES,
    PIECE_LEN,
    Weights,
    changed,
    check_read,
    random_array,
    same,
)
from tests.tiers import tiered

NUM_CASES = 500
NUM_VERSIONS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Store:
    """A good store: bases are 1 and 4."""

    folder: Path
    versions: dict[int, Weights]


def make_store(folder: Path, seed: int, shapes: list[tuple[int, ...]]) -> Store:
    rng = np.random.default_rng(seed)
    weights = {f"t{i}": random_array(rng, DTYPES[i % 3], shape) for i, shape in enumerate(shapes)}
    writer = VersionWriter(folder, base_every=3, keep=9, max_file_bytes=300)
    versions = {}
    for _ in range(NUM_VERSIONS):
        versions[writer.write(weights).version] = weights
        weights = changed(rng, weights, 0.2)
    return Store(folder=folder, versions=versions)


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch):
    monkeypatch.setattr(deltas, "PIECE_LEN", PIECE_LEN)


@pytest.fixture
def stores(tmp_path) -> tuple[Store, Store]:
    """Two of the same model, written by two trainers."""
    shapes: list[tuple[int, ...]] = [(40, 3), (8, 9), (40, 3), (40, 3), (8, 9), (), (0,), (40, 3)]
    return make_store(tmp_path / "a", 1, shapes), make_store(tmp_path / "b", 2, shapes)


class Damager:
    """Damages a copy of a store."""

    def __init__(self, folder: Path, other: Path, rng: np.random.Generator) -> None:
        self.folder, self.other, self.rng = folder, other, rng

    def pick(self, pattern: str = "versions/*/*") -> Path:
        found = sorted(path for path in self.folder.glob(pattern) if self.is_whole(path))
        return found[self.rng.integers(len(found))]

    @staticmethod
    def is_whole(path: Path) -> bool:
        """Whether it can be damaged, a second time too: a folder of a version, or a file."""
        is_version = path.parent.name == "versions"
        return is_version or (path.is_file() and path.stat().st_size > 0)

    def in_other(self, path: Path) -> Path:
        return self.other / path.relative_to(self.folder)

    def cut(self):
        path = self.pick()
        path.write_bytes(path.read_bytes()[: self.rng.integers(max(1, path.stat().st_size))])

    def flip(self):
        path = self.pick()
        data = bytearray(path.read_bytes())
        data[self.rng.integers(len(data))] ^= 1 << int(self.rng.integers(8))
        path.write_bytes(data)

    def append(self):
        path = self.pick()
        path.write_bytes(path.read_bytes() + self.rng.bytes(5))

    def zero_tail(self):
        path = self.pick()
        data = path.read_bytes()
        keep = int(self.rng.integers(len(data)))
        path.write_bytes(data[:keep] + bytes(len(data) - keep))

    def swap_files(self):
        one, two = self.pick("versions/*/*.safetensors"), self.pick("versions/*/*.safetensors")
        data = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(data)

    def swap_tensors(self):
        """Two of one size in a file, or one with that of another version."""
        path, source = self.pick("versions/*/*.safetensors"), self.pick("versions/*/*.safetensors")
        with SafetensorsFile(path) as file, SafetensorsFile(source) as other:
            pairs = [
                (a, b)
                for a in file.tensors.values()
                for b in other.tensors.values()
                if a.end - a.start == b.end - b.start
            ]
        if not pairs:
            return self.swap_files()
        a, b = pairs[self.rng.integers(len(pairs))]
        data, given = bytearray(path.read_bytes()), bytearray(source.read_bytes())
        data[a.start : a.end], given[b.start : b.end] = (
            given[b.start : b.end],
            data[a.start : a.end],
        )
        if path == source:
            given = data
            given[b.start : b.end] = path.read_bytes()[a.start : a.end]
        path.write_bytes(data)
        source.write_bytes(given)
        return None

    def stale_manifest(self):
        stale = self.pick("versions/*/manifest.json").read_bytes()
        self.pick("versions/*/manifest.json").write_bytes(stale)

    def foreign_manifest(self):
        path = self.pick("versions/*/manifest.json")
        shutil.copy(self.in_other(path), path)

    def foreign_file(self):
        path = self.pick("versions/*/*.safetensors")
        if self.in_other(path).exists():
            shutil.copy(self.in_other(path), path)

    def foreign_version(self):
        path = self.pick("versions/*")
        shutil.rmtree(path)
        shutil.copytree(self.in_other(path), path)

    def foreign_store_file(self):
        shutil.copy(self.other / "store.json", self.folder / "store.json")

    def damaged_store_file(self):
        path = self.folder / "store.json"
        path.write_bytes(path.read_bytes()[: self.rng.integers(max(1, path.stat().st_size))])

    def half_renamed(self):
        path = self.pick("versions/*/manifest.json")
        path.rename(f"{path}.tmp")

    def half_renamed_over_another(self):
        path = self.pick("versions/*/manifest.json")
        path.rename(f"{path}.tmp")
        shutil.copy(self.pick("versions/*/manifest.json"), path)

    def missing_file(self):
        self.pick().unlink()

    def missing_version(self):
        shutil.rmtree(self.pick("versions/*"))

    def moved_version(self):
        one, two = self.pick("versions/*"), self.pick("versions/*")
        if one != two:
            shutil.rmtree(two)
            shutil.copytree(one, two)

    def reordered_writes(self):
        """The manifest came to the disk before a file, which is empty or not there."""
        path = self.pick("versions/*/*.safetensors")
        path.unlink()
        if self.rng.integers(2):
            path.touch()

    def replaced_by_folder(self):
        path = self.pick()
        path.unlink()
        path.mkdir()


DAMAGES: dict[str, Callable[[Damager], None]] = {
    name: value
    for name, value in vars(Damager).items()
    if name not in ("pick", "is_whole", "in_other") and not name.startswith("_")
}


def read_damaged(
    stores: tuple[Store, Store],
    tmp_path: Path,
    number: int,
    *,
    heal: bool = True,
    damages: Sequence[str] = tuple(DAMAGES),
) -> str:
    """What came of a case: "right", "refused" or "wrong"."""
    store, other = stores
    rng = np.random.default_rng(number)
    folder = tmp_path / f"case-{number}"
    shutil.copytree(store.folder, folder)
    read = VersionReader(folder)
    held = int(rng.integers(NUM_VERSIONS + 1))  # 0: none
    if held:
        read.read(held)
    damage = damages[number % len(damages)]
    for _ in range(1 + number % 2):
        DAMAGES[damage](Damager(folder, other.folder, rng))
    version = int(rng.integers(1, NUM_VERSIONS + 1)) if number % 3 else NUM_VERSIONS
    try:
        found = read.read(version)
        outcome = "right" if same(found.tensors, store.versions[version]) else "wrong"
    except WeightStoreError as error:
        is_named = re.search(r"case-\d+/(versions/\d{10}/\w|store\.json)", str(error))
        outcome = "refused" if is_named else f"refused, but without a file: {error}"
    if heal:
        if outcome == "refused" and held:  # what was held still is
            again = VersionReader(store.folder)
            again._held = read._held
            assert read._held is not None
            assert read._held.ref.version == held
            check_read(again.read(held), held, store.versions[held])
            check_read(again.read(version), version, store.versions[version])
        weights = changed(rng, store.versions[NUM_VERSIONS], 0.3)
        done = VersionWriter(folder).write(weights)
        assert done.is_base
        assert read.newest() == done.version
        check_read(read.read(done.version), done.version, weights)
    shutil.rmtree(folder)
    return outcome


@pytest.mark.parametrize("first", tiered([0, 125, 250, 375], fast=[0]))
def test_no_damage_is_served(stores, tmp_path, first):
    found = Counter(
        read_damaged(stores, tmp_path, number) for number in range(first, first + NUM_CASES // 4)
    )
    assert found.keys() == {"right", "refused"}
    assert found["refused"] > 25  # the damage was where it was looked
    assert found["right"] > 25


def test_without_checksums_damage_would_be_served(stores, tmp_path, monkeypatch):
    """Else the test above could not fail."""
    monkeypatch.setattr(reader._VersionFiles, "_check_digest", lambda *_: None)
    monkeypatch.setattr(reader, "_prove", lambda *_: None)
    damages = ("flip", "zero_tail", "swap_tensors", "foreign_file")
    found = Counter(
        read_damaged(stores, tmp_path, number, heal=False, damages=damages) for number in range(40)
    )
    assert found["wrong"] > 5


def test_what_is_held_wrong_is_read_again(stores):
    """A host's memory failed: the files prove it, and the base heals it."""
    store, _ = stores
    read = VersionReader(store.folder)
    read.read(4)
    assert read._held is not None
    array = read._held.tensors["t0"].copy()
    array.reshape(-1)[:] = 0
    read._held.tensors["t0"] = array
    found = read.read(5)
    check_read(found, 5, store.versions[5])
    assert not found.is_delta
