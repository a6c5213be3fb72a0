"""The float64 reference against Tunix's own model and function."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

from benchmarks.lib.float64_reference import float64_logprobs
from tunix_sgljax.bench.models import make_tunix_model
from tunix_sgljax.bench.shapes import MODELS, PAD_ID
from tunix_sgljax.exactness.trainer_match import trainer_logps
from tunix_sgljax.padding import left_pad_prompts


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Tunix uses deprecated parts of JAX.
@pytest.mark.parametrize("is_changed", [False, True])
def test_is_tunix_up_to_rounding(is_changed):
    config = MODELS["tiny"].config
    model = make_tunix_model(config)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, config.vocab_size, length).tolist() for length in (3, 8)]
    completions = rng.integers(1, config.vocab_size, (2, 6)).astype(np.int32)
    exact = np.stack(float64_logprobs(model, config, prompts, completions.tolist()))
    if is_changed:
        kernel = model.layers[5].mlp.up_proj.kernel
        kernel[...] = kernel[...].at[0, 0].add(0.5)
    graphdef, state = nnx.split(model)
    found = trainer_logps(
        graphdef,
        state,
        left_pad_prompts(prompts, 8, PAD_ID),
        completions,
        pad_id=PAD_ID,
        eos_id=-1,
        temperature=1.0,
    )
    gap = np.abs(found - exact).max()
    assert (gap > 1e-3) if is_changed else (gap < 2e-5)
