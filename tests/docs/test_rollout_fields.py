"""docs/tunix.md: every field of RolloutConfig, as the code treats it."""

from __future__ import annotations

import dataclasses
import re
import typing

import numpy as np
import pytest
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import FOREIGN_OPTIONS, EngineConfig, SamplingParams
from tests.docs import doc_blocks
from tunix_sgljax import sampling
from tunix_sgljax.rollout_config.checks import check_fields
from tunix_sgljax.rollout_config.engine_options import ask_options
from tunix_sgljax.rollout_config.fields import FIELDS, default_of
from tunix_sgljax.rollout_config.vllm_sampling import DECIDED, RENAMED, WITHOUT_MEANING

maker = doc_blocks.load_script("make_rollout_fields")

INSTALLED = {field.name: field for field in dataclasses.fields(RolloutConfig)}
OTHER: dict[str, typing.Any] = {
    "seed": 7,
    "top_k": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "eos_tokens": [3],
    "data_type": np.dtype("float16"),
    "rollout_sglang_jax_disable_radix_cache": False,
    "rollout_sglang_jax_mem_fraction_static": 0.5,
    "rollout_sglang_jax_precompile_bs_paddings": [64],
    "rollout_sglang_jax_precompile_token_paddings": [64],
    "rollout_sglang_jax_log_level": "warning",
    "rollout_sglang_jax_kwargs": {"decode_steps": 8},  # no engine
    "rollout_sglang_jax_lora_scaling": 2.0,
    "rollout_vllm_hbm_utilization": 0.5,
    "rollout_vllm_lora_config": {"max_lora_rank": 4},
    "rollout_vllm_logprobs_mode": "raw_logprobs",
    "rollout_vllm_kwargs": {"max_num_seqs": 8},
    "rollout_vllm_sampling_kwargs": {"min_p": 0.5},
}
"""Values that are not Tunix's defaults; for other fields one is made from the default."""


def names_of(*treatments: str) -> list[str]:
    """Fields that the installed Tunix has and that are treated so."""
    found = [name for name, field in FIELDS.items() if field.treatment in treatments]
    return [name for name in found if name in INSTALLED]


def config_with(name: str) -> RolloutConfig:
    """A config in which one field is not at its default."""
    default = default_of(INSTALLED[name])
    value: typing.Any
    if name in OTHER:
        value = OTHER[name]
    elif isinstance(default, bool):
        value = not default
    elif isinstance(default, (int, float)):
        value = default + 1
    elif isinstance(default, str):
        value = default + "other"
    else:
        kind = str(INSTALLED[name].type)
        value = {"x": 1} if "dict" in kind.lower() else 64 if "int" in kind else "other"
    return RolloutConfig(**{name: value})


def asked(config: RolloutConfig) -> dict[str, typing.Any]:
    """What the engine and its requests are asked for."""
    params = sampling.to_sampling_params(
        config, end_ids=(1,), seed=sampling.seed_to_int(config.seed)
    )
    return params.to_dict() | dict(ask_options(config).values)


def test_every_field_is_in_the_table():
    assert INSTALLED.keys() <= FIELDS.keys()
    for name in FIELDS.keys() - INSTALLED.keys():
        assert FIELDS[name].is_new, f"{name} is no field of the installed Tunix"


def test_the_page_is_up_to_date():
    text = maker.OUTPUT.read_text(encoding="utf-8")
    assert text == maker.render(text), "run python docs/make_rollout_fields.py"


def test_the_page_has_every_field_once():
    text = maker.OUTPUT.read_text(encoding="utf-8")
    tables = text.partition("<!-- fields:")[2].partition("### Names of engine options")[0]
    set_here, _, unread = tables.partition("### Without a meaning")
    rows = re.findall(r"^\| `(\w+)` \| (?:\*(accepted)\*: )?(.+) \|$", set_here, re.MULTILINE)
    kinds = {name: field.treatment for name, field in FIELDS.items()}
    assert [(name, kind) for name, kind, _ in rows] == [
        (name, kind if kind == "accepted" else "")
        for name, kind in kinds.items()
        if kind != "named"
    ]
    for name, _, words in rows:
        assert ("(new)" in words) == FIELDS[name].is_new
    cells = " ".join(re.findall(r"^\| (`.+?) \|", unread, re.MULTILINE))
    found = {name: bool(new) for name, new in re.findall(r"`(\w+)`( \(new\))?", cells)}
    assert cells.count("`") == 2 * len(found)
    assert found == {n: FIELDS[n].is_new for n, kind in kinds.items() if kind == "named"}
    _, _, names = text.partition("### Names of engine options")
    for option in FOREIGN_OPTIONS.values():
        if option.option is not None:
            assert f"`{option.name}` ({option.engine})" in names
    rows = re.findall(
        r"^\| (`.+) \| .+ \|$", text.partition("### vLLM's sampling")[2], re.MULTILINE
    )
    entries = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(entries) == sorted([*RENAMED, *DECIDED, *WITHOUT_MEANING, "n"])


@pytest.mark.parametrize("name", names_of("named"))
def test_named(name):
    config = config_with(name)
    assert check_fields(config) == {f"{name}={getattr(config, name)!r}": FIELDS[name].text}
    assert asked(config) == asked(RolloutConfig())


@pytest.mark.parametrize("name", names_of("mapped", "translated", "accepted"))
def test_decides_what_the_table_says(name):
    """Where it names an option or a sampling field, that is what changes, and nothing is named."""
    config = config_with(name)
    assert check_fields(config) == {}
    before, after = asked(RolloutConfig()), asked(config)
    changed = {key for key in after if after[key] != before.get(key)}
    target = FIELDS[name].target
    if target is None:
        assert name in SHOWN_ELSEWHERE
        return
    assert target in {*EngineConfig.option_names(), *SamplingParams().to_dict()}
    assert target in changed
    bounds = {"max_running_requests", "chunked_prefill_size"} if "_buckets" in target else set()
    assert changed <= {target} | bounds


SHOWN_ELSEWHERE = {
    "rollout_sglang_jax_lora_scaling",  # tests/adapter/test_lora.py
    "max_prompt_length",  # tests/adapter/test_generate.py
    "return_logprobs",
    "rollout_mapping_config",  # tests/adapter/test_mappings.py
    "kv_cache_size",  # tests/adapter/test_config.py, as those below
    "rollout_sglang_jax_model_version",
    "rollout_sglang_jax_log_level",
    "rollout_sglang_jax_kwargs",
    "rollout_sglang_jax_enable_static_lora",  # tests/adapter/test_foreign_config.py, as those below
    "rollout_sglang_jax_lora_target_modules",
    "rollout_sglang_jax_max_lora_rank",
    "rollout_vllm_model_version",
    "rollout_vllm_lora_config",
    "rollout_vllm_logprobs_mode",
    "rollout_vllm_kwargs",
    "rollout_vllm_sampling_kwargs",
}
