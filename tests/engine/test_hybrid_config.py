"""Reading config.json of Qwen3-Next and Qwen3.5: given, absent, null and refused settings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from sgljax_engine import (
    EngineConfig,
    InvalidConfigError,
    RopeConfig,
    UnsupportedModelError,
    hf_rules,
    load_model_config,
    model_config_from_hf,
    to_hf_tensors,
)
from sgljax_engine.builder.sources import pick_dtype
from sgljax_engine.models.registry import get_model

GOLDEN = Path(__file__).parents[1] / "golden"
REAL_CONFIGS = Path(__file__).parents[1] / "real_configs"
NAMES = ("qwen3_next_grouped", "qwen3_5_ratio_two", "qwen3_5_moe_ratio_two")


NETS = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    },
}
EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
DENSE = "Qwen3_5ForCausalLM"
REAL: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen3.5-0.8B": (
        752_393_024,
        json.loads((REAL_CONFIGS / "qwen3.5-0.8b/config.json").read_text()),
    ),
    "Qwen3.5-9B": (
        8_953_803_264,
        {
            "architectures": [DENSE],
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 32,
            "vocab_size": 248_320,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3.5-27B": (
        26_895_998_464,
        {
            "architectures": [DENSE],
            "hidden_size": 5120,
            "intermediate_size": 17_408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
            "vocab_size": 248_320,
            "tie_word_embeddings": False,
            "output_gate_type": "swish",
            "mamba_ssm_dtype": "float32",
            "attn_output_gate": True,
        },
    ),
    "Qwen3.5-35B-A3B": (
        34_660_610_688,
        {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 32,
            "vocab_size": 248_320,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            **EXPERTS,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3-Next-80B-A3B": (
        79_674_391_296,
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 32,
            "vocab_size": 151_936,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            **EXPERTS,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "tie_word_embeddings": False,
        },
    ),
}
"""What transformers 5.12.1 counts, and the settings of the published models that decide it.

Those of 0.8B, 27B and Next are from copies of their config.json in public repositories; 9B and 35B
are the defaults of transformers' classes.
"""


def config_of(name, **changes):
    """A golden's config.json with some settings changed; None removes one."""
    config = json.loads((GOLDEN / name / "config.json").read_text()) | changes
    return {name: value for name, value in config.items() if value is not None}


@pytest.mark.parametrize("model", REAL)
def test_parameters_of_published_models(model):
    count, settings = REAL[model]
    config = model_config_from_hf(NETS | settings)
    specs = get_model(config.architecture).param_specs(config)
    assert sum(math.prod(spec.shape) for spec in specs.values()) == count
    assert len(config.cached_layers) * 4 == config.num_layers
    assert config.rope == RopeConfig(theta=1e7, rotary_dim=64)


def test_published_folders_name_their_dtype_inside():
    """All of Qwen3.5's do; where there are no weights to ask, it counts."""
    folder = REAL_CONFIGS / "qwen3.5-0.8b"
    assert json.loads((folder / "config.json").read_text()).get("dtype") is None
    assert pick_dtype(EngineConfig(), folder) == "bfloat16"
    assert load_model_config(folder).tie_word_embeddings


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def test_sizes_of_the_nets(name):
    config = model_config_from_hf(config_of(name))
    given = json.loads((GOLDEN / name / "config.json").read_text())
    net = config.linear_attention
    assert net is not None
    assert net.layers == tuple(kind == "linear_attention" for kind in given["layer_types"])
    assert net.is_grouped == (name == "qwen3_next_grouped")
    assert net.num_value_heads == given["linear_num_value_heads"]
    assert net.num_key_heads == given["linear_num_key_heads"]
    assert net.head_sizes[1:] == (given["linear_key_head_dim"], given["linear_value_head_dim"])
    assert config.state_layers == (0, 1, 2)
    assert config.cached_layers == (3,)


def test_settings_that_are_left_out(name):
    """Transformers' classes have the published sizes as defaults."""
    left_out = (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "layer_types",
        "head_dim",
    )
    config = model_config_from_hf(config_of(name, **dict.fromkeys(left_out)))
    net = config.linear_attention
    assert net is not None
    assert (net.num_value_heads, net.conv_size) == (32, 4)
    assert net.head_sizes == (16, 128, 128)
    assert net.layers == (True, True, True, False)
    assert config.head_dim == 256
    assert config.rope.rotary_dim == 64


def test_every_other_layer_may_have_attention(name):
    config = model_config_from_hf(config_of(name, layer_types=None, full_attention_interval=2))
    assert config.cached_layers == (1, 3)


@pytest.mark.parametrize("where", ["nested", "top"])
def test_the_part_of_a_head_that_turns(name, where):
    rope = {"rope_type": "default", "rope_theta": 5e5}
    if where == "nested":
        changed = {"rope_parameters": rope | {"partial_rotary_factor": 0.5}}
    else:
        changed = {"rope_parameters": rope, "partial_rotary_factor": 0.5}
    assert model_config_from_hf(config_of(name, **changed)).rope == RopeConfig(
        theta=5e5, rotary_dim=8
    )


def test_positions_of_images_change_nothing():
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    image = rope | {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    found = [
        model_config_from_hf(config_of("qwen3_5_ratio_two", rope_parameters=each))
        for each in (rope, image)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types 'sliding_attention'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type='spiral'"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    ],
)
def test_what_is_refused(name, changed, named):
    with pytest.raises(UnsupportedModelError, match=named):
        model_config_from_hf(config_of(name, **changed))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"linear_num_value_heads": 7}, "num_value_heads"),
        ({"layer_types": ["linear_attention"] * 4}, "some layers, and not all"),
        ({"linear_conv_kernel_dim": 17}, "conv_size"),
    ],
)
def test_sizes_that_do_not_fit(name, changed, named):
    with pytest.raises(InvalidConfigError, match=named):
        model_config_from_hf(config_of(name, **changed))


def test_a_folder_is_written_as_it_was_read():
    """Names and shapes of Hugging Face, the convolution's among them."""
    folder = GOLDEN / "qwen3_5_ratio_two"
    weights = load_file(folder / "model.safetensors")
    config = model_config_from_hf(config_of("qwen3_5_ratio_two"))
    found = to_hf_tensors(config, weights, hf_rules(config))
    assert found.keys() == weights.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor.load(), weights[name])
        assert tensor.shape == weights[name].shape
