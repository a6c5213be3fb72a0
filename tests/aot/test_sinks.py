"""Programs of gpt-oss, with its sizes, compiled for TPUs and GPUs by their own compilers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.aot.programs import GPT_OSS
from tests.aot.test_compile import KV_TOKENS, ROWS
from tests.aot.topologies import needs_cuda_plugin, needs_libtpu, run_compiler

SCRIPT = """
import json, os, sys
if sys.argv[1].startswith("h100"):
    os.environ["XLA_FLAGS"] = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"
from sgljax_engine import EngineConfig
from tools.aot import compile_programs, parse_topology, topology_mesh
from tests.aot.programs import GPT_OSS
from tests.aot.test_compile import OPTIONS
from tools.aot.__main__ import to_json
from tools.aot.target import prepare_compiler

topology, num_devices = sys.argv[1], int(sys.argv[2])
prepare_compiler(topology)
report = compile_programs(
    GPT_OSS,
    chip=parse_topology(topology)[0],
    mesh=topology_mesh(topology, (1, num_devices)),
    config=EngineConfig.from_options({**OPTIONS, "expert_parallel_size": num_devices}),
)
print(json.dumps(to_json(report, "gpt-oss", topology)))
"""
LAYERS, HIDDEN = GPT_OSS.num_layers, GPT_OSS.hidden_size
LARGEST_STATE = 2**26


def compile_for(topology: str, num_devices: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reports of decode and prefill, with experts in a part for each device."""
    done = run_compiler("-c", SCRIPT, topology, num_devices)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["problem"] is None
    decode, prefill, _ = found["programs"]
    kv = KV_TOKENS * LAYERS * 2 * GPT_OSS.num_kv_heads * GPT_OSS.head_dim * 2 // num_devices
    assert decode["memory"]["alias_bytes"] == prefill["memory"]["alias_bytes"] == kv
    return decode, prefill


def count(program: dict[str, Any], name: str) -> int:
    return sum(each["count"] for each in program["kernels"] if name in each["name"])


def sizes(program: dict[str, Any]) -> set[int]:
    """Elements of the large arrays that are copied."""
    shapes = (each["array"].partition("[")[2].rstrip("]") for each in program["copies"])
    return {math.prod(map(int, shape.split(","))) for shape in shapes}


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "num_devices"), [("v5e:1x1", 1), ("v5e:2x2", 4)], ids=["one", "parts"]
)
def test_a_tpu_copies_no_page_or_weight(topology, num_devices):
    """But the table of embeddings, once a dispatch: its rows of 2880 do not fill the lanes."""
    decode, prefill = compile_for(topology, num_devices)
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
    decode, prefill = compile_for(f"h100:{num_gpus}", num_gpus)
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
