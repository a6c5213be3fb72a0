"""Weight files that are cut off, rewritten or no files: errors, never the end of the process."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sgljax_engine import (
    InvalidConfigError,
    WeightLoadError,
    find_weight_files,
    read_hf_tensors,
    read_safetensors,
)
from sgljax_engine.weights.hf_json import read_json
from sgljax_engine.weights.loader import read_hf_folder
from sgljax_engine.weights.safetensors_file import SafetensorsFile

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.int64),
    "c": np.ones((2, 2), jnp.bfloat16),
    "empty": np.empty((0, 3), np.float16),
    "flag": np.array(True),
}


@pytest.fixture
def path(tmp_path) -> Path:
    save_file(ARRAYS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def raw(path: Path, header: object, size: int) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    return path


def test_what_the_library_writes(path):
    found, expected = read_safetensors(path), load_file(path)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()
        assert found[name].flags.writeable


def test_cut_off_at_every_byte(path):
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(WeightLoadError, match=r"cannot read .*model\.safetensors.*truncated"):
            read_safetensors(path)


def test_cut_off_while_it_is_read(path):
    """A mapped file would end the process here."""
    with SafetensorsFile(path) as file:
        os.truncate(path, 8)
        with pytest.raises(WeightLoadError, match="it ends at byte"):
            file.read("a")


@pytest.mark.parametrize("how", ["bytes", "size"])
def test_rewritten_while_it_is_read(path, how):
    save_file({"a": ARRAYS["a"]}, path)
    lazy = read_hf_tensors(path.parent)
    with SafetensorsFile(path) as file:
        content = path.read_bytes()
        path.write_bytes(content if how == "bytes" else content + b"x")
        os.utime(path, ns=(1, 1))
        with pytest.raises(WeightLoadError, match="it was changed while it was read"):
            file.read("a")
    path.write_bytes(content)
    with pytest.raises(WeightLoadError, match="it was changed while it was read"):
        lazy["a"].load()


def test_an_update_that_is_rewritten_in_place_fails(path):
    def rewrite(num_bytes: int) -> None:
        os.truncate(path, 16)

    with pytest.raises(WeightLoadError, match="truncated"):
        read_hf_folder(find_weight_files(path.parent), rewrite)


def entry(start, end, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (b"", 0),
        (b"{", 4),
        ([], 0),
        ({"a": 5}, 0),
        ({"a": entry(0, 4)}, 8),
        ({"a": entry(4, 8)}, 8),
        ({"a": entry(0, 4), "b": entry(0, 4)}, 4),
        ({"a": entry(0, 8)}, 8),
        ({"a": entry(0, 4, shape=(-1, -1))}, 4),
        ({"a": entry(0, 4, shape=(True,))}, 4),
        ({"a": entry(0, 4, shape=(10**30,))}, 4),
        ({"a": entry(4, 0)}, 4),
        ({"a": {"dtype": "F32"}}, 0),
        (b"[" * 50_000, 0),
        (b"\xff", 0),
    ],
)
def test_bad_headers(tmp_path, header, size):
    with pytest.raises(WeightLoadError, match="cannot read"):
        read_safetensors(raw(tmp_path / "x.safetensors", header, size))


def test_a_header_longer_than_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(WeightLoadError, match="a header of"):
        read_safetensors(path)


def test_an_unknown_dtype_is_named(tmp_path):
    path = raw(tmp_path / "x.safetensors", {"a": entry(0, 4, dtype="F4")}, 4)
    with pytest.raises(WeightLoadError, match="'a' is F4, not supported"):
        read_safetensors(path)


@pytest.mark.parametrize("kind", ["pipe", "folder", "missing"])
def test_what_is_no_file(tmp_path, kind):
    path = tmp_path / "model.safetensors"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(WeightLoadError, match="no such weights file"):
        read_hf_folder(find_weight_files(tmp_path))


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    """Reading tensors one by one takes the memory of one."""
    save_file(
        {f"w{i}": np.zeros(4 << 20, np.float32) for i in range(8)}, tmp_path / "x.safetensors"
    )
    code = (
        "import resource, sys\n"
        "from sgljax_engine.weights.safetensors_file import SafetensorsFile\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "with SafetensorsFile(sys.argv[1]) as file:\n"
        "    file.read('w0').sum()\n"
        "    before = peak()\n"
        "    for name in file.tensors:\n"
        "        file.read(name).sum()\n"
        "    print(peak() - before)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x.safetensors")]
    grown = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert grown < 20_000, "kB; a tensor has 16,384, all have 131,072"


@pytest.mark.parametrize("file", [5, None, ["x"], "../x.safetensors", "a/b", "", "a\0b"])
@pytest.mark.parametrize("read", [find_weight_files, read_hf_tensors])
def test_an_index_that_names_no_file(tmp_path, read, file):
    index = {"weight_map": {"w": file, "v": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightLoadError, match="not a file beside it"):
        read(tmp_path)


def test_an_index_without_a_map(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    with pytest.raises(WeightLoadError, match="weight_map must be an object, got list"):
        read_hf_folder(find_weight_files(tmp_path))


def test_a_pipe_for_a_config(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(InvalidConfigError, match="is no regular file"):
        read_json(tmp_path / "config.json")
