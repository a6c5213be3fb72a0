"""docs/switching.md: every field of RolloutConfig, as the code treats it; and its Python runs."""

from __future__ import annotations

import dataclasses
import re
import typing

import jax
import numpy as np
import optax
import pytest
from tunix.rl.rl_cluster import ClusterConfig, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import EngineConfig, InvalidConfigError, SamplingParams
from tests import tunix_reference as ref
from tests.adapter.helpers import MODEL, EndingTokenizer
from tests.docs import doc_blocks
from tunix_sgljax import sampling

FIELDS = {field.name: field for field in dataclasses.fields(RolloutConfig)}
TABLE = re.findall(
    r"^\| `(\w+)` \| (mapped|checked|refused) \| (.+) \|$",
    (doc_blocks.DOCS / "switching.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
ROWS = {name: (kind, text) for name, kind, text in TABLE}
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
    "rollout_sglang_jax_kwargs": {"decode_steps": 8},
}
"""Values that are not Tunix's defaults; for other fields one is made from the default."""


def other_value(name: str) -> typing.Any:
    """A value that the field does not have by default."""
    default = getattr(RolloutConfig(), name)
    if name in OTHER:
        return OTHER[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return default + 1
    if isinstance(default, str):
        return default + "other"
    if isinstance(default, dict):
        return {"other": 1}
    kind = str(FIELDS[name].type)
    return {"x": 1} if "dict" in kind else 64 if "int" in kind else "other"


def treated(name: str) -> dict[str, typing.Any]:
    """What the engine and its requests are asked for, with another value of one field."""
    config = RolloutConfig(**{name: other_value(name)})
    sampling.check_config(config, None)
    asked = sampling.to_sampling_params(config, eos_id=1, seed=sampling.seed_to_int(config.seed))
    return asked.to_dict() | sampling.engine_options(config)


def test_every_field_is_in_the_tables_once():
    assert len(TABLE) == len(ROWS)
    assert ROWS.keys() == FIELDS.keys()


@pytest.mark.parametrize("name", [n for n, (kind, _) in ROWS.items() if kind != "mapped"])
def test_refused_or_checked(name):
    with pytest.raises(InvalidConfigError, match=rf"RolloutConfig\.{name}\b"):
        sampling.check_config(RolloutConfig(**{name: other_value(name)}), None)


@pytest.mark.parametrize("name", [n for n, (kind, _) in ROWS.items() if kind == "mapped"])
def test_mapped(name):
    """Where the table names an option or a sampling field first, that is what changes."""
    changed = treated(name)  # it is not refused
    first = re.match(r"`(\w+)`", ROWS[name][1])
    names = {*EngineConfig.option_names(), *SamplingParams().to_dict()}
    if first is None or first[1] not in names:
        assert name in SHOWN_ELSEWHERE
        return
    default = sampling.to_sampling_params(RolloutConfig(), eos_id=1, seed=None).to_dict()
    default |= sampling.engine_options(RolloutConfig())
    assert changed.get(first[1]) != default.get(first[1])


SHOWN_ELSEWHERE = {
    "rollout_sglang_jax_lora_scaling",  # tests/adapter/test_lora.py
    "max_prompt_length",  # tests/adapter/test_generate.py
    "return_logprobs",
    "rollout_mapping_config",  # tests/adapter/test_mappings.py
    "kv_cache_size",  # tests/adapter/test_config.py, as those below
    "rollout_sglang_jax_model_version",
    "rollout_sglang_jax_log_level",
    "rollout_sglang_jax_kwargs",
}


def test_fields_of_vllm_are_told_apart_in_its_section():
    """Each of vLLM's fields is in the table of what takes its place."""
    page = (doc_blocks.DOCS / "switching.md").read_text(encoding="utf-8")
    section = page.partition("### From Tunix's vllm engine")[2].partition("\n## ")[0]
    cells = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("|"))
    named = set(re.findall(r"`(\w+)`", cells))
    prefix = "rollout_vllm_"
    assert named == {name.removeprefix(prefix) for name in FIELDS if name.startswith(prefix)}


# Tunix enters meshes as older versions of JAX did.
@pytest.mark.filterwarnings("ignore:`with mesh.`:DeprecationWarning")
def test_code_blocks():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    names = {
        "ClusterConfig": ClusterConfig,
        "RolloutConfig": RolloutConfig,
        "dataclasses": dataclasses,
        "mesh": mesh,
        "role_to_mesh": dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
        "rollout_config": RolloutConfig(max_prompt_length=16, kv_cache_size=128),
        "training_config": RLTrainingConfig(
            actor_optimizer=optax.sgd(0.1), eval_every_n_steps=2, max_steps=1
        ),
        "full_batch_size": 8,
        "actor": ref.make_tunix_qwen3(MODEL),
        "reference": ref.make_tunix_qwen3(MODEL),
        "tokenizer": EndingTokenizer(eos=1),
    }
    assert doc_blocks.run("switching.md", names) == 5
    names["cluster"].rollout.close()
    names["rollout"].close()
