"""Factors that a trainer keeps in its weights, as MaxText's Gemma does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sgljax_engine import Engine, InvalidConfigError, SamplingParams, ScaleConfig
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.geometry import SMALL
from tests.tiers import tiered

TIED = {
    architecture: dataclasses.replace(
        TINY, architecture=architecture, tie_word_embeddings=True, final_logit_softcap=20.0
    )
    for architecture in ("Gemma3ForCausalLM", "Gemma4ForCausalLM", "Qwen3ForCausalLM")
}
FACTOR = TINY.hidden_size**0.5


def sample(backend, model, weights):
    with Engine(model_config=model, weights=weights, attention_backend=backend, **SMALL) as engine:
        params = SamplingParams(max_new_tokens=12, temperature=0.0)
        outputs = engine.generate_requests(random_prompts(3, 5, 20), params)
    return [output.output_ids for output in outputs], [output.logprobs for output in outputs]


@pytest.mark.parametrize("backend", ["auto", pytest.param("xla", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "architecture", tiered(["Gemma3ForCausalLM", "Gemma4ForCausalLM"], ["Gemma3ForCausalLM"], [])
)
def test_factors_may_be_in_the_weights(architecture, backend):
    model = TIED[architecture]
    weights = spread_weights(model)
    table = weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] / 8
    is_offset = architecture == "Gemma3ForCausalLM"
    with_factors = {
        name: x + 1 if is_offset and "norm" in name else x for name, x in weights.items()
    } | {"model.embed_tokens.weight": table * np.float32(FACTOR)}
    scales = ScaleConfig(embedding=1.0, norm_offset=0.0, logits=1 / FACTOR)
    scaled = dataclasses.replace(model, scales=scales)
    wanted, found = (sample(backend, *each) for each in ((model, weights), (scaled, with_factors)))
    assert found[0] == wanted[0]
    np.testing.assert_allclose(found[1], wanted[1], atol=2e-5)
    # The factors matter.
    plain = sample(backend, model, with_factors)
    assert np.abs(np.subtract(plain[1], wanted[1])).max() > 0.1


def test_logits_are_scaled_before_their_cap():
    model = dataclasses.replace(TIED["Qwen3ForCausalLM"], tie_word_embeddings=False)
    weights = spread_weights(model)
    scaled = dataclasses.replace(model, scales=ScaleConfig(logits=0.25))
    smaller = weights | {"lm_head.weight": weights["lm_head.weight"] / 4}
    wanted, found = sample("auto", model, smaller), sample("auto", scaled, weights)
    assert found[0] == wanted[0]
    np.testing.assert_allclose(found[1], wanted[1], atol=2e-5)


@pytest.mark.parametrize(
    ("field", "value"), [("embedding", 0.0), ("norm_offset", 0.5), ("logits", -1.0)]
)
def test_factors_out_of_range(field, value):
    with pytest.raises(InvalidConfigError, match=field):
        ScaleConfig(**{field: value})
