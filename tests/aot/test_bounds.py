"""Real models compiled for chips that are not here: they fit, and what decode steps may cost."""

from __future__ import annotations

import functools
import json

import pytest

from tests.aot.programs import TWO_LAYERS
from tests.aot.test_compile import compile_for
from tests.aot.topologies import needs_libtpu, run_compiler

pytestmark = [needs_libtpu, pytest.mark.slow]

GIB = 1 << 30

ENGINES = {
    # What `aot` is asked: a model, a topology, devices of an engine, options.
    "qwen3-0.6b on v5e": (
        "qwen3-0.6b",
        "v5e:1x1",
        1,
        {"max_model_len": 1024, "max_running_requests": 64, "num_kv_tokens": 65536},
    ),
    "qwen3-8b on v5e tp 8": ("qwen3-8b", "v5e:2x4", 8, {"max_model_len": 4096}),
    "qwen3-8b on v5e 2 of tp 4": ("qwen3-8b", "v5e:2x4", 4, {"max_model_len": 4096}),
    "qwen3-0.6b on v5p": ("qwen3-0.6b", "v5p:1x1x1", 1, {"max_model_len": 4096}),
    "qwen3-0.6b on v5e, a pool that VMEM could hold": (
        "qwen3-0.6b",
        "v5e:1x1",
        1,
        {"max_model_len": 1024, "max_running_requests": 64, "num_kv_tokens": 26624},
    ),
    # The pool is what memory gives: `num_kv_tokens` is left to the engine.
    "llama-3.2-1b on v6e": (
        "llama-3.2-1b",
        "v6e:1x1",
        1,
        {"max_model_len": 4096, "max_running_requests": 64},
    ),
    "gemma-3-4b on v6e": (
        "gemma-3-4b-it",
        "v6e:1x1",
        1,
        {"max_model_len": 4096, "max_running_requests": 64},
    ),
    "gemma-4-e2b on v5e": (
        "gemma-4-e2b",
        "v5e:1x1",
        1,
        {"max_model_len": 4096, "max_running_requests": 32},
    ),
}
NUM_LAYERS = {
    "qwen3-0.6b": 28,
    "qwen3-8b": 36,
    "llama-3.2-1b": 16,
    "gemma-3-4b-it": 34,
    "gemma-4-e2b": 35,
}
NUM_OWN_KEYS = NUM_LAYERS | {"gemma-4-e2b": 15}
"""Layers with keys of their own; prefill ends with these, since it is to write keys alone."""
HIDDEN_SIZE = {"qwen3-8b": 4096}
SHARED = [name for name in ENGINES if "tp" in name]


@functools.cache
def compiled(name):
    """The report of `aot --json`; compiled once, in a process of its own."""
    model, topology, tp_size, options = ENGINES[name]
    pairs = [x for key, value in options.items() for x in ("--engine", f"{key}={value}")]
    done = run_compiler(
        *("-m", "tools.aot", "--model", model, "--topology", topology),
        *("--tp", tp_size, "--json", *pairs),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def program_of(name, kind):
    (found,) = [program for program in compiled(name)["programs"] if program["name"] == kind]
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_it_fits(name):
    _, _, tp_size, options = ENGINES[name]
    found = compiled(name)
    assert found["problem"] is None
    assert found["needed_bytes"] < found["chip"]["usable_bytes"]
    preview = found["preview"]
    assert (preview["max_model_len"], preview["tp_size"]) == (options["max_model_len"], tp_size)
    assert preview["attention"] == "tpu"
    memory = preview["memory"]
    rule = "num_kv_tokens" if "num_kv_tokens" in options else "mem_fraction_static"
    assert memory["rule"] == rule
    assert memory["kv_tokens"] >= memory["num_engines"] * options["max_model_len"]
    for program in found["programs"]:
        assert program["memory"]["alias_bytes"] >= memory["kv_bytes"] // tp_size, "KV in place"


def test_decode_of_the_smallest_model_needs_little_beside_weights_and_kv():
    """64 rows of 1,024 tokens on one v5e: 0.52 GiB, mostly arrays of the size of logits."""
    decode = program_of("qwen3-0.6b on v5e", "decode")
    assert decode["size"] == 64
    assert decode["memory"]["temp_bytes"] < 0.6 * GIB


@pytest.mark.parametrize("name", [name for name in ENGINES if "0.6b on v5e" in name])
def test_decode_moves_little_more_than_it_must(name):
    """Weights once, and the keys and values of 64 full rows: 1.05, however small the pool is."""
    decode = program_of(name, "decode")
    memory = compiled(name)["preview"]["memory"]
    row_bytes = 1024 * memory["kv_bytes"] / memory["kv_tokens"]
    needed = memory["weights_bytes"] + decode["size"] * row_bytes
    assert needed <= decode["memory_bytes"] <= 1.1 * needed


def test_estimates_are_of_one_basis():
    """What the model needs, and what the program has, are within a tenth in decode."""
    by_model, by_program, *_ = compiled("qwen3-0.6b on v5e")["estimates"]
    assert (by_model["name"], by_model["basis"]) == ("decode", "model")
    assert (by_program["name"], by_program["basis"]) == ("decode", "program")
    assert by_model["step_s"] <= by_program["step_s"] <= 1.1 * by_model["step_s"]


def test_prefill_reads_keys_once_for_128_tokens():
    """Weights of all layers once, and the keys and values of 16 full rows for 2,048 tokens."""
    name = "qwen3-0.6b on v5e"
    memory, prefill = compiled(name)["preview"]["memory"], program_of(name, "prefill")
    table_bytes = 2 * 151936 * 1024
    rows = prefill["size"] / 128
    needed = memory["weights_bytes"] - table_bytes
    needed += memory["kv_bytes"] * rows * 1024 / memory["kv_tokens"]
    assert 0.97 * needed <= prefill["memory_bytes"] <= 1.25 * needed


@pytest.mark.parametrize("name", ENGINES)
def test_decode_is_a_kernel_call_a_layer_and_copies_nothing_large(name):
    """No copy of a layer's KV pages or of a weight."""
    decode = program_of(name, "decode")
    attention = calls_of(decode)["paged_attention"]
    assert (attention["count"], attention["num_loops"]) == (NUM_LAYERS[ENGINES[name][0]], 1)
    assert decode["copies"] == []


@pytest.mark.parametrize("name", ENGINES)
def test_prefill_is_a_kernel_call_a_layer_with_keys(name):
    attention = calls_of(program_of(name, "prefill"))["paged_attention"]
    assert (attention["count"], attention["num_loops"]) == (NUM_OWN_KEYS[ENGINES[name][0]], 0)
    for copy in program_of(name, "prefill")["copies"]:
        assert copy["num_bytes"] < 0.05 * GIB, "activations, no weight and no page"


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_queries_and_keys_are_rotated_where_they_are(kind):
    """A kernel rotates queries, and keys, in each layer, so that nothing transposes them."""
    program = program_of("qwen3-0.6b on v5e", kind)
    assert calls_of(program)["rotate_heads"]["count"] == 2 * 28
    # In prefill the embeddings of the tokens, which are as many numbers as a weight.
    assert [copy["count"] for copy in program["copies"]] == [1] * (kind == "prefill")


def calls_of(program):
    """Calls by the names of their kernels."""
    return {call["name"].removeprefix("tpu_custom_call "): call for call in program["kernels"]}


@pytest.mark.parametrize("name", SHARED)
def test_engines_of_several_devices_exchange_two_activations_a_layer(name):
    """Beside them, and the embeddings of the rows, sampling exchanges few numbers of a row."""
    model, decode = ENGINES[name][0], program_of(name, "decode")
    rows = decode["size"]
    activations = f"bf16[{rows},{HIDDEN_SIZE[model]}]"
    sums = [op for op in decode["collectives"] if op["array"] == activations]
    assert {op["name"] for op in sums} == {"all-reduce"}
    assert sum(op["count"] for op in sums) <= 2 * NUM_LAYERS[model] + 1
    for op in decode["collectives"]:
        if op["array"] != activations:
            # In branches, which not every step takes, there are an all-reduce of [rows, 64, 16]
            # and an all-gather of [rows, 640] float32; the others are within [rows, 512].
            numbers = 1024 if op["is_conditional"] else 512
            assert op["num_bytes"] / op["count"] <= rows * numbers * 4, op  # all have the same size


@pytest.mark.parametrize("name", [name for name in ENGINES if name not in SHARED])
def test_one_device_exchanges_nothing(name):
    for program in compiled(name)["programs"]:
        assert program["collectives"] == []


@pytest.mark.parametrize(
    "options",
    [{"page_size": 8}, {"page_size": 32}, {"page_size": 64}, {"dtype": "float32"}],
    ids=["page_8", "page_32", "page_64", "float32"],
)
def test_the_kernel_compiles_for_other_pages_and_float32(options):
    found = compile_for("v5e:1x1", (1, 1), **options)
    preview = found["preview"]
    assert (found["problem"], preview["attention"]) == (None, "tpu")
    assert preview["memory"]["page_size"] == options.get("page_size", 16)
    decode, prefill, _ = found["programs"]
    for program in (decode, prefill):
        assert calls_of(program)["paged_attention"]["count"] == TWO_LAYERS.num_layers
    assert decode["copies"] == []
