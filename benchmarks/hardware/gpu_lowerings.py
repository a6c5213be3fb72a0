"""Which of the engine's GPU kernels this JAX lowers and compiles, and what it warns of.

    python benchmarks/hardware/gpu_lowerings.py    # needs JAX's CUDA plugin, but no GPU

It prints JSON. Beside JAX it needs what the engine imports, so another JAX can have a virtual
environment of its own: `gpu_mosaic.py --python` asks it there.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.mesh import use_abstract_mesh

from benchmarks.hardware import mosaic_attention
from sgljax_engine.kernels.gpu import (
    decode_attention,
    invariant,
    linear,
    paged_attention,
    prefill_attention,
    ragged_linear,
    shared_attention,
)
from sgljax_engine.kernels.runs import find_runs
from tools.aot import topology_mesh
from tools.aot.target import prepare_compiler

ROWS, TOKENS, EXPERTS = 64, 64, 8
HIDDEN, MLP = 1024, 2048
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
PAGES, PAGE_SIZE, ROW_PAGES = 1024, 16, 64
SCORES = paged_attention.Scores(0.1)


class Case(NamedTuple):
    """A kernel as the engine calls it, and shapes of its arguments."""

    call: Callable[..., Any]
    shapes: tuple[Any, ...]


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def whole(*sizes: int) -> jax.ShapeDtypeStruct:
    return shape(*sizes, dtype=jnp.int32)


def real(*sizes: int) -> jax.ShapeDtypeStruct:
    return shape(*sizes, dtype=jnp.float32)


def cases() -> dict[str, Case]:
    """All kernels of `kernels.gpu`, and the experiment in Mosaic GPU."""
    x, up, down = shape(TOKENS, HIDDEN), shape(HIDDEN, MLP), shape(MLP, HIDDEN)
    pages = shape(PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    table, kv_lens = whole(ROWS, ROW_PAGES), whole(ROWS)
    heads = tuple(shape(ROWS, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    rope = (real(ROWS, HEAD_DIM // 2),) * 2
    query, block = (shape(ROWS, n, HEADS, HEAD_DIM) for n in (1, 16))

    def decode(q: Any, k: Any, v: Any, rope: Any, pages: Any, *tables: Any) -> Any:
        return decode_attention.decode_attention(
            q, k, v, rope, None, pages, *tables, options=SCORES
        )

    def paged(*args: Any) -> Any:
        return paged_attention.paged_attention(*args, options=SCORES)

    def prefill(*args: Any) -> Any:
        return prefill_attention.prefill_attention(*args, options=SCORES)

    def shared(q: Any, k: Any, v: Any, table: Any, kv_lens: Any) -> Any:
        runs = find_runs(table, kv_lens, PAGE_SIZE, jnp.int32(128), 32)
        return shared_attention.shared_attention(q, k, v, table, kv_lens, runs, SCORES)

    def prepare(q: Any, k: Any, v: Any, rope: Any, k_pages: Any, v_pages: Any, slots: Any) -> Any:
        into = invariant.Slots(k_pages, v_pages, slots)
        return invariant.prepare_heads(q, k, v, rope, None, into)

    def mosaic(*args: Any) -> Any:
        return mosaic_attention.decode_attention(*args, scale=SCORES.scale)

    return {
        "linear.linears": Case(lambda x, a, b: linear.linears(x, [a, b]), (x, up, up)),
        "linear.gated": Case(lambda x, a, b: linear.gated(x, a, b, jax.nn.silu), (x, up, up)),
        "linear.linear_add": Case(linear.linear_add, (shape(TOKENS, MLP), down, x)),
        "ragged_linear": Case(
            ragged_linear.ragged_linear, (shape(EXPERTS, HIDDEN, MLP), x, whole(EXPERTS))
        ),
        "decode_attention": Case(decode, (*heads, rope, (pages, pages), table, kv_lens)),
        "paged_attention": Case(paged, (query, pages, pages, table, whole(ROWS, 1), kv_lens)),
        "prefill_attention": Case(prefill, (block, pages, pages, table, whole(ROWS, 16), kv_lens)),
        "shared_attention": Case(shared, (query, pages, pages, table, kv_lens)),
        "invariant.linear": Case(invariant.linear, (x, up)),
        "invariant.unembed": Case(invariant.unembed, (x, shape(32_000, HIDDEN))),
        "invariant.rms_norm": Case(
            lambda x, weight: invariant.rms_norm(x, weight, 1e-6, 0.0), (x, shape(HIDDEN))
        ),
        "invariant.sines": Case(invariant.sines, (real(TOKENS, HEAD_DIM // 2),)),
        "invariant.prepare_heads": Case(prepare, (*heads, rope, pages, pages, whole(ROWS))),
        "mosaic_attention": Case(mosaic, (heads[0], pages, pages, table, kv_lens)),
    }


def lower_for_h100(case: Case) -> jax.stages.Lowered:
    """The kernel's program for an H100 that need not be here."""
    prepare_compiler("h100:1")
    mesh = topology_mesh("h100:1", (1, 1))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), case.shapes
    )
    with use_abstract_mesh(mesh.abstract_mesh):  # JAX 0.12 asks it what it lowers for
        return jax.jit(case.call).lower(*shapes)


def try_case(case: Case) -> dict[str, Any]:
    """What happens with DeprecationWarnings as errors, and without.

    Returns:
        `strict`, the first line of what stops lowering, or None; `compiles`, the same of the
        compiler without errors of warnings; and `warnings`, all texts of JAX's.
    """
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        found["strict"] = _problem(lambda: lower_for_h100(case))
    jax.clear_caches()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["compiles"] = _problem(lambda: lower_for_h100(case).compile())
    texts = {str(each.message) for each in caught if each.category is DeprecationWarning}
    return found | {"warnings": sorted(texts)}


def _problem(call: Callable[[], object]) -> str | None:
    try:
        call()
    except Exception as error:  # compilers have their own, of no common class
        return f"{type(error).__name__}: {error}".partition("\n")[0][:400]
    return None


def main() -> None:
    """Prints versions, and what was found of each kernel."""
    found = {name: try_case(case) for name, case in cases().items()}
    print(json.dumps({"jax": jax.__version__, "kernels": found}))


if __name__ == "__main__":
    main()
