"""An engine's programs, compiled by the vendors' compilers and read."""

from __future__ import annotations

import json

import pytest

from sgljax_engine.builder.group import build_shapes
from sgljax_engine.config import EngineConfig
from sgljax_engine.runner.warmup import call_size, largest, warm_calls
from tests.aot.programs import TWO_LAYERS
from tests.aot.topologies import needs_cuda_plugin, needs_libtpu, run_compiler
from tools.aot import CHIPS

ROWS, TOKENS, KV_TOKENS = 8, 256, 2048
OPTIONS = {
    "max_running_requests": ROWS,
    "max_model_len": 256,
    "num_kv_tokens": KV_TOKENS,
    "batch_buckets": (1, ROWS),
    "token_buckets": (128, TOKENS),
    "chunked_prefill_size": TOKENS,
    "dtype": "bfloat16",
}

SCRIPT = """
import json, sys
from sgljax_engine import EngineConfig
from tools.aot import compile_programs, parse_topology, topology_mesh
from tests.aot.programs import TWO_LAYERS
from tests.aot.test_compile import OPTIONS
from tools.aot.target import prepare_compiler
from tools.aot.words import to_json

topology, shape, more = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
prepare_compiler(topology)
report = compile_programs(
    TWO_LAYERS,
    chip=parse_topology(topology)[0],
    mesh=topology_mesh(topology, shape),
    config=EngineConfig.from_options(OPTIONS | more),
)
print(json.dumps(to_json(report, "two layers", topology)))
"""


def compile_for(topology, shape, **more):
    """The report as JSON, made by a process of its own."""
    done = run_compiler("-c", SCRIPT, topology, json.dumps(shape), json.dumps(more))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_largest_of_each_program_is_taken():
    runner, _ = build_shapes(TWO_LAYERS, EngineConfig.from_options(OPTIONS), "bfloat16", None)
    calls = largest(warm_calls(runner, frozenset({"score"})))
    assert [(call.name, call_size(call)) for call in calls] == [
        ("decode", ROWS),
        ("prefill", TOKENS),
        ("score", TOKENS),
        ("copy_pages", ROWS // 8),
    ]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "shape"),
    [("v5e:1x1", (1, 1)), ("v6e:2x2", (2, 2)), ("v5p:2x2x1", (1, 4))],
    ids=["v5e", "v6e_2_of_tp2", "v5p_tp4"],
)
def test_programs_of_a_chip(topology, shape):
    num_engines, tp_size = shape
    found = compile_for(topology, shape)
    preview = found["preview"]
    assert (preview["platform"], found["problem"]) == ("tpu", None)
    assert (preview["num_engines"], preview["tp_size"]) == shape
    programs = {program["name"]: program for program in found["programs"]}
    assert list(programs) == ["decode", "prefill", "copy_pages"]
    rows = ROWS // num_engines
    assert (programs["decode"]["size"], programs["prefill"]["size"]) == (rows, TOKENS)

    # Weights and KV are arguments, and the KV is updated where it is.
    table = TWO_LAYERS.vocab_size * TWO_LAYERS.hidden_size
    body = preview["num_parameters"] - table
    kv = KV_TOKENS // num_engines * 2 * 2 * 4 * 128 * 2 // tp_size
    held = found["held_bytes"]
    assert held == preview["weights_bytes"] // tp_size + kv
    decode, prefill = programs["decode"]["memory"], programs["prefill"]["memory"]
    assert held <= decode["argument_bytes"] < 1.05 * held
    assert decode["alias_bytes"] == prefill["alias_bytes"] == kv
    assert found["needed_bytes"] < CHIPS[topology[:3]].usable_bytes

    # The kernel for TPUs, once a layer: nothing copies pages or weights, or needs much memory.
    assert preview["attention"] == "tpu"
    assert sum(call["count"] for call in programs["decode"]["kernels"]) == TWO_LAYERS.num_layers
    assert programs["decode"]["copies"] == []
    assert decode["temp_bytes"] < 2**26

    # A decode program counts one token of each row; prefill computes no logits. The last layer's
    # MLP after its keys and values is left out of prefill.
    # The kernel says what it takes if each request fills its page table.
    scores = TWO_LAYERS.num_layers * 4 * TWO_LAYERS.num_heads * TWO_LAYERS.head_dim
    scores *= preview["max_model_len"]
    by_row, by_token = 2 * (body + table) + scores, 2 * body + scores
    assert 1 <= programs["decode"]["flops"] / (by_row * rows / tp_size) < 1.6
    assert 0.5 <= programs["prefill"]["flops"] / (by_token * TOKENS / tp_size) < 1.6
    assert programs["decode"]["memory_bytes"] > held - kv

    # Two sums over the devices in each layer, each iteration.
    for program in programs.values():
        assert bool(program["collectives"]) == (tp_size > 1 and program["name"] != "copy_pages")
    sums = [op for op in programs["decode"]["collectives"] if op["name"] == "all-reduce"]
    logits_bytes = 4 * rows * TWO_LAYERS.vocab_size
    for op in programs["decode"]["collectives"]:
        if op["name"] in ("all-gather", "all-to-all", "collective-permute"):
            assert op["num_bytes"] < 0.25 * logits_bytes, "logits stay where they are"
    if tp_size > 1:
        assert sum(op["count"] for op in sums if op["num_loops"] == 1) >= 2 * 2
    assert [each["name"] for each in found["estimates"]] == ["decode"] * 2 + ["prefill"] * 2


SCORES = """
import dataclasses, json, sys
from sgljax_engine import EngineConfig
from sgljax_engine.builder.group import build_shapes
from sgljax_engine.runner.warmup import warm_calls
from tests.aot.programs import TWO_LAYERS
from tests.aot.test_compile import OPTIONS, TOKENS
from tools.aot import parse_topology, topology_mesh
from tools.aot.report import read_program
from tools.aot.target import prepare_compiler

topology, model = sys.argv[1], dataclasses.replace(TWO_LAYERS, head_dim=int(sys.argv[2]))
prepare_compiler(topology)
chip, mesh = parse_topology(topology)[0], topology_mesh(topology, (1, 1))
config = EngineConfig.from_options(OPTIONS | {"token_buckets": (TOKENS,)})
runner, _ = build_shapes(model, config, "bfloat16", mesh, chip.usable_bytes)
(call,) = runner.scorer.warm_calls()
compiled = runner.programs.compile_alone(call, runner.kv_memory.state(runner.weights))
a_page_array = TOKENS * model.num_kv_heads * model.head_dim
report = read_program(compiled, name="score", size=TOKENS, large={a_page_array}, compile_s=0)
print(json.dumps(dataclasses.asdict(report)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "head_dim"),
    [
        pytest.param("v5e:1x1", 128, marks=needs_libtpu),
        pytest.param("v5e:1x1", 64, marks=needs_libtpu),  # two heads in a row of a page
        pytest.param("h100:1", 128, marks=needs_cuda_plugin),
    ],
)
def test_scores_of_a_chip(topology, head_dim):
    """Keys live in pages of the program's own, which the kernels of decoding write and read."""
    done = run_compiler("-c", SCORES, topology, head_dim)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    attention = [call for call in found["kernels"] if "rotate" not in call["name"]]
    assert attention
    assert found["copies"] == []
    logits = TOKENS * TWO_LAYERS.vocab_size * 4
    assert found["memory"]["temp_bytes"] < 3 * logits


@needs_libtpu
@pytest.mark.slow
def test_steps_with_drafts_of_a_chip():
    """A row's tokens are one block, whose kernel reads its pages once and writes them in place."""
    found = compile_for("v6e:2x2", (1, 2), speculation="always")
    programs = [(program["name"], program) for program in found["programs"]]
    assert sorted(name for name, _ in programs) == ["copy_pages", "decode", "decode", "prefill"]
    aliased = dict(programs)["prefill"]["memory"]["alias_bytes"]
    for name, program in programs:
        if name != "decode":
            continue
        assert program["problem"] is None
        calls = [call for call in program["kernels"] if call["name"].endswith("paged_attention")]
        assert sum(call["count"] for call in calls) == TWO_LAYERS.num_layers
        # Logits of a step, which happen to have as many elements as a weight; no pages.
        assert sum(copy["count"] * copy["num_bytes"] for copy in program["copies"]) < 2**20
        assert program["memory"]["alias_bytes"] == aliased


@needs_libtpu
@pytest.mark.slow
def test_a_program_that_does_not_fit_is_reported():
    """KV of nearly all of a v5e, which the portable attention copies."""
    found = compile_for(
        "v5e:1x1",
        (1, 1),
        num_kv_tokens=4_000_000,
        max_running_requests=ROWS,
        attention_backend="xla",
    )
    assert found["held_bytes"] < CHIPS["v5e"].usable_bytes
    assert found["problem"].startswith("decode of 8: Ran out of memory")
    assert found["programs"][0]["memory"] is None


@needs_cuda_plugin
@pytest.mark.slow
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_programs_of_a_gpu(num_gpus):
    found = compile_for(f"h100:{num_gpus}", (1, num_gpus))
    assert (found["preview"]["platform"], found["problem"]) == ("gpu", None)
    for program in found["programs"]:
        kv = KV_TOKENS * 2 * 2 * 4 * 128 * 2 // num_gpus
        assert program["memory"]["alias_bytes"] == kv
        assert program["flops"] is None
        has_sums = num_gpus > 1 and program["name"] != "copy_pages"
        assert bool(program["collectives"]) == has_sums
    assert [each["name"] for each in found["estimates"]] == ["decode", "prefill"]


@needs_cuda_plugin
@pytest.mark.slow
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_attention_of_a_gpu_is_a_kernel(num_gpus):
    found = compile_for(f"h100:{num_gpus}", (1, num_gpus), linear_backend="xla")
    decode, prefill, _ = found["programs"]
    for program, num_loops in ((decode, 1), (prefill, 0)):
        (kernel,) = program["kernels"]
        assert kernel["name"] == "__gpu$xla.gpu.triton pallas_call"
        assert kernel["num_loops"] == num_loops
        assert program["launches"]["large_copies"] == 0


@needs_cuda_plugin
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", None), ("float32", None), ("bfloat16", "int8")]
)
def test_a_layer_of_a_decode_step_is_seven_kernels(dtype, quantization):
    """Norm; q, k, v; attention; its output; norm; gate and up; down. Norms are XLA's.

    XLA combines the splits of so few rows' contexts, and needs 14 kernels or more for all else.
    """
    options = {"dtype": dtype, "quantization": quantization}
    fused = compile_for("h100:1", (1, 1), **options)["programs"][0]
    assert (fused["name"], fused["launches"]["per_layer"]) == ("decode", 7 + 1)
    assert fused["launches"]["own"] == 5 * TWO_LAYERS.num_layers
    assert fused["launches"]["large_copies"] == fused["launches"]["copies"] == 0
    kv = KV_TOKENS * 2 * 2 * 4 * 128 * (2 if dtype == "bfloat16" else 4)
    assert fused["memory"]["alias_bytes"] == kv
    xla = compile_for("h100:1", (1, 1), **options, linear_backend="xla")["programs"][0]
    assert xla["launches"]["own"] == TWO_LAYERS.num_layers
    assert xla["launches"]["total"] >= fused["launches"]["total"] + 6 * TWO_LAYERS.num_layers


@needs_cuda_plugin
@pytest.mark.slow
def test_a_layer_of_a_deterministic_step_is_eight_kernels():
    """Queries, keys and cache are a kernel of their own, which prefill has too."""
    found = compile_for("h100:1", (1, 1), enable_deterministic_sampling=True)
    decode, prefill, _ = found["programs"]
    assert decode["launches"]["per_layer"] == 8
    assert prefill["launches"]["per_layer"] == (8 + 3) / 2  # the last one only writes keys
    for program in (decode, prefill):
        assert program["launches"]["large_copies"] == program["launches"]["products"] == 0
    assert decode["launches"]["own"] == 8 * TWO_LAYERS.num_layers + 3  # sines, norm, logits
