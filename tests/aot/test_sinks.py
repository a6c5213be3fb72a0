"""Programs of gpt-oss, with its sizes, compiled for TPUs and GPUs by their own compilers."""

from __future__ import annotations

import pytest

from tests.aot.families import compile_for, count, sizes
from tests.aot.programs import GPT_OSS
from tests.aot.test_compile import KV_TOKENS, ROWS
from tests.aot.topologies import needs_cuda_plugin, needs_libtpu

LAYERS, HIDDEN = GPT_OSS.num_layers, GPT_OSS.hidden_size
KV_BYTES = KV_TOKENS * LAYERS * 2 * GPT_OSS.num_kv_heads * GPT_OSS.head_dim * 2
LARGEST_STATE = 2**26


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "num_devices"), [("v5e:1x1", 1), ("v5e:2x2", 4)], ids=["one", "parts"]
)
def test_a_tpu_copies_no_page_or_weight(topology, num_devices):
    """But the table of embeddings, once a dispatch: its rows of 2880 do not fill the lanes."""
    decode, prefill = compile_for(topology, num_devices, "GPT_OSS", KV_BYTES // num_devices)
    for program in (decode, prefill):  # the sinks are the kernel's: XLA has no softmax of a token
        assert count(program, "paged_attention") == LAYERS
    assert count(decode, "ragged-dot-none") == 3 * LAYERS
    # Nobody reads what the experts of a prefill's last layer make.
    assert count(prefill, "ragged-dot-none") == 3 * (LAYERS - 1)
    table = GPT_OSS.vocab_size * HIDDEN // num_devices
    assert sizes(decode) == {table}
    assert [each["num_loops"] for each in decode["copies"]] == [0]
    assert decode["memory"]["temp_bytes"] < 2 * table + LARGEST_STATE
    # Queries of 256 tokens happen to have as many elements as pages, or as another weight.
    weights = [each for each in prefill["copies"] if each["array"].startswith("bf16[256,")]
    assert len(prefill["copies"]) - len(weights) <= 3

    sums = [each for each in decode["collectives"] if each["array"] == f"f32[{ROWS},{HIDDEN}]"]
    assert sum(each["count"] for each in sums) == (LAYERS if num_devices > 1 else 0)
    for each in decode["collectives"]:
        if each["name"] != "all-reduce":
            assert each["num_bytes"] < 2**16, "no weight goes to another device"


@needs_cuda_plugin
@pytest.mark.slow
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_a_gpu_copies_no_page_or_weight_and_spills_nothing(num_gpus):
    decode, prefill = compile_for(f"h100:{num_gpus}", num_gpus, "GPT_OSS", KV_BYTES // num_gpus)
    for program in (decode, prefill):
        assert program["launches"]["large_copies"] == 0
    if num_gpus == 1:
        # Queries, keys and values; attention; its output; three products of experts.
        assert decode["launches"]["own"] == 6 * LAYERS
        assert prefill["launches"]["own"] == 6 * (LAYERS - 1) + 1
    else:
        assert count(decode, "triton") == LAYERS
        sums = [each for each in decode["collectives"] if each["num_loops"] == 1]
        assert all(each["name"] != "all-to-all" for each in sums)
