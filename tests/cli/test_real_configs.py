"""The config.json of every model that Tunix lists, planned by `doctor`; see tests/real_configs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from tunix.models import registry

from sgljax_engine import (
    EngineConfig,
    Llama3Scaling,
    RopeConfig,
    UnsupportedModelError,
    model_config_from_hf,
)
from sgljax_engine.models.registry import MODELS
from tunix_sgljax.cli.doctor_facts import gather
from tunix_sgljax.model_config import to_model_config
from tunix_sgljax.training.models import named_config

FOLDER = Path(__file__).parents[1] / "real_configs"
NAMES: dict[str, list[str]] = json.loads((FOLDER / "models.json").read_text())
PARAMETERS: dict[str, int] = json.loads((FOLDER / "parameters.json").read_text())
CONFIGS = {file: json.loads((FOLDER / f"{file}.json").read_text()) for file in NAMES}
SUPPORTED = [file for file in NAMES if CONFIGS[file]["architectures"][0] in MODELS]

WIDER_TABLES = {"gemma-2b", "gemma-7b", "gemma-2-2b", "gemma-2-9b"}
"""Tunix's configs are of Google's own checkpoints, whose vocabularies are padded to 256128."""
NARROWER_TABLES = {"gemma-3-4b", "gemma-3-12b", "gemma-3-27b"}
"""Tunix's configs leave out the 64 rows of images."""


def test_every_name_that_tunix_lists_has_one():
    listed = sorted(str(model.model_name) for model in registry.MODEL_CATALOG)
    assert sorted(name for names in NAMES.values() for name in names) == listed
    assert NAMES.keys() == PARAMETERS.keys()


@pytest.mark.parametrize("file", NAMES)
def test_doctor_counts_every_parameter(file, tmp_path):
    shutil.copy(FOLDER / f"{file}.json", tmp_path / "config.json")
    facts = gather(tmp_path, EngineConfig())
    assert facts.model is not None
    if file not in SUPPORTED:
        assert facts.model.problem_kind == UnsupportedModelError.__name__
        assert facts.preview is None
        return
    assert facts.preview is not None
    assert facts.preview.num_parameters == PARAMETERS[file]
    assert facts.preview.dtype == CONFIGS[file].get("torch_dtype", CONFIGS[file].get("dtype"))


@pytest.mark.parametrize("file", SUPPORTED)
def test_tunix_has_the_same_shapes(file):
    """A second source for each, except where Tunix differs."""
    ours = model_config_from_hf(CONFIGS[file])
    expected = {}
    if file in WIDER_TABLES:
        expected["vocab_size"] = (256_000, 256_128)
    if file in NARROWER_TABLES:
        expected["vocab_size"] = (262_208, 262_144)
    if file == "gemma-4-26b-a4b":  # Tunix's router reads what the experts read
        assert ours.moe is not None
        expected["moe"] = (ours.moe, dataclasses.replace(ours.moe, routes_experts_input=True))
    if file == "gemma-2-9b":
        expected["intermediate_size"] = (14_336, 28_672)  # Tunix's is that of no checkpoint
    for name in NAMES[file]:
        tunix = to_model_config(named_config(name), context_length=ours.context_length)
        differing = {
            field.name: (getattr(ours, field.name), getattr(tunix, field.name))
            for field in dataclasses.fields(ours)
            if field.name not in ("eos_token_ids", "rope")
            and getattr(ours, field.name) != getattr(tunix, field.name)
        }
        assert differing == expected


STRETCHED = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=8192
)
ROPES = {
    "deepseek-r1-distill-llama-8b": RopeConfig(theta=5e5, llama3=STRETCHED),
    "deepseek-r1-distill-qwen-1.5b": RopeConfig(theta=1e4),
    "gemma-3-27b": RopeConfig(theta=1e6, linear_factor=8.0),
    "llama-3-70b": RopeConfig(theta=5e5),
    "llama-3.1-405b": RopeConfig(theta=5e5, llama3=STRETCHED),
    "llama-3.2-1b": RopeConfig(theta=5e5, llama3=dataclasses.replace(STRETCHED, factor=32.0)),
    "qwen2.5-7b": RopeConfig(theta=1e6),
    "qwen2.5-math-1.5b": RopeConfig(theta=1e4),
    "qwen3-4b": RopeConfig(theta=1e6),
    "qwen3-4b-2507": RopeConfig(theta=5e6),
}


@pytest.mark.parametrize("file", ROPES)
def test_rotary_embeddings(file):
    assert model_config_from_hf(CONFIGS[file]).rope == ROPES[file]


def test_what_a_multimodal_config_leaves_out():
    model = model_config_from_hf(CONFIGS["gemma-3-27b"])
    assert (model.vocab_size, model.context_length, model.rms_norm_eps) == (262_208, 131_072, 1e-6)
    assert model.attention.scale == 168**-0.5
    assert model.attention.sliding_rope == RopeConfig(theta=1e4)
    assert model.attention.sliding_layers[:12] == (*[True] * 5, False) * 2
    small = model_config_from_hf(CONFIGS["gemma-3-4b"])
    assert (small.num_heads, small.num_kv_heads, small.head_dim) == (8, 4, 256)
    assert small.attention.scale == 256**-0.5


def test_no_listed_model_slides_but_gemma():
    """Qwen2's sliding windows are off in all of its files; where they are on, last layers slide."""
    for file, config in CONFIGS.items():
        if file in SUPPORTED and "gemma" not in file:
            assert not any(model_config_from_hf(config).attention.sliding_layers)
    on = CONFIGS["qwen2.5-7b"] | {"use_sliding_window": True, "max_window_layers": 20}
    assert model_config_from_hf(on).attention.sliding_layers == (*[False] * 20, *[True] * 8)
