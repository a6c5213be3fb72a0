"""A trainer's weights and pairs as a fleet's workers read them, beside what an engine makes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from sgljax_engine.models.hf_export import to_peft_tensors
from tests import lora_models
from tests.adapter.helpers import new_rollout
from tests.adapter.test_lora import config

MODELS = ("gqa2_tied", "gemma_mha", "gemma4_keys_as_values")


@pytest.fixture(scope="module", params=MODELS)
def adapted(request):
    """A model with pairs that change it, and an engine that serves both apart."""
    model = lora_models.make(request.param, "two" if request.param == "gemma_mha" else "all")
    nnx.update(model, lora_models.draw(model, seed=3))
    rollout = new_rollout(model, rollout_config=config(), lora="adapter")
    yield model, rollout
    rollout.close()


def test_pairs_are_those_of_an_engine(adapted, tmp_path):
    """What PEFT's files hold is, bit for bit, what the engine makes of the pairs themselves."""
    model, rollout = adapted
    named, rules = rollout.weight_source(nnx.state(model, nnx.Param))
    pairs = {name: np.asarray(x) for name, x in named.items() if "_lora_" in name}
    tensors, peft = to_peft_tensors(rollout.engine.model_config, pairs, rules, max_rank=8)
    save_file(tensors, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    (tmp_path / "adapter_config.json").write_text(json.dumps(peft))
    assert rollout.engine.find_differing_adapter(rollout.adapter, str(tmp_path)) == []
    name = next(name for name in tensors if "lora_B" in name)
    save_file(
        {**tensors, name: 2 * tensors[name]},
        tmp_path / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    projection = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
    assert rollout.engine.find_differing_adapter(rollout.adapter, str(tmp_path)) == [projection]
