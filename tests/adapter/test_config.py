"""Every RolloutConfig field and every option is honoured, named or refused, never dropped.

test_foreign_config has what other engines' fields mean.
"""

from __future__ import annotations

import dataclasses
import fractions
import json
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import (
    InvalidConfigError,
    InvalidRequestError,
    UnsupportedModelError,
    WeightSyncError,
    model_config_from_hf,
)
from tests import inside
from tests import tunix_reference as ref
from tests.adapter.helpers import (
    MODEL,
    new_rollout,
    rollout_config,
    tokens_of,
)
from tests.geometry import CHUNKED
from tunix_sgljax import SglJaxRollout
from tunix_sgljax.rollout_config.engine_options import ask_options

FIELDS = {field.name: field for field in dataclasses.fields(RolloutConfig)}

HONOURED = {
    "data_type": (jnp.bfloat16, "runtime.dtype", "bfloat16"),
    "kv_cache_size": (2048, "max_model_len", 2048),
    "rollout_sglang_jax_context_length": (96, "max_model_len", 96),
    "rollout_sglang_jax_mem_fraction_static": (0.35, "cache.mem_fraction_static", 0.35),
    "rollout_sglang_jax_precompile_bs_paddings": ([1, 64], "runtime.batch_buckets", (1, 64)),
    "rollout_sglang_jax_precompile_token_paddings": (
        [64, 2048],
        "runtime.token_buckets",
        (64, 2048),
    ),
    "rollout_sglang_jax_chunked_prefill_size": (256, "scheduler.chunked_prefill_size", 256),
    "rollout_sglang_jax_page_size": (32, "cache.page_size", 32),
    "rollout_sglang_jax_max_running_requests": (5, "scheduler.max_running_requests", 5),
    "rollout_sglang_jax_kwargs": ({"decode_steps": 3}, "scheduler.decode_steps", 3),  # no engine
    "rollout_vllm_hbm_utilization": (0.35, "cache.mem_fraction_static", 0.35),
    "rollout_vllm_max_num_seqs": (5, "scheduler.max_running_requests", 5),
    "rollout_vllm_max_num_batched_tokens": (256, "scheduler.chunked_prefill_size", 256),
    "rollout_vllm_kwargs": ({"block_size": 32}, "cache.page_size", 32),
}
"""Fields that become engine options: a value, the option's place in EngineConfig, what is there."""

TESTED_ELSEWHERE = {
    "max_tokens_to_generate": "test_generate",
    "temperature": "test_families",
    "top_p": "test_generate",
    "top_k": "test_generate",
    "seed": "test_generate",
    "max_prompt_length": "test_generate",
    "eos_tokens": "test_generate",
    "return_logprobs": "test_generate",
    "rollout_mapping_config": "test_mappings",
    "tensor_parallel_size": "below",
    "data_parallel_size": "below",
    "expert_parallel_size": "below",
    "rollout_sglang_jax_model_version": "below",
    "rollout_sglang_jax_log_level": "below",
    "rollout_sglang_jax_enable_static_lora": "test_foreign_config",
    "rollout_sglang_jax_lora_target_modules": "test_foreign_config",
    "rollout_sglang_jax_max_lora_rank": "test_foreign_config",
    "rollout_sglang_jax_lora_scaling": "test_foreign_config",
    "rollout_vllm_lora_config": "test_foreign_config",
    "rollout_vllm_model_version": "test_foreign_config",
    "rollout_vllm_logprobs_mode": "test_foreign_config",
    "rollout_vllm_sampling_kwargs": "test_foreign_config",
    "rollout_sglang_jax_disable_radix_cache": "test_foreign_config",
    "rollout_sglang_jax_enable_deterministic_sampling": "test_exact",
}

NAMED = sorted(FIELDS.keys() - HONOURED.keys() - TESTED_ELSEWHERE.keys())
"""All others, those of a newer Tunix among them: named in a warning, or refused."""


def default_of(name):
    field = FIELDS[name]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def other_than(default):
    """Some value that is not the default, of its type where that can be seen."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return default + 7
    if isinstance(default, str):
        return default + "other"
    if isinstance(default, dict):
        return {"some": "thing"}
    assert default is None, f"teach this test about defaults like {default!r}"
    return "something"


def option(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.fixture
def refuse(model):
    """Checks that a rollout with these arguments is refused, with a message that matches."""

    def check(match, error=InvalidConfigError, actor=None, **arguments):
        if "config" in arguments:
            arguments["rollout_config"] = rollout_config(**arguments.pop("config"))
        with pytest.raises(error, match=match):
            new_rollout(model if actor is None else actor, **arguments)

    return check


# ------------------------------------------------------------------ fields of RolloutConfig


def test_the_lists_above_name_fields():
    assert not HONOURED.keys() & TESTED_ELSEWHERE.keys()
    assert HONOURED.keys() | TESTED_ELSEWHERE.keys() <= FIELDS.keys()


@pytest.mark.parametrize("name", HONOURED)
def test_honoured_field(make_rollout, name):
    value, path, expected = HONOURED[name]
    config = RolloutConfig(**{name: value})
    rollout = make_rollout(rollout_config=config)
    # Explicit options win, so they must not be in this field's way.
    rollout._builder.explicit_options.clear()
    rollout.bind(config)
    assert option(rollout._builder.engine_config, path) == expected
    rollout.bind(RolloutConfig())
    assert option(rollout._builder.engine_config, path) != expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rollout_sglang_jax_precompile_token_paddings", [64, 16]),
        (
            "rollout_sglang_jax_kwargs",
            {"batch_buckets": [4, 8], "max_running_requests": 8},  # no engine
        ),
        (
            "rollout_sglang_jax_kwargs",
            {"speculation": "auto", "speculative_drafters": ["history", "ngram"]},
        ),
    ],
)
def test_a_config_fits_the_engine_that_it_made(model, field, value):
    config = rollout_config(**{field: value})
    rollout = SglJaxRollout(
        rollout_actor=model, tokenizer=ref.IntegerTokenizer(), rollout_config=config
    )
    rollout._check_same_engine(config)
    with pytest.raises(InvalidConfigError, match="cannot change after construction"):
        rollout._check_same_engine(rollout_config(rollout_sglang_jax_context_length=77))


@pytest.fixture(scope="module")
def strict(model):
    """A rollout that refuses fields without a meaning."""
    rollout = new_rollout(model, strict_config=True)
    yield rollout
    rollout.close()


@pytest.mark.parametrize("name", NAMED)
def test_field_without_meaning(refuse, make_rollout, strict, caplog, name):
    value = other_than(default_of(name))
    match = re.escape(f"RolloutConfig.{name}={value!r} has no meaning")
    config = rollout_config(**{name: value})
    refuse(match, rollout_config=config, strict_config=True)
    with pytest.raises(InvalidConfigError, match=match):
        strict.generate(["1"], config)
    with caplog.at_level(logging.WARNING, logger="tunix_sgljax"):
        make_rollout(rollout_config=config)
    (record,) = caplog.records
    assert f"{name}={value!r} (" in record.getMessage()


def test_there_are_fields_without_meaning():
    assert sum(name.startswith("rollout_vllm_") for name in NAMED) >= 9
    assert sum(name.startswith("rollout_sglang_jax_") for name in NAMED) >= 4


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_field_at_its_default_is_fine(make_rollout, name):
    """Also when the default was written out."""
    make_rollout(rollout_config=rollout_config(**{name: default_of(name)}), strict_config=True)


def test_fields_reach_the_engine(make_rollout):
    explicit = dict(CHUNKED)
    in_kwargs = {name: explicit.pop(name) for name in ["num_kv_tokens"]}
    config = rollout_config(
        kv_cache_size=1024,
        rollout_sglang_jax_context_length=48,
        rollout_sglang_jax_page_size=8,
        rollout_sglang_jax_max_running_requests=2,
        rollout_sglang_jax_kwargs=in_kwargs,
    )
    rollout = make_rollout(rollout_config=config, **explicit)
    # Explicit options win.
    assert rollout._builder.engine_config.scheduler.max_running_requests == 8
    assert rollout._builder.engine_config.cache.page_size == 4
    state = rollout.engine.get_internal_state()
    assert state.total_kv_tokens == CHUNKED["num_kv_tokens"]
    assert rollout.engine.max_model_len == 48
    with pytest.raises(InvalidRequestError, match="max_model_len = 48"):
        rollout.generate(["1 " * 40], config)


def test_data_type_is_that_of_the_engine(make_rollout):
    """None is the actor's. Weights of norms are float32 in any case."""
    for data_type, expected in ((None, "float32"), (jnp.float32, "float32"), ("bfloat16",) * 2):
        runner = inside.runner(make_rollout(config={"data_type": data_type}).engine)
        norms = {name for name in runner.weights if "norm" in name}
        others = [weight for name, weight in runner.weights.items() if name not in norms]
        assert {array.dtype.name for array in jax.tree.leaves((others, runner.kv_memory.kv))} == {
            expected
        }
        assert {runner.weights[name].dtype.name for name in norms} == {"float32"}


def test_max_prompt_and_output_bound_the_context(make_rollout):
    """Without a context length, a sequence of the configured lengths always fits."""
    config = {"kv_cache_size": 8, "max_prompt_length": 40, "max_tokens_to_generate": 24}
    assert make_rollout(config=config)._builder.engine_config.max_model_len == 64


def test_log_level(make_rollout):
    loggers = [logging.getLogger(name) for name in ("sgljax_cpu", "sgljax_engine", "tunix_sgljax")]
    before = [logger.level for logger in loggers]
    try:
        make_rollout(config={"rollout_sglang_jax_log_level": "info"})
        make_rollout(config={"rollout_sglang_jax_log_level": None})
        assert [logger.level for logger in loggers] == before
        make_rollout(config={"rollout_sglang_jax_log_level": "error"})
        assert [logger.level for logger in loggers] == [logging.ERROR] * 3
        with pytest.raises(InvalidConfigError, match=r"log_level.*'loud'"):
            make_rollout(config={"rollout_sglang_jax_log_level": "loud"})
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


# ------------------------------------------------------------------ options


def test_unknown_engine_option_is_refused_with_the_nearest(refuse):
    refuse("'pagesize'.*'page_size'", pagesize=4)
    kwargs = {"max_running_request": 4}
    match = "'max_running_request'.*'max_running_requests'"
    refuse(match, rollout_config=rollout_config(rollout_sglang_jax_kwargs=kwargs))


# ------------------------------------------------------------------ mesh


def mesh_of_one(*axes):
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(axes)), axes)


@pytest.mark.parametrize("axes", [(), ("fsdp", "tp"), ("data",)], ids=str)
@pytest.mark.parametrize("size", [-1, 1])
def test_mesh(make_rollout, axes, size):
    mesh = mesh_of_one(*axes) if axes else None
    assert make_rollout(mesh=mesh, config={"tensor_parallel_size": size}).mesh is mesh


def test_an_empty_mesh_is_none(make_rollout, rollout):
    """Tunix hands one over where it runs without a mesh."""
    empty = jax.sharding.Mesh(np.empty((), object), ())
    made = make_rollout(mesh=empty)
    assert made.mesh is None
    assert tokens_of(made, [[1, 2, 3]]) == tokens_of(rollout, [[1, 2, 3]])


@pytest.mark.parametrize(
    ("field", "option"),
    [("tensor_parallel_size", "tp_size"), ("data_parallel_size", "data_parallel_size")],
)
def test_parallel_sizes_share_out_the_devices(refuse, rollout, field, option):
    one = mesh_of_one("fsdp", "tp")
    refuse(f"{option} .*got 0.*RolloutConfig.{field}", rollout_config=rollout_config(**{field: 0}))
    two = rollout_config(**{field: 2})
    refuse(f"{option} 2 .*needs 2 devices; this process has 1", mesh=None, rollout_config=two)
    refuse(f"{option} 2 must share out the 1 devices", mesh=one, rollout_config=two)
    with pytest.raises(InvalidConfigError, match=f"{field} asks for {option}=2"):
        rollout.generate(["1"], two)


def test_a_mesh_whose_shape_is_written_down_twice(refuse, make_rollout):
    """As recipes do."""
    devices = np.array(jax.devices()[:1] * 4).reshape(2, 2, 1)  # nothing is placed on them here
    mesh = jax.sharding.Mesh(devices, ("data", "fsdp", "tp"))
    for size in (1, 2, 4):
        config = rollout_config(data_parallel_size=size)
        made = make_rollout(mesh=mesh, rollout_config=config, strict_config=True)
        assert made._builder.engine_config.parallel.data_parallel_size == size
    refuse("data_parallel_size 3 must share", mesh=mesh, config={"data_parallel_size": 3})


def test_expert_parallel_size_divides_the_experts(refuse, make_rollout):
    field = "expert_parallel_size"
    refuse(f"{field} .*got 0.*RolloutConfig.{field}", config={field: 0})
    devices = np.array(jax.devices()[:1] * 8).reshape(4, 2)  # nothing is placed on them here
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tp"))
    refuse(f"{field} must be 1 for a model without experts.*got 2", mesh=mesh, config={field: 2})
    for size, tp_size in ((-1, 2), (1, 2), (4, 8)):  # devices as Tunix counts them
        config = rollout_config(tensor_parallel_size=2, expert_parallel_size=size)
        asked = ask_options(config).values
        assert (asked["tp_size"], asked.get(field, 1)) == (tp_size, max(size, 1))
    make_rollout(config={field: -1}, strict_config=True)


# ------------------------------------------------------------------ tokenizer


# ------------------------------------------------------------------ model


class UnknownModel(nnx.Module):
    """A model whose config is none of Tunix's."""

    def __init__(self):
        self.config = fractions.Fraction(1)


def test_other_models_are_refused(refuse):
    refuse("Fraction.*supported.*gemma3", UnsupportedModelError, UnknownModel())
    refuse("NoneType.*supported", UnsupportedModelError, nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    mamba = {"architectures": ["MambaForCausalLM"]}
    refuse("MambaForCausalLM", UnsupportedModelError, model_config=mamba)


def hf_config(**changes):
    """The contents of a config.json that describes `MODEL`."""
    shape = ref.CONFIGS[MODEL]
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": shape["vocab_size"],
        "hidden_size": shape["embed_dim"],
        "intermediate_size": shape["hidden_dim"],
        "num_hidden_layers": shape["num_layers"],
        "num_attention_heads": shape["num_heads"],
        "num_key_value_heads": shape["num_kv_heads"],
        "head_dim": shape["head_dim"],
        "rms_norm_eps": shape["norm_eps"],
        "rope_theta": shape["rope_theta"],
        "tie_word_embeddings": shape["use_tied_embedding"],
        "max_position_embeddings": 512,
    }
    return fields | changes


def test_a_model_can_be_described_in_other_words(make_rollout, rollout, model, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    words = [
        {"model_config": hf_config()},
        {"model_config": model_config_from_hf(hf_config())},
        {"model_config": model.config},
        {"config": {"rollout_sglang_jax_model_version": str(tmp_path)}},
    ]
    expected = tokens_of(rollout, [[1, 2, 3]])
    for arguments in words:
        assert tokens_of(make_rollout(**arguments), [[1, 2, 3]]) == expected


def test_a_wrong_description_is_refused_when_weights_come(make_rollout):
    rollout = make_rollout(model_config=hf_config(intermediate_size=100))
    with pytest.raises(WeightSyncError, match=r"gate_proj.*\[64, 96\].*\[64, 100\]"):
        tokens_of(rollout, [[1]])


def test_the_trained_models_rope_theta_is_the_one_that_its_code_uses(make_rollout, model):
    """Tunix 0.1.7 ignores its own config's rope_theta; sampling must not obey it either."""
    config = dataclasses.replace(model.config, rope_theta=10_000)
    rollout = make_rollout(model_config=config)
    assert rollout._builder.model_config.rope.theta == ref.ROPE_THETA
