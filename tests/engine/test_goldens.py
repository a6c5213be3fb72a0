"""Greedy tokens and log-probs against transformers + torch (see tests/golden/make_goldens.py)."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import sgljax_cpu
from sgljax_engine import Engine
from sgljax_engine.attention.xla import XlaAttention
from sgljax_engine.layers.kernels import XlaKernels
from sgljax_engine.models.registry import MODELS
from tests import inside
from tests.engine.exactness_checks import check_golden, check_golden_scores
from tests.geometry import SMALL
from tests.tiers import tiered

GOLDEN = Path(__file__).parents[1] / "golden"
FAST = (
    *("gemma2_window", "llama_scaled_untied", "qwen2_bias_untied", "qwen3_gqa_tied"),
    "smollm3_every_second",
)
"""Those of the fast tier: what layers without experts and without shared keys have."""
SLOW = (
    *("gemma_mqa", "gemma3_window", "gemma4_multimodal_keys_as_values", "gemma4_shared_keys"),
    *("mistral_window", "qwen3_moe_odd_sharded", "mixtral_window", "olmo2_yarn", "olmo3_window"),
    *("gpt_oss_window", "deepseek_v2_groups", "deepseek_v3_groups"),
)
"""Those of the slow tier: with these each family has one. The others are of the soak."""

FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))


PLAIN = [name for name in FOLDERS if not name.startswith(("qwen3_next", "qwen3_5"))]
"""Without recurrent states; `test_hybrid.py` checks the others."""

PORTABLE = (
    *("qwen2_bias_untied", "gemma2_window", "gemma4_shared_keys"),
    *("gemma4_multimodal_keys_as_values", "qwen3_moe_odd_sharded", "olmo2_yarn"),
    *("gpt_oss_window", "deepseek_v2_groups", "deepseek_v3_groups"),
    *("qwen3_5_equal_heads", "qwen3_next_tied"),
)
"""One for each mechanism of XLA's code: biases, windows, caps, keys, experts, norms, sinks, states,
latents."""


@pytest.fixture(scope="module", params=tiered(PLAIN, FAST, SLOW))
def model(request):
    folder = GOLDEN / request.param
    golden = np.load(folder / "golden.npz")
    with Engine(folder, dtype="float32", **SMALL) as engine:
        yield engine, golden


def test_every_architecture_has_one():
    configs = [json.loads((GOLDEN / name / "config.json").read_text()) for name in FOLDERS]
    found = {config["architectures"][0] for config in configs}
    assert found == set(MODELS), (
        f"no golden of {sorted(set(MODELS) - found)}, no model for {sorted(found - set(MODELS))}: "
        "add a spec to tests/golden/golden_specs.py and run tests/golden/make_goldens.py"
    )
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
@pytest.mark.parametrize("drafts", tiered(["off", "always"], [], ["off"]))
@pytest.mark.parametrize("name", tiered(PORTABLE, [], ["qwen2_bias_untied"]))
def test_without_jit_compiled_kernels(name, drafts, monkeypatch):
    """XLA's products and attention, as on accelerators; with drafts that are right, too."""
    monkeypatch.setattr(sgljax_cpu, "unavailable", lambda: "this is a test of what else there is")
    golden = np.load(GOLDEN / name / "golden.npz")
    with Engine(GOLDEN / name, dtype="float32", speculation=drafts, **SMALL) as engine:
        static = inside.runner(engine)._static
        assert isinstance(static.context.kernels, XlaKernels)
        assert isinstance(static.attention, XlaAttention)
        check_golden(engine, golden)
        if drafts == "always":
            check_golden(engine, golden)
            assert engine.get_internal_state().counters.num_accepted_history > 100
        check_golden_scores(engine, golden)


@pytest.mark.parametrize("model", tiered(PLAIN, FAST, ("qwen3_moe_odd_sharded",)), indirect=True)
def test_score_matches_logits(model):
    check_golden_scores(*model)
