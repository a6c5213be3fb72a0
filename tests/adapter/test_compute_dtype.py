"""Models that compute in another dtype than they are stored in: the rollout follows the trainer."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tunix.models.qwen2 import model as qwen2

from sgljax_engine.placement import shardings as placement
from tests import inside
from tests import tunix_families as families
from tests import tunix_reference as ref
from tests.adapter.helpers import new_rollout, params_of, rollout_config, text_of
from tunix_sgljax import mismatch_report
from tunix_sgljax.exactness.mismatch import TOLERANCES
from tunix_sgljax.model_config import compute_dtype, engine_dtype

NUM_TOKENS = 64
CONFIG = rollout_config(max_tokens_to_generate=NUM_TOKENS, temperature=0.9, seed=5)
PROMPTS = ref.make_prompts(96, np.random.default_rng(3).integers(4, 16, 16).tolist(), seed=21)
QWEN2 = families.FAMILIES["qwen2_tied"].config
MIXED = {"num_layers": 1, "dtype": jnp.bfloat16, "param_dtype": jnp.float32}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("qwen2", marks=pytest.mark.soak),
        pytest.param("qwen3", marks=pytest.mark.slow),
    ],
)
def model(request):
    """Stored in float32, computes in bfloat16."""
    if request.param == "qwen3":
        return ref.make_tunix_qwen3({**ref.CONFIGS["gqa2_tied"], **MIXED}, seed=3)
    family = families.Family(qwen2.Qwen2, dataclasses.replace(QWEN2, **MIXED), seed=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.FAMILIES, "mixed", family)
        return families.make("mixed")


def rollout_of(model, **options):
    # The padding id is not sampled: the trainer would hide it from the tokens behind it.
    extra = {"bad_token_ids": [ref.PAD_ID]}
    config = options.pop("rollout_config", CONFIG)
    return new_rollout(model, rollout_config=config, sampling_params=extra, **options)


@ref.deprecations_ignored()
def report_of(model, tolerance=None, **options):
    rollout = rollout_of(model, **options)
    report = mismatch_report(rollout, model, [text_of(ids) for ids in PROMPTS])
    rollout.close()
    assert report.is_within(tolerance), str(report)
    return report.overall


def dtypes_of(arrays):
    return {array.dtype.name for array in jax.tree.leaves(arrays)}


def test_the_engine_computes_as_the_trainer_does(model):
    rollout = rollout_of(model)
    assert rollout.dtype == "bfloat16"
    runner = inside.runner(rollout.engine)
    assert dtypes_of(runner.kv_memory.kv) == {"bfloat16"}
    for _ in range(2):
        norms = {name: weight for name, weight in runner.weights.items() if "norm" in name}
        assert dtypes_of(norms) == {"float32"}  # as the trainer computes with them
        assert dtypes_of([w for n, w in runner.weights.items() if n not in norms]) == {"bfloat16"}
        assert rollout.find_differing_weights(params_of(model)) == []
        rollout.update_params(params_of(model))
    rollout.close()


@pytest.mark.soak
@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_it_is_nearer_to_the_trainer_than_float32(model, monkeypatch):
    # As XLA computes it: JIT-compiled CPU kernels store bfloat16 and compute in float32.
    followed = report_of(model, linear_backend="xla")
    finer = report_of(model, dtype="float32")
    assert followed.mean_abs < 0.9 * finer.mean_abs
    assert followed.k3 < 0.9 * finer.k3
    # It would not be with weights of norms that are rounded, as the trainer's are not.
    monkeypatch.setattr(placement, "_FLOAT32", ())
    rounded = report_of(model, 2 * TOLERANCES["bfloat16"], linear_backend="xla")
    assert rounded.mean_abs > 0.9 * finer.mean_abs


@pytest.mark.parametrize(
    "asked",
    [
        {"dtype": "float32"},
        {"rollout_config": dataclasses.replace(CONFIG, data_type=jnp.float32)},
        {"dtype": "float32", "rollout_config": dataclasses.replace(CONFIG, data_type="float16")},
    ],
    ids=["option", "data_type", "both"],
)
def test_what_is_asked_for_wins(model, asked):
    rollout = rollout_of(model, **asked)
    assert rollout.dtype == "float32"
    rollout.close()


def test_compute_dtype():
    assert compute_dtype(QWEN2) == "float32"
    assert compute_dtype(dataclasses.replace(QWEN2, dtype=jnp.bfloat16)) == "bfloat16"
    assert compute_dtype(dataclasses.replace(QWEN2, dtype="float16")) == "float16"
    # These compute in what their weights are.
    for name in ("llama3_tied", "gemma2", "gemma3"):
        assert compute_dtype(families.FAMILIES[name].config) is None
    for other in (None, {"dtype": "bfloat16"}, jnp.bfloat16):
        assert compute_dtype(other) is None


def test_weights_that_are_coarser_than_what_computes_are_kept_and_told(caplog):
    with caplog.at_level(logging.INFO, "tunix_sgljax"):
        assert engine_dtype(QWEN2, "bfloat16") == "bfloat16"
    assert "computes in float32 with weights of bfloat16" in caplog.text
    assert "dtype='float32'" in caplog.text
