"""What the compiled programs of a deterministic engine say about the order of its sums."""

from __future__ import annotations

import json
import re

import pytest

from sgljax_engine.layers.basic import SMALL_BATCH
from tests.aot.topologies import needs_libtpu, run_compiler

SCRIPT = """
import json, sys
from sgljax_engine import EngineConfig
from tools.aot import parse_topology, topology_mesh
from sgljax_engine.builder.group import build_shapes
from sgljax_engine.runner.warmup import call_size, warm_calls
from tests.aot.programs import TWO_LAYERS
from tests.aot.test_compile import OPTIONS
from tools.aot.target import prepare_compiler

topology = sys.argv[1]
prepare_compiler(topology)
config = EngineConfig.from_options(OPTIONS | {"enable_deterministic_sampling": True})
chip, mesh = parse_topology(topology)[0], topology_mesh(topology, (1, 1))
runner, _ = build_shapes(TWO_LAYERS, config, "bfloat16", mesh, chip.usable_bytes)
state = runner.kv_memory.state(runner.weights)
texts = {
    f"{call.name} {call_size(call)}": runner.programs.compile_alone(call, state).as_text()
    for call in warm_calls(runner, include_score=False, include_table=False)
    if call.name in ("decode", "prefill")
}
print(json.dumps(texts))
"""


def results(text, opcodes):
    """Shapes of the results of these instructions, each once."""
    found = re.findall(rf" = \w+\[([\d,]*)\]\S* (?:{opcodes})\(", text)
    return {tuple(map(int, filter(None, shape.split(",")))) for shape in found}


@needs_libtpu
@pytest.mark.slow
def test_programs_of_all_sizes_multiply_in_one_width():
    """Every product has the rows of one tile, so that no sum is cut up by the batch's size."""
    done = run_compiler("-c", SCRIPT, "v5e:1x1")
    assert done.returncode == 0, done.stderr
    texts = json.loads(done.stdout.splitlines()[-1])
    assert sorted(texts) == ["decode 1", "decode 8", "prefill 128", "prefill 256"]
    products = {name: results(text, "convolution|dot") for name, text in texts.items()}
    for name, shapes in products.items():
        assert shapes, name
        assert {shape[0] for shape in shapes} == {SMALL_BATCH}, name
    assert products["decode 1"] == products["decode 8"]
    assert products["prefill 128"] == products["prefill 256"] < products["decode 8"]
    for name, text in texts.items():
        assert "paged_attention" not in text, name  # sums over keys are not the kernel's
