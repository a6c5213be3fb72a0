"""Reading config.json: every family, both generations of transformers, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from sgljax_engine import (
    AttentionConfig,
    InvalidConfigError,
    Llama3Scaling,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    RouterConfig,
    UnsupportedModelError,
    YarnScaling,
    model_config_from_hf,
)
from sgljax_engine.layers.rope import rope_timescales, stretch_llama3

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = {
    "qwen2": "qwen2_bias_untied",
    "qwen3": "qwen3_mqa_untied",
    "qwen3_moe": "qwen3_moe_normalised",
    "llama": "llama_tied",
    "mistral": "mistral_window",
    "mixtral": "mixtral_window",
    "olmo2": "olmo2_yarn",
    "olmo3": "olmo3_window",
    "smollm3": "smollm3_every_second",
    "gemma": "gemma_mqa",
    "gemma2": "gemma2_window",
    "gemma3": "gemma3_window",
    "gpt_oss": "gpt_oss_window",
    "deepseek_v2": "deepseek_v2_groups",
    "deepseek_v3": "deepseek_v3_groups",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config_of(family, **changes):
    """A golden model's config.json with some settings changed; None removes one."""
    config = json.loads((GOLDEN / FOLDERS[family] / "config.json").read_text()) | changes
    return {name: value for name, value in config.items() if value is not None}


def read(family, **changes):
    return model_config_from_hf(config_of(family, **changes))


def legacy(family, **settings):
    """Changes that write a config as transformers 4 did."""
    return {"rope_parameters": None, "layer_types": None, **settings}


# ------------------------------------------------------------------ rotary embeddings


def test_llama_2_names_no_base():
    """Its config.json is older than `rope_theta`; transformers takes 10000."""
    old = legacy("llama", rope_scaling=None)
    assert read("llama", **old).rope == RopeConfig(theta=10_000.0)


@pytest.mark.parametrize(
    "family",
    [
        *("qwen2", "qwen3", "llama", "mistral", "mixtral", "olmo2", "smollm3", "gemma", "gemma2"),
        *("deepseek_v2", "deepseek_v3"),
    ],
)
def test_default_rope_of_both_generations(family):
    new = read(family, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert new.rope == RopeConfig(theta=5e5)
    assert read(family, **legacy(family, rope_theta=5e5)) == new


@pytest.mark.parametrize("kind", ["rope_type", "type"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_scaled_rope_of_both_generations(family, kind):
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=8192
    )
    expected = RopeConfig(theta=5e5, llama3=scaling)
    settings = {kind: "llama3"} | {k: v for k, v in LLAMA3.items() if k != "rope_type"}
    assert read(family, rope_parameters=settings | {"rope_theta": 5e5}).rope == expected
    assert read(family, **legacy(family, rope_theta=5e5, rope_scaling=settings)).rope == expected

    linear = {kind: "linear", "factor": 2}
    expected = RopeConfig(theta=5e5, linear_factor=2.0)
    assert read(family, **legacy(family, rope_theta=5e5, rope_scaling=linear)).rope == expected


def test_yarn_extends_the_context():
    """As model cards add it, max_position_embeddings stays as it was."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    model = read("qwen3", **legacy("qwen3", rope_theta=5e5, rope_scaling=yarn))
    scaling = YarnScaling(factor=4.0, beta_fast=32, beta_slow=1, original_context_length=32)
    expected = RopeConfig(theta=5e5, yarn=scaling, attention_factor=0.1 * np.log(4) + 1)
    assert model.rope == expected
    assert model.context_length == max(128, read("qwen3").context_length)
    assert read("qwen3", max_position_embeddings=40, rope_scaling=yarn).context_length == 128
    with pytest.raises(InvalidConfigError, match=r"beta_fast must be at least beta_slow \(1.0\)"):
        read("qwen3", rope_scaling=yarn | {"beta_fast": 0.5})


def test_dynamic_rope_is_plain_within_the_context():
    """transformers stretches sequences longer than max_position_embeddings alone."""
    settings = legacy("llama", rope_theta=5e5, rope_scaling={"type": "dynamic", "factor": 2})
    assert read("llama", **settings).rope == RopeConfig(theta=5e5)


def test_longrope_is_read_within_its_original_context():
    channels = [1.0 + i for i in range(read("llama").head_dim // 2)]
    longrope = {"type": "longrope", "short_factor": channels, "long_factor": channels}
    settings = legacy("llama", rope_theta=5e5, rope_scaling=longrope, max_position_embeddings=64)
    assert read("llama", **settings).rope == RopeConfig(theta=5e5, channel_factors=tuple(channels))
    beyond = settings | {"max_position_embeddings": 128, "original_max_position_embeddings": 64}
    with pytest.raises(UnsupportedModelError, match="Set max_position_embeddings to 64"):
        read("llama", **beyond)
    with pytest.raises(InvalidConfigError, match=r"len\(channel_factors\) must be one for each"):
        read("llama", **settings | {"rope_scaling": longrope | {"short_factor": [1.0]}})


def test_gemma3_of_both_generations():
    new = read("gemma3")
    assert new.rope == RopeConfig(theta=1e5, linear_factor=4.0)
    assert new.attention.sliding_rope == RopeConfig(theta=1e4)
    assert new.attention.sliding_layers == (True, True, False)
    old = legacy(
        "gemma3",
        rope_theta=1e5,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        sliding_window_pattern=3,
    )
    assert read("gemma3", **old) == new


def test_stretched_timescales_follow_the_formula():
    """Against Meta's description, channel by channel, in float64."""
    theta, length, factor, low, high = 5e5, 8192, 8.0, 1.0, 4.0
    expected = []
    for channel in range(64):
        timescale = theta ** (channel / 64)
        wavelength = 2 * np.pi * timescale
        if wavelength > length / low:
            frequency = 1 / timescale / factor
        elif wavelength < length / high:
            frequency = 1 / timescale
        else:
            smooth = (length / wavelength - low) / (high - low)
            frequency = (1 - smooth) / timescale / factor + smooth / timescale
        expected.append(1 / frequency)
    got = stretch_llama3(
        rope_timescales(128, theta),
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_context_length=length,
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5)


# ------------------------------------------------------------------ attention


def test_gemma2_attention():
    model = read("gemma2")
    assert model.attention == AttentionConfig(
        scale=24**-0.5,
        logit_softcap=4.0,
        sliding_window=13,
        sliding_layers=(True, False, True),
    )
    assert model.final_logit_softcap == 16.0
    assert read("gemma2", layer_types=None) == model
    full = read("gemma2", layer_types=["full_attention"] * 3)
    assert full.attention.sliding_window is None


def test_smollm3_rotates_in_some_layers():
    """Entries of `no_rope_layers` are 1 where there is a rotary embedding."""

    def rotates(**changes):
        config = config_of("smollm3", num_hidden_layers=5, **{"layer_types": None, **changes})
        return model_config_from_hf(config).attention.rope_layers

    without = {"no_rope_layers": None, "no_rope_layer_interval": None}
    assert read("smollm3").attention == AttentionConfig(rope_layers=(True, False))
    assert rotates(**without) == (True, True, True, False, True)
    assert rotates(**{**without, "no_rope_layer_interval": 2}) == (True, False, True, False, True)
    assert rotates(no_rope_layers=[0, 1, 1, 0, 0, 1]) == (False, True, True, False, False)
    plain = legacy("smollm3", rope_scaling=None, rope_theta=None)
    assert read("smollm3", **plain).rope == RopeConfig(theta=2e6)
    for wrong in ([1, 0], [1, 0, 2, 1, 1], "10101"):
        with pytest.raises(InvalidConfigError, match=r"no_rope_layers .*num_hidden_layers \(5\)"):
            rotates(no_rope_layers=wrong)
    with pytest.raises(InvalidConfigError, match="no_rope_layer_interval must be an integer >= 1"):
        rotates(**{**without, "no_rope_layer_interval": 0})
    with pytest.raises(UnsupportedModelError, match="use_sliding_window=True"):
        rotates(**without, use_sliding_window=True)


def test_mistral_slides_in_all_layers_or_in_none():
    """Without `sliding_window` the window is the default of transformers, and null is none."""
    sliding = (True, True)
    assert read("mistral").attention == AttentionConfig(sliding_window=13, sliding_layers=sliding)
    absent = read("mistral", sliding_window=None).attention
    assert absent == AttentionConfig(sliding_window=4096, sliding_layers=sliding)
    null = config_of("mistral") | {"sliding_window": None}
    assert model_config_from_hf(null).attention == AttentionConfig()
    assert read("mistral", layer_types=["sliding_attention"] * 2) == read("mistral")
    with pytest.raises(UnsupportedModelError, match="layer_types 'full_attention'"):
        read("mistral", layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(UnsupportedModelError, match="layer_types 'sliding_attention'"):
        model_config_from_hf(null | {"layer_types": ["sliding_attention"] * 2})


def test_olmo3_stretches_layers_with_full_attention_alone():
    """Versions of transformers before 5.13 wrote one embedding, and had it in all layers."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    old = read("olmo3", **legacy("olmo3", rope_theta=5e5, rope_scaling=yarn))
    assert old.rope.yarn is not None
    assert old.attention.sliding_layers == (True, True, True, False)
    assert old.attention.sliding_rope == read("olmo3").rope == RopeConfig(theta=5e5)
    named = {"full_attention": yarn, "sliding_attention": {"rope_theta": 1e4}}
    new = read("olmo3", rope_parameters=named)
    assert new.rope == old.rope
    assert new.attention.sliding_rope == RopeConfig(theta=1e4)
    for changes, message in (
        ({"rope_theta": 1e4}, "rope_theta=10000.0 is not supported, only 500000.0"),
        ({"rope_parameters": yarn}, "transformers would ignore these settings"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            read("olmo3", **legacy("olmo3") | changes)


@pytest.mark.parametrize(
    ("family", "tied"),
    [("llama", False), ("qwen2", False), ("gemma2", True), ("smollm3", True)],
)
def test_embeddings_are_tied_as_the_family_does_by_default(family, tied):
    assert read(family, tie_word_embeddings=None).tie_word_embeddings is tied
    assert read(family, tie_word_embeddings=not tied).tie_word_embeddings is not tied


# ------------------------------------------------------------------ experts


def test_experts_of_both_generations():
    """Transformers 5 calls the number of experts `num_local_experts`."""
    new = read("qwen3_moe")
    assert new.moe == MoEConfig(
        num_experts=8, num_experts_per_token=2, intermediate_size=24, norm_topk_prob=True
    )
    assert new.intermediate_size == 24
    assert read("qwen3_moe", num_local_experts=None, num_experts=8) == new
    not_said = read("qwen3_moe", norm_topk_prob=None).moe
    assert not_said is not None
    assert not_said.norm_topk_prob is False


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"decoder_sparse_step": 2}, UnsupportedModelError, "decoder_sparse_step=2 .* only 1"),
        ({"mlp_only_layers": [0]}, UnsupportedModelError, r"mlp_only_layers=\[0\]"),
        ({"num_local_experts": None}, InvalidConfigError, "no 'num_experts'"),
        (
            {"num_experts_per_tok": 9},
            InvalidConfigError,
            r"num_experts_per_token must be at most num_experts \(8\), got 9",
        ),
    ],
)
def test_experts_that_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        read("qwen3_moe", **changes)


def test_settings_of_gpt_oss():
    """The class has YaRN by default, and one limit; tensors tell which of them are quantised."""
    model = read("gpt_oss")
    assert model.attention == AttentionConfig(sliding_window=13, sliding_layers=(True, False))
    assert model.attention_bias
    assert model.moe is not None
    assert model.moe.swiglu_limit == 7.0
    assert read("gpt_oss", layer_types=None, swiglu_limit=7.0) == model
    assert read("gpt_oss", quantization_config={"quant_method": "mxfp4"}) == model
    assert not read("gpt_oss", attention_bias=False).attention_bias
    published = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    rope = read("gpt_oss", rope_parameters=None).rope
    assert rope == read("gpt_oss", **legacy("gpt_oss", rope_scaling=published)).rope
    assert rope.theta == 150_000.0
    assert rope.yarn is not None
    with pytest.raises(UnsupportedModelError, match=r"swiglu_limit=6\.0 is not supported, only 7"):
        read("gpt_oss", swiglu_limit=6.0)
    with pytest.raises(InvalidConfigError, match="sliding_window must be"):
        model_config_from_hf(config_of("gpt_oss") | {"sliding_window": None})


def test_settings_of_deepseek():
    """Kimi's config.json is V3's with one group."""
    model = read("deepseek_v3")
    latent, moe = model.attention.latent, model.moe
    assert (model.num_kv_heads, model.head_dim) == (1, 32)
    assert latent is not None
    assert moe is not None
    assert (moe.num_dense_layers, moe.shared_size, moe.has_shared_gate) == (1, 40, False)
    assert model.attention.scale == pytest.approx(20**-0.5 * (0.07 * np.log(8) + 1) ** 2)
    plain = {"rope_type": "default", "rope_theta": 1e4}
    assert read("deepseek_v3", rope_parameters=plain).attention.scale == 20**-0.5
    defaults = read("deepseek_v3", n_group=None, topk_group=None, n_routed_experts=256).moe
    assert defaults is not None
    router = defaults.router
    assert (router.num_groups, router.num_chosen_groups) == (8, 4)
    kimi = read("deepseek_v3", n_group=1, topk_group=1, topk_method="noaux_tc").moe
    assert kimi is not None
    assert kimi.router.num_groups == 1
    assert read("deepseek_v3", first_k_dense_replace=2).moe is None
    assert read("deepseek_v3", num_nextn_predict_layers=1) == model
    given = read("deepseek_v2", topk_method="greedy").moe
    assert given is not None
    assert given.router == RouterConfig(scale=1.5)
    without = model_config_from_hf(config_of("deepseek_v3") | {"q_lora_rank": None})
    assert without.attention.latent == dataclasses.replace(latent, query_rank=None)


@pytest.mark.parametrize(
    ("family", "changes", "error", "message"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, UnsupportedModelError, "topk_method='noaux"),
        ("deepseek_v2", {"norm_topk_prob": True}, UnsupportedModelError, "norm_topk_prob=True"),
        ("deepseek_v3", {"topk_method": "greedy"}, UnsupportedModelError, "topk_method='greedy'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, UnsupportedModelError, "scoring_func="),
        ("deepseek_v3", {"moe_layer_freq": 2}, UnsupportedModelError, "moe_layer_freq=2"),
        ("deepseek_v3", {"num_key_value_heads": 2}, InvalidConfigError, "num_key_value_heads must"),
        ("deepseek_v3", {"n_group": 3}, InvalidConfigError, "num_groups must be a divisor"),
        ("deepseek_v3", {"n_group": 8}, InvalidConfigError, "num_group_scores must be at most"),
        ("deepseek_v3", {"topk_group": 1}, InvalidConfigError, "num_experts_per_token must be at"),
        ("deepseek_v3", {"topk_group": 5}, InvalidConfigError, "num_chosen_groups must be at most"),
        ("deepseek_v2", {"qk_rope_head_dim": 7}, InvalidConfigError, "rope_dim must be even"),
        ("deepseek_v3", {"head_dim": 20}, UnsupportedModelError, "head_dim=20 .* only 8"),
        ("deepseek_v3", {"kv_lora_rank": 0}, InvalidConfigError, "rank must be an integer"),
    ],
)
def test_settings_of_deepseek_that_are_refused(family, changes, error, message):
    with pytest.raises(error, match=message):
        read(family, **changes)


# ------------------------------------------------------------------ refusals

EVERYWHERE = (
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"quantization_config": {"bits": 4}}, "quantization_config=.*bits"),
    ({"hidden_activation": "gelu", "hidden_act": "gelu"}, "hidden_act.*='gelu'"),
    ({"rope_scaling": {"rope_type": "spiral", "factor": 2}}, "rope_type='spiral'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2, "short_factor": 3}}, "short_factor=3"),
    ({"layer_types": ["chunked_attention"] * 3}, "layer_types 'chunked_attention'"),
)


@pytest.mark.parametrize(("changes", "message"), EVERYWHERE)
@pytest.mark.parametrize("family", FOLDERS)
def test_what_is_not_implemented_is_refused_by_name(family, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(family, **changes)


@pytest.mark.parametrize("family", sorted(FOLDERS.keys() - {"qwen2", "qwen3", "qwen3_moe"}))
def test_windows_are_switched_on_for_qwen_alone(family):
    with pytest.raises(UnsupportedModelError, match="use_sliding_window=True"):
        read(family, use_sliding_window=True)


@pytest.mark.parametrize("name", ["attention_bias", "mlp_bias"])
@pytest.mark.parametrize("family", FOLDERS)
def test_biases_are_those_of_the_familys_class(family, name, caplog):
    """Where transformers' class has no such setting, it has no effect, and a warning says so."""
    without = {
        "attention_bias": ("mistral", "mixtral", "qwen2"),
        "mlp_bias": FOLDERS.keys() - {"llama", "smollm3", "deepseek_v2"},
    }
    has_effect = family not in without[name]
    assert getattr(read(family, **{name: True}), name) is has_effect
    assert ("has no effect" in caplog.text) is not has_effect
    assert not getattr(read(family, **{name: False}), name)
    with pytest.raises(InvalidConfigError, match=f"{name} must be true or false, got 'yes'"):
        read("llama", **{name: "yes"})


def test_sliding_layers_of_qwen():
    """They are named, or the last ones; without `use_sliding_window` there is no window."""
    on = {"use_sliding_window": True, "sliding_window": 9}
    last = read("qwen3", num_hidden_layers=3, layer_types=None, max_window_layers=2, **on)
    expected = AttentionConfig(sliding_window=9, sliding_layers=(False, False, True))
    assert last.attention == expected
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    named = read("qwen3", num_hidden_layers=3, layer_types=kinds, **on)
    assert named.attention == expected
    everywhere = read("qwen3_moe", layer_types=None, **on).attention
    assert everywhere.sliding_window == 9
    assert all(everywhere.sliding_layers)
    with pytest.raises(InvalidConfigError, match="needs use_sliding_window=true"):
        read("qwen3", num_hidden_layers=3, layer_types=kinds)


def test_the_slip_of_the_first_gemmas_is_corrected(caplog):
    """Their config.json says "gelu", and no more; they were trained with its tanh form."""
    assert read("gemma", hidden_act="gelu") == read("gemma")
    assert "hidden_act='gelu'" in caplog.text
    caplog.clear()
    explicit = read("gemma", hidden_act="gelu", hidden_activation="gelu_pytorch_tanh")
    assert explicit == read("gemma")
    assert not caplog.text


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "'factor'"),
        ("qwen2", {"hidden_size": None}, "no 'hidden_size'"),
        ("qwen2", {"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a positive number, got '1e-5'"),
        ("gemma2", {"layer_types": ["full_attention"]}, r"layer_types .* \(3\) types, got 1"),
        ("qwen2", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ("qwen2", {"eos_token_id": "1"}, "eos_token_id must be a token id, a list of at most"),
    ],
)
def test_missing_or_inconsistent_settings_are_named(family, changes, message):
    with pytest.raises(InvalidConfigError, match=message):
        read(family, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_logit_softcap": 0.0}, "final_logit_softcap must be a positive number, got 0.0"),
        ({"attention": {"sliding_layers": (True,)}}, "sliding_window must be an integer >= 1"),
        ({"attention": {"scale": -1.0}}, "scale must be a positive number"),
        (
            {"attention": {"sliding_layers": (True,), "sliding_window": 4}},
            r"len\(sliding_layers\) must be 0 or num_layers \(3\), got 1",
        ),
        ({"rope": {"theta": 0.0}}, "theta must be a positive number"),
    ],
)
def test_wrong_values_are_named(changes, message):
    model: ModelConfig = read("gemma2")
    build = {"attention": AttentionConfig, "rope": RopeConfig}

    def replace():
        made = {k: build[k](**v) if isinstance(v, dict) else v for k, v in changes.items()}
        return dataclasses.replace(model, **made)

    with pytest.raises(InvalidConfigError, match=message):
        replace()


def test_scaling_factors_must_be_in_order():
    with pytest.raises(
        InvalidConfigError, match=r"high_freq_factor must be above .*\(4.0\), got 1"
    ):
        Llama3Scaling(
            factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0, original_context_length=8
        )
