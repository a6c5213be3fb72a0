"""Experts give a token the same bits in any batch, and the same tokens on several devices."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sgljax_engine import MoEConfig
from tests.devices import run_python
from tests.engine.determinism_cases import ALONE, Way, differing, make_engine, requests, run
from tests.engine.models import GPT_OSS, HYBRID, LATENTS, TINY_MOE, spread_weights
from tests.engine.native_cases import needs_machine_code
from tests.geometry import RETRACTING, SMALL

BITS_MODEL = dataclasses.replace(TINY_MOE, vocab_size=64, hidden_size=48, eos_token_ids=(5,))
NEXT_MODEL = dataclasses.replace(
    HYBRID,
    architecture="Qwen3NextForCausalLM",
    vocab_size=64,
    eos_token_ids=(5,),
    intermediate_size=24,
    moe=MoEConfig(
        num_experts=8,
        num_experts_per_token=3,
        intermediate_size=24,
        norm_topk_prob=True,
        shared_size=16,
    ),
    linear_attention=dataclasses.replace(HYBRID.linear_attention, is_grouped=True),  # type: ignore[type-var]
)
"""Recurrent states, and a shared expert beside the others."""

REQUESTS = [
    # Prompts short enough that several start, and answers long enough that pages run out.
    each._replace(prompt=each.prompt[:40], params=dataclasses.replace(each.params, ignore_eos=True))
    for each in requests(40, 64)
    if not each.params.changes_logits
][:16]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(BITS_MODEL, id="plain"),
        pytest.param(dataclasses.replace(GPT_OSS, vocab_size=64), id="sinks"),
        pytest.param(dataclasses.replace(LATENTS, vocab_size=64), id="latents"),
        pytest.param(NEXT_MODEL, id="hybrid", marks=pytest.mark.soak),
    ],
)
@needs_machine_code
def test_no_bit_differs(model):
    """Alone or in one prefill; in other chunks and orders, retracted."""
    weights = spread_weights(model)
    order = np.random.default_rng(1).permutation(len(REQUESTS)).tolist()
    with make_engine(ALONE, model, weights) as engine:
        alone = run(engine, REQUESTS, Way({}))
    for options in (SMALL, RETRACTING):
        with make_engine(options, model, weights) as engine:
            found = run(engine, REQUESTS, Way({}, order=order))
            num_retractions = engine.get_internal_state().counters.num_retractions
        assert differing(found, alone) == []
        assert (num_retractions > 0) == (options is RETRACTING)


SCRIPT = """
import dataclasses
import jax, numpy as np
from jax.sharding import Mesh
from sgljax_engine import Engine, SamplingParams
from tests import inside
from tests.engine.models import GPT_OSS, LATENTS, TINY_MOE, random_prompts, spread_weights
from tests.geometry import SMALL

TINY_MOE = dataclasses.replace(TINY_MOE, num_layers=1)  # compiled in half the time
prompts = random_prompts(8, 1, 40)
greedy = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
devices = np.asarray(jax.devices()[:4]).reshape(1, 4)
mesh = Mesh(devices, ("fsdp", "tp"))

def results(engine):
    outputs = engine.generate_requests(prompts, greedy)
    return [o.output_ids for o in outputs], np.concatenate([o.logprobs for o in outputs])

for base, count, sharded in (
    (TINY_MOE, 6, "width"), (TINY_MOE, 8, "experts"), (GPT_OSS, 6, "width"),
    (GPT_OSS, 8, "experts"), (LATENTS, 8, "experts"),
):
    model = dataclasses.replace(base, moe=dataclasses.replace(base.moe, num_experts=count))
    weights = spread_weights(model)
    with Engine(model_config=model, weights=weights, **SMALL) as engine:
        ids, logprobs = results(engine)
        checksums = engine.get_weights_checksum()
    with Engine(model_config=model, weights=weights, mesh=mesh, **SMALL) as engine:
        held = inside.runner(engine).weights
        layer = f"model.layers.{model.moe.num_dense_layers}"
        (shard,) = {s.data.shape for s in
                    held[f"{layer}.mlp.experts.gate_proj.weight"].addressable_shards}
        assert shard == ((6, 32, 6) if sharded == "width" else (2, 32, 24)), shard
        found, got = results(engine)
        assert found == ids, sharded
        np.testing.assert_allclose(got, logprobs, atol=3e-5)
        assert engine.get_weights_checksum() == checksums
        engine.update_weights(jax.device_put(weights, devices[0, 3]), verify=True)
        assert results(engine)[0] == ids
print("experts ok")
"""


@pytest.mark.soak
def test_four_devices():
    done = run_python("-c", SCRIPT, num_devices=4)
    assert "experts ok" in done.stdout
