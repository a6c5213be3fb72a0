"""What the comparison of kernels for TPUs counts by arithmetic is what our kernel copies."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from benchmarks.hardware import tpu_attention as comparison
from benchmarks.hardware.tpu_attention import PAGE_SIZE, Shape, Work
from sgljax_engine.attention.tpu import TpuAttention

DECODE = Work(((1, 300), (1, 40), (1, 512), (1, 17)), 512)
PREFILL = Work(((64, 64), (128, 400), (48, 48), (16, 112)), 512)


@pytest.mark.slow
@pytest.mark.parametrize(("work", "window"), [(DECODE, None), (PREFILL, 100)])
def test_pages_that_the_kernel_copies(monkeypatch, work, window):
    copied = []
    read = interpret_pallas_call.DMA.execute_read

    def counted_read(self):
        read(self)
        copied.append(self.data.nbytes)

    interpreted = functools.partial(TpuAttention, interpret=pltpu.InterpretParams())
    monkeypatch.setattr(interpret_pallas_call.DMA, "execute_read", counted_read)
    monkeypatch.setattr(comparison, "TpuAttention", interpreted)
    shape = Shape(hidden=0, mlp=0, heads=4, kv_heads=2, head_dim=128, window=window)
    blocks, num_pages = [], 0
    for new, keys in work.sequences:
        used = -(-keys // PAGE_SIZE)
        table = np.arange(num_pages, num_pages + used)
        table = np.pad(table, (0, work.max_keys // PAGE_SIZE - used))
        size = 1 if work.is_decode else 16
        blocks += [(table, start, start + size) for start in range(keys - new, keys, size)]
        num_pages += used
    tables = tuple(jnp.asarray(np.stack(x), jnp.int32) for x in zip(*blocks, strict=True))
    q, k, v = (jnp.ones((work.num_tokens, n, 128), jnp.bfloat16) for n in (4, 2, 2))
    pool = (jnp.zeros((num_pages, 2, PAGE_SIZE, 128), jnp.bfloat16),) * 2
    call = functools.partial(comparison.attend_by_ours, shape=shape, work=work)
    jax.block_until_ready(jax.jit(call)(q, k, v, pool, tables))
    assert sum(copied) == comparison.our_pages(shape, work) * shape.page_bytes
