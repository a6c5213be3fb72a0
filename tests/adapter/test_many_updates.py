"""Fifty weight updates in a row: no memory grows, nothing is compiled."""

from __future__ import annotations

import gc

import jax
import numpy as np
import psutil
import pytest
from flax import nnx

from tests import tunix_reference as ref
from tests.adapter.helpers import new_rollout, params_of, tokens_of
from tests.compilation import recorded_programs

QUICK_COMPILE = "that updates keep memory and compile nothing"

# Four megabytes of weights: a copy leaked at every fifth update would be noticed.
MODEL = {**ref.CONFIGS["gqa2_tied"], "vocab_size": 4096, "embed_dim": 192}
NUM_UPDATES = 50
WARM_UP = 5
MAX_GROWTH = 0.05


@pytest.fixture
def compiles():
    """A list that grows by one with every program that is new to this process."""
    with recorded_programs() as seen:
        yield seen


@pytest.mark.slow
def test_fifty_updates(compiles):
    model = ref.make_tunix_qwen3(MODEL)
    host = jax.tree.map(np.asarray, params_of(model))
    prompts = ref.make_prompts(MODEL["vocab_size"], (3, 9), seed=5)
    rollout = new_rollout(model)
    process = psutil.Process()

    def step(number):
        """One training step: new buffers, new weights, a rollout."""
        factor = np.float32(1 + number / NUM_UPDATES)
        params = jax.tree.map(lambda x: jax.device_put(x * factor), host)
        rollout.update_params(params, (nnx.Param,))
        return tokens_of(rollout, prompts)

    try:
        tokens_of(rollout, prompts)
        outputs = [step(number) for number in range(WARM_UP)]
        assert compiles, "the listener hears nothing"
        num_compiles = len(compiles)
        programs = rollout.engine.get_internal_state().num_compiles
        gc.collect()
        resident = [process.memory_info().rss]
        for number in range(WARM_UP, NUM_UPDATES):
            outputs.append(step(number))
            resident.append(process.memory_info().rss)
        state = rollout.engine.get_internal_state()
    finally:
        rollout.close()

    assert len(compiles) == num_compiles
    assert state.num_compiles == programs
    assert state.counters.num_weight_updates == state.weight_version == NUM_UPDATES
    assert max(resident) < resident[0] * (1 + MAX_GROWTH)
    assert len({str(tokens) for tokens in outputs}) > 1, "the updates had no effect"


def test_the_first_update_compiles_and_the_second_does_not(compiles):
    """Also for host arrays, which take a program of their own, once."""
    model = ref.make_tunix_qwen3("gqa2_tied")
    prompts = ref.make_prompts(128, (3,))
    params = params_of(model)
    host = jax.tree.map(np.asarray, params)
    rollout = new_rollout(model)
    try:
        tokens_of(rollout, prompts)
        counts = []
        for source in (params, params, host, host, params, host):
            before = len(compiles)
            rollout.update_params(source, (nnx.Param,))
            tokens_of(rollout, prompts)
            counts.append(len(compiles) - before)
    finally:
        rollout.close()
    assert counts[0] <= 1
    assert counts[2] <= 1
    assert counts[1] == counts[3] == counts[4] == counts[5] == 0
