"""Programs of a family's model, compiled for TPUs and GPUs by their own compilers."""

from __future__ import annotations

import json
import math
from typing import Any

from tests.aot.topologies import run_compiler

SCRIPT = """
import json, os, sys
if sys.argv[1].startswith("h100"):
    os.environ["XLA_FLAGS"] = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"
from sgljax_engine import EngineConfig
from tools.aot import compile_programs, parse_topology, topology_mesh
from tests.aot import programs
from tests.aot.test_compile import OPTIONS
from tools.aot.target import prepare_compiler
from tools.aot.words import to_json

topology, num_devices, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
prepare_compiler(topology)
report = compile_programs(
    getattr(programs, name),
    chip=parse_topology(topology)[0],
    mesh=topology_mesh(topology, (1, num_devices)),
    config=EngineConfig.from_options({**OPTIONS, "expert_parallel_size": num_devices}),
)
print(json.dumps(to_json(report, name, topology)))
"""


def compile_for(
    topology: str, num_devices: int, name: str, kv_bytes: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reports of decode and prefill of a model of `programs`.

    Its experts are in a part for each device; `kv_bytes` are of a device's pages.
    """
    done = run_compiler("-c", SCRIPT, topology, num_devices, name)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["problem"] is None
    decode, prefill, _ = found["programs"]
    assert decode["memory"]["alias_bytes"] == prefill["memory"]["alias_bytes"] == kv_bytes
    return decode, prefill


def count(program: dict[str, Any], name: str) -> int:
    """Kernels of a name."""
    return sum(each["count"] for each in program["kernels"] if name in each["name"])


def sizes(program: dict[str, Any]) -> set[int]:
    """Elements of the large arrays that are copied."""
    shapes = (each["array"].partition("[")[2].rstrip("]") for each in program["copies"])
    return {math.prod(map(int, shape.split(","))) for shape in shapes}
