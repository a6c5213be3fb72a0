"""MXFP4 weights against the format's definition, number by number."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import WeightLoadError, logical_rules, to_hf_tensors
from sgljax_engine.models.registry import get_model
from sgljax_engine.models.weight_rules import hf_source
from sgljax_engine.weights.forms import Form
from sgljax_engine.weights.hf_files import mapped_tensors
from sgljax_engine.weights.mxfp4 import dequantize, join_blocks
from sgljax_engine.weights.specs import TargetSpec
from tests.engine.models import GPT_OSS, logical_weights

MODEL = dataclasses.replace(
    GPT_OSS,
    num_layers=1,
    hidden_size=64,
    attention=dataclasses.replace(GPT_OSS.attention, sliding_layers=(True,)),
    moe=dataclasses.replace(GPT_OSS.moe, num_experts=3, intermediate_size=32),  # type: ignore[type-var]
)
LAYER = "model.layers.0.mlp.experts."


def number(code: int, scale: int) -> float:
    """A number of 4 bits (sign, exponent, mantissa) times a power of two."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return (-size if code & 8 else size) * 2.0 ** (scale - 127)


def quantized(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks and scales of a weight [experts, out, in]."""
    rng = np.random.default_rng(0)
    *rows, size = shape
    blocks = rng.integers(0, 256, (*rows, size // 32, 16), np.uint8)
    return blocks, rng.integers(110, 140, (*rows, size // 32), np.uint8)


def plain(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The weight [experts, in, out]."""
    made = [
        [number(code, int(scale)) for byte in block for code in (byte & 15, byte >> 4)]
        for block, scale in zip(blocks.reshape(-1, 16).tolist(), scales.flat, strict=True)
    ]
    return np.reshape(made, (*scales.shape[:2], -1)).swapaxes(1, 2)


def test_every_number():
    blocks, scales = quantized(2, 6, 64)
    blocks[0, 0, 0] = np.arange(16) * 17  # each code, in both halves of a byte
    arrays = {"w_blocks": blocks, "w_scales": scales}
    join_blocks(arrays)
    assert list(arrays) == ["w_blocks"]
    found = jax.jit(dequantize)(arrays["w_blocks"])
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found, np.float32), plain(blocks, scales))


def test_both_forms_of_a_checkpoint_are_one_model():
    """Plain tensors in float32, and blocks of the same numbers."""
    moe, hidden = MODEL.moe, MODEL.hidden_size
    assert moe is not None
    both = quantized(moe.num_experts, 2 * moe.intermediate_size, hidden)
    down = quantized(moe.num_experts, hidden, moe.intermediate_size)
    rest = {n: w for n, w in logical_weights(MODEL).items() if ".experts." not in n}
    rest = {n: w.T if n.endswith(("_proj.weight", "router.weight")) else w for n, w in rest.items()}
    rest[f"{LAYER}gate_up_proj_bias"] = np.zeros(both[0].shape[:2], np.float32)
    rest[f"{LAYER}down_proj_bias"] = np.zeros(down[0].shape[:2], np.float32)
    found = []
    for name, form in (("blocks", 0), ("plain", 1)):
        weights = dict(rest)
        for projection, parts in (("gate_up_proj", both), ("down_proj", down)):
            if form:
                weights[f"{LAYER}{projection}"] = plain(*parts).astype(np.float32)
            else:
                for which, part in zip(("blocks", "scales"), parts, strict=True):
                    weights[f"{LAYER}{projection}_{which}"] = part
        source = hf_source(MODEL, weights, None)
        assert len(weights) == len(rest) + (2 if form else 4), name  # the caller's stay
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        targets = {
            name: TargetSpec(spec.shape, jnp.dtype("float32"), Form.LOGICAL, here, spec.alias)
            for name, spec in get_model(MODEL.architecture).param_specs(MODEL).items()
        }
        tensors = mapped_tensors(source.arrays, source.rules, targets)
        found.append({n: np.asarray(tensor.load(), np.float32) for n, tensor in tensors.items()})
    gate = plain(*both)[:, :, 0::2]
    np.testing.assert_array_equal(found[0][f"{LAYER}gate_proj.weight"], gate)
    for name, weight in found[0].items():
        np.testing.assert_array_equal(weight, found[1][name], err_msg=name)
    exported = to_hf_tensors(MODEL, found[0], logical_rules(MODEL))
    assert exported.keys() == weights.keys()
    for name, tensor in exported.items():
        np.testing.assert_array_equal(tensor.load(), weights[name], err_msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop("w_scales"), "'w_blocks' has no scales beside it"),
        (lambda arrays: arrays.update(w_scales=np.zeros((2, 6, 3), np.uint8)), r"\[2, 6, 3\], got"),
    ],
)
def test_blocks_without_their_scales_are_named(change, message):
    blocks, scales = quantized(2, 6, 64)
    arrays = {"w_blocks": blocks, "w_scales": scales}
    change(arrays)
    with pytest.raises(WeightLoadError, match=message):
        join_blocks(arrays)
