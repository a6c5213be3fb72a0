"""Decode programs in which rows read the keys that they share together, as compilers write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.hardware import shared_bytes
from tests.aot.programs import TWO_LAYERS
from tests.aot.test_compile import ROWS
from tests.aot.topologies import needs_cuda_plugin, needs_libtpu, run_compiler

LAYERS = TWO_LAYERS.num_layers

SCRIPT = """
import dataclasses, json, os, sys
if sys.argv[1].startswith("h100"):
    os.environ["XLA_FLAGS"] = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"
from sgljax_engine import EngineConfig
from sgljax_engine.builder.group import build_shapes
from sgljax_engine.runner.warmup import warm_calls
from tests.aot.programs import TWO_LAYERS
from tests.aot.test_compile import OPTIONS, ROWS
from tools.aot import parse_topology, topology_mesh
from tools.aot.compile import compile_call
from tools.aot.target import prepare_compiler

topology, num_devices, more = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
prepare_compiler(topology)
chip, mesh = parse_topology(topology)[0], topology_mesh(topology, (1, num_devices))
config = EngineConfig.from_options(OPTIONS | more)
runner, _ = build_shapes(TWO_LAYERS, config, "bfloat16", mesh, chip.usable_bytes)
calls = [
    call
    for call in warm_calls(runner, has_shared=True)
    if call.name == "decode" and len(call.args[0].input_ids) == ROWS
][-2:]
programs = [compile_call(runner, call, chip, TWO_LAYERS) for call in calls]
print(json.dumps([dataclasses.asdict(program) for program in programs]))
"""


DRAFTS = {"speculation": "always", "speculative_num_draft_tokens": 3}


def compile_both(topology: str, num_devices: int, **more: Any) -> list[dict[str, Any]]:
    """The reports of decode without shared keys and with them, for the most tokens of a row."""
    done = run_compiler("-c", SCRIPT, topology, num_devices, json.dumps(more))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def num_kernels(program: dict[str, Any]) -> int:
    return sum(each["count"] for each in program["kernels"])


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "num_devices", "more"),
    [("v5e:1x1", 1, {}), ("v5e:2x2", 4, {}), ("v5e:1x1", 1, DRAFTS)],
)
def test_a_tpu_calls_one_more_kernel_a_layer_and_copies_no_page(topology, num_devices, more):
    alone, shared = compile_both(topology, num_devices, **more)
    assert alone["size"] == shared["size"] == ROWS
    assert num_kernels(shared) == num_kernels(alone) + LAYERS
    assert shared["copies"] == alone["copies"] == []


@needs_cuda_plugin
@pytest.mark.slow
@pytest.mark.parametrize(("num_gpus", "more"), [(1, {}), (2, {}), (1, DRAFTS)])
def test_a_gpu_launches_one_more_kernel_a_layer_and_spills_nothing(num_gpus, more):
    alone, shared = compile_both(f"h100:{num_gpus}", num_gpus, **more)
    assert alone["size"] == shared["size"] == ROWS
    assert num_kernels(shared) == num_kernels(alone) + LAYERS
    assert shared["launches"]["large_copies"] == alone["launches"]["large_copies"] == 0
    if not more:  # a program with drafts has several loops, which are not counted as steps
        launches = [each["launches"]["total"] for each in (alone, shared)]
        assert launches[1] - launches[0] == LAYERS


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "most"), [("GPU", 0.193), ("TPU", 0.174)])
def test_a_step_reads_a_prompt_once(kernel, most):
    """A fifth of the bytes, counted as the interpreted kernels load them."""
    found = shared_bytes.kv_bytes(kernel, 16)
    num_keys = shared_bytes.ROWS * (shared_bytes.PROMPT + shared_bytes.OUTPUT)
    assert found["alone"] == num_keys * 2 * 8 * 128 * 2
    assert found["shared"] / found["alone"] < most
