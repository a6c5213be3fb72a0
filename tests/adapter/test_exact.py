"""Deterministic sampling through Tunix's flag, and weights compared bit by bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import tunix_reference as ref
from tests.adapter.helpers import MODEL, new_rollout, rollout_config, text_of
from tunix_sgljax import SglJaxRollout

TRAINER_AS_USERS = "the trainer's bits"

PROMPTS = [text_of(ids) for ids in ref.make_prompts(ref.CONFIGS[MODEL]["vocab_size"])]


def config_of(**changes):
    fields = {
        "rollout_sglang_jax_enable_deterministic_sampling": True,
        "max_tokens_to_generate": 40,
        "return_logprobs": True,
        "temperature": 0.8,
        "seed": 5,
    }
    return rollout_config(**(fields | changes))


def generate(rollout: SglJaxRollout, prompts: list[str], config):
    output = rollout.generate(prompts, config)
    assert output.logprobs is not None
    return [
        (tokens.tolist(), np.asarray(logprobs, np.float32).tobytes())
        for tokens, logprobs in zip(output.tokens, output.logprobs, strict=True)
    ]


class TestFlag:
    def test_per_token_logps_have_the_bits_of_sampling(self, model):
        config = config_of()
        rollout = new_rollout(model, rollout_config=config)
        output = rollout.generate(PROMPTS * 2, config)
        assert output.logprobs is not None
        length = max(len(tokens) for tokens in output.tokens)
        completions = np.full((len(output.tokens), length), ref.PAD_ID, np.int32)
        for row, tokens in enumerate(output.tokens):
            completions[row, : len(tokens)] = tokens
        logps = np.asarray(
            rollout.get_per_token_logps(
                jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(completions)
            )
        )
        rollout.close()
        for row, tokens in enumerate(output.tokens):
            # Tunix's arrays cannot tell a sampled pad id from padding.
            end = int(np.append(tokens == ref.PAD_ID, True).argmax())
            expected = np.asarray(output.logprobs[row], np.float32)[:end]
            np.testing.assert_array_equal(logps[row, :end], expected)


@pytest.fixture(scope="module")
def updated(model):
    """A rollout whose weights the tests below update."""
    made = new_rollout(model, rollout_config=rollout_config())
    yield made
    made.close()


class TestWeights:
    def test_the_trainers_bits_arrive(self, model, updated):
        assert updated.find_differing_weights(nnx.state(model, nnx.Param)) == []

    def test_after_updates_as_before(self, model, updated):
        for step in range(3):
            state = jax.tree.map(
                lambda x, s=step: x * (1.0 + 1e-3 * s), nnx.state(model, nnx.Param)
            )
            updated.update_params(state)
            assert updated.find_differing_weights(state) == []

    def test_one_other_bit_is_found(self, model, updated):
        state = nnx.state(model, nnx.Param)
        updated.update_params(state)
        other = jax.tree.map(lambda x: x, state)
        embedding = other["embedder"]["input_embedding"]
        value = np.array(embedding[...])
        value.view(np.uint32)[3, 1] ^= 1
        embedding.set_value(jnp.asarray(value))
        assert updated.find_differing_weights(other) == ["model.embed_tokens.weight"]
