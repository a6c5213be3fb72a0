"""RolloutConfigs that were written for Tunix's other engines: what of them means something here."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from sgljax_engine import InvalidConfigError, InvalidRequestError
from tests import tunix_reference as ref
from tests.adapter.helpers import (
    VOCAB_SIZE,
    EndingTokenizer,
    new_rollout,
    rollout_config,
    text_of,
    tokens_of,
)
from tests.geometry import SMALL
from tunix_sgljax import SglJaxRollout
from tunix_sgljax.rollout_config.engine_options import ask_options
from tunix_sgljax.rollout_config.fields import max_lora_rank

GOLDEN = Path(__file__).parents[1] / "golden/qwen3_gqa_tied"
PROMPTS = ref.make_prompts(VOCAB_SIZE, (3, 1, 9), seed=1)

VLLM: dict[str, Any] = {
    "rollout_vllm_model_version": "Qwen/Qwen3-1.7B",
    "rollout_vllm_hbm_utilization": 0.4,
    "rollout_vllm_tpu_backend_type": "jax",
    "rollout_vllm_server_mode": True,
    "rollout_vllm_async_scheduling": True,
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "rollout_vllm_max_num_seqs": 8,
    "rollout_vllm_max_num_batched_tokens": 256,
    "rollout_vllm_reshard_chunk_size": 4,
    "rollout_vllm_kwargs": {
        "kv_cache_metrics": True,
        "disable_log_stats": False,
        "enable_prefix_caching": False,
        "dtype": "float32",
        "hf_overrides": {"architectures": ["Qwen3ForCausalLM"]},
    },
    "rollout_vllm_sampling_kwargs": {"stop": ["</answer>"], "detokenize": True, "min_tokens": 2},
}
"""As Tunix's own recipes for vLLM have them: deepscaler, deepswe, frozenlake, math_gsm8k."""

SGLANG_JAX: dict[str, Any] = {
    "rollout_sglang_jax_model_version": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "rollout_sglang_jax_mem_fraction_static": 0.8,
    "rollout_sglang_jax_init_with_random_weights": True,
    "rollout_sglang_jax_disable_radix_cache": True,
    "rollout_sglang_jax_enable_deterministic_sampling": False,
    "rollout_sglang_jax_precompile_bs_paddings": [8],
    "rollout_sglang_jax_precompile_token_paddings": [2048],
    "rollout_sglang_jax_chunked_prefill_size": 2048,
    "rollout_sglang_jax_page_size": 64,
    "rollout_sglang_jax_use_sort_for_toppk_minp": False,
    "rollout_sglang_jax_enable_static_lora": True,
    "rollout_sglang_jax_lora_target_modules": ["all"],
    "rollout_sglang_jax_max_lora_rank": 8,
    "rollout_sglang_jax_lora_scaling": 2.0,
}
"""As those for SGLang-JAX: deepscaler, grpo_demo_llama3_qwen2."""


@pytest.fixture
def bare(model):
    """Makes rollouts whose config alone decides, and closes them."""
    made = []

    def make(config, **arguments):
        tokenizer = EndingTokenizer(eos=1)
        rollout = SglJaxRollout(
            rollout_actor=model, tokenizer=tokenizer, rollout_config=config, **arguments
        )
        made.append(rollout)
        return rollout

    yield make
    for rollout in made:
        rollout.close()


@pytest.fixture
def warnings(caplog):
    """The adapter's warnings so far, as text."""
    caplog.set_level(logging.WARNING, logger="tunix_sgljax")
    return lambda: [record.getMessage() for record in caplog.records]


# ------------------------------------------------------------------ whole recipes


def test_a_config_for_vllm(bare, warnings, caplog):
    """It runs; one warning has all that changes nothing, whichever config comes later."""
    train = rollout_config(temperature=1.0, seed=3, **VLLM)
    evaluation = rollout_config(temperature=0.0, **VLLM)
    config = bare(train)._builder.engine_config
    assert config.cache.mem_fraction_static == 0.4
    assert config.cache.disable_radix_cache is True
    assert config.scheduler.max_running_requests == 8
    assert config.scheduler.chunked_prefill_size == 256
    assert config.runtime.dtype == "float32"
    caplog.clear()
    rollout = bare(train, **SMALL)
    for each in (train, evaluation, train):
        output = rollout.generate([text_of(ids) for ids in PROMPTS], each)
        assert all(2 <= len(row) <= 16 for row in output.tokens)
    (message,) = warnings()
    for named in (
        "rollout_vllm_server_mode=True (calls of all threads are always batched)",
        "rollout_vllm_tpu_backend_type='jax' (",
        "rollout_vllm_async_scheduling=True (",
        "rollout_vllm_reshard_chunk_size=4 (",
        "rollout_vllm_kwargs['kv_cache_metrics']=True (logging is Python's",
        "rollout_vllm_kwargs['disable_log_stats']=False (",
        "rollout_vllm_kwargs['hf_overrides']={'architectures': ['Qwen3ForCausalLM']} (",
        "rollout_vllm_sampling_kwargs['detokenize']=True (",
    ):
        assert named in message
    assert message.count("=") == 8 + 1  # and strict_config=True
    for used in ("hbm_utilization", "max_num_seqs", "prefix_caching", "'dtype'", "'stop'"):
        assert used not in message


def test_a_config_for_sglang_jax(bare, warnings):
    rollout = bare(rollout_config(**SGLANG_JAX))
    config = rollout._builder.engine_config
    assert config.cache.mem_fraction_static == 0.8
    assert config.cache.page_size == 64
    assert not config.cache.disable_radix_cache  # Tunix's default, True, shares all the same
    assert config.runtime.batch_buckets == (8,)
    assert config.scheduler.max_running_requests == 8
    (message,) = warnings()
    assert "rollout_sglang_jax_use_sort_for_toppk_minp=False (" in message
    assert message.count("=") == 1 + 1


VERSIONS = ("rollout_vllm_model_version", "rollout_sglang_jax_model_version")


@pytest.mark.parametrize("field", VERSIONS)
def test_a_folders_end_tokens_end_completions(bare, tmp_path, warnings, field):
    """As in vLLM and SGLang: those of generation_config.json beside the tokenizer's."""
    folder = shutil.copytree(GOLDEN, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB_SIZE}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    fields = {field: str(folder), "eos_tokens": None}
    rollout = bare(rollout_config(**fields), sampling_params={"logit_bias": {7: 100.0}}, **SMALL)
    asked = [
        (rollout_config(**fields), [7]),
        (rollout_config(eos_tokens=None), [7]),  # an evaluation config may leave the folder out
        (rollout_config(**fields | {"eos_tokens": [2], "max_tokens_to_generate": 3}), [7] * 3),
    ]
    for each, want in asked:
        assert rollout.generate(text_of([3, 4]), each).tokens[0].tolist() == want
    assert rollout.request_params(rollout_config(eos_tokens=None)).stop_token_ids == (1, 2, 7)
    no_end = rollout_config(
        eos_tokens=None, rollout_vllm_sampling_kwargs={"ignore_eos": True}, **{field: str(folder)}
    )
    assert rollout.request_params(no_end).stop_token_ids == ()
    assert warnings() == []


@pytest.mark.parametrize("field", VERSIONS)
def test_a_model_that_is_no_folder_is_warned_about(bare, warnings, field):
    """Nothing says which other end tokens it has."""
    bare(rollout_config(**{field: "Qwen/Qwen3-1.7B"}, eos_tokens=[2, 7]))
    assert warnings() == []
    bare(rollout_config(**{field: "Qwen/Qwen3-1.7B"}, eos_tokens=None))
    (message,) = warnings()
    assert f"RolloutConfig.{field}='Qwen/Qwen3-1.7B' is no local folder" in message
    assert "only the tokenizer's end token 1 ends a completion" in message


def test_a_later_config_is_named_for_what_is_new(bare, warnings):
    rollout = bare(rollout_config(rollout_vllm_server_mode=True), **SMALL)
    rollout.generate(["5"], rollout_config(rollout_vllm_server_mode=True))
    rollout.generate(["5"], rollout_config(rollout_vllm_async_scheduling=True))
    first, second = warnings()
    assert "rollout_vllm_server_mode=True (" in first
    assert "rollout_vllm_async_scheduling=True (" in second
    assert "rollout_vllm_server_mode" not in second


# ------------------------------------------------------------------ who decides


def test_several_fields_for_one_option(warnings, bare):
    """Keywords, then SGLang's kwargs and fields, then vLLM's."""
    fields = {
        "rollout_sglang_jax_kwargs": {"page_size": 4},  # no engine
        "rollout_sglang_jax_page_size": 8,
        "rollout_vllm_kwargs": {"block_size": 32, "max_num_seqs": 3, "dtype": "half"},
        "rollout_vllm_max_num_seqs": 5,
        "data_type": np.float32,
    }
    asked = ask_options(rollout_config(**fields))
    wanted = {"page_size": 4, "dtype": "float32", "max_running_requests": 3}  # no engine
    assert asked.values == wanted
    assert asked.sources["page_size"] == "rollout_sglang_jax_kwargs['page_size']"
    rollout = bare(rollout_config(**fields), page_size=16)
    assert rollout._builder.engine_config.cache.page_size == 16
    (message,) = warnings()
    for named in (
        "rollout_sglang_jax_page_size=8 (rollout_sglang_jax_kwargs['page_size'] decides page_size)",
        "rollout_vllm_kwargs['block_size']=32 (",
        "rollout_vllm_kwargs['dtype']='float16' (data_type decides dtype)",
        "rollout_vllm_max_num_seqs=5 (rollout_vllm_kwargs['max_num_seqs'] decides",
    ):
        assert named in message


def test_fields_that_agree_are_no_conflict(bare, warnings):
    bare(
        rollout_config(rollout_sglang_jax_max_running_requests=5, rollout_vllm_max_num_seqs=5),
        strict_config=True,
    )
    assert not warnings()


@pytest.mark.parametrize("field", ["rollout_vllm_kwargs", "rollout_sglang_jax_kwargs"])
@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"enable_prefix_caching": True}, {"disable_radix_cache": False}),
        # no engine
        ({"max_model_len": 77, "seed": 5}, {"max_model_len": 77, "random_seed": 5}),
        (
            {"context_length": 77, "max_total_tokens": 99},
            {"max_model_len": 77, "num_kv_tokens": 99},  # no engine
        ),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int8"}),
        ({"gpu_memory_utilization": 0.5, "block_size": None}, {"mem_fraction_static": 0.5}),
        ({"precompile_bs_paddings": [1, 300]}, {"batch_buckets": (1, 300)}),  # no engine
        # This engine's own name decides, whatever the order.
        (
            {"max_num_seqs": 4, "max_running_requests": 6},  # no engine
            {"max_running_requests": 6},  # no engine
        ),
        ({"swap_space": 4, "max_loras": 2, "enable_lora": True}, {}),
    ],
    ids=lambda value: "-".join(value),
)
def test_entries_of_kwargs(field, entries, expected):
    assert dict(ask_options(rollout_config(**{field: entries})).values) == expected


def test_automatic_dtype_is_the_actors():
    kwargs = {"dtype": "auto", "max_num_seqs": None}
    assert not ask_options(rollout_config(rollout_vllm_kwargs=kwargs)).values


def test_unknown_entries(bare, warnings):
    """vLLM has hundreds, so those are named; this engine's own field takes no misspelt option."""
    bare(rollout_config(rollout_vllm_kwargs={"brand_new_option": 1, "swap_space": 4}))
    (message,) = warnings()
    assert "rollout_vllm_kwargs['brand_new_option']=1 (it is not known here)" in message
    assert "rollout_vllm_kwargs['swap_space']=4 (retracted requests are computed again" in message
    with pytest.raises(InvalidConfigError, match="unknown engine option 'brand_new_option'"):
        bare(rollout_config(rollout_sglang_jax_kwargs={"brand_new_option": 1}))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (
            {"rollout_vllm_hbm_utilization": 1.5},
            r"mem_fraction_static must be .*1\.5; asked for by RolloutConfig\.rollout_vllm_hbm_ut",
        ),
        ({"rollout_vllm_max_num_seqs": "many"}, r"max_running_requests.*'many'.*max_num_seqs"),
        ({"rollout_vllm_kwargs": {"enable_prefix_caching": "x"}}, r"vllm_kwargs: .* got 'x'"),
        ({"rollout_vllm_kwargs": {"dtype": "int3"}}, r"dtype must be .*'int3'.*\['dtype'\]"),
        (
            {"rollout_vllm_kwargs": {"kv_cache_dtype": "fp8_e5m2"}},
            r"kv_cache_dtype must be .*'fp8_e5m2'.*\['kv_cache_dtype'\]",
        ),
        ({"rollout_vllm_kwargs": [1]}, r"rollout_vllm_kwargs must be a dict, got \[1\]"),
        ({"rollout_vllm_logprobs_mode": "raw_logits"}, r"logprobs_mode must be .*'raw_logits'"),
        ({"rollout_vllm_kwargs": {"logprobs_mode": 3}}, r"\['logprobs_mode'\] must be .* got 3"),
    ],
    ids=str,
)
def test_wrong_values_name_the_field(bare, fields, match):
    with pytest.raises(InvalidConfigError, match=match):
        bare(rollout_config(**fields))


# ------------------------------------------------------------------ log-probs


def test_logprobs_mode(bare):
    raw = rollout_config(rollout_vllm_logprobs_mode="raw_logprobs")
    assert bare(raw).logprobs_mode == "raw_logprobs"
    assert bare(raw, logprobs_mode="trainer_logprobs").logprobs_mode == "trainer_logprobs"
    assert bare(rollout_config()).logprobs_mode == "trainer_logprobs"
    entry = rollout_config(rollout_vllm_kwargs={"logprobs_mode": "raw_logprobs"})
    assert bare(entry, strict_config=True).logprobs_mode == "raw_logprobs"


# ------------------------------------------------------------------ sampling kwargs


def sampled(rollout, **changes):
    return tokens_of(rollout, PROMPTS, **changes)


def test_sampling_kwargs_count(make_rollout, rollout):
    plain = sampled(rollout)
    banned = [row[0] for row in plain]
    kwargs = {"logit_bias": dict.fromkeys(banned, -100.0)}
    assert all(
        row[0] not in banned for row in sampled(rollout, rollout_vllm_sampling_kwargs=kwargs)
    )
    # The training config's hold where a call's config has none, as with Tunix's vLLM; keywords win.
    bound = make_rollout(config={"rollout_vllm_sampling_kwargs": kwargs})
    assert all(row[0] not in banned for row in sampled(bound))
    assert sampled(bound, rollout_vllm_sampling_kwargs={"min_p": 0.0}) == plain
    keyword = make_rollout(
        config={"rollout_vllm_sampling_kwargs": kwargs}, sampling_params={"logit_bias": None}
    )
    assert sampled(keyword) == plain


def test_stop_tokens_are_added(make_rollout, rollout):
    plain = sampled(rollout)[2]
    ends = plain[9], plain[4]
    first, second = sorted(plain.index(end) for end in ends)
    ending = make_rollout(tokenizer=EndingTokenizer(eos=plain[second]))
    fields = {
        "eos_tokens": None,
        "rollout_vllm_sampling_kwargs": {"stop_token_ids": [plain[first]]},
    }
    assert sampled(ending, **fields)[2] == plain[: first + 1]
    fields["rollout_vllm_sampling_kwargs"] = {"stop_token_ids": [], "ignore_eos": False}
    assert sampled(ending, **fields)[2] == plain[: second + 1]
    fields["rollout_vllm_sampling_kwargs"] = {"ignore_eos": True}
    assert sampled(ending, **fields)[2] == plain


def test_sampling_kwargs_that_repeat_the_config(rollout):
    kwargs = {"temperature": 0.0, "top_p": 1.0, "top_k": None, "n": 1, "max_tokens": 16}
    assert sampled(rollout, rollout_vllm_sampling_kwargs=kwargs) == sampled(rollout)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"temperature": 0.5}, r"\['temperature'\] must not be 0\.5: .*temperature=0\.0 decides"),
        ({"n": 4}, r"\['n'\] must not be 4: each prompt gets one completion"),
        ({"seed": 4}, r"\['seed'\] must not be 4"),
        (
            {"guided_decoding": "x"},
            "sampling_kwargs: structured_outputs must be a dict with one of",
        ),
        ({"bad_words": ["x"]}, "sampling_kwargs: .*use bad_token_ids"),
        ({"min_q": 0.1}, "sampling_kwargs: unknown sampling field 'min_q'; did you mean 'min_p'"),
        ({"min_p": 2}, r"sampling_kwargs: min_p must be in \[0, 1\], got 2"),
    ],
    ids=str,
)
def test_sampling_kwargs_that_would_change_samples_unseen(bare, rollout, kwargs, match):
    config = rollout_config(rollout_vllm_sampling_kwargs=kwargs)
    with pytest.raises(InvalidConfigError, match=match):
        bare(config)
    with pytest.raises((InvalidConfigError, InvalidRequestError), match=match):
        rollout.generate(["5"], config)


# ------------------------------------------------------------------ LoRA


def test_max_lora_rank(bare):
    fields: dict[str, Any] = {}
    assert max_lora_rank(rollout_config()) is None
    for field, value, expected in (
        ("rollout_vllm_kwargs", {"max_lora_rank": 4}, 4),
        ("rollout_vllm_lora_config", {"max_lora_rank": 8, "max_loras": 2}, 8),
        ("rollout_sglang_jax_max_lora_rank", 16, 16),
    ):
        fields[field] = value
        assert max_lora_rank(rollout_config(**fields)) == expected
    bare(rollout_config(**fields), strict_config=True)


# ------------------------------------------------------------------ the rest


def test_strict_config_is_a_flag(model):
    with pytest.raises(InvalidConfigError, match="strict_config must be True or False, got 'yes'"):
        new_rollout(model, strict_config="yes")


def test_seeds_and_keys_are_no_trouble(bare):
    """Comparing fields with their defaults must do with arrays."""
    bare(rollout_config(seed=jax.random.PRNGKey(3)), strict_config=True)
