"""Converts a trainer's weights to the form of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.latent import K_UP, KV_UP, V_UP
from sgljax_engine.models.registry import get_model
from sgljax_engine.models.spec import ParamKind, ParamSpec
from sgljax_engine.models.weight_rules import expert_name, stored_name
from sgljax_engine.weights.adapters import AdapterSlots, pair_factors, plan_adapter
from sgljax_engine.weights.forms import Form
from sgljax_engine.weights.hf_files import HfTensor, mapped_tensors
from sgljax_engine.weights.rules import WeightRule
from sgljax_engine.weights.specs import TargetSpec


def to_hf_tensors(
    model: ModelConfig, weights: Mapping[str, np.ndarray], rules: Sequence[WeightRule]
) -> dict[str, HfTensor]:
    """A trainer's weights by Hugging Face's names, each computed when it is loaded.

    The inverse of loading a Hugging Face folder into the trainer. Each expert has tensors of its
    own, as on Hugging Face's hub, but gpt-oss' are stacked and fused. An output projection tied to
    the embeddings is left out.

    Args:
        model: Config of the model.
        weights: Host arrays by the trainer's names.
        rules: Map them onto the engine's parameters, as for `Engine.update_weights`.

    Raises:
        WeightSyncError: names every parameter that is missing, unused or of the wrong shape.
    """
    specs = get_model(model.architecture).param_specs(model)
    tensors: dict[str, HfTensor] = {}
    mapped = mapped_tensors(weights, rules, _logical_targets(specs))
    if model.moe is not None and model.moe.has_bias:
        tensors |= _fused_experts(mapped)
        mapped = {name: tensor for name, tensor in mapped.items() if ".experts." not in name}
    if model.attention.latent is not None:
        tensors |= _joined_heads(mapped)
        mapped = {name: x for name, x in mapped.items() if specs[name].kind is not ParamKind.HEADS}
    for name, tensor in mapped.items():
        if specs[name].kind.is_projection:
            tensor = _by_output(tensor)
        if specs[name].kind is ParamKind.EXPERTS:
            for expert in range(tensor.shape[0]):
                tensors[stored_name(model, expert_name(name, expert))] = _expert(tensor, expert)
        elif specs[name].kind is ParamKind.RECURRENT and len(tensor.shape) > 1:
            tensors[name] = _depthwise(tensor)
        else:
            tensors[stored_name(model, name)] = tensor
    return tensors


def to_peft_tensors(
    model: ModelConfig,
    pairs: Mapping[str, np.ndarray],
    rules: Sequence[WeightRule],
    max_rank: int,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A trainer's LoRA pairs as PEFT writes them, and the contents of its adapter_config.json.

    A [rank, in] and scale B [out, rank] in float32; the config's own scale is 1.

    Args:
        model: Config of the model.
        pairs: Host arrays by the trainer's names.
        rules: Map them onto the engine's projections, as for `Engine.load_adapter`.
        max_rank: The largest rank that a pair may have.

    Raises:
        WeightSyncError: names each pair that is incomplete or does not fit.
    """
    targets = _logical_targets(get_model(model.architecture).param_specs(model))
    with_slots = {
        name.removesuffix(".weight"): (name, spec)
        for name, spec in targets.items()
        if name.endswith(".weight")
    }
    slots = AdapterSlots(1, max_rank, tuple((name, s, s) for name, (_, s) in with_slots.items()))
    plan, named = plan_adapter(pairs, rules, slots, targets)
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    for step in plan.steps:
        a, b = map(np.asarray, pair_factors(named[step.a], named[step.b], step))
        ranks[step.name] = a.shape[1]
        for letter, array in (("A", a), ("B", b)):
            name = f"base_model.model.{step.name}.lora_{letter}.weight"
            tensors[name] = np.ascontiguousarray(array.T)
    config = {
        "peft_type": "LORA",
        "r": max_rank,
        "lora_alpha": max_rank,
        "target_modules": sorted(ranks),
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != max_rank},
        "alpha_pattern": {name: rank for name, rank in ranks.items() if rank != max_rank},
    }
    return tensors, config


def _logical_targets(specs: Mapping[str, ParamSpec]) -> dict[str, TargetSpec]:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    dtype = jnp.dtype("float32")
    return {
        name: TargetSpec(spec.shape, dtype, Form.LOGICAL, sharding, spec.alias)
        for name, spec in specs.items()
    }


def _by_output(tensor: HfTensor) -> HfTensor:
    """A projection [..., in, out] as [..., out, in]."""
    *stacked, num_inputs, num_outputs = tensor.shape
    shape = (*stacked, num_outputs, num_inputs)
    return HfTensor(shape, tensor.dtype, lambda: tensor.load().swapaxes(-1, -2))


def _depthwise(tensor: HfTensor) -> HfTensor:
    """A convolution's weight with the axis of its only input."""
    channels, width = tensor.shape
    return HfTensor((channels, 1, width), tensor.dtype, lambda: tensor.load()[:, None])


def _fused_experts(tensors: Mapping[str, HfTensor]) -> dict[str, HfTensor]:
    """gpt-oss' experts and their biases, whose gates alternate with the other projection."""
    found = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            continue
        prefix, projection, kind = name.rsplit(".", 2)
        fused = "down_proj" if projection == "down_proj" else "gate_up_proj"
        fused = f"{prefix}.{fused}{'' if kind == 'weight' else '_bias'}"
        if projection == "gate_proj":
            found[fused] = _alternating(tensor, tensors[f"{prefix}.up_proj.{kind}"])
        elif projection == "down_proj":
            found[fused] = tensor
    return found


def _joined_heads(tensors: Mapping[str, HfTensor]) -> dict[str, HfTensor]:
    """The projections of latents, which lie head by head in files: keys, then values."""
    found = {}
    for name, keys in tensors.items():
        prefix, marker, _ = name.partition(f".{K_UP}.")
        if marker:
            values = _by_output(tensors[f"{prefix}.{V_UP}.weight"])
            found[f"{prefix}.{KV_UP}.weight"] = _joined(keys, values)
    return found


def _joined(keys: HfTensor, values: HfTensor) -> HfTensor:
    num_heads, nope_dim, rank = keys.shape
    shape = (num_heads * (nope_dim + values.shape[1]), rank)
    return HfTensor(
        shape,
        keys.dtype,
        lambda: np.concatenate([keys.load(), values.load()], axis=1).reshape(shape),
    )


def _alternating(even: HfTensor, odd: HfTensor) -> HfTensor:
    shape = (*even.shape[:-1], 2 * even.shape[-1])
    return HfTensor(
        shape, even.dtype, lambda: np.stack([even.load(), odd.load()], axis=-1).reshape(shape)
    )


def _expert(stack: HfTensor, expert: int) -> HfTensor:
    # A trainer's weights are on the host, where the stack is a view of them.
    return HfTensor(stack.shape[1:], stack.dtype, lambda: stack.load()[expert])
