"""JAX's ragged paged attention for TPUs beside ours, both compiled for TPUs that are not here.

    python benchmarks/hardware/tpu_attention.py    # needs libtpu; goes on from the results it finds

A program is two layers of a model: norms, projections, rotary embedding, attention and MLP; decode
runs them in a loop over tokens, as the engine does. Each kernel gets its own layout of pages and
its own blocks. Ours writes new keys and values; JAX's does not, so they are scattered before it.
Heads narrower than 128 channels share rows with both.

Temporaries, copies, and bytes that XLA moves around the kernel are read off the compiled program.
Which pages a kernel copies no compiler knows: `our_pages` and `jax_pages` count them for given
lengths. tests/benchmarks/test_tpu_attention.py holds ours against the interpreted kernel; JAX's
cannot be interpreted, so its count is read off its code.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.mesh import use_abstract_mesh
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from benchmarks.lib.reporting import make_parser, output_dir, read_results, write_results
from sgljax_engine.attention.base import AttentionOptions, BlockTables, NewTokens
from sgljax_engine.attention.tpu import TpuAttention, heads_per_row
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.kernels.tpu import paged_attention as our_kernel
from sgljax_engine.kernels.tpu.rotate import rotate_heads
from tools.aot import topology_mesh
from tools.aot.hlo import Instruction, Module, operands
from tools.aot.report import count_copies
from tools.aot.target import prepare_compiler
from tools.aot.traffic import count_traffic

PAGE_SIZE = 16
_NUM_LAYERS = 2
_POOL_TOKENS = 1 << 16
_BLOCK = 16
"""Query tokens of a block of the engine's prefill."""

_JAX_PAGES = 16
"""Pages of a block of JAX's kernel: the most that its own table has for pages of 16 tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer of a model, in bfloat16."""

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def per_row(self) -> int:
        """Kv heads that share a row of a page."""
        return heads_per_row(self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Keys and values of a page."""
        return 4 * PAGE_SIZE * self.kv_heads * self.head_dim

    @property
    def weight_bytes(self) -> int:
        """Projections and MLP."""
        heads = 2 * (self.heads + self.kv_heads)
        return 2 * self.hidden * (heads * self.head_dim + 3 * self.mlp)


MODELS = {
    "Qwen3-0.6B": Shape(hidden=1024, mlp=3072, heads=16, kv_heads=8, head_dim=128),
    "Llama-3.1-8B": Shape(hidden=4096, mlp=14336, heads=32, kv_heads=8, head_dim=128),
    "Llama-3.2-1B": Shape(hidden=2048, mlp=8192, heads=32, kv_heads=8, head_dim=64),
    "Gemma 3 4B, full": Shape(hidden=2560, mlp=10240, heads=8, kv_heads=4, head_dim=256),
    "Gemma 3 1B, sliding": Shape(
        hidden=1152, mlp=6912, heads=4, kv_heads=1, head_dim=256, window=512
    ),
}


class Work(NamedTuple):
    """A dispatch.

    Attributes:
        sequences: New tokens of each sequence, and its keys with them.
        max_keys: Keys that a page table has room for.
    """

    sequences: tuple[tuple[int, int], ...]
    max_keys: int

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one new token."""
        return self.sequences[0][0] == 1

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(new for new, _ in self.sequences)

    @property
    def program(self) -> str:
        """Name of the program that does it."""
        kind = "decode" if self.is_decode else "prefill"
        return f"{kind} {self.num_tokens}, {self.max_keys:,} keys"


WORKS = {
    "decode, 64 rows of 1,024 keys": Work(((1, 1024),) * 64, 1024),
    "decode, 64 rows of 142 to 1,024": Work(tuple((1, 142 + 14 * i) for i in range(64)), 1024),
    "decode, 128 rows of 8,192 keys": Work(((1, 8192),) * 128, 8192),
    "prefill, 16 prompts of 128": Work(((128, 128),) * 16, 8192),
    "prefill, a prompt of 2,048": Work(((2048, 2048),), 8192),
    "prefill, the last 2,048 of 8,192": Work(((2048, 8192),), 8192),
}


def our_pages(shape: Shape, work: Work) -> int:
    """Pages that our kernel reads in a layer, and those that it writes."""
    rows, dim = -(-shape.kv_heads // shape.per_row), shape.per_row * shape.head_dim
    step = 1
    if not work.is_decode:
        blocks = (work.num_tokens // _BLOCK, _BLOCK, shape.heads, dim)
        queries: Any = jax.ShapeDtypeStruct(blocks, jnp.bfloat16)
        step = _BLOCK * our_kernel.step_blocks(queries, rows)
    total = before = 0
    for new, keys in work.sequences:
        first = keys - new
        while first < keys:  # what is in one step
            end = min(keys, first + step - before % step)
            oldest = 0 if shape.window is None else max(first - shape.window + 1, 0)
            used, all_new = -(-end // PAGE_SIZE), end // PAGE_SIZE - -(-first // PAGE_SIZE)
            total += used - oldest // PAGE_SIZE - max(all_new, 0)
            total += used - first // PAGE_SIZE
            before, first = before + end - first, end
    return total


def jax_pages(shape: Shape, work: Work) -> int:
    """Pages that JAX's kernel reads in a layer: all of each sequence for each block of queries."""
    total = before = 0
    queries = _jax_queries(shape, work)
    for new, keys in work.sequences:
        blocks = (before + new - 1) // queries - before // queries + 1
        total += blocks * -(-keys // (_JAX_PAGES * PAGE_SIZE)) * _JAX_PAGES
        before += new
    return total


def _jax_queries(shape: Shape, work: Work) -> int:
    """Queries of a block: as its table has it for decode, the most that compile for prefill."""
    if work.is_decode:
        return 32
    return 128 if shape.heads <= 16 else 64


def attend_by_ours(
    q: Any, k: Any, v: Any, pool: Any, tables: Any, shape: Shape, work: Work
) -> tuple[Any, Any]:
    """Our backend, in the engine's blocks."""
    table, starts, lens = tables
    num_queries = 1 if work.is_decode else _BLOCK
    positions = starts[:, None] + jnp.arange(num_queries)
    out, layer = TpuAttention().write_and_attend(
        NewTokens(q, k, v),
        LayerKV(*pool),
        BlockTables(table, positions, lens),
        jnp.zeros(len(q), jnp.int32),  # the kernel finds slots by itself
        AttentionOptions(shape.head_dim**-0.5, shape.window),
    )
    return out, tuple(layer)


def _attend_by_jax(
    q: Any, k: Any, v: Any, pool: Any, tables: Any, shape: Shape, work: Work
) -> tuple[Any, Any]:
    """JAX's kernel, after a scatter."""
    table, cu_q_lens, lens, slots = tables
    tokens, (_, _, combined, dim) = q.shape[0], pool.shape
    new = jnp.stack([x.reshape(tokens, combined // 2, dim) for x in (k, v)], axis=2)
    flat = pool.reshape(-1, combined, dim)
    flat = flat.at[slots].set(new.reshape(tokens, combined, dim), mode="drop")
    # As for ours: a pool that fits into VMEM would be brought there whole, and back.
    pool = flat.reshape(pool.shape)
    held = pltpu.with_memory_space_constraint(pool, pltpu.HBM)
    # Heads that share a row: queries are zero in the others' parts.
    index = (jnp.arange(shape.heads) * shape.kv_heads // shape.heads % shape.per_row)[:, None]
    parts = [jnp.where(index == i, q, 0) for i in range(shape.per_row)]
    out = ragged_paged_attention(
        jnp.concatenate(parts, axis=-1),
        held,
        lens,
        table,
        cu_q_lens,
        jnp.array([len(lens)], jnp.int32),
        sm_scale=shape.head_dim**-0.5,
        sliding_window=shape.window,
        num_kv_pages_per_block=_JAX_PAGES,
        num_queries_per_block=_jax_queries(shape, work),
    )
    parts = jnp.split(out, shape.per_row, axis=-1)
    return sum(jnp.where(index == i, part, 0) for i, part in enumerate(parts)), pool


def _rotate(x: Any, positions: Any) -> Any:
    """Rotary embedding, as the engine has it on TPUs."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 1e6 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    if x.shape[-1] % 128 == 0:
        return rotate_heads(x, None, sin, cos)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _layer(x: Any, weights: Any, positions: Any, attend: Any) -> Any:
    def norm(x: Any) -> Any:
        x = x.astype(jnp.float32)
        return (x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)

    y = norm(x)
    q, k, v = (jnp.einsum("td,hnd->thn", y, weights[name]) for name in ("q", "k", "v"))
    out, pool = attend(_rotate(q, positions), _rotate(k, positions), v)
    x += jnp.einsum("thn,hnd->td", out, weights["o"])
    gate, up = (jnp.einsum("td,fd->tf", norm(x), weights[name]) for name in ("gate", "up"))
    return x + jnp.einsum("tf,fd->td", jax.nn.silu(gate) * up, weights["down"]), pool


def make_program(shape: Shape, work: Work, is_ours: bool) -> tuple[Any, tuple[Any, ...]]:
    """A function of (x, weights, pools, tables, positions), and their shapes."""
    attend = attend_by_ours if is_ours else _attend_by_jax

    def layers(x: Any, weights: Any, pools: Any, tables: Any, positions: Any) -> Any:
        stored = []
        for pool, own in zip(pools, weights, strict=True):
            here = functools.partial(attend, pool=pool, tables=tables, shape=shape, work=work)
            x, pool = _layer(x, own, positions, here)
            stored.append(pool)
        return x, tuple(stored)

    def decode(x: Any, weights: Any, pools: Any, tables: Any, positions: Any) -> Any:
        def step(state: Any) -> Any:
            count, x, pools = state
            moving = [table + count for table in tables[1 if is_ours else 2 :]]
            now = (*tables[: 1 if is_ours else 2], *moving)
            return count + 1, *layers(x, weights, pools, now, positions + count)

        return lax.while_loop(lambda state: state[1][0, 0] < state[0], step, (0, x, pools))

    def array(*sizes: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    ints = functools.partial(array, dtype=jnp.int32)
    tokens, width = work.num_tokens, work.max_keys // PAGE_SIZE
    rows, dim = -(-shape.kv_heads // shape.per_row), shape.per_row * shape.head_dim
    heads = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads, "o": shape.heads}
    weights = {name: array(count, shape.head_dim, shape.hidden) for name, count in heads.items()}
    weights |= {name: array(shape.mlp, shape.hidden) for name in ("gate", "up", "down")}
    count = tokens if work.is_decode else tokens // _BLOCK
    if is_ours:
        pool: Any = (array(_POOL_TOKENS // PAGE_SIZE, rows, PAGE_SIZE, dim),) * 2
        tables = ints(count, width), ints(count), ints(count)
    else:
        pool = array(_POOL_TOKENS // PAGE_SIZE, PAGE_SIZE, 2 * rows, dim)
        tables = ints(count, width), ints(count + 1), ints(count), ints(tokens)
    x, many = array(tokens, shape.hidden), _NUM_LAYERS
    arguments = x, (weights,) * many, (pool,) * many, tables, ints(tokens)
    return (decode if work.is_decode else layers), arguments


def read_program(text: str, shape: Shape, work: Work, pool_size: int) -> dict[str, Any]:
    """Bytes of a layer that XLA moves beside weights, what kernels are handed included; copies."""
    module = Module(text)
    queries, keys = (work.num_tokens * n * shape.head_dim for n in (shape.heads, shape.kv_heads))
    copies = count_copies(module, {queries, keys, 2 * keys})
    num_bytes = 0
    for name, instructions in module.computations.items():
        known = module.by_name(name)
        kernels = [each for each in instructions if _is_attention(each)]
        for kernel in kernels:
            given = [known[operand] for operand in operands(kernel) if operand in known]
            arrays = [array for each in (kernel, *given) for array in each.arrays]
            num_bytes += sum(
                array.num_bytes
                for array in arrays
                if array.size != pool_size and array.memory_space == 0
            )
        module.computations[name] = [each for each in instructions if each not in kernels]
    num_bytes += count_traffic(module)
    return {
        "around_bytes": num_bytes // _NUM_LAYERS - shape.weight_bytes,
        "page_copies": sum(copy.count for copy in count_copies(module, {pool_size})),
        "other_copies": sum(copy.count for copy in copies),
        "other_copied_bytes": sum(copy.num_bytes for copy in copies),
    }


def _is_attention(each: Instruction) -> bool:
    return each.opcode == "custom-call" and "paged_attention" in each.name


def compile_for(chip: str, shape: Shape, work: Work, is_ours: bool) -> dict[str, Any]:
    """What a compiled program says; {"problem": ...} if the compiler refuses it."""
    function, arguments = make_program(shape, work, is_ours)
    mesh = topology_mesh(f"{chip}:1x1", (1, 1))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arguments
    )
    try:
        with use_abstract_mesh(mesh.abstract_mesh):  # JAX's kernel asks what it is lowered for
            compiled = jax.jit(function, donate_argnums=2).lower(*arguments).compile()
    except Exception as error:  # Mosaic has its own, of no common class
        return {"problem": re.sub(r"\s+", " ", str(error)).partition(" The MLIR")[0][:160]}
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    assert memory is not None
    assert text is not None
    pool_size = jax.tree.leaves(arguments[2])[0].size
    read = read_program(text, shape, work, pool_size)
    return {"temporary_bytes": memory.temp_size_in_bytes, **read}


KERNELS = {"ours": True, "JAX's": False}


def report_tables(programs: dict[str, Any]) -> list[str]:
    """The report's tables."""
    megabytes = "{:,.1f}".format
    lines = [
        "| model | a layer's work | ours, MB | JAX's, MB | ours is | with weights |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for model, shape in MODELS.items():
        for title, work in WORKS.items():
            around = [
                programs.get(f"v5e, {model}, {work.program}, {kernel}", {}).get("around_bytes")
                for kernel in KERNELS
            ]
            if None in around:
                continue
            pages = our_pages(shape, work), jax_pages(shape, work)
            moved = [
                part + count * shape.page_bytes for part, count in zip(around, pages, strict=True)
            ]
            whole = [part + shape.weight_bytes for part in moved]
            lines.append(
                f"| {model} | {title} | {megabytes(moved[0] / 1e6)} | {megabytes(moved[1] / 1e6)} "
                f"| {moved[0] / moved[1] - 1:+.0%} | {whole[0] / whole[1] - 1:+.0%} |"
            )
    lines += [
        "",
        "| program | kernel | around it, MB | temporaries, MB | copies of pages | other copies |",
        "|---|---|---:|---:|---:|---|",
    ]
    for name, found in sorted(programs.items()):
        program, _, kernel = name.rpartition(", ")
        if "problem" in found:
            lines.append(f"| {program} | {kernel} | does not compile: {found['problem']} | | | |")
            continue
        lines.append(
            f"| {program} | {kernel} | {megabytes(found['around_bytes'] / 1e6)} | "
            f"{megabytes(found['temporary_bytes'] / 1e6)} | {found['page_copies']} | "
            f"{found['other_copies']}, {megabytes(found['other_copied_bytes'] / 1e6)} MB |"
        )
    return lines


def main(argv: list[str] | None = None) -> None:
    """Compiles what the results lack, and writes them after each program."""
    parser: argparse.ArgumentParser = make_parser(__doc__)
    parser.add_argument("--chips", nargs="+", default=["v5e", "v6e"])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    args = parser.parse_args(argv)
    prepare_compiler("v5e:1x1")
    report = output_dir(args) / "tpu_attention.md"
    programs = read_results(report).get("programs", {})
    for chip, model, (kernel, is_ours) in itertools.product(
        args.chips, args.models, KERNELS.items()
    ):
        for work in {work.program: work for work in WORKS.values()}.values():
            name = f"{chip}, {model}, {work.program}, {kernel}"
            if name in programs:
                continue
            programs[name] = compile_for(chip, MODELS[model], work, is_ours)
            write_results(
                report,
                "Paged attention on TPUs: JAX's kernel and ours",
                "benchmarks/hardware/tpu_attention.py",
                report_tables(programs),
                {"programs": programs},
                facts=["The compiler of all programs: libtpu; nothing was run"],
                device="none",
            )


if __name__ == "__main__":
    main()
