"""Which widths of token tiles an engine uses, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import (
    AttentionConfig,
    Engine,
    EngineConfig,
    InvalidConfigError,
    ModelConfig,
    logical_rules,
)
from sgljax_engine.config import RuntimeConfig
from sgljax_engine.layers.basic import SMALL_BATCH
from sgljax_engine.layers.kernels import CpuKernels
from sgljax_engine.layers.tiles import tokens_in_tiles
from sgljax_engine.models.registry import get_model
from sgljax_engine.models.spec import ModelContext, ModelDefinition
from sgljax_engine.placement.submeshes import place
from sgljax_engine.runner.compile import widths
from sgljax_engine.runner.compile.widths import CANDIDATES, agreeing_widths
from sgljax_engine.weights.apply import apply
from sgljax_engine.weights.plan import WeightPlanner
from sgljax_engine.xla_options import compiler_options
from tests import inside
from tests.engine.models import (
    MIXED_HEADS,
    SHARED_KEYS,
    TINY,
    logical_weights,
    spread_weights,
)

ODD = dataclasses.replace(
    TINY,
    architecture="Qwen2ForCausalLM",
    hidden_size=37,
    vocab_size=97,
    intermediate_size=71,
    num_layers=1,
)
FLAG: dict[str, Any] = {"enable_deterministic_sampling": True}


class Model(NamedTuple):
    """What `agreeing_widths` takes."""

    definition: ModelDefinition
    context: ModelContext
    weights: dict[str, jax.Array]
    is_own_cpu: bool


def make_model(config: ModelConfig = TINY, dtype: str = "float32") -> Model:
    definition = get_model(config.architecture)
    placement = place(config, None, dtype, runtime=RuntimeConfig(linear_backend="xla")).whole
    planner = WeightPlanner(placement.weight_targets(definition.param_specs(config)))
    weights = apply(*planner.plan(logical_weights(config), logical_rules(config)))
    return Model(definition, ModelContext(config, placement.layout), weights, placement.is_own_cpu)


def hidden_bits(model: Model, ids: np.ndarray, width: int) -> np.ndarray:
    """Hidden states of tokens that see themselves alone, in tiles of one width."""
    context = model.context._replace(tile_widths=(width,))

    def attend(q, new, cache, options):
        v = new[1]
        group = q.shape[1] // v.shape[1]
        return q + jnp.repeat(v, group, axis=1), cache

    def run(weights, ids):
        positions = ids * 3 % TINY.context_length
        tokens = tokens_in_tiles((width,), len(ids), jnp.int32(len(ids)))
        return model.definition.forward(
            weights, context, ids, positions, attend, None, tokens, None, None
        )[0]

    options = compiler_options(model.is_own_cpu)
    out = jax.jit(run, compiler_options=options)(model.weights, ids)
    return np.asarray(out, np.float32).view(np.uint32)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("config", "dtype"),
    [(TINY, "bfloat16"), (ODD, "float32")],
)
def test_those_that_agree_do(config, dtype):
    """In batches of any size too, down to one token and to a single tile."""
    model = make_model(config, dtype)
    found = agreeing_widths(*model)
    assert SMALL_BATCH in found
    assert set(found) <= set(CANDIDATES)
    assert list(found) == sorted(found)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, 300, dtype=np.int32)
    expected = hidden_bits(model, ids, SMALL_BATCH)
    for width in found:
        count = 1 if width < CANDIDATES[-1] else 200
        np.testing.assert_array_equal(hidden_bits(model, ids[:count], width), expected[:count])


def cut(config: ModelConfig) -> tuple[ModelConfig, list[int], dict[str, Any]]:
    """The model of one layer of each kind, which they are, and its weights."""
    few, layers = widths._one_of_each_layer(config)
    names: dict[str, Any] = {x: x for x in get_model(config.architecture).param_specs(config)}
    return few, layers, widths._weights_of_layers(names, layers)


@pytest.mark.parametrize(
    ("config", "layers", "kv_layers"),
    [
        (TINY, [0], ()),
        (MIXED_HEADS, [0, 1], ()),
        (SHARED_KEYS, [0, 1, 2, 3], (0, 1, 0, 1)),
        # Layers with full attention first, and several that share.
        (
            dataclasses.replace(
                SHARED_KEYS,
                num_layers=7,
                attention=dataclasses.replace(
                    SHARED_KEYS.attention,
                    sliding_layers=(False, False, True, True, True, False, True),
                    kv_layers=(0, 1, 2, 3, 3, 1, 3),
                ),
            ),
            [0, 2, 4, 5],
            (0, 1, 1, 0),
        ),
        # Windows alone make no kind of their own.
        (
            dataclasses.replace(
                TINY,
                attention=AttentionConfig(sliding_window=8, sliding_layers=(True, False)),
            ),
            [0],
            (),
        ),
    ],
    ids=["equal layers", "mixed heads", "shared keys", "full layers first", "windows"],
)
def test_a_layer_of_each_kind_is_tried(config, layers, kv_layers):
    few, found, weights = cut(config)
    assert found == layers
    assert few.attention.kv_layers == kv_layers
    # Weights are those of the layers' kinds, numbered anew.
    specs = get_model(config.architecture).param_specs(config)
    of_few = get_model(few.architecture).param_specs(few)
    assert set(weights) == set(of_few)
    for new, layer in enumerate(layers):
        mine, theirs = f"model.layers.{new}.", f"model.layers.{layer}."
        for name in of_few:
            if name.startswith(mine):
                assert weights[name] == name.replace(mine, theirs)
                assert of_few[name].shape == specs[weights[name]].shape
    shared = {name: weight for name, weight in weights.items() if ".layers." not in name}
    assert all(name == weight for name, weight in shared.items())
    assert set(shared) == {name for name in specs if ".layers." not in name}


@pytest.mark.soak
def test_one_that_disagrees_is_dropped(monkeypatch):
    real = widths._few_layers

    def one_layer(model, context, *args):
        logits = real(model, context, *args)
        return logits + 1e-3 if context.tile_widths == (128,) else logits

    model = make_model()
    found = agreeing_widths(*model)
    monkeypatch.setattr(widths, "_few_layers", one_layer)
    assert agreeing_widths(*model) == tuple(width for width in found if width != 128)


@pytest.mark.soak
def test_a_device_on_which_place_matters_is_refused(monkeypatch):
    real = widths._few_layers

    def one_layer(*args):
        logits = real(*args)
        return logits + 1e-3 * jnp.arange(len(logits), dtype=jnp.float32)[:, None]

    monkeypatch.setattr(widths, "_few_layers", one_layer)
    with pytest.raises(InvalidConfigError, match="depend on its place in the batch"):
        agreeing_widths(*make_model())
    with pytest.raises(InvalidConfigError, match="enable_deterministic_sampling cannot be kept"):
        Engine(model_config=TINY, weights=spread_weights(), linear_backend="xla", **FLAG)


class TestConfig:
    @pytest.mark.parametrize("backend", ["xla", "xla_tiles", "tpu"])
    def test_other_attention_is_refused(self, backend):
        message = (
            "'auto', 'native', 'pallas' or 'xla_rows' with enable_deterministic_sampling, "
            f"got '{backend}'"
        )
        with pytest.raises(InvalidConfigError, match=message):
            EngineConfig.from_options(FLAG | {"attention_backend": backend})

    @pytest.mark.parametrize("backend", ["auto", "native", "pallas", "xla_rows"])
    def test_others_may_be_asked_for(self, backend):
        config = EngineConfig.from_options(FLAG | {"attention_backend": backend})
        assert config.runtime.enable_deterministic_sampling

    @pytest.mark.parametrize("value", [1, "yes"])
    def test_is_a_bool(self, value: Any):
        with pytest.raises(InvalidConfigError, match="_sampling must be None, True"):
            EngineConfig.from_options({"enable_deterministic_sampling": value})

    def test_is_off_by_default(self):
        """Where it has a price: then nothing goes in tiles."""
        ways: tuple[dict[str, Any], ...] = ({"linear_backend": "xla"}, {}, FLAG)
        for options in ways:
            with Engine(model_config=TINY, weights=spread_weights(), **options) as engine:
                static = inside.runner(engine)._static
                assert static.is_deterministic == (options is FLAG)
                is_native = isinstance(static.context.kernels, CpuKernels)
                assert (static.context.tile_widths == ()) == (options is not FLAG or is_native)
