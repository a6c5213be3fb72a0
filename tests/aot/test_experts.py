"""Programs with experts, compiled for TPUs and GPUs by their own compilers."""

from __future__ import annotations

import json

import pytest

from tests.aot.programs import TWO_LAYERS
from tests.aot.test_compile import ROWS, TOKENS
from tests.aot.topologies import needs_cuda_plugin, needs_libtpu, run_compiler

NUM_EXPERTS, NUM_CHOSEN, WIDTH = 32, 2, 768

SCRIPT = f"""
import dataclasses, json, sys
from sgljax_engine import EngineConfig, MoEConfig
from tools.aot import compile_programs, parse_topology, topology_mesh
from tests.aot.programs import TWO_LAYERS
from tests.aot.test_compile import OPTIONS
from tools.aot.target import prepare_compiler
from tools.aot.words import to_json

topology, shape = sys.argv[1], json.loads(sys.argv[2])
prepare_compiler(topology)
moe = MoEConfig(num_experts={NUM_EXPERTS}, num_experts_per_token={NUM_CHOSEN},
                intermediate_size={WIDTH}, norm_topk_prob=True)
report = compile_programs(
    dataclasses.replace(TWO_LAYERS, architecture="Qwen3MoeForCausalLM", moe=moe),
    chip=parse_topology(topology)[0],
    mesh=topology_mesh(topology, shape),
    config=EngineConfig.from_options({{**OPTIONS, **json.loads(sys.argv[3])}}),
)
print(json.dumps(to_json(report, "two layers", topology)))
"""


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "tp_size"),
    [("v5e:1x1", 1), ("v6e:2x1", 2), ("v5p:2x2x1", 4)],
    ids=["one", "by_width", "by_experts"],
)
def test_each_product_is_one_kernel_that_copies_nothing(topology, tp_size):
    done = run_compiler("-c", SCRIPT, topology, json.dumps((1, tp_size)), "{}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    decode = {program["name"]: program for program in found["programs"]}["decode"]
    layers = TWO_LAYERS.num_layers

    kernels = [k for k in decode["kernels"] if "ragged-dot-none" in k["name"]]
    assert sum(kernel["count"] for kernel in kernels) == 3 * layers
    stack = NUM_EXPERTS * WIDTH * TWO_LAYERS.hidden_size * 2 // tp_size
    assert all(copy["num_bytes"] < 0.1 * stack for copy in decode["copies"])
    assert decode["memory"]["temp_bytes"] < 0.5 * 3 * layers * stack

    # The work of the experts that tokens chose, and not of all.
    an_expert = 3 * TWO_LAYERS.hidden_size * WIDTH
    body = found["preview"]["num_parameters"] - layers * NUM_EXPERTS * an_expert
    least = 2 * ROWS * (body + layers * NUM_CHOSEN * an_expert) / tp_size
    assert decode["flops"] < 3 * least < 2 * ROWS * found["preview"]["num_parameters"] / tp_size


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(("topology", "tp_size"), [("v5e:1x1", 1), ("v6e:2x1", 2)])
def test_kept_experts_are_not_copied(topology, tp_size):
    """The array of all tokens' experts has the layout that programs write it in."""
    options = {"enable_return_routed_experts": True}
    done = run_compiler("-c", SCRIPT, topology, json.dumps((1, tp_size)), json.dumps(options))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    programs = {program["name"]: program for program in found["programs"]}
    assert "read_routed" in programs
    for program in programs.values():
        assert not [copy for copy in program["copies"] if copy["array"].startswith("u8")]


@needs_cuda_plugin
@pytest.mark.slow
def test_a_product_of_experts_is_one_kernel_of_a_gpu():
    """Three a layer, no copy of the experts' weights, and no tokens times experts in memory."""
    done = run_compiler("-c", SCRIPT, "h100:1", "[1, 1]", '{"linear_backend": "pallas"}')
    assert done.returncode == 0, done.stderr
    programs = {each["name"]: each for each in json.loads(done.stdout.splitlines()[-1])["programs"]}
    xla = run_compiler("-c", SCRIPT, "h100:1", "[1, 1]", '{"linear_backend": "xla"}')
    assert xla.returncode == 0, xla.stderr
    others = {each["name"]: each for each in json.loads(xla.stdout.splitlines()[-1])["programs"]}
    for name in ("decode", "prefill"):
        program, other = programs[name]["launches"], others[name]["launches"]
        # Nobody reads what the experts of a prefill's last layer make.
        layers = TWO_LAYERS.num_layers - (name == "prefill")
        assert program["own"] >= other["own"] + 3 * layers
        assert program["large_copies"] == 0
    expanded = TOKENS * NUM_CHOSEN * NUM_EXPERTS * TWO_LAYERS.hidden_size * 2
    for each in (programs, others):  # XLA's code takes one expert's tokens at a time
        assert each["prefill"]["memory"]["temp_bytes"] < 0.5 * expanded
