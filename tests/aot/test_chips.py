"""The table of chips, topologies by name, and the estimates made of both."""

from __future__ import annotations

import dataclasses

import pytest

from sgljax_engine import EngineConfig, InvalidConfigError, preview_engine
from sgljax_engine.model_config import AttentionConfig, LinearAttentionConfig, MoEConfig
from tests.aot.programs import TWO_LAYERS
from tools.aot import CHIPS, ProgramReport, parse_topology
from tools.aot.roofline import estimate, used_parameters


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_a_chip_is_sound(chip):
    assert CHIPS[chip.name] is chip
    assert 0.7 * chip.hbm_bytes < chip.usable_bytes <= chip.hbm_bytes
    # A chip computes between 100 and 1,000 operations in the time of a byte.
    assert 100 < chip.bf16_flops_per_s / chip.hbm_bytes_per_s < 1000
    assert chip.source.startswith("https://")
    assert (chip.platform == "tpu") == bool(chip.accelerator_type)


@pytest.mark.parametrize(
    ("topology", "name", "shape"),
    [("v5e:2x4", "v5e", (2, 4)), ("v5p:2x2x2", "v5p", (2, 2, 2)), ("h100:8", "h100", (8,))],
)
def test_topologies_by_name(topology, name, shape):
    assert parse_topology(topology) == (CHIPS[name], shape)


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5e", "'v5e:2x4' and 'h100:8', got 'v5e'; known chips: v5e, v6e, v5p, h100"),
        ("v5e:8", "got 'v5e:8'"),
        ("v5e:2x2x2x2", "got 'v5e:2x2x2x2'"),
        ("v9:2x4", "topology must be of one of v5e, v6e, v5p, h100, got 'v9:2x4'"),
        ("h100:1x1", "got 'h100:1x1'"),
        ("h100:16", "topology must have 1 to 8 chips, got 'h100:16' of 16"),
        ("v5e:0x4", "topology must have 1 to 256 chips, got 'v5e:0x4' of 0"),
        ("v6e:32x16", "topology must have 1 to 256 chips, got 'v6e:32x16' of 512"),
    ],
)
def test_other_topologies_are_refused(topology, message):
    with pytest.raises(InvalidConfigError, match=message):
        parse_topology(topology)


def test_experts_count_as_far_as_tokens_go_through_them():
    moe = MoEConfig(
        num_experts=64, num_experts_per_token=4, intermediate_size=256, norm_topk_prob=True
    )
    model = dataclasses.replace(TWO_LAYERS, architecture="Qwen3MoeForCausalLM", moe=moe)
    experts = 2 * 64 * 3 * 512 * 256
    found = {size: used_parameters(model, size, is_decode=True) for size in (1, 8, 16, 32)}
    rest = found[1].num_multiplied - experts / 16
    assert 0 < rest < TWO_LAYERS.vocab_size * 512 * 1.2
    for size, used in found.items():
        assert used.num_multiplied == rest + experts / 16
        assert used.num_read == rest + experts * min(size / 16, 1)


def test_both_estimates_are_of_full_page_tables():
    """Whatever the pool holds: the kernels' costs are of full tables, too."""
    head = 4 * 128  # channels of a token's keys in a layer
    for num_kv_tokens in (1024, 2048, 8192):
        options = {"num_kv_tokens": num_kv_tokens, "max_model_len": 1024, "dtype": "bfloat16"}
        preview = preview_engine(TWO_LAYERS, config=EngineConfig.from_options(options))
        decode = ProgramReport(
            name="decode", size=4, flops=1e12, memory_bytes=819_000_000, compile_s=1.0
        )
        by_model, by_program = estimate(CHIPS["v5e"], TWO_LAYERS, preview, decode)
        read = preview.weights_bytes + 2 * 2 * 4 * 1024 * head * 2
        assert by_model.step_s == pytest.approx(read / 819e9)
        assert (by_model.basis, by_model.bound) == ("model", "memory")
        assert by_program.step_s == pytest.approx(1e12 / 197e12)
        assert (by_program.basis, by_program.bound) == ("program", "compute")
        assert by_program.tokens_per_s == pytest.approx(4 / by_program.step_s)
        uncounted = dataclasses.replace(decode, flops=None, memory_bytes=None)
        assert estimate(CHIPS["v5e"], TWO_LAYERS, preview, uncounted) == (by_model,)


def test_sliding_layers_read_their_windows():
    slides = AttentionConfig(sliding_window=256, sliding_layers=(True, False))
    model = dataclasses.replace(TWO_LAYERS, attention=slides, architecture="Gemma3ForCausalLM")
    options = {"num_kv_tokens": 4096, "max_model_len": 1024, "dtype": "bfloat16"}
    preview = preview_engine(model, config=EngineConfig.from_options(options))
    decode = ProgramReport(name="decode", size=4, compile_s=1.0)
    (found,) = estimate(CHIPS["v5e"], model, preview, decode)
    read = preview.weights_bytes + 2 * 4 * (256 + 1024) * 4 * 128 * 2
    assert found.step_s == pytest.approx(read / 819e9)


def test_recurrent_states_are_read_and_written():
    """And prefill computes them to the last layer that has one, of which it needs no output."""
    net = LinearAttentionConfig(
        layers=(False, True),
        num_key_heads=4,
        num_value_heads=8,
        key_dim=64,
        value_dim=128,
        conv_size=4,
        is_grouped=False,
    )
    model = dataclasses.replace(TWO_LAYERS, linear_attention=net, architecture="Qwen3_5ForCausalLM")
    options = {"num_kv_tokens": 4096, "max_model_len": 1024, "dtype": "bfloat16"}
    preview = preview_engine(model, config=EngineConfig.from_options(options))
    decode = ProgramReport(name="decode", size=4, compile_s=1.0)
    (found,) = estimate(CHIPS["v5e"], model, preview, decode)
    keys = 2 * 4 * 1024 * model.num_kv_heads * model.head_dim * 2
    states = 2 * 4 * 4 * 8 * 64 * 128
    assert found.bound == "memory"
    assert found.step_s == pytest.approx((preview.weights_bytes + keys + states) / 819e9)
    whole, prefill = (used_parameters(model, 8, is_decode=each).num_read for each in (True, False))
    dim = model.hidden_size
    after = 8 * 128 * dim + 3 * dim * model.intermediate_size + 2 * dim + 128
    assert whole - prefill == after + model.vocab_size * dim
