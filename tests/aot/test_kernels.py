"""The kernels of GPUs, compiled for an H100 by its own compiler: nothing leaves the registers."""

from __future__ import annotations

import pytest

from tests.aot.topologies import needs_cuda_plugin, run_compiler

SCRIPT = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"
import jax
import jax.numpy as jnp
from tools.aot import topology_mesh
from sgljax_engine.kernels.gpu import decode_attention, paged_attention, prefill_attention
from tools.aot.target import prepare_compiler

prepare_compiler("h100:1")
mesh = topology_mesh("h100:1", (1, 1))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

def shape(*sizes, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

kernel, head_dim, dtype, more_keys = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
scores, sinks = paged_attention.Scores(0.1, 600, 50.0), ()
num_heads, num_kv_heads = 8, 4
if sys.argv[5:]:  # as gpt-oss
    scores, sinks = paged_attention.Scores(0.125, 128), (shape(64, dtype=jnp.float32),)
    num_heads, num_kv_heads = 64, 8
pages, scales = shape(1024, num_kv_heads, 16, head_dim, dtype=dtype), None
if dtype == "int8":
    dtype, scales = "bfloat16", (shape(1024, num_kv_heads, 16, dtype=jnp.float32),) * 2
table, kv_lens = shape(64, 128), shape(64)
if kernel == "decode":
    heads = [shape(64, count, head_dim, dtype=dtype) for count in (num_heads, *[num_kv_heads] * 2)]
    norms = () if sinks else (shape(head_dim, dtype=jnp.float32),)
    angles = shape(64, head_dim // 2, dtype=jnp.float32)

    def run(heads, angles, norms, pages, tables, sinks):
        norms = decode_attention.HeadNorms(*norms, *norms, 1e-6, 0.0) if norms else None
        return decode_attention.decode_attention(
            *heads, angles, norms, pages, *tables, scores, *sinks
        )

    args = (heads, (angles, angles), norms, (pages, pages), (table, kv_lens), sinks)
elif kernel.startswith("latents"):
    num_queries = 1 if kernel == "latents, decode" else 16
    pages = shape(1024, 1, 16, head_dim, dtype=dtype)

    def run(q, k, *tables):
        return paged_attention.paged_attention(q, k, None, *tables, scores)

    q = shape(64, num_queries, 16, head_dim, dtype=dtype)
    args = (q, pages, table, shape(64, num_queries), kv_lens)
else:
    num_queries = 1 if kernel == "paged, decode" else 16
    q = shape(64, num_queries, num_heads, head_dim, dtype=dtype)

    def run(args, sinks, scales):
        if kernel.startswith("paged"):
            return paged_attention.paged_attention(*args, scores, *(sinks or [None]), scales)
        tiling = prefill_attention.choose_prefill_tiling(q.shape, num_kv_heads)
        tiling = tiling._replace(keys=tiling.keys * more_keys)
        return prefill_attention.prefill_attention(*args, scores, *sinks, tiling=tiling)

    args = ((q, pages, pages, table, shape(64, num_queries), kv_lens), sinks, scales)
text = jax.jit(run).lower(*args).compile().as_text()
assert text.count("__gpu$xla.gpu.triton") == 1, text
"""


@needs_cuda_plugin
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "head_dim", "dtype"),
    [
        ("prefill", 64, "bfloat16"),
        ("prefill", 128, "float16"),
        ("prefill", 256, "bfloat16"),
        ("prefill", 512, "bfloat16"),
        ("paged", 512, "bfloat16"),
        ("paged", 128, "int8"),
        ("paged", 512, "int8"),
        ("paged, decode", 128, "int8"),
        ("decode", 512, "bfloat16"),
        ("decode", 512, "float32"),
        ("latents", 576, "bfloat16"),
        ("latents, decode", 576, "bfloat16"),
    ],
)
def test_attention_spills_no_registers(kernel, head_dim, dtype):
    done = run_compiler("-c", SCRIPT, kernel, head_dim, dtype, 1)
    assert done.returncode == 0, done.stderr


@needs_cuda_plugin
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["prefill", "paged", "decode"])
def test_attention_with_sinks_spills_no_registers(kernel):
    """One kernel too: it starts with the sinks."""
    done = run_compiler("-c", SCRIPT, kernel, 64, "bfloat16", 1, "sinks")
    assert done.returncode == 0, done.stderr


@needs_cuda_plugin
@pytest.mark.slow
def test_the_compiler_tells_of_spills():
    """512 keys in a step have more scores than there are registers."""
    done = run_compiler("-c", SCRIPT, "prefill", 32, "bfloat16", 4)
    assert done.returncode != 0
    assert "register spilling" in done.stderr
