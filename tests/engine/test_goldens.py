"""Greedy tokens and log-probs against transformers + torch (see tests/golden/make_goldens.py)."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import sgljax_cpu
from sgljax_engine import Engine
from sgljax_engine.layers.basic import Layout
from sgljax_engine.layers.kernels import XlaKernels
from sgljax_engine.models.registry import MODELS
from sgljax_engine.placement import submeshes
from tests import inside
from tests.engine.exactness_checks import check_golden, check_golden_scores
from tests.geometry import SMALL
from tests.tiers import tiered

GOLDEN = Path(__file__).parents[1] / "golden"
FAST = ("gemma2_window", "llama_scaled_untied", "qwen2_bias_untied", "qwen3_gqa_tied")
"""Those of the fast tier: what layers without experts and without shared keys have."""
SLOW = (
    *("gemma_mqa", "gemma3_window", "gemma4_multimodal_keys_as_values", "gemma4_shared_keys"),
    *("llama_attention_bias_tied", "mistral_window", "qwen3_moe_odd_sharded"),
)
"""Those of the slow tier: with these each family has one. The others are of the soak."""

FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))


PLAIN = [name for name in FOLDERS if not name.startswith(("qwen3_next", "qwen3_5"))]
"""Without recurrent states; `test_hybrid.py` checks the others."""


@pytest.fixture(scope="module", params=tiered(PLAIN, FAST, SLOW))
def model(request):
    folder = GOLDEN / request.param
    golden = np.load(folder / "golden.npz")
    with Engine(folder, dtype="float32", **SMALL) as engine:
        yield engine, golden


def test_every_architecture_has_one():
    configs = [json.loads((GOLDEN / name / "config.json").read_text()) for name in FOLDERS]
    assert {config["architectures"][0] for config in configs} == set(MODELS)
    assert len(FOLDERS) >= 10


def test_greedy_tokens_and_logprobs(model):
    check_golden(*model)


@pytest.fixture
def strict_ranks(name):
    """As a host process may be set; Gemma 4 does not take it."""
    before = jax.config.jax_numpy_rank_promotion  # type: ignore[attr-defined]
    if not name.startswith("gemma4"):
        jax.config.update("jax_numpy_rank_promotion", "raise")
    yield
    jax.config.update("jax_numpy_rank_promotion", before)


@pytest.mark.usefixtures("strict_ranks")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("qwen2_bias_untied", Layout.TOKENS_FIRST, marks=pytest.mark.slow),
        pytest.param("qwen2_bias_untied", Layout.FEATURES_FIRST, marks=pytest.mark.soak),
        pytest.param("gemma2_window", Layout.TOKENS_FIRST, marks=pytest.mark.soak),
        pytest.param("gemma4_shared_keys", Layout.FEATURES_FIRST, marks=pytest.mark.soak),
        pytest.param("qwen3_moe_odd_sharded", Layout.TOKENS_FIRST, marks=pytest.mark.soak),
        pytest.param("qwen3_5_equal_heads", Layout.TOKENS_FIRST, marks=pytest.mark.soak),
        pytest.param("qwen3_next_tied", Layout.FEATURES_FIRST, marks=pytest.mark.soak),
    ],
)
def test_without_jit_compiled_kernels(name, layout, monkeypatch):
    """XLA's products, rows copied out of pages, and the layout of TPUs and GPUs too."""
    monkeypatch.setattr(sgljax_cpu, "unavailable", lambda: "this is a test of what else there is")
    monkeypatch.setattr(submeshes, "default_layout", lambda platform: layout)
    golden = np.load(GOLDEN / name / "golden.npz")
    with Engine(GOLDEN / name, dtype="float32", **SMALL) as engine:
        context = inside.runner(engine)._static.context
        assert isinstance(context.kernels, XlaKernels)
        assert context.layout is layout
        check_golden(engine, golden)


def test_score_matches_logits(model):
    check_golden_scores(*model)
