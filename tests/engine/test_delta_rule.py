"""The gated delta rule in both forms against float64, and that cuts do not matter.

The reference is the rule as it is written, token by token. These forms are those of other devices;
test_hybrid_bits.py has those of the JIT-compiled CPU kernels. `python -m
tests.engine.test_delta_rule` prints the errors over 4,096 tokens.
"""

from __future__ import annotations

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import InvalidConfigError, LinearAttentionConfig
from sgljax_engine.attention.base import BlockTables
from sgljax_engine.cache.layer_states import LayerState, state_shapes
from sgljax_engine.layers import delta_net
from sgljax_engine.layers.delta_net import Heads, NetInputs
from sgljax_engine.layers.kernels import XlaKernels
from sgljax_engine.runner.batches.page_ids import NO_SLOT
from sgljax_engine.runner.programs.recur import block_recur, row_recur

BLOCK = 16
NET = LinearAttentionConfig(
    layers=(True, False),
    num_key_heads=2,
    num_value_heads=6,
    key_dim=32,
    value_dim=16,
    conv_size=4,
    is_grouped=False,
)


def random_tokens(num_tokens, seed=0, slowest=1e-3):
    """Queries, keys and values as nets have them, decays from nearly none to strong, and rates."""
    rng = np.random.default_rng(seed)
    groups, heads = NET.num_key_heads, NET.num_value_heads
    q, k = rng.standard_normal((2, num_tokens, groups, NET.key_dim))
    # Neighbours look alike, as they do behind a convolution: the system is far from diagonal.
    k = k + 2 * np.roll(k, 1, axis=0)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((num_tokens, groups, NET.ratio, NET.value_dim))
    fastest = np.geomspace(slowest, 1.0, heads)
    decay = -fastest * rng.exponential(size=(num_tokens, heads))
    rate = 1 / (1 + np.exp(-rng.standard_normal((num_tokens, heads))))
    arrays = q * NET.key_dim**-0.5, k, v, decay, rate
    return [x.astype(np.float32) for x in arrays]


def net_inputs(arrays):
    """Inputs of any kind of array."""
    return NetInputs(*map(jnp.asarray, arrays))


def reference(q, k, v, decay, rate):
    """The rule in float64; outputs [T, V, d]."""
    q, k, v, decay, rate = (np.asarray(x, np.float64) for x in (q, k, v, decay, rate))
    num_tokens, groups, ratio, width = v.shape
    q, k = (np.repeat(x, ratio, axis=1) for x in (q, k))
    v = v.reshape(num_tokens, groups * ratio, width)
    state, out = np.zeros((groups * ratio, NET.key_dim, width)), np.empty_like(v)
    for t in range(num_tokens):
        state *= np.exp(decay[t])[:, None, None]
        known = np.einsum("vhd,vh->vd", state, k[t])
        state += k[t][:, :, None] * (rate[t][:, None] * (v[t] - known))[:, None]
        out[t] = np.einsum("vhd,vh->vd", state, q[t])
    return out


@jax.jit
def recurrent(q, k, v, decay, rate):
    """Token by token, as decode does it."""

    def one(state, token):
        q, k, v, decay, rate = (x[None] for x in token)
        return delta_net.token_step(state, Heads(q, k, v), decay, rate)

    state = jnp.zeros((1, *state_shapes(NET, 1)[1][1:]), jnp.float32)
    return jax.lax.scan(one, state, (q, k, v, decay, rate))[1][:, 0]


@jax.jit
def chunked(q, k, v, decay, rate):
    """Block by block, as prefill does it."""
    blocks = [x.reshape(-1, BLOCK, *x.shape[1:]) for x in (q, k, v, decay, rate)]
    terms = delta_net.chunk_terms(Heads(*blocks[:3]), *blocks[3:])
    state = jnp.zeros(state_shapes(NET, 1)[1][1:], jnp.float32)
    out = jax.lax.scan(delta_net.chunk_step, state, terms)[1]
    return out.reshape(-1, *out.shape[2:])


def errors(num_tokens=4096):
    """Largest error of each form, and of both, relative to the outputs' root mean square."""
    tokens = random_tokens(num_tokens)
    expected = reference(*tokens)
    by_token, by_block = np.asarray(recurrent(*tokens)), np.asarray(chunked(*tokens))
    size = np.sqrt((expected**2).mean())
    return {
        "recurrent": np.abs(by_token - expected).max(axis=(1, 2)) / size,
        "chunked": np.abs(by_block - expected).max(axis=(1, 2)) / size,
        "between": np.abs(by_block - by_token).max(axis=(1, 2)) / size,
    }


@pytest.fixture(scope="module")
def found():
    return errors()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["recurrent", "chunked", "between"])
def test_both_forms_over_4096_tokens(found, form):
    assert found[form].max() < 5e-6
    # No drift: the last thousand tokens are as good as the first.
    assert found[form][-1024:].max() < 4 * found[form][:1024].max()


@pytest.mark.slow
def test_equal_keys_without_decay():
    """The hardest system: all below the diagonal are ones."""
    q, k, v, decay, rate = random_tokens(64)
    k[:], decay[:], rate[:] = k[:1], 0.0, 1.0
    expected = reference(q, k, v, decay, rate)
    for form in (recurrent, chunked):
        np.testing.assert_allclose(form(q, k, v, decay, rate), expected, atol=2e-6)


@pytest.mark.slow
def test_decays_that_leave_nothing():
    """The exponential of what lies ahead would overflow."""
    q, k, v, decay, rate = random_tokens(64)
    decay[::3] = -200.0
    expected = reference(q, k, v, decay, rate)
    for form in (recurrent, chunked):
        np.testing.assert_allclose(form(q, k, v, decay, rate), expected, atol=2e-6)


@jax.jit
def one_pass(tables, owners, inputs, weight, layer):
    """Blocks, as prefill has them."""
    return block_recur(NET, tables, owners)(inputs, weight, layer)


@jax.jit
def one_step(active, inputs, weight, layer):
    """Rows, as decode has them."""
    return row_recur(NET, active, XlaKernels())(inputs, weight, layer)


@pytest.mark.slow
class TestWhereStatesLive:
    """Blocks of two requests in slots, against one pass over each alone."""

    LENGTHS = (53, 38)
    NUM_BLOCKS = 8
    """All passes have it, so that they are of one program; the last ones are unused."""

    @pytest.fixture(scope="class")
    @classmethod
    def inputs(cls):
        rng = np.random.default_rng(1)

        def one(length):
            qkv = rng.standard_normal((length, NET.num_channels))
            decay = -rng.exponential(size=(length, NET.num_value_heads)) * 0.1
            rate = rng.uniform(size=(length, NET.num_value_heads))
            return net_inputs(x.astype(np.float32) for x in (qkv, decay, rate))

        weight = rng.standard_normal((NET.num_channels, NET.conv_size)).astype(np.float32)
        return [one(length) for length in cls.LENGTHS], weight

    @staticmethod
    def run(pieces, weight, slots, layer):
        """One pass over (inputs, start, end, slot) of each request."""
        batch, firsts, lens = [], [], []
        for inputs, start, end in pieces:
            for first in range(start, end, BLOCK):
                last = min(first + BLOCK, end)
                part = net_inputs(x[first:last] for x in inputs)
                more = BLOCK - (last - first)
                # What is no token must not matter.
                batch.append(
                    net_inputs(np.pad(x, ((0, more), (0, 0)), constant_values=7.0) for x in part)
                )
                firsts.append(first)
                lens.append(last)
        owners = [
            s
            for s, (_, start, end) in zip(slots, pieces, strict=True)
            for _ in range(start, end, BLOCK)
        ]
        more = TestWhereStatesLive.NUM_BLOCKS - len(batch)
        assert more > 0
        batch += [net_inputs(np.full_like(x, 9.0) for x in batch[0])] * more
        firsts, lens, owners = firsts + [0] * more, lens + [0] * more, owners + [NO_SLOT] * more
        positions = np.array(firsts, np.int32)[:, None] + np.arange(BLOCK, dtype=np.int32)
        tables = BlockTables(
            jnp.zeros((len(firsts), 1), jnp.int32),
            jnp.asarray(positions),
            jnp.array(lens, jnp.int32),
        )
        inputs = net_inputs(np.concatenate(x) for x in zip(*batch, strict=True))
        out, layer = one_pass(tables, jnp.array(owners, jnp.int32), inputs, weight, layer)
        out = np.asarray(out).reshape(len(firsts), BLOCK, *out.shape[1:])
        found, at = [], 0
        for _, start, end in pieces:
            count = -(-(end - start) // BLOCK)
            found.append(out[at : at + count].reshape(-1, *out.shape[2:])[: end - start])
            at += count
        return found, layer

    @staticmethod
    def dirty(num_slots=3):
        """States that no request may see."""
        return LayerState(*(jnp.full(s, 3.0, jnp.float32) for s in state_shapes(NET, num_slots)))

    def test_cuts_of_whole_blocks_change_no_bit(self, inputs):
        """Wherever a prompt is cut, and whatever else is in the pass."""
        (a, b), weight = inputs
        (whole,), _ = self.run([(a, 0, 53)], weight, [1], self.dirty())
        first, layer = self.run([(a, 0, 32), (b, 0, 16)], weight, [2, 0], self.dirty())
        second, layer = self.run([(b, 16, 38), (a, 32, 53)], weight, [0, 2], layer)
        np.testing.assert_array_equal(np.concatenate([first[0], second[1]]), whole)
        (alone,), _ = self.run([(b, 0, 38)], weight, [0], self.dirty())
        np.testing.assert_array_equal(np.concatenate([first[1], second[0]]), alone)
        # The third slot is nobody's.
        assert all((np.asarray(x)[1] == 3.0).all() for x in layer)

    def test_decode_goes_on_where_prefill_ends(self, inputs):
        (a, b), weight = inputs
        expected, _ = self.run([(a, 0, 53), (b, 0, 38)], weight, [0, 1], self.dirty())
        _, layer = self.run([(a, 0, 45), (b, 0, 30)], weight, [0, 1], self.dirty())
        layer = jax.tree.map(lambda x: x[:2], layer)
        active = jnp.array([True, True])
        for step in range(8):
            rows = [net_inputs(x[45 + step] for x in a), net_inputs(x[30 + step] for x in b)]
            inputs = net_inputs(map(np.stack, zip(*rows, strict=True)))
            out, layer = one_step(active, inputs, weight, layer)
            for row, start in enumerate((45, 30)):
                np.testing.assert_allclose(out[row], expected[row][start + step], atol=2e-6)

    def test_rows_that_take_no_token_keep_their_states(self, inputs):
        (a, b), weight = inputs
        layer = self.dirty(2)
        rows = net_inputs(np.stack([x[0], y[0]]) for x, y in zip(a, b, strict=True))
        _, new = one_step(jnp.array([False, True]), rows, weight, layer)
        for before, after in zip(layer, new, strict=True):
            np.testing.assert_array_equal(before[0], after[0])
            assert (np.asarray(before[1]) != np.asarray(after[1])).any()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_value_heads", 5),
        ("conv_size", 1),
        ("conv_size", 17),
        ("layers", (True, True)),
        ("layers", (False, False)),
        ("key_dim", 0),
    ],
)
def test_sizes_that_are_refused(field, value):
    with pytest.raises(InvalidConfigError, match=field):
        dataclasses.replace(NET, **{field: value})


if __name__ == "__main__":
    for form, each in errors().items():
        parts = [each[:64].max(), each[:1024].max(), each.max()]
        sys.stdout.write(f"{form} {' '.join(f'{part:.2e}' for part in parts)}\n")
