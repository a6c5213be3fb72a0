"""Attention over latents and experts in groups (DeepSeek): kernels, weights, pages and routing."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_cpu import PANEL, Panels
from sgljax_engine import Engine, InvalidConfigError, SamplingParams, hf_rules, logical_rules
from sgljax_engine.attention import tpu
from sgljax_engine.attention.cpu import NativeAttention
from sgljax_engine.attention.pallas import PallasAttention
from sgljax_engine.attention.registry import attention_problem
from sgljax_engine.attention.xla import XlaAttention
from sgljax_engine.cache.kv_pages import LayerKV
from sgljax_engine.errors import WeightSyncError
from sgljax_engine.layers.experts import Groups, route
from sgljax_engine.layers.kernels import CpuKernels, XlaKernels
from sgljax_engine.models.hf_export import to_hf_tensors
from sgljax_engine.weights.rules import LoraRule
from tests.engine.models import LATENTS, logical_weights, random_prompts, spread_weights
from tests.engine.native_cases import needs_machine_code
from tests.engine.paged_cases import OPTIONS, case_of
from tests.geometry import SMALL

BACKENDS: dict[str, Any] = {
    "xla": XlaAttention(),
    "native": NativeAttention(),
    "pallas": PallasAttention(interpret=True),
}
KV_UP = "model.layers.1.self_attn.kv_b_proj.weight"
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("shape", [(4, 20, 1, 1, 48), (16, 6, 1, 16, 32)], ids=str)
@pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=needs_machine_code if name == "native" else ()) for name in BACKENDS],
)
def test_keys_are_values(backend, shape):
    """Twenty heads of one key are more than a tile has; 48 channels are of two parts."""
    case = case_of(shape)
    case = case._replace(values=case.keys, layer=LayerKV(case.layer.k, None))
    out = case.run(BACKENDS[backend].attend, OPTIONS["default"])
    case.check(out, OPTIONS["default"], 2e-5)


def test_tpus_take_other_attention(monkeypatch):
    monkeypatch.setattr(tpu, "tpu_problem", lambda *_: None)
    target: Any = None
    assert attention_problem("tpu", target, (128,)) is None
    assert "latents" in str(attention_problem("tpu", target, (128,), has_values=False))


@needs_machine_code
def test_products_by_head():
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(5, 24, 2 * PANEL)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(7, 5, 24)), jnp.float32)
    expected = np.einsum("tni,nio->tno", np.asarray(x), np.asarray(weights))
    panels: Any = Panels(weights.reshape(5, 24, 2, PANEL).transpose(0, 2, 1, 3), 2 * PANEL)
    found = jax.jit(lambda x: CpuKernels().heads_linear(panels, x))
    for out in (XlaKernels().heads_linear(weights, x), found(x)):
        np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_array_equal(found(x[2:3]), found(x)[2:3])


def test_experts_of_the_best_groups():
    """Against numpy, expert by expert; the bias chooses, and is in no factor."""
    rng = np.random.default_rng(1)
    logits, bias = rng.normal(size=(20, 12)), rng.normal(0, 0.3, 12)
    found = route(
        jnp.asarray(logits, jnp.float32),
        4,
        is_normalized=True,
        is_sigmoid=True,
        groups=Groups(num_groups=4, num_chosen=2, num_scores=2),
        choice_bias=jnp.asarray(bias, jnp.float32),
        scale=2.5,
    )
    for row, weights, ids in zip(logits, *map(np.asarray, found), strict=True):
        scores = 1 / (1 + np.exp(-row))
        choice = (scores + bias).reshape(4, 3)
        best = np.argsort(np.sort(choice, axis=1)[:, 1:].sum(axis=1))[2:]
        seen = [expert for group in best for expert in range(3 * group, 3 * group + 3)]
        expected = sorted(seen, key=lambda expert: -(scores + bias)[expert])[:4]
        assert ids.tolist() == expected
        factors = 2.5 * scores[expected] / scores[expected].sum()
        np.testing.assert_allclose(weights, factors, rtol=1e-5)


def test_files_have_keys_and_values_in_one_projection():
    logical = logical_weights(LATENTS)
    tensors = to_hf_tensors(LATENTS, logical, logical_rules(LATENTS))
    files = spread_weights(LATENTS)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: weight.shape for name, weight in files.items()
    }
    np.testing.assert_array_equal(np.asarray(tensors[KV_UP].load()), files[KV_UP])


@pytest.mark.slow
def test_a_token_takes_one_latent_and_all_projections_take_lora():
    latent = LATENTS.attention.latent
    assert latent is not None
    rng, weights, prompts = (
        np.random.default_rng(0),
        spread_weights(LATENTS),
        random_prompts(3, 5, 30),
    )
    num_out, num_in = weights[KV_UP].shape
    pair = {
        "a": rng.normal(0, 0.5, (num_in, 4)).astype(np.float32),
        "b": rng.normal(0, 0.5, (4, num_out)).astype(np.float32),
    }
    rule = LoraRule(KV_UP, "a", "b", 1.0, in_axes=(1,))
    rules = (*hf_rules(LATENTS), rule)
    merged = weights | {KV_UP: weights[KV_UP] + (pair["a"] @ pair["b"]).T}
    options = {**SMALL, "max_loras": 1, "max_lora_rank": 4}
    with Engine(model_config=LATENTS, weights=weights, **options) as engine:
        memory = engine.get_internal_state().memory
        assert memory.kv_bytes // memory.kv_tokens == 4 * LATENTS.num_layers * latent.page_dim
        plain = engine.generate_requests(prompts, GREEDY)
        with pytest.raises(WeightSyncError, match=r"k_b_proj.weight', which has no adapter slots"):
            engine.load_adapter("one", pair, rules)
        engine.update_weights(merged)
        expected = engine.generate_requests(prompts, GREEDY)
        engine.update_weights(weights | pair, rules)
        found = engine.generate_requests(prompts, GREEDY)
    assert [each.output_ids for each in found] == [each.output_ids for each in expected]
    assert [each.output_ids for each in found] != [each.output_ids for each in plain]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 2}, r"\(num_kv_heads, head_dim\) must be \(1, 32\), got \(2, 32\)"),
        ({"head_dim": 24}, r"\(num_kv_heads, head_dim\) must be \(1, 32\), got \(1, 24\)"),
    ],
)
def test_pages_hold_one_latent(changes, message):
    with pytest.raises(InvalidConfigError, match=message):
        dataclasses.replace(LATENTS, **changes)
