"""The table of chips, topologies by name, and the estimates made of both."""

from __future__ import annotations

import dataclasses

import pytest

from sgljax_engine import EngineConfig, InvalidConfigError, preview_engine
from sgljax_engine.aot import CHIPS, ProgramReport, parse_topology
from sgljax_engine.aot.roofline import estimate, num_used_parameters
from tests.aot.programs import QWEN3_8B, TWO_LAYERS


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


def test_parameters_that_a_token_meets():
    table = 151936 * 4096
    assert num_used_parameters(QWEN3_8B, 10 * table, has_logits=True) == 9 * table
    assert num_used_parameters(QWEN3_8B, 10 * table, has_logits=False) == 8 * table
    tied = dataclasses.replace(QWEN3_8B, tie_word_embeddings=True)
    assert num_used_parameters(tied, 10 * table, has_logits=True) == 10 * table


def test_estimates():
    config = EngineConfig.from_options({"num_kv_tokens": 2048, "max_model_len": 1024})
    preview = preview_engine(TWO_LAYERS, config=config)
    assert preview.memory is not None
    decode = ProgramReport(
        name="decode", size=2, flops=1e12, memory_bytes=819_000_000, compile_s=1.0
    )
    by_model, by_program = estimate(CHIPS["v5e"], TWO_LAYERS, preview, decode)
    read = preview.weights_bytes + preview.memory.kv_bytes / 2
    assert by_model.step_s == pytest.approx(read / 819e9)
    assert (by_model.basis, by_model.bound) == ("model", "memory")
    assert by_program.step_s == pytest.approx(1e12 / 197e12)
    assert (by_program.basis, by_program.bound) == ("program", "compute")
    assert by_program.tokens_per_s == pytest.approx(2 / by_program.step_s)
    uncounted = dataclasses.replace(decode, flops=None, memory_bytes=None)
    assert estimate(CHIPS["v5e"], TWO_LAYERS, preview, uncounted) == (by_model,)
