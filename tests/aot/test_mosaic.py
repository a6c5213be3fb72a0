"""The experiment in Mosaic GPU, compiled for an H100 by its own compiler, and interpreted."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from benchmarks.hardware.mosaic_attention import Steps, decode_attention
from tests.aot.topologies import needs_cuda_plugin, run_compiler

SCRIPT = """
import os, sys
from pathlib import Path
os.environ |= {"MOSAIC_GPU_DUMP_TO": sys.argv[1], "MOSAIC_GPU_DUMP_PTXAS": "1"}
os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
from benchmarks.hardware.gpu_lowerings import cases, lower_for_h100

text = lower_for_h100(cases()["mosaic_attention"]).compile().as_text()
assert text.count('custom_call_target="mosaic_gpu_v2"') == 1, text
"""


@needs_cuda_plugin
@pytest.mark.slow
def test_it_copies_by_tma_multiplies_by_wgmma_and_spills_no_registers(tmp_path):
    done = run_compiler("-W", "error::DeprecationWarning", "-c", SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    ptx, log = (
        "\n".join(x.read_text() for x in tmp_path.glob(f"*.{end}")) for end in ("ptx", "ptxas")
    )
    for instruction in ("cp.async.bulk.tensor", "wgmma.mma_async", "mbarrier"):
        assert instruction in ptx
    assert "0 bytes spill stores, 0 bytes spill loads" in log


@pytest.mark.slow
def test_it_agrees_with_float64():
    """Two splits, of which a row of one key leaves one empty; memory without keys is NaN."""
    rng = np.random.default_rng(0)
    num_rows, num_heads, head_dim, page_size, row_pages = 2, 3, 64, 16, 7
    kv_lens, scale = np.array([1, 100], np.int32), 0.125
    q = jnp.asarray(rng.normal(size=(num_rows, num_heads, head_dim)), jnp.bfloat16)
    pages = rng.normal(size=(2, num_rows * row_pages, 1, page_size, head_dim))
    table = rng.permutation(num_rows * row_pages).reshape(num_rows, row_pages).astype(np.int32)
    for row, length in enumerate(kv_lens):
        for page in range(row_pages):
            pages[:, table[row, page], :, max(length - page * page_size, 0) :] = np.nan
    k, v = jnp.asarray(pages, jnp.bfloat16)
    arguments = (q, k, v, jnp.asarray(table), jnp.asarray(kv_lens), scale)
    out = decode_attention(*arguments, Steps(splits=2), interpret=InterpretGPUParams())
    wide_q, *wide = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v))
    for row, length in enumerate(kv_lens):
        keys, values = (x[table[row], 0].reshape(-1, head_dim)[:length] for x in wide)
        weights = np.exp(scale * wide_q[row] @ keys.T)
        expected = weights / weights.sum(axis=1, keepdims=True) @ values
        np.testing.assert_allclose(np.asarray(out[row], np.float64), expected, atol=0.006)
