"""Where rounding first differs: engine against trainer, and the trainer against itself.

    python benchmarks/exactness/first_difference.py               # tiny, half a minute
    python benchmarks/exactness/first_difference.py --model small

Takes the first layer and the head of Tunix's Qwen3 apart into operations, compiles each alone and
compares what it gives:

- with what the engine's layer functions give of the same tokens, in the layout and for the number
  of tokens of a decode dispatch;
- with what it gives itself of the same rows in a batch with fewer rows, or with more padding.

"Equal inputs" feeds an operation what the reference computed, so that a difference is its own;
"in a chain" feeds it what its own side computed. A compiler fuses operations that stand in one
program, and then rounds otherwise than piece by piece: the last lines tell how far the chain of
pieces is from Tunix's program as a whole. What is found here is true of the pieces.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from tunix.models.qwen3.model import K_MASK, Qwen3, apply_rope
from tunix.rl.common import process_ids, selective_log_softmax

from benchmarks.lib.reporting import ROOT, report_head, write_report
from benchmarks.lib.torch_model import hf_arrays
from sgljax_engine.attention.base import AttentionOptions
from sgljax_engine.attention.contiguous import row_attention
from sgljax_engine.cache.contiguous_kv import CHUNK, LANES, LayerContiguousKV
from sgljax_engine.layers import basic
from sgljax_engine.layers import rope as engine_rope
from sgljax_engine.layers.basic import Layout
from sgljax_engine.sampling.sampler import token_logprobs
from sgljax_engine.xla_options import compiler_options
from tunix_sgljax.bench.environment import describe_environment
from tunix_sgljax.bench.models import make_tunix_model
from tunix_sgljax.bench.shapes import MODELS, PAD_ID

LAYOUT = Layout.FEATURES_FIRST
PREFILL = 256
"""Tokens that the engine prefills together on CPUs."""

Values = dict[str, Any]


class Piece(NamedTuple):
    """One operation: what it makes, of what, and how."""

    name: str
    inputs: tuple[str, ...]
    run: Callable[..., Any]


class Row(NamedTuple):
    """One line of a table.

    Attributes:
        name: Of the operation.
        alone: Largest difference with equal inputs.
        chained: Largest difference of its side's own chain.
        scale: The largest value of the reference.
    """

    name: str
    alone: float
    chained: float
    scale: float


def compiled(module: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A module's function as a program whose weights are arguments, as in Tunix's."""
    graphdef, state = nnx.split(module)
    run = jax.jit(lambda state, *args: function(nnx.merge(graphdef, state), *args))
    return lambda *args: run(state, *args)


def tunix_pieces(model: Qwen3) -> list[Piece]:
    """Layer 0 and the head of Tunix's Qwen3, in order. `tokens` come from `padded`."""
    layer, attn = model.layers[0], model.layers[0].attn
    kv_heads, scale = attn.num_kv_heads, attn.scale

    def call(module: Any) -> Callable[..., Any]:
        return compiled(module, lambda module, x: module(x))

    def scores(q: jax.Array, k: jax.Array) -> jax.Array:
        grouped = q.reshape(*q.shape[:2], kv_heads, -1, q.shape[-1])
        return jnp.einsum("BTHGD,BSHD->BHGTS", grouped, k) * scale

    def softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
        masked = jnp.where(mask[:, None, None], scores, K_MASK)
        return jax.nn.softmax(masked.astype(jnp.float32), axis=-1).astype(scores.dtype)

    def mix(weights: jax.Array, v: jax.Array) -> jax.Array:
        out = jnp.einsum("BHGTS,BSHD->BTHGD", weights, v)
        return out.reshape(*out.shape[:2], -1, out.shape[-1])

    rope = jax.jit(functools.partial(apply_rope, head_dim=attn.head_dim))
    tied = model.config.use_tied_embedding
    head = compiled(model.embedder, lambda m, x: m.decode(x)) if tied else call(model.lm_head)
    add = jax.jit(jnp.add)
    return [
        Piece("embedding", ("ids",), compiled(model.embedder, lambda m, ids: m.encode(ids))),
        Piece("input norm", ("embedding",), call(layer.input_layernorm)),
        Piece("q_proj", ("input norm",), call(attn.q_proj)),
        Piece("k_proj", ("input norm",), call(attn.k_proj)),
        Piece("v_proj", ("input norm",), call(attn.v_proj)),
        Piece("q_norm", ("q_proj",), call(attn.q_norm)),
        Piece("k_norm", ("k_proj",), call(attn.k_norm)),
        Piece("rope of q", ("q_norm", "positions"), rope),
        Piece("rope of k", ("k_norm", "positions"), rope),
        Piece("scores", ("rope of q", "rope of k"), jax.jit(scores)),
        Piece("softmax", ("scores", "mask"), jax.jit(softmax)),
        Piece("weighted values", ("softmax", "v_proj"), jax.jit(mix)),
        Piece("o_proj", ("weighted values",), call(attn.o_proj)),
        Piece("residual", ("embedding", "o_proj"), add),
        Piece("post norm", ("residual",), call(layer.post_attention_layernorm)),
        Piece("gate_proj", ("post norm",), call(layer.mlp.gate_proj)),
        Piece("up_proj", ("post norm",), call(layer.mlp.up_proj)),
        Piece("gated", ("gate_proj", "up_proj"), jax.jit(lambda g, u: nnx.silu(g) * u)),
        Piece("down_proj", ("gated",), call(layer.mlp.down_proj)),
        Piece("layer", ("residual", "down_proj"), add),
        Piece("final norm", ("layer",), call(model.final_norm)),
        Piece("logits", ("final norm",), head),
        Piece("log-prob", ("logits", "next ids"), jax.jit(selective_log_softmax)),
    ]


def padded(prompts: Sequence[np.ndarray], completions_BC: np.ndarray, width: int) -> Values:
    """What Tunix makes of prompts padded to a width, and completions."""
    prompts_BP = np.full((len(prompts), width), PAD_ID, np.int32)
    for row, prompt in enumerate(prompts):
        prompts_BP[row, width - len(prompt) :] = prompt
    ids, positions, mask, _ = process_ids(prompts_BP, completions_BC, PAD_ID, -1)
    following = jnp.roll(ids, -1, axis=1)
    return {"ids": ids, "positions": positions, "mask": mask, "next ids": following}


def run_chain(pieces: Sequence[Piece], tokens: Values) -> Values:
    """All values, each of its side's own."""
    values = dict(tokens)
    for piece in pieces:
        values[piece.name] = piece.run(*(values[name] for name in piece.inputs))
    return values


# ---------------------------------------------------------------- the trainer against itself


def against_itself(pieces: Sequence[Piece], base: Values, other: Values) -> list[Row]:
    """Compares the first rows of a batch with a batch of those alone, or of more padding."""
    num_rows, length = other["ids"].shape
    shift = length - base["ids"].shape[1]
    is_real_BL = np.asarray(base["ids"] != PAD_ID)[:num_rows]
    is_seen = np.asarray(base["mask"])[:num_rows] & is_real_BL[:, :, None]

    def fitted(name: str) -> Any:
        """The reference's value in the other shape."""
        if name in ("ids", "positions", "mask", "next ids"):
            return other[name]
        value = base[name][:num_rows]
        token_axes = (3, 4) if value.ndim == 5 else (1,)
        return jnp.pad(value, [(shift * (axis in token_axes), 0) for axis in range(value.ndim)])

    def gap(name: str, value: Any) -> float:
        want, got = np.asarray(base[name])[:num_rows], np.asarray(value)
        if want.ndim == 5:  # of queries and keys
            want, got = (np.moveaxis(x, (1, 2), (3, 4)) for x in (want, got[..., shift:, shift:]))
            return float(np.abs(got - want)[is_seen].max())
        return float(np.abs(got[:, shift:] - want)[is_real_BL].max())

    values, rows = dict(other), []
    for piece in pieces:
        alone = gap(piece.name, piece.run(*map(fitted, piece.inputs)))
        values[piece.name] = piece.run(*(values[name] for name in piece.inputs))
        scale = float(np.abs(np.asarray(base[piece.name])[:num_rows]).max())
        rows.append(Row(piece.name, alone, gap(piece.name, values[piece.name]), scale))
    return rows


# ---------------------------------------------------------------- the engine against the trainer


def engine_pieces(model: Qwen3, hidden_size: int, lengths: np.ndarray) -> list[Piece]:
    """The same operations of the engine, activations [D, T]; attention is one of them."""
    weights = {name: jnp.asarray(x) for name, x in hf_arrays(model, hidden_size).items()}
    config = model.config
    layer = "model.layers.0."

    def jit(function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(function, compiler_options=compiler_options(True))

    def norm(name: str) -> Callable[..., Any]:
        def run(weight: jax.Array, x: jax.Array) -> jax.Array:
            return basic.rms_norm(x, LAYOUT.per_feature(weight), config.norm_eps, 0.0, -2)

        return functools.partial(jit(run), weights[f"{name}.weight"])

    def linear(name: str) -> Callable[..., Any]:
        run = jit(functools.partial(basic.linear, layout=LAYOUT))
        return lambda x: run(x, weight=weights[f"{layer}{name}.weight"])

    def heads(name: str) -> Callable[..., Any]:
        project = linear(f"self_attn.{name}")
        return lambda x: LAYOUT.split_heads(project(x), config.head_dim)

    def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
        scales = engine_rope.rope_timescales(config.head_dim, 1e6)
        sin, cos = map(LAYOUT.place, engine_rope.rope_tables(positions, scales))
        return engine_rope.apply_rope(x, sin, cos, LAYOUT.feature_axis)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        options = AttentionOptions(config.head_dim**-0.5)
        lens = jnp.asarray(lengths)
        q = LAYOUT.tokens_first(q)
        out = row_attention(q, LayerContiguousKV(k, v), lens, jnp.zeros_like(lens), options)
        return out.reshape(out.shape[0], -1).T

    def embed(table: jax.Array, ids: jax.Array) -> jax.Array:
        return LAYOUT.place(basic.embed(table, ids))

    def unembed(table: jax.Array, x: jax.Array) -> jax.Array:
        return basic.unembed(lax.optimization_barrier(LAYOUT.tokens_first(x)), table)

    def log_prob(logits: jax.Array, ids: jax.Array) -> jax.Array:
        return token_logprobs(logits, ids, jnp.ones(ids.shape, jnp.float32))[1]

    table, add = weights["model.embed_tokens.weight"], jit(jnp.add)
    head = table if config.use_tied_embedding else weights["lm_head.weight"]
    return [
        Piece("embedding", ("ids",), functools.partial(jit(embed), table)),
        Piece("input norm", ("embedding",), norm(f"{layer}input_layernorm")),
        Piece("q_proj", ("input norm",), heads("q_proj")),
        Piece("k_proj", ("input norm",), heads("k_proj")),
        Piece("v_proj", ("input norm",), heads("v_proj")),
        Piece("q_norm", ("q_proj",), norm(f"{layer}self_attn.q_norm")),
        Piece("k_norm", ("k_proj",), norm(f"{layer}self_attn.k_norm")),
        Piece("rope of q", ("q_norm", "positions"), jit(rope)),
        Piece("rope of k", ("k_norm", "positions"), jit(rope)),
        Piece("weighted values", ("rope of q", "keys", "values"), jit(attention)),
        Piece("o_proj", ("weighted values",), linear("self_attn.o_proj")),
        Piece("residual", ("embedding", "o_proj"), add),
        Piece("post norm", ("residual",), norm(f"{layer}post_attention_layernorm")),
        Piece("gate_proj", ("post norm",), linear("mlp.gate_proj")),
        Piece("up_proj", ("post norm",), linear("mlp.up_proj")),
        Piece("gated", ("gate_proj", "up_proj"), jit(lambda g, u: jax.nn.silu(g) * u)),
        Piece("down_proj", ("gated",), linear("mlp.down_proj")),
        Piece("layer", ("residual", "down_proj"), add),
        Piece("final norm", ("layer",), norm("model.norm")),
        Piece("logits", ("final norm",), functools.partial(jit(unembed), head)),
        Piece("log-prob", ("logits", "next ids"), jit(log_prob)),
    ]


def against_engine(model: Qwen3, hidden_size: int, base: Values) -> list[Row]:
    """Compares at the last token but one of each row, which a decode dispatch would take."""
    place = base["ids"].shape[1] - 2
    lengths = np.asarray(base["positions"])[:, place] + 1
    pieces = engine_pieces(model, hidden_size, lengths)
    by_name = {piece.name: piece for piece in pieces}
    newest = {name: base[name][:, place] for name in ("ids", "positions", "next ids")}

    def fitted(name: str) -> Any:
        """The reference's value of the newest tokens, features first."""
        if name in newest:
            return newest[name]
        value = base[name][:, place]
        if name == "weighted values":
            value = value.reshape(len(value), -1)
        return value if name in ("logits", "log-prob") else LAYOUT.place(value)

    def own_keys() -> Values:
        """The engine's own keys and values of all tokens, in passes like its prefills."""
        found: dict[str, list[Any]] = {"rope of k": [], "v_proj": []}
        ids, positions = (np.asarray(base[name]).ravel() for name in ("ids", "positions"))
        for start in range(0, len(ids), PREFILL):
            part = slice(start, start + PREFILL)
            fill = (0, PREFILL - len(ids[part]))
            values: Values = {"ids": np.pad(ids[part], fill)}
            values["positions"] = np.pad(positions[part], fill)
            for name in ("embedding", "input norm", "k_proj", "v_proj", "k_norm", "rope of k"):
                piece = by_name[name]
                values[name] = piece.run(*(values[key] for key in piece.inputs))
            for name, parts in found.items():
                parts.append(np.asarray(LAYOUT.tokens_first(values[name]))[: len(ids[part])])
        shape = base["v_proj"].shape
        return {name: np.concatenate(parts).reshape(shape) for name, parts in found.items()}

    def in_rows(keys: Values) -> Values:
        k, v = (_rows(np.asarray(keys[name]), lengths) for name in ("rope of k", "v_proj"))
        lead = k.shape[:4]
        k = k.reshape(*lead[:3], CHUNK // LANES, LANES, -1).swapaxes(-2, -1)
        v = v.reshape(*lead[:3], CHUNK, -1, LANES).swapaxes(-3, -2)
        return {"keys": jnp.asarray(k), "values": jnp.asarray(v)}

    theirs, values, rows = in_rows(base), {**newest, **in_rows(own_keys())}, []
    for piece in pieces:
        want = np.asarray(fitted(piece.name))
        alone = piece.run(*(theirs.get(n) if n in theirs else fitted(n) for n in piece.inputs))
        values[piece.name] = piece.run(*(values[name] for name in piece.inputs))
        apart, chained = (
            float(np.abs(np.asarray(x) - want).max()) for x in (alone, values[piece.name])
        )
        rows.append(Row(piece.name, apart, chained, float(np.abs(want).max())))
    return rows


def _rows(x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[B, L, K, h], real tokens up to the last but one, to [chunks, B, K, CHUNK, h]."""
    num_rows, length, heads, dim = x.shape
    num_chunks = -(-length // CHUNK)
    out = np.zeros((num_rows, num_chunks * CHUNK, heads, dim), x.dtype)
    for row, count in enumerate(lengths):
        out[row, :count] = x[row, length - 1 - count : length - 1]
    return out.reshape(num_rows, num_chunks, CHUNK, heads, dim).transpose(1, 0, 3, 2, 4)


# ---------------------------------------------------------------- the report


def first(rows: Sequence[Row], column: str) -> str:
    """The first operation that differs in a column."""
    return next((row.name for row in rows if getattr(row, column) > 0), "none")


def format_rows(title: str, rows: Sequence[Row]) -> list[str]:
    """A table, and the answer below it."""
    differing = [row.name for row in rows if row.alone > 0]
    return [
        f"## {title}",
        "",
        "| operation | largest value | equal inputs | in a chain |",
        "|---|---:|---:|---:|",
        *(f"| {r.name} | {r.scale:.3g} | {r.alone:.2e} | {r.chained:.2e} |" for r in rows),
        "",
        f"First to differ: **{first(rows, 'chained')}**. With equal inputs these differ: "
        f"{', '.join(differing) or 'none'}.",
        "",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Compares and writes the tables."""
    parser = argparse.ArgumentParser(description="Where rounding first differs.")
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--fewer-rows", type=int, default=8)
    parser.add_argument("--padding", type=int, default=8, help="more of it, in the other shape")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "benchmarks/results")
    args = parser.parse_args(argv)
    bench = MODELS[args.model]
    model = make_tunix_model(bench.config)
    rng = np.random.default_rng(0)
    width, new = 64, 64
    prompts = [
        rng.integers(1, bench.config.vocab_size, n) for n in rng.integers(8, width + 1, args.rows)
    ]
    completions = rng.integers(1, bench.config.vocab_size, (args.rows, new)).astype(np.int32)
    pieces = tunix_pieces(model)
    base = run_chain(pieces, padded(prompts, completions, width))
    few = args.fewer_rows
    tables = {
        f"Engine, {args.rows} tokens of a decode step, against Tunix's {args.rows} rows": (
            against_engine(model, bench.config.hidden_size, base)
        ),
        f"Tunix, {few} rows against {args.rows}": against_itself(
            pieces, base, padded(prompts[:few], completions[:few], width)
        ),
        f"Tunix, prompts padded to {width + args.padding} against {width}": against_itself(
            pieces, base, padded(prompts, completions, width + args.padding)
        ),
    }
    whole = one_layer(model, base)
    apart = float(np.abs(np.asarray(base["log-prob"] - whole)[:, width:-1]).max())
    environment = describe_environment(jax.devices()[0].device_kind)
    lines = report_head(
        "The first operation that rounds otherwise",
        "benchmarks/exactness/first_difference.py",
        environment,
        f"First layer and head of {bench.in_words}, float32, random weights; {args.rows} rows of "
        f"{width} + {new} tokens, prompts padded on the left",
    )
    for title, rows in tables.items():
        lines += format_rows(title, rows)
    lines += [
        f"Operations are compiled one by one. Tunix's same layer and head as one program are "
        f"{apart:.2e} away from the chain of its pieces.",
        "",
    ]
    content = {
        "tables": {title: [row._asdict() for row in rows] for title, rows in tables.items()},
        "pieces_to_whole": apart,
    }
    write_report(args.output_dir / "first_difference.md", lines, environment, content)


def one_layer(model: Qwen3, base: Values) -> Any:
    """Log-probs of layer 0 and the head in one program."""
    graphdef, state = nnx.split(model)

    def run(state: Any, ids: Any, positions: Any, mask: Any, following: Any) -> Any:
        whole = nnx.merge(graphdef, state)
        x = whole.embedder.encode(ids)
        _, x = whole.layers[0](x, positions, None, mask)
        x = whole.final_norm(x)
        tied = whole.config.use_tied_embedding
        logits = whole.embedder.decode(x) if tied else whole.lm_head(x)
        return selective_log_softmax(logits, following)

    names = ("ids", "positions", "mask", "next ids")
    return jax.jit(run)(state, *(base[name] for name in names))


if __name__ == "__main__":
    main()
