"""Embeddings and output projection, tied by the config: one table, two equal ones, or two others.

transformers' answers to such folders are in tests/folders; here are updates of a running engine.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sgljax_engine import Engine, WeightLoadError, WeightSyncError, load_model_config
from tests.geometry import SMALL

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3_gqa_tied"
OPTIONS: dict[str, Any] = {**SMALL, "dtype": "float32"}
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def folder_with(folder, change):
    """The golden's folder with other weights."""
    weights = load_file(GOLDEN / "model.safetensors")
    change(weights)
    shutil.copy(GOLDEN / "config.json", folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def store_two(weights):
    weights[HEAD] = weights[TABLE] + 1


def store_copy(weights):
    weights[HEAD] = weights[TABLE].copy()


def store_head(weights):
    weights[HEAD] = weights.pop(TABLE)


@pytest.fixture(scope="module")
def engine():
    with Engine(GOLDEN, **OPTIONS) as engine:
        yield engine


@pytest.mark.parametrize("change", [store_copy, store_head])
def test_one_table_by_either_name(engine, tmp_path, change):
    folder = folder_with(tmp_path, change)
    assert load_model_config(folder).tie_word_embeddings
    assert engine.find_differing_weights(folder) == []
    assert engine.find_differing_weights(load_file(folder / "model.safetensors")) == []


def test_another_head_is_never_dropped(engine, tmp_path):
    """Neither from a folder nor from arrays, as HTTP updates bring them."""
    folder, version = folder_with(tmp_path, store_two), engine.weight_version
    assert not load_model_config(folder).tie_word_embeddings
    with pytest.raises(WeightLoadError, match="tie_word_embeddings False, not True"):
        engine.update_weights(folder)
    with pytest.raises(WeightSyncError, match=r"'lm_head.weight' and .* differ"):
        engine.update_weights(load_file(folder / "model.safetensors"))
    assert engine.weight_version == version


def test_an_engine_with_two_tables(tmp_path):
    """It takes a folder with one, which then serves as both."""
    folder = folder_with(tmp_path, store_two)
    with Engine(folder, **OPTIONS) as engine:
        assert not engine.model_config.tie_word_embeddings
        assert engine.find_differing_weights(GOLDEN) == [HEAD]
        engine.update_weights(GOLDEN)
        weights = load_file(GOLDEN / "model.safetensors")
        assert engine.find_differing_weights(weights | {HEAD: weights[TABLE]}) == []
        assert engine.find_differing_weights(folder) == [HEAD]


def test_a_table_of_another_dtype_is_the_same_table(tmp_path):
    def round_head(weights):
        weights[TABLE] = weights[TABLE].astype(np.float16).astype(np.float32)
        weights[HEAD] = weights[TABLE].astype(np.float16)

    assert load_model_config(folder_with(tmp_path, round_head)).tie_word_embeddings
