"""Converts a trainer's weights to the form of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.registry import get_model
from sgljax_engine.models.spec import ParamKind
from sgljax_engine.weights.hf_files import HfTensor, mapped_tensors
from sgljax_engine.weights.rules import WeightRule
from sgljax_engine.weights.sync import TargetSpec


def to_hf_tensors(
    model: ModelConfig, weights: Mapping[str, np.ndarray], rules: Sequence[WeightRule]
) -> dict[str, HfTensor]:
    """A trainer's weights by Hugging Face's names, each computed when it is loaded.

    The inverse of loading a Hugging Face folder into the trainer. An output projection tied to the
    embeddings is left out.

    Args:
        model: Config of the model.
        weights: Host arrays by the trainer's names.
        rules: Map them onto the engine's parameters, as for `Engine.update_weights`.

    Raises:
        WeightSyncError: names every parameter that is missing, unused or of the wrong shape.
    """
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    specs = get_model(model.architecture).param_specs(model)
    targets = {
        name: TargetSpec(
            spec.shape, jnp.dtype("float32"), spec.kind is ParamKind.LINEAR, sharding, spec.alias
        )
        for name, spec in specs.items()
    }
    return mapped_tensors(weights, rules, targets)
