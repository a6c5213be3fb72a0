"""Writers that die or meet, versions that are deleted, and what is refused."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from sgljax_engine import InvalidConfigError, WeightStoreError
from sgljax_engine.fleet import VersionReader, VersionWriter
from tests.fleet.weight_stores import HookedFileSystem, Weights, check_read

STORES = itertools.count()


@pytest.fixture
def url() -> str:
    return f"hooked://writers-{next(STORES)}"


def weights_of(number: int) -> Weights:
    a = np.arange(100, dtype=np.float32)
    a[:3] = number
    return {"a": a, "b": np.ones(3, np.float16)}


def check_newest(url: str | Path, version: int, number: int) -> None:
    read = VersionReader(url)
    assert read.newest() == version
    check_read(read.read(version), version, weights_of(number))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_writer_may_be_killed_at_any_call(tmp_path):
    script = Path(__file__).with_name("killed_writers.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


@pytest.mark.parametrize("kind", ["folder", "file", "memory"])
def test_places_of_a_store(tmp_path, kind):
    places = {"folder": tmp_path / "s", "file": f"file://{tmp_path}/s", "memory": "memory://s"}
    place = places[kind]
    writer = VersionWriter(place)
    assert writer.newest is None
    assert VersionReader(place).newest() is None
    for number in (1, 2):
        done = writer.write(weights_of(number))
        assert (done.version, done.is_base) == (number, number == 1)
        check_newest(place, number, number)
    assert writer.newest == 2


def test_an_unknown_url_is_refused():
    for make in (VersionWriter, VersionReader):
        with pytest.raises(WeightStoreError, match="nowhere"):
            make("nowhere://store")


def test_the_last_writer_to_begin_wins(url):
    first, second = VersionWriter(url), VersionWriter(url)
    first.write(weights_of(1))
    assert second.write(weights_of(2)).version == 2
    for _ in range(2):
        with pytest.raises(WeightStoreError, match=r"0000000002 is another writer's"):
            first.write(weights_of(3))
    done = second.write(weights_of(4))
    assert (done.version, done.is_base) == (3, False)
    check_newest(url, 3, 4)


@pytest.mark.parametrize(
    ("touched", "version"),
    [
        ("store.json", 2),  # both want the same number
        ("0000000002/writer.json", 3),
        ("0000000002/00000.safetensors", 3),
        ("0000000002/manifest.json", 3),  # behind the first one's last look
    ],
)
def test_a_writer_is_replaced_while_it_writes(url, touched, version):
    """The second one begins when the first is about to touch this file."""
    first, second = VersionWriter(url), VersionWriter(url)
    first.write(weights_of(1))
    others = []

    def hook(operation, path):
        if operation != "list" and path.endswith(touched) and not others:
            others.append(second.write(weights_of(5)).version)

    with HookedFileSystem.hooked(hook):
        if "manifest" in touched:
            first.write(weights_of(2))
        else:
            with pytest.raises(WeightStoreError, match="another writer's"):
                first.write(weights_of(2))
    assert others == [version]
    check_newest(url, version, 5)
    with pytest.raises(WeightStoreError, match="another writer's"):
        first.write(weights_of(3))
    check_newest(url, second.write(weights_of(6)).version, 6)


def test_a_base_is_deleted_while_it_is_read(url):
    writer = VersionWriter(url, base_every=1, keep=1)
    writer.write(weights_of(1))
    read = VersionReader(url)

    def hook(operation, path):
        if operation == "read" and path.endswith("0000000001/00000.safetensors"):
            writer.write(weights_of(2))

    with (
        HookedFileSystem.hooked(hook),
        pytest.raises(WeightStoreError, match=r"0000000001/00000.safetensors: it is missing"),
    ):
        read.read(1)
    check_read(read.read(2), 2, weights_of(2))


def test_old_bases_go_with_their_deltas(tmp_path):
    writer = VersionWriter(tmp_path, base_every=3, keep=2)
    for number in range(1, 11):
        writer.write(weights_of(number))
    left = sorted(int(path.name) for path in (tmp_path / "versions").iterdir())
    assert left == [7, 8, 9, 10]
    with pytest.raises(WeightStoreError, match=r"0000000006/manifest.json: it is missing"):
        VersionReader(tmp_path).read(6)


def test_a_reader_that_missed_some_takes_the_base(url):
    writer, read = VersionWriter(url, base_every=4), VersionReader(url)
    for number in range(1, 8):
        writer.write(weights_of(number))
        if number == 2:
            assert not read.read(2).is_delta  # from nothing: base and delta
    found = read.read(7)
    assert not found.is_delta
    check_read(found, 7, weights_of(7))
    writer.write(weights_of(8))
    check_read(read.read(8), 8, weights_of(8))


def test_deltas_in_a_row_from_what_is_held(url):
    writer, read = VersionWriter(url), VersionReader(url)
    for number in (1, 2, 3, 4):
        writer.write(weights_of(number))
        if number == 1:
            read.read(1)
    found = read.read(4)
    assert found.is_delta
    check_read(found, 4, weights_of(4))
    again = read.read(4)
    assert again.num_bytes == 0
    check_read(again, 4, weights_of(4))
    read.forget()
    assert not read.read(4).is_delta


def test_a_base_is_what_other_libraries_read(tmp_path):
    tensors = {"x": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3), "y": np.ones((), "i1")}
    VersionWriter(tmp_path).write(tensors)
    found = load_file(tmp_path / "versions" / "0000000001" / "00000.safetensors")
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in tensors.items()
    }


def test_an_adapter_is_marked(url):
    adapter = {"r": 8, "target_modules": ["q_proj"]}
    writer = VersionWriter(url)
    writer.write(weights_of(1), adapter=adapter)
    assert VersionReader(url).read(1).adapter == adapter
    assert writer.write(weights_of(2)).is_base
    assert VersionReader(url).read(2).adapter is None


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({}, "must not be empty"),
        ({"x": [1.0]}, "'x' must be a NumPy array, got list"),
        ({"x": np.ones(2, complex)}, "'x' has dtype complex128"),
        ({"__metadata__": np.ones(2)}, "cannot be called"),
    ],
)
def test_what_is_no_tensor_is_refused(url, tensors, match):
    writer = VersionWriter(url)
    writer.write(weights_of(1))
    with pytest.raises(WeightStoreError, match=match):
        writer.write(tensors)
    assert not writer.write(weights_of(2)).is_base  # nothing happened


@pytest.mark.parametrize("name", ["base_every", "max_file_bytes", "keep"])
def test_numbers_below_one_are_refused(name):
    options: dict = {name: 0}
    with pytest.raises(InvalidConfigError, match=f"{name} must be at least 1, got 0"):
        VersionWriter("memory://none", **options)
