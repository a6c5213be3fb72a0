"""Greedy tokens and log-probs against transformers + torch (see tests/golden/make_goldens.py)."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from sgljax_engine import Engine
from sgljax_engine.layers import target
from sgljax_engine.layers.basic import Layout
from sgljax_engine.layers.kernels import XlaKernels
from sgljax_engine.models.registry import MODELS
from sgljax_engine.placement import submeshes
from tests.engine.gates import check_golden, check_golden_scores
from tests.tiers import tiered

GOLDEN = Path(__file__).parents[1] / "golden"
FAST = (
    "gemma2_window",
    "gemma3_window",
    "gemma4_shared_keys",
    "gemma_mqa",
    "llama_bias_untied",
    "llama_scaled_untied",
    "mistral_window",
    "qwen2_bias_untied",
    "qwen3_gqa_tied",
    "qwen3_moe_odd_sharded",
)
"""Those of the fast tier, one an architecture."""

FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))


@pytest.fixture(
    scope="module",
    params=tiered(FOLDERS, FAST),
)
def model(request):
    folder = GOLDEN / request.param
    golden = np.load(folder / "golden.npz")
    with Engine(folder, dtype="float32", page_size=4, max_running_requests=8) as engine:
        yield engine, golden


def test_every_architecture_has_one():
    configs = [json.loads((GOLDEN / name / "config.json").read_text()) for name in FOLDERS]
    assert {config["architectures"][0] for config in configs} == set(MODELS)
    assert len(FOLDERS) >= 10


def test_greedy_tokens_and_logprobs(model):
    check_golden(*model)


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_bias_untied",
        "gemma2_window",
        pytest.param("gemma4_shared_keys", marks=pytest.mark.slow),
        "qwen3_moe_odd_sharded",
    ],
)
def test_without_jit_compiled_kernels(name, monkeypatch):
    """What other processors and dtypes use: XLA's products, and rows copied out of pages."""
    monkeypatch.setattr(target, "unavailable", lambda: "this is a test of what else there is")
    golden = np.load(GOLDEN / name / "golden.npz")
    with Engine(GOLDEN / name, dtype="float32", page_size=4, max_running_requests=8) as engine:
        context = engine._group.loops[0]._core.runner._static.context
        assert isinstance(context.kernels, XlaKernels)
        check_golden(engine, golden)


@pytest.fixture
def strict_ranks():
    """As a host process may be set."""
    before = jax.config.jax_numpy_rank_promotion  # type: ignore[attr-defined]
    jax.config.update("jax_numpy_rank_promotion", "raise")
    yield
    jax.config.update("jax_numpy_rank_promotion", before)


@pytest.mark.usefixtures("strict_ranks")
@pytest.mark.parametrize("layout", [Layout.TOKENS_FIRST, Layout.FEATURES_FIRST])
@pytest.mark.parametrize(
    "name",
    [
        "qwen2_bias_untied",
        pytest.param("gemma2_window", marks=pytest.mark.slow),
        pytest.param("qwen3_moe_normalised", marks=pytest.mark.slow),
    ],
)
def test_layouts(name, layout, monkeypatch):
    """That of TPUs and GPUs too, with biases, norms behind the layer, and two rotary embeddings."""
    monkeypatch.setattr(submeshes, "default_layout", lambda platform: layout)
    golden = np.load(GOLDEN / name / "golden.npz")
    options = {"page_size": 4, "max_running_requests": 8, "linear_backend": "xla"}
    with Engine(GOLDEN / name, dtype="float32", **options) as engine:
        assert engine._group.loops[0]._core.runner._static.context.layout is layout
        check_golden(engine, golden)


def test_score_matches_logits(model):
    check_golden_scores(*model)
