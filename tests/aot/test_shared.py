"""Decode programs in which rows read the keys that they share together, as compilers write them."""

from __future__ import annotations

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine.attention.base import Attention, AttentionOptions, BlockTables
from sgljax_engine.attention.pallas import PallasAttention
from sgljax_engine.attention.tpu import TpuAttention
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.kernels.gpu import paged_attention as gpu_kernel
from sgljax_engine.kernels.runs import MIN_SHARED_KEYS, find_runs, run_blocks
from sgljax_engine.kernels.tpu import paged_step
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


class Counted:
    """A module of Pallas, some functions of which add what they read to `num_bytes`."""

    def __init__(self, module: Any, pages_shape: tuple[int, ...]) -> None:
        self.module, self.pages_shape, self.num_bytes = module, pages_shape, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def add(self, num_bytes: Any) -> None:
        self.num_bytes += int(num_bytes)

    def load(self, ref: Any, **masks: Any) -> jax.Array:
        """Triton's: elements of pages that the mask leaves."""
        out = self.module.load(ref, **masks)
        if ref.ref.shape == self.pages_shape:
            elements = jnp.sum(jnp.broadcast_to(masks["mask"], out.shape), dtype=jnp.int32)
            jax.debug.callback(self.add, elements * out.dtype.itemsize)
        return out

    def make_async_copy(self, source: Any, target: Any, semaphore: Any) -> Any:
        """Mosaic's: whole pages, as copies start."""
        copy, counted = self.module.make_async_copy(source, target, semaphore), self

        class Copy:
            def start(self) -> None:
                jax.debug.callback(counted.add, np.prod(source.shape) * source.dtype.itemsize)
                copy.start()

            def wait(self) -> None:
                copy.wait()

        return Copy()


GROUPS, SAMPLES, PROMPT, OUTPUT, PAGE = 4, 16, 2048, 256, 16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 1, 128
"""Qwen3-8B on one of eight devices."""


def kv_bytes(
    monkeypatch: pytest.MonkeyPatch, attention: Attention, module: Any, name: str
) -> list[int]:
    """Bytes of keys and values that a layer reads in the last step, without runs and with them."""
    num_shared = (PROMPT - 1) // PAGE
    num_own, num_rows = (PROMPT + OUTPUT) // PAGE - num_shared, GROUPS * SAMPLES
    row = np.arange(num_rows)[:, None]
    shared = row // SAMPLES * num_shared + np.arange(num_shared)
    own = GROUPS * num_shared + row * num_own + np.arange(num_own)
    table = jnp.asarray(np.concatenate([shared, own], axis=1), jnp.int32)
    size = run_blocks(NUM_HEADS, NUM_KV_HEADS)
    before = jnp.full(num_rows, PROMPT - 1, jnp.int32)
    runs = find_runs(table, before, PAGE, jnp.int32(MIN_SHARED_KEYS), size)
    lens = jnp.full(num_rows, PROMPT + OUTPUT, jnp.int32)
    pages = jnp.zeros((int(table.max()) + 1, NUM_KV_HEADS, PAGE, HEAD_DIM), jnp.bfloat16)
    queries = jnp.zeros((num_rows, 1, NUM_HEADS, HEAD_DIM), jnp.bfloat16)
    counted = Counted(getattr(module, name), pages.shape)
    monkeypatch.setattr(module, name, counted)
    found = []
    for given in (None, runs):
        tables = BlockTables(table, lens[:, None] - 1, lens, given)
        attend = jax.jit(functools.partial(attention.attend, options=AttentionOptions(scale=0.1)))
        counted.num_bytes = 0
        jax.block_until_ready(attend(queries, LayerKV(pages, pages), tables))
        jax.effects_barrier()
        found.append(counted.num_bytes)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "module", "name", "most"),
    [
        (PallasAttention(interpret=True), gpu_kernel, "plgpu", 0.193),
        (TpuAttention(interpret=True), paged_step, "pltpu", 0.174),
    ],
    ids=["sm_90", "v5e"],
)
def test_a_step_reads_a_prompt_once(monkeypatch, attention, module, name, most):
    """A fifth of the bytes, counted as the interpreted kernels load them."""
    alone, shared = kv_bytes(monkeypatch, attention, module, name)
    a_key = 2 * NUM_KV_HEADS * HEAD_DIM * 2
    assert alone == GROUPS * SAMPLES * (PROMPT + OUTPUT) * a_key
    assert shared / alone < most
