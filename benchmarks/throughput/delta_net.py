"""One gated delta net's recurrence: XLA's code against JIT-compiled CPU kernels.

    python benchmarks/throughput/delta_net.py           # about a minute

16 heads of 128 x 128, float32. XLA's code prefills blocks of 16 tokens in products of matrices and
decodes rows together; the kernels take one token after another, with the same bits at any cut. They
take turns, in the functions of programs that engines call: with the convolution, without
projections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lib.reporting import make_parser, output_dir, write_results
from benchmarks.lib.turns import speed_table, take_turns
from sgljax_engine import LinearAttentionConfig
from sgljax_engine.attention.base import BlockTables
from sgljax_engine.cache.layer_states import LayerState, state_shapes
from sgljax_engine.layers.delta_net import NetInputs
from sgljax_engine.layers.devices import compiler_options
from sgljax_engine.layers.kernels import CpuKernels, XlaKernels
from sgljax_engine.models.spec import Recur
from sgljax_engine.runner.programs.recur import block_recur, row_recur

FORMS: dict[str, CpuKernels | None] = {"XLA": None, "kernels": CpuKernels()}
BLOCK, STEPS = 16, 8


def net_of(size: int) -> LinearAttentionConfig:
    """A net of 16 heads of that size."""
    return LinearAttentionConfig(
        layers=(True, False),
        num_key_heads=16,
        num_value_heads=16,
        key_dim=size,
        value_dim=size,
        conv_size=4,
        is_grouped=False,
    )


def runs_of(
    net: LinearAttentionConfig,
    num_states: int,
    num_tokens: int,
    num_steps: int,
    make: Callable[[CpuKernels | None], Recur],
) -> dict[str, Callable[[], Any]]:
    """A call of each form: so many passes over random tokens, by recurs that `make` makes."""
    rng = np.random.default_rng(0)
    shapes = (num_tokens, net.num_channels), *((num_tokens, net.num_value_heads),) * 2
    qkv, decay, rate = (rng.uniform(0.1, 1, shape).astype(np.float32) for shape in shapes)
    inputs = NetInputs(*map(jnp.asarray, (qkv, -decay, rate)))
    weight = jnp.asarray(rng.standard_normal((net.num_channels, net.conv_size)), jnp.float32)

    def run_of(kernels: CpuKernels | None) -> Callable[[], Any]:
        def passes(layer: Any, inputs: NetInputs) -> Any:
            def one(_: int, carry: Any) -> Any:
                out, layer = make(kernels)(inputs, weight, carry[0])
                return layer, carry[1] + out

            out = jnp.zeros((num_tokens, net.num_value_heads, net.value_dim), jnp.float32)
            return jax.lax.fori_loop(0, num_steps, one, (layer, out))

        options = compiler_options(is_own_cpu=True)
        program = jax.jit(passes, donate_argnums=0, compiler_options=options)
        shapes = state_shapes(net, num_states)
        held = [LayerState(*(jnp.zeros(shape, jnp.float32) for shape in shapes))]

        def run() -> None:
            held[0], out = program(held[0], inputs)
            out.block_until_ready()

        return run

    return {name: run_of(kernels) for name, kernels in FORMS.items()}


def main(argv: list[str] | None = None) -> None:
    """Measures, and writes the results."""
    args = make_parser(__doc__, pairs=11).parse_args(argv)
    size, num_tokens = (16, 32) if args.quick else (128, 256)
    net, seconds = net_of(size), {}
    for rows in (1, 8, 64):

        def by_row(kernels: CpuKernels | None, rows: int = rows) -> Recur:
            return row_recur(net, jnp.ones(rows, bool), kernels or XlaKernels())

        runs = runs_of(net, rows, rows, STEPS, by_row)
        seconds[f"{STEPS} decode steps of {rows} rows"] = take_turns(runs, args.pairs)

    def by_block(kernels: CpuKernels | None) -> Recur:
        positions = jnp.arange(num_tokens, dtype=jnp.int32).reshape(-1, BLOCK)
        pages = jnp.zeros((len(positions), 1), jnp.int32)
        tables = BlockTables(pages, positions, positions[:, -1] + 1)
        return block_recur(net, tables, pages[:, 0], kernels)

    runs = runs_of(net, 1, num_tokens, 1, by_block)
    seconds[f"prefill of {num_tokens} tokens"] = take_turns(runs, args.pairs)
    write_results(
        output_dir(args) / "delta_net.md",
        "The recurrence of a gated delta net on a CPU",
        "benchmarks/throughput/delta_net.py",
        speed_table(seconds, "XLA"),
        seconds,
        facts=[
            f"16 heads of {size} x {size}: {net.num_value_heads * size * size * 4 / 1e6:.2f} MB of "
            "state a row, float32",
            "Cores are shared with other machines, so read the ratios",
        ],
    )


if __name__ == "__main__":
    main()
