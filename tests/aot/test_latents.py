"""Programs of DeepSeek V2 Lite, with its sizes, compiled for a TPU and a GPU by their compilers."""

from __future__ import annotations

import pytest

from tests.aot.families import compile_for, count, sizes
from tests.aot.programs import LATENTS
from tests.aot.test_compile import KV_TOKENS
from tests.aot.topologies import needs_cuda_plugin, needs_libtpu

LAYERS, PAGE_DIM = LATENTS.num_layers, LATENTS.head_dim
NUM_EXPERT_LAYERS = LAYERS - 1
KV_BYTES = KV_TOKENS * LAYERS * PAGE_DIM * 2


@needs_cuda_plugin
@pytest.mark.slow
def test_a_gpu_copies_no_page_or_weight_and_spills_nothing():
    decode, prefill = compile_for("h100:1", 1, "LATENTS", KV_BYTES)
    for program in (decode, prefill):
        assert program["launches"]["large_copies"] == 0
        # Attention of each layer and three products of experts at least are ours.
        own = program["launches"]["own"]
        assert own >= LAYERS + 3 * (NUM_EXPERT_LAYERS - 1)
    assert count(decode, "triton") >= LAYERS + 3 * NUM_EXPERT_LAYERS


@needs_libtpu
@pytest.mark.slow
def test_a_tpu_copies_pages_outside_of_steps_alone():
    """XLA's attention wants 576 numbers in other tiles than programs are given."""
    decode, prefill = compile_for("v5e:1x1", 1, "LATENTS", KV_BYTES)
    assert count(decode, "ragged-dot-none") == 3 * NUM_EXPERT_LAYERS
    for program in (decode, prefill):
        assert sizes(program) <= {KV_TOKENS * PAGE_DIM}, "weights are not copied"
        assert [each["num_loops"] for each in program["copies"]] == [0]
        assert sum(each["count"] for each in program["copies"]) <= 2 * LAYERS
