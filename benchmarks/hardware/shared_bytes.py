"""KV bytes that a decode step reads, by the size of the groups that share a prompt.

    python benchmarks/hardware/shared_bytes.py            # some minutes, on any machine

64 rows with prompts of 2,048 tokens at their 256th token; a layer of Qwen3-8B's shape in bfloat16.
The kernels of GPUs and TPUs are interpreted, and what they load of the pages is added up, as they
load it. `docs/make_shared_plot.py` draws the result.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from sgljax_engine.attention.base import Attention, AttentionOptions, BlockTables
from sgljax_engine.attention.pallas import PallasAttention
from sgljax_engine.attention.tpu import TpuAttention
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.kernels.gpu import paged_attention as gpu_kernel
from sgljax_engine.kernels.runs import MIN_SHARED_KEYS, find_runs, run_blocks
from sgljax_engine.kernels.tpu import paged_step

ROWS, PROMPT, OUTPUT, PAGE = 64, 2048, 256, 16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DEVICES = 4, 1, 128, 8
"""Qwen3-8B on one of eight devices: the bytes of one device are an eighth of a layer's."""

KERNELS: dict[str, tuple[Attention, Any, str]] = {
    "GPU": (PallasAttention(interpret=True), gpu_kernel, "plgpu"),
    "TPU": (TpuAttention(interpret=True), paged_step, "pltpu"),
}
SIZES = (1, 4, 16, 64)


class _Counted:
    """A module of Pallas whose loads of pages are counted, in bytes."""

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


def kv_bytes(kernel: str, group: int) -> dict[str, int]:
    """Bytes of keys and values of a layer that a step reads, without runs and with them."""
    attention, module, name = KERNELS[kernel]
    num_shared = (PROMPT - 1) // PAGE
    num_own = (PROMPT + OUTPUT) // PAGE - num_shared
    row = np.arange(ROWS)[:, None]
    shared = row // group * num_shared + np.arange(num_shared)
    own = ROWS // group * num_shared + row * num_own + np.arange(num_own)
    table = jnp.asarray(np.concatenate([shared, own], axis=1), jnp.int32)
    size = run_blocks(NUM_HEADS, NUM_KV_HEADS)
    before = jnp.full(ROWS, PROMPT - 1, jnp.int32)
    runs = find_runs(table, before, PAGE, jnp.int32(MIN_SHARED_KEYS), size)
    lens = jnp.full(ROWS, PROMPT + OUTPUT, jnp.int32)
    pages = jnp.zeros((int(table.max()) + 1, NUM_KV_HEADS, PAGE, HEAD_DIM), jnp.bfloat16)
    queries = jnp.zeros((ROWS, 1, NUM_HEADS, HEAD_DIM), jnp.bfloat16)
    counted = _Counted(getattr(module, name), pages.shape)
    found = {}
    with mock.patch.object(module, name, counted):
        for label, given in (("alone", None), ("shared", runs)):
            tables = BlockTables(table, lens[:, None] - 1, lens, given)
            options = AttentionOptions(scale=0.1)
            attend = jax.jit(functools.partial(attention.attend, options=options))
            counted.num_bytes = 0
            jax.block_until_ready(attend(queries, LayerKV(pages, pages), tables))
            jax.effects_barrier()
            found[label] = counted.num_bytes * DEVICES
    return found


def main(argv: list[str] | None = None) -> None:
    """Counts and writes the report."""
    args = make_parser(__doc__).parse_args(argv)
    sizes = SIZES[2:3] if args.quick else SIZES
    found = {kernel: {str(size): kv_bytes(kernel, size) for size in sizes} for kernel in KERNELS}
    lines = ["| group | kernel | each row alone, MB | once for a run, MB | ratio |"]
    lines.append("|---:|---|---:|---:|---:|")
    for size in sizes:
        for kernel, by_size in found.items():
            alone, shared = by_size[str(size)]["alone"], by_size[str(size)]["shared"]
            megabytes = f"{alone / 1e6:.1f} | {shared / 1e6:.1f}"
            lines.append(f"| {size} | {kernel} | {megabytes} | {shared / alone:.3f} |")
    write_results(
        output_dir(args) / "shared_bytes.md",
        "KV bytes of a decode step of samples that share a prompt",
        "benchmarks/hardware/shared_bytes.py",
        lines,
        {"bytes": found},
    )


if __name__ == "__main__":
    main()
