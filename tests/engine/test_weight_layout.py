"""Which files of a folder are its model, where saving it again left files of an older one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sgljax_engine import Engine, WeightLoadError, find_weight_files, read_hf_tensors
from sgljax_engine.builder.sources import folder_weights
from sgljax_engine.models.registry import load_model_config
from tests.geometry import SMALL

GOLDEN = Path(__file__).parents[1] / "golden/qwen3_gqa_tied"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    """A model in two shards, and another one that was saved over it in a single file."""
    shutil.copytree(GOLDEN, tmp_path / "model")
    folder = tmp_path / "model"
    new = load_file(folder / "model.safetensors")
    old = {name: array + np.float32(0.1) for name, array in new.items()}
    names = sorted(old)
    shards = {"model-00001-of-00002.safetensors": names[::2]}
    shards["model-00002-of-00002.safetensors"] = names[1::2]
    for file_name, part in shards.items():
        save_file({name: old[name] for name in part}, folder / file_name)
    weight_map = {name: file_name for file_name, part in shards.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def loaded(folder):
    """What both readers say, which must be the same."""
    arrays = folder_weights(load_model_config(folder), folder).arrays
    lazy = {name: tensor.load() for name, tensor in read_hf_tensors(folder).items()}
    assert arrays.keys() == lazy.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, lazy[name])
    return arrays


@pytest.mark.parametrize("num_left", [0, 1])
def test_an_index_without_its_shards_does_not_count(folder, num_left):
    """transformers deletes the old shards, leaves the index, and loads the single file."""
    for path in sorted(folder.glob("model-*.safetensors"))[num_left:]:
        path.unlink()
    files, wanted = loaded(folder), load_file(GOLDEN / "model.safetensors")
    for name, array in wanted.items():
        np.testing.assert_array_equal(files[name], array)
    size = (folder / "model.safetensors").stat().st_size
    assert find_weight_files(folder).num_bytes() == size


def test_two_whole_sets_are_refused(folder):
    """A copy or an upload keeps the old shards; then nothing tells which set is the newer one."""
    with pytest.raises(WeightLoadError, match="holds two models"):
        Engine(folder)
    with Engine(GOLDEN, **SMALL) as engine:
        with pytest.raises(WeightLoadError, match="which is the newer one"):
            engine.update_weights(folder)
        assert engine.weight_version == 0
    with pytest.raises(WeightLoadError, match="which is the newer one"):
        read_hf_tensors(folder)
    (folder / "model.safetensors").unlink()
    old = load_file(folder / "model-00001-of-00002.safetensors")
    np.testing.assert_array_equal(loaded(folder)[min(old)], old[min(old)])


def test_an_index_of_the_single_file(folder):
    """Some folders have an index though all tensors are in one file."""
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    assert loaded(folder).keys() == names.keys()


@pytest.mark.parametrize(
    "weight_map", [None, [], {"a": 1}, {"a": "../x.safetensors"}, {"a": "/x.safetensors"}]
)
def test_a_broken_index(folder, weight_map):
    """It is refused where it is needed, and no matter beside a single file."""
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert find_weight_files(folder).names == ("model.safetensors",)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightLoadError, match=r"weight_map|the index names"):
        find_weight_files(folder)
