"""A multimodal checkpoint is read as its language model; the golden of one is in test_goldens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sgljax_engine import (
    Engine,
    InvalidConfigError,
    Rule,
    SamplingParams,
    UnsupportedModelError,
    WeightLoadError,
    WeightSyncError,
    load_model_config,
    model_config_from_hf,
)
from sgljax_engine.builder.sources import folder_weights
from sgljax_engine.weights import loader
from sgljax_engine.weights.hf_layout import find_weight_files
from tests.geometry import SMALL

GOLDEN = Path(__file__).parents[1] / "golden" / "gemma3_window"
OPTIONS: dict[str, Any] = {**SMALL, "dtype": "float32"}
NAMES = {
    "files": ("language_model.model.", ""),
    "modules": ("model.language_model.", "model."),
}
"""What the language model's and the other modules' names begin with: on the hub, where transformers
4 and 5 write it too; and as the modules of transformers 5 are called."""


def nested(**changes):
    """The golden's config.json as that of a multimodal model."""
    text = json.loads((GOLDEN / "config.json").read_text())
    for name in ("architectures", "dtype", "transformers_version"):
        text.pop(name, None)
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "dtype": "float32",
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"},
    } | changes


def write_folder(folder, names, **extra):
    """The golden's weights under a multimodal checkpoint's names, beside a vision tower."""
    text, rest = NAMES[names]
    weights = {
        text + name.removeprefix("model."): array
        for name, array in load_file(GOLDEN / "model.safetensors").items()
    }
    beside = {
        f"{rest}vision_tower.vision_model.embeddings.patch_embedding.weight": (4, 3, 2, 2),
        f"{rest}vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.bias": (4,),
        f"{rest}multi_modal_projector.mm_input_projection_weight": (4, 32),
        f"{rest}multi_modal_projector.mm_soft_emb_norm.weight": (4,),
    }
    weights |= {name: np.ones(shape, np.float32) for name, shape in beside.items()}
    save_file(weights | extra, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(nested()))


@pytest.mark.slow
@pytest.mark.parametrize("names", NAMES)
def test_it_computes_what_the_language_model_does(tmp_path, names):
    write_folder(tmp_path, names)
    golden = np.load(GOLDEN / "golden.npz")
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    with Engine(tmp_path, **OPTIONS) as engine:
        outputs = engine.generate_requests([golden["prompt_4"].tolist()], params)
        assert outputs[0].output_ids == golden["greedy_4"][:12].tolist()
        np.testing.assert_allclose(outputs[0].logprobs, golden["greedy_logps_4"][:12], atol=1e-4)


@pytest.mark.parametrize("names", NAMES)
def test_what_is_ignored_is_not_read(tmp_path, names):
    """The vision tower of a multimodal model is not needed, not even for a moment."""
    of_text = load_file(GOLDEN / "model.safetensors")
    head = of_text["model.embed_tokens.weight"]
    write_folder(tmp_path, names, **{"language_model.lm_head.weight": head})
    text, model = NAMES[names][0], load_model_config(tmp_path)
    wanted = {text + name.removeprefix("model.") for name in of_text}
    assert set(folder_weights(model, tmp_path).arrays) == wanted
    assert folder_weights(model, tmp_path, rules=[Rule("**", None)]).arrays == {}


def test_shards_of_which_nothing_is_read(tmp_path):
    """The index only names files: what no file holds is missed by whoever needs it."""
    weights = {"a": np.ones(2, np.float32), "vision": np.ones(3, np.float32)}
    for name, array in weights.items():
        save_file({name: array}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in weights}}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    sizes: list[int] = []

    def read():
        files = find_weight_files(tmp_path)
        return loader.read_hf_folder(files, sizes.append, lambda name: name == "vision")

    assert list(read()) == ["a"]
    assert sum(sizes) == find_weight_files(tmp_path).num_bytes()
    index["weight_map"]["missing"] = "vision.safetensors"
    path.write_text(json.dumps(index))
    assert list(read()) == ["a"]
    save_file(weights, tmp_path / "vision.safetensors")
    with pytest.raises(
        WeightLoadError, match=r"a.safetensors and vision.safetensors both hold 'a'"
    ):
        read()


def test_other_modules_are_not_ignored(tmp_path):
    write_folder(tmp_path, "files", **{"language_model.model.gate.weight": np.ones(4, "f4")})
    with pytest.raises(WeightSyncError, match=r"language_model\.model\.gate\.weight"):
        Engine(tmp_path, **OPTIONS)


def test_the_config_is_that_of_the_language_model(tmp_path):
    write_folder(tmp_path, "files")
    assert load_model_config(tmp_path) == load_model_config(GOLDEN)


def test_settings_of_the_whole_model_win():
    model = model_config_from_hf(nested(eos_token_id=[1, 106]))
    assert model.eos_token_ids == (1, 106)
    with pytest.raises(UnsupportedModelError, match="quantization_config="):
        model_config_from_hf(nested(quantization_config={"bits": 4}))


def test_the_whole_config_says_whether_embeddings_are_tied():
    """The outer class has both tables, so what `text_config` says has no effect."""
    text = nested()["text_config"] | {"tie_word_embeddings": False}
    assert model_config_from_hf(nested(text_config=text)).tie_word_embeddings
    text["tie_word_embeddings"] = True
    untied = nested(text_config=text, tie_word_embeddings=False)
    assert not model_config_from_hf(untied).tie_word_embeddings


def test_a_config_without_the_language_model_is_refused():
    with pytest.raises(InvalidConfigError, match="no 'text_config'"):
        model_config_from_hf(nested(text_config=None))
