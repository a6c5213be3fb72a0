"""Recurrent states token by token: the bits of hybrids, wherever their sequences are cut."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sgljax_engine.cache.layer_states import state_shapes
from sgljax_engine.layers import delta_net
from sgljax_engine.layers.delta_net import Heads, TokenTerms
from sgljax_engine.layers.devices import compiler_options
from sgljax_engine.layers.kernels import CpuKernels
from sgljax_engine.model_config import LinearAttentionConfig
from sgljax_engine.runner.batches.page_ids import NO_SLOT
from tests.engine.determinism_cases import (
    ALONE,
    Interrupter,
    Way,
    make_engine,
    requests,
    run,
)
from tests.engine.exactness_checks import check_bits
from tests.engine.models import HYBRID, spread_weights
from tests.engine.native_cases import needs_machine_code
from tests.engine.test_delta_rule import NET, random_tokens, reference
from tests.geometry import RETRACTING
from tests.tiers import tiered

MODEL = dataclasses.replace(HYBRID, eos_token_ids=(5,))
ASKED = [
    each._replace(prompt=each.prompt[:60])
    for each in requests(40, MODEL.vocab_size)
    if not each.params.changes_logits
][:12]
UNCACHED: dict[str, Any] = {**ALONE, "disable_radix_cache": True}

LARGE = dataclasses.replace(NET, key_dim=20, value_dim=144)
"""More columns than are summed at once, and a partly filled last vector of keys."""


@pytest.fixture(scope="module")
def alone():
    """Each request by itself, a token a dispatch."""
    with make_engine(UNCACHED, MODEL) as engine:
        found = run(engine, ASKED, Way({}))
    assert len({bits.tokens for bits in found}) == len(ASKED)
    return found


@needs_machine_code
class TestEngine:
    @pytest.mark.parametrize("drafts", tiered(["off", "always"], [], ["off"]))
    def test_no_bit_differs(self, alone, drafts):
        """Batches, chunks, interruptions, retraction; the second time from kept states."""
        with make_engine({**RETRACTING, "speculation": drafts}, MODEL) as engine:
            for _ in range(2):
                interrupt = Interrupter(1, spread_weights(MODEL))
                order = range(len(ASKED))[::-1]
                check_bits(run(engine, ASKED, Way({}, order, interrupt=interrupt)), alone)
            counters = engine.get_internal_state().counters
        assert counters.num_retractions > 0
        assert drafts == "off" or 0 < counters.num_accepted_tokens < counters.num_draft_tokens

    def test_a_turn_that_goes_on_from_its_state(self, alone):
        """A sampled token's log-prob equals its score as part of a prompt's answer."""
        asked, bits = ASKED[1], alone[1]
        tokens = asked.prompt + list(bits.tokens)
        with make_engine(RETRACTING, MODEL) as engine:
            first = engine.generate_requests([asked.prompt], asked.params)[0]
            again = engine.generate_requests([tokens], asked.params)[0]
            engine.flush_cache()
            anew = engine.generate_requests([tokens], asked.params)[0]
            (scores,) = engine.score([tokens])
        assert first.logprobs == np.frombuffer(bits.logprobs, np.float32).tolist()
        assert (again.num_cached_tokens > 0, anew.num_cached_tokens) == (True, 0)
        assert again.logprobs == anew.logprobs
        assert list(scores)[-len(bits.tokens) :] == first.logprobs


def rule_of(net: LinearAttentionConfig) -> Any:
    return jax.jit(
        lambda states, tokens: CpuKernels().delta_rule(states, tokens, net.head_sizes),
        compiler_options=compiler_options(True),
    )


def terms_of(*arrays: np.ndarray) -> TokenTerms:
    """The terms, of any kind of array."""
    return TokenTerms(*map(jnp.asarray, arrays))


@needs_machine_code
class TestRule:
    def test_against_float64_and_at_any_cut(self):
        arrays = random_tokens(90)
        expected, rule = reference(*arrays), rule_of(NET)
        q, k, v, decay, rate = arrays
        heads = np.concatenate([x.reshape(len(x), -1) for x in (q, k, v)], axis=1)
        whole = None
        for cuts, num_slots in (([0, 90], 1), ([0, 7, 40, 90], 3), (list(range(91)), 2)):
            # Whatever the slot held before, a sequence does not see it.
            states = jnp.full((num_slots, *state_shapes(NET, 1)[1][1:]), jnp.nan)
            found = []
            for start, end in itertools.pairwise(cuts):
                slots = np.full(end - start, num_slots - 1, np.int32)
                part = (x[start:end] for x in (heads, decay, rate))
                is_first = np.arange(start, end) == 0
                states, out = rule(states, terms_of(*part, slots, is_first))
                found.append(np.asarray(out))
            outs = np.concatenate(found)
            np.testing.assert_allclose(outs, expected, atol=1e-6)
            whole = outs if whole is None else whole
            np.testing.assert_array_equal(outs, whole)
            assert np.isnan(np.asarray(states)[:-1]).all()

    def test_sequences_side_by_side(self):
        """Tokens of two slots in turns, and of none; sizes that fill no vector."""
        net, rng = LARGE, np.random.default_rng(0)
        groups, ratio = net.num_key_heads, net.ratio
        sizes = (groups, net.key_dim), (groups, net.key_dim), (groups, ratio, net.value_dim)
        q, k, v = (rng.standard_normal((12, *size)).astype(np.float32) * 0.3 for size in sizes)
        decay, rate = -rng.exponential(size=(12, 6)), rng.uniform(size=(12, 6))
        decay, rate = decay.astype(np.float32), rate.astype(np.float32)
        heads = np.concatenate([x.reshape(12, -1) for x in (q, k, v)], axis=1)
        slots = np.array([2, 0, 2, NO_SLOT] * 3, np.int32)
        is_first = np.arange(12) < 2
        states = jnp.full((3, *state_shapes(net, 1)[1][1:]), 7.0)
        new, out = rule_of(net)(states, terms_of(heads, decay, rate, slots, is_first))
        for slot in (0, 2):
            own = slots == slot
            expected = jnp.zeros((1, *states.shape[1:]))
            for i in np.flatnonzero(own):
                q_i, k_i, v_i, *gates = (jnp.asarray(x[i : i + 1]) for x in (q, k, v, decay, rate))
                expected, o = delta_net.token_step(expected, Heads(q_i, k_i, v_i), *gates)
                np.testing.assert_allclose(out[i], o[0], atol=1e-5)
            np.testing.assert_allclose(new[slot], expected[0], atol=1e-5)
        assert (np.asarray(new)[1] == 7.0).all()
        assert not np.asarray(out)[slots == NO_SLOT].any()

    def test_heads(self):
        """Convolution, silu and norms against float64; the same bits in blocks and alone."""
        rng = np.random.default_rng(0)
        weight = rng.standard_normal((LARGE.num_channels, LARGE.conv_size)).astype(np.float32)
        window = rng.standard_normal((3, 8, LARGE.num_channels)).astype(np.float32)

        @jax.jit
        def heads(window):
            return CpuKernels().net_heads(window, jnp.asarray(weight), LARGE.head_sizes)

        found = np.asarray(heads(window))
        taps = lax.broadcasted_iota(jnp.int32, (5, 4), 0) + np.arange(4, dtype=np.int32)[None]
        x = np.einsum("ntwc,cw->ntc", window[:, np.asarray(taps)].astype(np.float64), weight)
        x = x / (1 + np.exp(-x))
        keys = LARGE.num_key_heads * LARGE.key_dim
        q, k = (x[..., i * keys : (i + 1) * keys].reshape(3, 5, -1, LARGE.key_dim) for i in (0, 1))
        q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + delta_net.EPS) for y in (q, k))
        parts = q * LARGE.key_dim**-0.5, k, x[..., 2 * keys :]
        expected = np.concatenate([part.reshape(3, 5, -1) for part in parts], axis=-1)
        np.testing.assert_allclose(found, expected, atol=2e-6)
        for token in range(5):
            one = heads(window[:1, token : token + 4])
            np.testing.assert_array_equal(one[0, 0], found[0, token])
