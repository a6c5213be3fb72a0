"""MaxText's configs and weights, without MaxText: from what it wrote into golden/maxtext.json."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgljax_engine import (
    AttentionConfig,
    InvalidConfigError,
    KVShape,
    MoEConfig,
    Rule,
    ScaleConfig,
    UnsupportedModelError,
    WeightSyncError,
    YarnScaling,
)
from sgljax_engine.models.registry import get_model
from sgljax_engine.weights.forms import Form
from sgljax_engine.weights.plan import SyncPlan, plan_sync
from sgljax_engine.weights.specs import TargetSpec, source_spec
from sgljax_engine.weights.transform import to_logical
from tunix_sgljax import mappings, model_config
from tunix_sgljax.maxtext import SglJaxMaxTextRollout
from tunix_sgljax.maxtext.model_config import to_model_config
from tunix_sgljax.maxtext.rules import halves_of_pairs, round_to_bfloat16, to_rules

GOLDENS = json.loads((Path(__file__).parents[1] / "golden" / "maxtext.json").read_text())
CASES = pytest.mark.parametrize("name", GOLDENS)


class MaxTextConfig(SimpleNamespace):
    """A config of MaxText, as far as can be told without it."""


MaxTextConfig.__module__ = "maxtext.configs.types"


def config_of(name: str, **changes: Any) -> MaxTextConfig:
    return MaxTextConfig(**GOLDENS[name]["config"] | changes)


def parameters(name: str) -> dict[str, np.ndarray]:
    """Distinct numbers in the shapes of MaxText's parameters."""
    rng = np.random.default_rng(0)
    shapes = GOLDENS[name]["parameters"]
    return {key: rng.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}


def targets(model) -> dict[str, TargetSpec]:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        name: TargetSpec(spec.shape, jnp.dtype("float32"), Form.LOGICAL, sharding, spec.alias)
        for name, spec in get_model(model.architecture).param_specs(model).items()
    }


def plan_of(name: str, source: dict[str, np.ndarray], **changes: Any) -> SyncPlan:
    config = config_of(name, **changes)
    model = to_model_config(config, context_length=64)
    return plan_sync(source_spec(source), to_rules(config), targets(model))


class Weights:
    """The engine's weights, each made when it is asked for: all take seconds to compile."""

    def __init__(self, plan: SyncPlan, source: dict[str, np.ndarray]) -> None:
        self._plan = plan
        self._steps = {
            step.target: (step, arrays)
            for step, arrays in zip(plan.steps, plan.arrays(source), strict=True)
        }
        self._made: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._made:
            step, arrays = self._steps[name]
            self._made[name] = np.asarray(to_logical(arrays, step, self._plan.targets[name]))
        return self._made[name]


@functools.cache
def synced(name: str) -> tuple[dict[str, np.ndarray], Weights]:
    """MaxText's parameters, and the engine's made of them. Not to be changed."""
    source = parameters(name)
    return source, Weights(plan_of(name, source), source)


@CASES
def test_every_parameter_has_its_place(name):
    """All of MaxText's are used and all of the engine's made, with the right shapes."""
    source = parameters(name)
    plan = plan_of(name, source)
    made, _ = jax.eval_shape(plan.program.at_target, plan.arrays(source))
    assert {key: x.shape for key, x in made.items()} == {
        key: target.shape for key, target in plan.targets.items()
    }
    extra = "lm_head.weight" in made and name.endswith("-tied")
    assert sum(x.size for x in made.values()) == sum(x.size for x in source.values()) + (
        made["lm_head.weight"].size if extra else 0
    )


def test_flat_layers_keep_their_numbers():
    name = "qwen3-0.6b-flat-head"
    source, made = synced(name)
    for layer in range(3):
        theirs, ours = f"base.decoder.layers_{layer}.", f"model.layers.{layer}."
        query = source[f"{theirs}self_attention.query.kernel"].reshape(64, 64)
        np.testing.assert_array_equal(made[f"{ours}self_attn.q_proj.weight"], query)
        wi = source[f"{theirs}mlp.wi_0.kernel"]
        np.testing.assert_array_equal(made[f"{ours}mlp.gate_proj.weight"], wi)
    head = source["base.decoder.logits_dense.kernel"]
    np.testing.assert_array_equal(made["lm_head.weight"], head.T)


def test_stacked_experts():
    name = "qwen3-30b-a3b-scanned-tied"
    source, made = synced(name)
    for layer in range(3):
        experts = source["base.decoder.layers.moe_block.wo"][:, layer]
        target = f"model.layers.{layer}.mlp.experts.down_proj.weight"
        np.testing.assert_array_equal(made[target], experts)


@pytest.mark.parametrize(
    ("name", "layer", "weight", "index"),
    [
        ("gemma2-2b-scanned-tied", 2, "layers.pre_ffw_norm_local.scale", np.s_[:, 1]),
        ("gemma2-2b-scanned-tied", 1, "layers.pre_ffw_norm_global.scale", np.s_[:, 0]),
        ("gemma3-4b-scanned-tied", 8, "layers.layers_2.pre_ffw_norm.scale", np.s_[:, 1]),
        ("gemma3-4b-scanned-tied", 13, "layers_remainder.layers_1.pre_ffw_norm.scale", np.s_[:]),
        (
            "gemma4-31b-scanned-tied",
            9,
            "scanned_blocks.local_layers.pre_ffw_norm.scale",
            np.s_[:, 1, 3],
        ),
        (
            "gemma4-31b-scanned-tied",
            11,
            "scanned_blocks.global_layer.pre_ffw_norm.scale",
            np.s_[:, 1],
        ),
        (
            "gemma4-31b-scanned-tied",
            13,
            "layers_remainder.local_layers.pre_ffw_norm.scale",
            np.s_[:, 1],
        ),
    ],
)
def test_layers_in_cycles(name, layer, weight, index):
    source, made = synced(name)
    found = made[f"model.layers.{layer}.pre_feedforward_layernorm.weight"]
    np.testing.assert_array_equal(found, source[f"base.decoder.{weight}"][index])


@pytest.mark.parametrize(
    ("name", "layer", "module", "index"),
    [
        ("qwen3-next-80b-a3b-flat-head", 1, "layers_1", ()),
        ("qwen3-next-80b-a3b-scanned-tied", 6, "layers.local_layers", (1, 2)),
        ("qwen3-next-80b-a3b-scanned-tied", 9, "layers_remainder.local_layers", (1,)),
        ("qwen3.5-35b-a3b-scanned-tied", 6, "layers.layer_2", (1,)),
    ],
)
def test_gated_delta_nets_in_cycles(name, layer, module, index):
    """Projections stay grouped by key heads; a convolution's channels come first."""
    source, made = synced(name)

    def their(weight: str) -> np.ndarray:
        x = source[f"base.decoder.{module}.{weight}"]
        return np.moveaxis(x, range(1, 1 + len(index)), range(len(index)))[index]

    ours = f"model.layers.{layer}."
    for own, weight in {
        "linear_attn.in_proj_qkvz.weight": "attention.in_proj_qkvz.kernel",
        "linear_attn.in_proj_ba.weight": "attention.in_proj_ba.kernel",
        "linear_attn.A_log": "attention.A_log",
        "linear_attn.norm.weight": "attention.norm.rms_norm.scale",
        "mlp.experts.down_proj.weight": "mlp.routed_experts.wo",
        "mlp.shared_expert.up_proj.weight": "mlp.shared_expert.wi_1.kernel",
    }.items():
        np.testing.assert_array_equal(made[ours + own], their(weight))
    convolution = their("attention.conv1d.kernel")  # [4, 1, C]
    np.testing.assert_array_equal(made[f"{ours}linear_attn.conv1d.weight"], convolution[:, 0].T)


@pytest.mark.parametrize(
    ("name", "layer", "ours", "theirs", "index"),
    [
        ("gpt-oss-20b-scanned-tied", 3, "self_attn.sinks", "1.GptOssAttention.sinks", 1),
        ("gpt-oss-20b-scanned-tied", 2, "mlp.router.bias", "0.GptOssMlp.gate.bias", 1),
        ("gpt-oss-20b-scanned-tied", 1, "mlp.experts.gate_proj.bias", "1.GptOssMlp.wi_0_bias", 0),
        ("gpt-oss-20b-scanned-tied", 1, "mlp.experts.up_proj.weight", "1.GptOssMlp.wi_1", 0),
        ("gpt-oss-20b-scanned-tied", 0, "self_attn.o_proj.bias", "0.GptOssAttention.out.bias", 0),
        ("olmo3-7b-scanned-tied", 6, "self_attn.k_norm.weight", "2.attention.key_norm.scale", 1),
        (
            "olmo3-7b-scanned-tied",
            3,
            "post_feedforward_layernorm.weight",
            "3.post_mlp_layer_norm.scale",
            0,
        ),
    ],
)
def test_cycles_of_gpt_oss_and_olmo3(name, layer, ours, theirs, index):
    source, made = synced(name)
    their = source[f"base.decoder.layers.layers_{theirs}"][:, index]
    np.testing.assert_array_equal(made[f"model.layers.{layer}.{ours}"], their)


def test_mixtrals_experts():
    source, made = synced("mixtral-8x7b-scanned-tied")
    for ours, theirs in {
        "gate.weight": "gate.kernel",
        "experts.gate_proj.weight": "wi_0",
        "experts.up_proj.weight": "wi_1",
    }.items():
        their = source[f"base.decoder.layers.MoeBlock_0.{theirs}"][:, 2]
        np.testing.assert_array_equal(made[f"model.layers.2.mlp.{ours}"], their)


@pytest.mark.parametrize("layer", [0, 2])
def test_latents(layer):
    """The dense layer and those with experts, which MaxText stacks apart."""
    name = "deepseek2-16b-scanned-tied"
    source, made = synced(name)
    stack, index = [("dense_layers", 0), ("moe_layers", 0), ("moe_layers", 1)][layer]
    up = source[f"base.decoder.{stack}.self_attention.wkv_b.kernel"][:, index]
    ours, nope_dim = f"model.layers.{layer}.self_attn", 12
    for head in range(4):
        keys, values = up[:, head, :nope_dim], up[:, head, nope_dim:]
        np.testing.assert_array_equal(made[f"{ours}.k_b_proj.weight"][head], keys.T)
        np.testing.assert_array_equal(made[f"{ours}.v_b_proj.weight"][head], values)


@pytest.mark.slow
def test_layers_may_be_stacked_first():
    name = "gemma4-31b-scanned-tied"
    source = parameters(name)
    moved = {
        key: np.moveaxis(x, (1, 2), (0, 1)) if "scanned_blocks.local" in key else x
        for key, x in source.items()
    }
    for key, x in source.items():
        if "global_layer" in key or "layers_remainder" in key:
            moved[key] = np.moveaxis(x, 1, 0)
    plan = plan_of(name, moved, param_scan_axis=0)
    wanted, found = synced(name)[1], Weights(plan, moved)
    for key in plan.targets:  # a layer of each kind: scanned, local and global, and one behind them
        if re.search(r"\.(4|5|13)\.", key):
            np.testing.assert_array_equal(found[key], wanted[key])


def test_a_tied_head_is_rounded_as_maxtext_does():
    name = "qwen3-0.6b-scanned-tied"
    source, made = synced(name)
    table = source["base.token_embedder.embedding"]
    np.testing.assert_array_equal(made["model.embed_tokens.weight"], table)
    rounded = table.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(made["lm_head.weight"], rounded)
    for field in ("dtype", "weight_dtype"):
        assert "lm_head.weight" not in plan_of(name, source, **{field: "bfloat16"}).targets


def test_rounding_survives_compilation():
    x = jnp.linspace(0.1, 3.0, 97)
    wanted = x.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(jax.jit(round_to_bfloat16)(x), wanted)


def test_llamas_pairs_become_halves():
    pairs = jnp.arange(8.0)[None]
    assert halves_of_pairs(pairs).tolist() == [[0, 2, 4, 6, 1, 3, 5, 7]]
    name = "llama3.1-8b-flat-head"
    source, made = synced(name)
    kernels = source["base.decoder.layers_0.self_attention.key.kernel"]
    halves = np.concatenate([kernels[..., ::2], kernels[..., 1::2]], -1).reshape(64, 32)
    np.testing.assert_array_equal(made["model.layers.0.self_attn.k_proj.weight"], halves)
    values = source["base.decoder.layers_0.self_attention.value.kernel"].reshape(64, 32)
    np.testing.assert_array_equal(made["model.layers.0.self_attn.v_proj.weight"], values)


class TestModel:
    """What MaxText computes otherwise than a config says, or than Hugging Face."""

    def model(self, name: str, **changes: Any):
        return to_model_config(config_of(name, **changes), context_length=64)

    def test_llama(self):
        model = self.model("llama3.1-8b-flat-head")
        assert model.attention.scale == 1.0
        assert model.rope.llama3 is not None
        assert model.rope.llama3.factor == 8.0
        assert self.model("llama3.1-8b-flat-head", rope_use_scale=False).rope.llama3 is None
        name = "llama3.1-8b-flat-head"
        other = self.model(name, model_name="llama2-7b", local_rope_max_timescale=-1)
        assert other.rope.llama3 is None

    def test_experts_always_have_a_sum_of_one(self):
        name = "qwen3-30b-a3b-flat-head"
        moe = self.model(name, norm_topk_prob=False).moe
        assert moe is not None
        assert moe.norm_topk_prob
        gemma = self.model("gemma4-26b-flat-head", norm_topk_prob=False).moe
        assert gemma is not None
        assert not gemma.norm_topk_prob
        assert gemma.is_beside_mlp

    def test_hybrids(self):
        """MaxText has the same layer for both; a shared expert is as wide as the others."""
        for name in ("qwen3-next-80b-a3b-scanned-tied", "qwen3.5-35b-a3b-scanned-tied"):
            model = self.model(name)
            nets = model.linear_attention
            assert nets is not None
            assert nets.is_grouped
            cycle = (True, True, True, False)
            assert nets.layers == (cycle * 3)[: model.num_layers]
            assert (nets.num_key_heads, nets.num_value_heads) == (2, 6)
            assert (nets.key_dim, nets.value_dim, nets.conv_size) == (16, 8, 4)
            assert model.rope.rotary_dim == 8
            assert model.moe is not None
            assert (model.moe.shared_size, model.moe.norm_topk_prob) == (32, True)
        name = "qwen3.5-35b-a3b-flat-head"
        alone = self.model(name, shared_experts=0, norm_topk_prob=False).moe
        assert alone is not None
        assert (alone.shared_size, alone.norm_topk_prob) == (0, True)
        assert self.model(name, use_mrope=False, partial_rotary_factor=1.0).rope.rotary_dim is None

    def test_gemma_keeps_factors_in_its_weights(self):
        tied = self.model("gemma3-4b-scanned-tied")
        assert tied.scales == ScaleConfig(embedding=1.0, norm_offset=0.0, logits=0.125)
        assert self.model("gemma3-4b-flat-head").scales.logits == 1.0
        assert self.model("qwen3-0.6b-scanned-tied").scales == ScaleConfig()
        llama = self.model("llama3.1-8b-scanned-tied")
        assert llama.scales == ScaleConfig(logits=0.125)  # MaxText's default with tied embeddings

    def test_a_cap_of_logits_needs_a_tied_head(self):
        assert self.model("gemma2-2b-scanned-tied").final_logit_softcap == 30.0
        assert self.model("gemma2-2b-flat-head").final_logit_softcap is None

    def test_gemma_layers(self):
        attention = self.model("gemma3-4b-scanned-tied").attention
        assert attention.sliding_layers == (*[True] * 5, False) * 2 + (True, True)
        assert attention.scale == 16**-0.5
        assert attention.sliding_rope is not None
        assert (attention.sliding_rope.theta, attention.sliding_rope.linear_factor) == (1e4, 1.0)
        full = self.model("gemma3-4b-scanned-tied").rope
        assert (full.theta, full.linear_factor) == (1e6, 8.0)
        large = self.model(
            "gemma3-4b-flat-head",
            model_name="gemma3-27b",
            base_emb_dim=64,
            base_num_query_heads=2,
        )
        assert large.attention.scale == 32**-0.5
        gemma2 = self.model("gemma2-2b-scanned-tied")
        assert gemma2.num_layers == 4
        assert gemma2.attention.sliding_layers == (True, False, True, False)

    def test_gemma4(self):
        attention = self.model("gemma4-31b-scanned-tied").attention
        assert attention.full_kv == KVShape(1, 32)
        assert attention.full_values_are_keys
        assert self.model("gemma4-31b-scanned-tied").rope.rotary_fraction == 0.25
        small = self.model("gemma4-e2b-flat-head")
        assert small.attention.kv_layers == (0, 1, 2, 3, 4, 3, 3, 3, 3, 4)
        assert small.shared_kv_intermediate_size == 192
        assert small.per_layer_input_size == 8
        with pytest.raises(UnsupportedModelError, match="num_kv_shared_layers=8 leaves"):
            self.model("gemma4-e2b-flat-head", num_kv_shared_layers=8)

    def test_gpt_oss(self):
        model = self.model("gpt-oss-20b-scanned-tied")
        moe, attention = model.moe, model.attention
        assert moe is not None
        assert (moe.intermediate_size, moe.swiglu_limit, moe.has_bias) == (48, 7.0, True)
        assert model.attention_bias
        # Queries are scaled in MaxText's graph, not in its weights.
        assert (attention.scale, attention.sliding_window) == (None, 8)
        assert attention.sliding_layers == (True, False) * 2

    def test_mixtral(self):
        """Experts are as wide as `mlp_dim`; a window and biases of attention are not read."""
        name = "mixtral-8x7b-flat-head"
        model = self.model(name, sliding_window_size=8, attention_bias=True)
        assert model == self.model(name)
        assert model.attention == AttentionConfig(scale=1.0)
        assert model.moe == MoEConfig(
            num_experts=8, num_experts_per_token=2, intermediate_size=32, norm_topk_prob=True
        )

    def test_deepseek2(self):
        name = "deepseek2-16b-flat-head"
        model = self.model(name)
        moe, latent = model.moe, model.attention.latent
        assert moe is not None
        assert latent is not None
        assert (moe.num_dense_layers, moe.norm_topk_prob, moe.has_shared_gate) == (1, False, False)
        assert (moe.intermediate_size, moe.shared_size, model.intermediate_size) == (32, 64, 96)
        assert (latent.rank, latent.nope_dim, latent.rope_dim, latent.value_dim) == (24, 12, 8, 16)
        assert (model.num_kv_heads, model.head_dim) == (1, 32)
        longer = 20**-0.5 * (0.1 * 0.707 * math.log(4) + 1) ** 2
        assert model.attention.scale == pytest.approx(longer)
        assert model.rope.attention_factor == 1.0
        scaled = self.model(name, routed_scaling_factor=2.5, max_position_embeddings=16)
        assert scaled.moe is not None
        assert scaled.moe.router.scale == 2.5
        assert scaled.attention.scale == pytest.approx(20**-0.5)

    def test_olmo3(self):
        """YaRN is in all layers, unlike in transformers."""
        model = self.model("olmo3-7b-scanned-tied")
        attention = model.attention
        assert attention.sliding_layers == (True, True, True, False) * 2
        assert attention.scale is None
        assert attention.sliding_rope == model.rope
        assert not model.attention_bias
        assert self.model("olmo3-7b-flat-head", attention_bias=True).attention_bias

    def test_yarn(self):
        name = "gpt-oss-20b-flat-head"
        rope = self.model(name).rope
        assert rope.theta == 150_000.0
        yarn = YarnScaling(
            factor=4.0,
            beta_fast=32.0,
            beta_slow=1.0,
            original_context_length=16,
            truncate=False,
        )
        assert rope.yarn == yarn
        assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
        assert self.model(name, rope_attention_scaling=False).rope.attention_factor == 1.0
        assert self.model(name, rope_factor=1).rope.attention_factor == 1.0
        assert self.model("olmo3-7b-flat-head").rope.yarn == dataclasses.replace(
            yarn, truncate=True
        )
        # MaxText has a table of so many positions.
        assert self.model(name, max_position_embeddings=40).context_length == 40
        # Any of Llama's kin may have it.
        fields = {key: x for key, x in GOLDENS[name]["config"].items() if key in _YARN_FIELDS}
        assert self.model("qwen3-0.6b-flat-head", **fields).rope.yarn == yarn


_YARN_FIELDS = (
    "beta_fast",
    "beta_slow",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rope_attention_scaling",
    "rope_factor",
    "rope_interleave",
    "rope_truncate",
    "rope_type",
)

REFUSED = [
    ("qwen3-0.6b-flat-head", "decoder_block", "deepseek4"),
    ("deepseek2-16b-flat-head", "model_name", "deepseek3-671b"),
    ("deepseek2-16b-flat-head", "attention_type", "global"),
    ("deepseek2-16b-flat-head", "q_lora_rank", 16),
    ("deepseek2-16b-flat-head", "use_indexer", True),
    ("deepseek2-16b-flat-head", "rope_type", "default"),
    ("deepseek2-16b-flat-head", "rope_interleave", False),
    ("deepseek2-16b-flat-head", "routed_score_func", "sigmoid"),
    ("deepseek2-16b-flat-head", "first_num_dense_layers", 3),
    ("qwen3-0.6b-flat-head", "attention_sink", True),
    ("qwen3-0.6b-flat-head", "attention_type", "mla"),
    ("qwen3-0.6b-flat-head", "fused_qkv", True),
    ("qwen3-0.6b-flat-head", "fused_mlp", True),
    ("qwen3-0.6b-flat-head", "mlp_activations", ["gelu", "linear"]),
    ("qwen3-0.6b-flat-head", "quantization", "int8"),
    ("qwen3-0.6b-flat-head", "use_qwix_quantization", True),
    ("qwen3-0.6b-flat-head", "weight_dtype", "float8_e4m3fn"),
    ("qwen3-0.6b-flat-head", "use_multimodal", True),
    ("qwen3-0.6b-flat-head", "using_pipeline_parallelism", True),
    ("gemma3-4b-flat-head", "rope_type", "yarn"),
    ("qwen3-next-80b-a3b-flat-head", "rope_type", "yarn"),
    ("gpt-oss-20b-flat-head", "rope_interleave", True),
    ("gpt-oss-20b-flat-head", "attention_sink", False),
    ("gpt-oss-20b-flat-head", "mlp_bias", False),
    ("gpt-oss-20b-flat-head", "routed_bias", False),
    ("gpt-oss-20b-flat-head", "mlp_activations", ["silu", "linear"]),
    ("gpt-oss-20b-flat-head", "mlp_activations_limit", -1.0),
    ("gpt-oss-20b-flat-head", "inhomogeneous_layer_cycle_interval", 1),
    ("gpt-oss-20b-scanned-tied", "num_decoder_layers", 3),
    ("mixtral-8x7b-flat-head", "mlp_bias", True),
    ("mixtral-8x7b-flat-head", "capacity_factor", 1.25),
    ("olmo3-7b-flat-head", "use_qk_norm", False),
    ("olmo3-7b-flat-head", "model_name", "qwen3-0.6b"),
    ("olmo3-7b-scanned-tied", "num_decoder_layers", 6),
    ("qwen3-0.6b-flat-head", "rope_type", "llama3.1"),
    ("qwen3-0.6b-flat-head", "use_qk_norm", False),
    ("qwen3-0.6b-flat-head", "mtp_num_layers", 1),
    ("qwen2.5-1.5b-flat-head", "attention_bias", False),
    ("qwen3-30b-a3b-flat-head", "prefuse_moe_weights", True),
    ("qwen3-30b-a3b-flat-head", "routed_bias", True),
    ("qwen3-30b-a3b-flat-head", "routed_score_func", "sigmoid"),
    ("qwen3-30b-a3b-flat-head", "n_routing_groups", 4),
    ("qwen3-30b-a3b-flat-head", "capacity_factor", 1.25),
    ("qwen3-30b-a3b-flat-head", "inhomogeneous_layer_cycle_interval", 4),
    ("qwen3-0.6b-flat-head", "use_mrope", True),
    ("qwen3-next-80b-a3b-flat-head", "use_qk_norm", True),
    ("qwen3-next-80b-a3b-flat-head", "use_qk_norm_in_gdn", False),
    ("qwen3-next-80b-a3b-flat-head", "inhomogeneous_layer_cycle_interval", 1),
    ("qwen3-next-80b-a3b-flat-head", "inhomogeneous_layer_cycle_interval", 5),
    ("qwen3.5-35b-a3b-flat-head", "capacity_factor", 1.25),
    ("qwen3.5-35b-a3b-flat-head", "weight_dtype", "float8_e4m3fn"),
    ("qwen3.5-35b-a3b-flat-head", "use_multimodal", True),
    ("qwen3.5-35b-a3b-scanned-tied", "num_decoder_layers", 10),
    ("gemma3-4b-flat-head", "normalization_layer_epsilon", 1e-5),
    ("gemma3-4b-flat-head", "use_post_ffw_norm", False),
    ("gemma3-4b-flat-head", "model_name", "gemma3-1b"),
    ("gemma4-31b-flat-head", "v_norm_with_scale", True),
    ("gemma4-e2b-flat-head", "vocab_size_per_layer_input", 52),
]


class TestRefused:
    """What the engine cannot compute is named by MaxText's field."""

    @pytest.mark.parametrize(("name", "field", "value"), REFUSED)
    def test_field(self, name, field, value):
        with pytest.raises(
            UnsupportedModelError, match=f"^MaxText's {field}={re.escape(repr(value))}"
        ):
            to_model_config(config_of(name, **{field: value}), context_length=64)

    def test_a_config_of_another_release(self):
        config = config_of("qwen3-0.6b-flat-head")
        del config.fused_qkv
        with pytest.raises(UnsupportedModelError, match="has no field 'fused_qkv'"):
            to_model_config(config, context_length=64)

    def test_parameters_of_another_model(self):
        source = parameters("qwen3-0.6b-flat-head")
        del source["base.decoder.layers_1.mlp.wo.kernel"]
        source["base.decoder.layers_1.mlp.wo.bias"] = np.zeros(64, np.float32)
        with pytest.raises(WeightSyncError) as caught:
            plan_of("qwen3-0.6b-flat-head", source)
        assert "'base.decoder.layers_1.mlp.wo.bias' [64] is mapped by no rule" in str(caught.value)
        assert "'model.layers.1.mlp.down_proj.weight' [96, 64] is missing" in str(caught.value)

    def test_a_rollout_without_maxtexts_config(self):
        with pytest.raises(InvalidConfigError, match="must be a MaxTextConfig, got dict"):
            SglJaxMaxTextRollout(maxtext_config={}, rollout_actor=None, tokenizer=None)


class TestActor:
    """An adapter is an actor like Tunix's own models."""

    CONFIG = config_of("qwen3-0.6b-scanned-tied", dtype="bfloat16")

    def adapter(self, **methods: Any) -> Any:
        return SimpleNamespace(config=None, base=SimpleNamespace(config=self.CONFIG), **methods)

    def test_its_config_is_that_of_the_model_inside(self):
        assert model_config.config_of(self.adapter()) is self.CONFIG
        assert model_config.config_of(SimpleNamespace(config=3)) == 3
        assert model_config.config_of(object()) is None

    def test_its_model_and_dtype(self):
        model = model_config.to_model_config(self.CONFIG, context_length=64)
        assert model == to_model_config(self.CONFIG, context_length=64)
        assert model_config.compute_dtype(self.CONFIG) == "bfloat16"
        assert model_config.engine_dtype(self.CONFIG, "float32") == "bfloat16"

    def test_a_checkpoints_config_gives_end_tokens_alone(self):
        """The weights are mapped to what MaxText computes, whatever a config.json says."""
        model = to_model_config(self.CONFIG, context_length=64)
        given = dataclasses.replace(model, eos_token_ids=(7,), tie_word_embeddings=False)
        assert model_config.as_trained(given, self.CONFIG) == dataclasses.replace(
            model, eos_token_ids=(7,)
        )

    def test_dtypes_may_be_numpys(self):
        """As `pyconfig.initialize` gives them."""
        names = {"dtype": "bfloat16", "weight_dtype": "float32"}
        dtypes = {name: jnp.dtype(dtype) for name, dtype in names.items()}
        config = config_of("qwen3-0.6b-scanned-tied", **dtypes)
        wanted = config_of("qwen3-0.6b-scanned-tied", **names)
        assert to_model_config(config, 64) == to_model_config(wanted, 64)
        assert model_config.compute_dtype(config) == "bfloat16"

    def test_its_own_mapping_for_vllm_is_not_taken(self):
        def refused() -> Any:
            raise ValueError("gemma4-31b vLLM weight mapping not found.")

        adapter = self.adapter(to_hf_mappings=refused)
        assert mappings.find_mapping(None, adapter) is None
        mapper = mappings.WeightMapper(None, None, maxtext_config=self.CONFIG)  # type: ignore[arg-type]
        assert mapper.rules_for({}) == to_rules(self.CONFIG)

    def test_a_mapping_of_the_users_comes_first(self):
        given = {"to_hf_mappings": {"a": "b"}, "lora_to_hf_mappings": {}}
        mapping = mappings.find_mapping(given, self.adapter())
        assert mapping is not None
        mapper = mappings.WeightMapper(
            mapping, to_model_config(self.CONFIG, 64), maxtext_config=self.CONFIG
        )
        assert list(mapper.rules_for({"a": 0})) == [Rule("a", "b")]
