"""Reading config.json of Qwen3-Next and Qwen3.5: given, absent, null and refused settings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from sgljax_engine import (
    InvalidConfigError,
    RopeConfig,
    UnsupportedModelError,
    hf_rules,
    model_config_from_hf,
    to_hf_tensors,
)

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("qwen3_next_grouped", "qwen3_5_ratio_two", "qwen3_5_moe_ratio_two")


def config_of(name, **changes):
    """A golden's config.json with some settings changed; None removes one."""
    config = json.loads((GOLDEN / name / "config.json").read_text()) | changes
    return {name: value for name, value in config.items() if value is not None}


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
        ({"attention_bias": True}, "attention_bias=True"),
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type='yarn'"),
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
