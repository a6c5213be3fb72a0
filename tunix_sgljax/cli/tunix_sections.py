"""Reads the sections of a Tunix config for a rollout with this engine.

The sections are those of `tunix.cli`'s YAML files: `sgljax_config` is for this engine,
`vllm_config` and `sglang_jax_config` are for Tunix's other engines.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from sgljax_engine import InvalidConfigError

ENGINE = "sgljax"
"""This engine's name in `rollout_engine`."""
_FOREIGN_SECTIONS = {"sglang_jax": "sglang_jax_config", "vllm": "vllm_config"}
_MESH_FIELDS = ("tensor_parallel_size", "data_parallel_size")
_SIZES_BATCHES = {
    "rollout_sglang_jax_max_running_requests",
    "rollout_sglang_jax_precompile_bs_paddings",
    "rollout_vllm_max_num_seqs",
    "batch_buckets",
    "max_num_seqs",
    "max_running_requests",
}
"""Fields of RolloutConfig and engine options that set how many sequences are decoded together."""


def plain(value: Any) -> Any:
    """A config value without OmegaConf's containers, with references resolved."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return value


def read_section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A section as a dict; empty where it is missing or null."""
    section = plain(config.get(name))
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise InvalidConfigError(f"{name} must be a mapping, got {section!r}")
    return section


def check_engine_name(name: Any) -> Any:
    """Returns the value of `rollout_engine`, or refuses a misspelt one.

    Tunix would refuse it only when all models are loaded.
    """
    known = (ENGINE, "vanilla", *_FOREIGN_SECTIONS)
    near = difflib.get_close_matches(str(name), known, n=1)
    if name not in known and near:
        raise InvalidConfigError(f"rollout_engine {name!r} is unknown; did you mean {near[0]!r}?")
    return name


def recipe_section(config: Mapping[str, Any], named_engines: Sequence[str]) -> str | None:
    """The recipe's section for the engine that it names; None if there is none.

    Scripts fill in the sections of several engines and pick one by `rollout_engine`, before a
    user's override picks this engine. If only this engine is named, the one filled section counts;
    of two, SGLang's, whose options are closest.
    """
    filled = [name for name in _FOREIGN_SECTIONS.values() if read_section(config, name)]
    for engine in reversed(named_engines):
        section = _FOREIGN_SECTIONS.get(engine)
        if section is not None:
            return section if section in filled else None
    return filled[0] if filled else None


def names_model(fields: Mapping[str, Any]) -> bool:
    """Whether fields of RolloutConfig say which model it is."""
    return any(fields.get(f"rollout_{name}_model_version") for name in _FOREIGN_SECTIONS)


def model_version(config: Mapping[str, Any], named_engines: Sequence[str]) -> str | None:
    """Where the model's end tokens are, for a recipe of an engine that reads them; else None.

    vLLM and SGLang take generation_config.json of the model that Tunix names to them. It is beside
    a local tokenizer, or where Tunix downloads the model.
    """
    if not set(_FOREIGN_SECTIONS) & set(named_engines):
        return None
    model = read_section(config, "actor_model_config")
    tokenizer = read_section(config, "tokenizer_config").get("tokenizer_path") or ""
    if (Path(tokenizer) / "config.json").is_file():
        return str(tokenizer)
    return model.get("model_download_path") or model.get("model_id") or None


def translate_section(
    config: Mapping[str, Any], name: str, fields: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Translates a section for another engine to fields of RolloutConfig, and its other keys.

    Uses only the section itself: values that Tunix fills in for that engine do not apply here.
    """
    prefix = f"rollout_{name.removesuffix('_config')}_"
    values, unknown = {}, []
    for key, value in read_section(config, name).items():
        field = key if key in _MESH_FIELDS else f"{prefix}{key}"
        if field in fields:
            values[field] = value
        else:
            unknown.append(f"{name}.{key}")
    return values, unknown


def unread_rollout_keys(config: Mapping[str, Any], fields: Collection[str]) -> list[str]:
    """Keys of `rollout_config` that Tunix's pipeline drops, since they are not fields."""
    keys = read_section(config, "rollout_config")
    return [
        f"rollout_config.{key}"
        for key in keys
        if key not in fields and key != "total_generation_steps"
    ]


def leaves_batch_open(fields: Mapping[str, Any], options: Collection[str]) -> bool:
    """Whether no setting says how many sequences are decoded together."""
    names = {*fields, *options}
    for extra in ("rollout_sglang_jax_kwargs", "rollout_vllm_kwargs"):
        names.update(fields.get(extra) or ())
    return not names & _SIZES_BATCHES


def micro_batch_advice(config: Mapping[str, Any]) -> str | None:
    """Advice for a user whose rollouts come in parts of a batch; None if there is none.

    Tunix calls the engine once for each rollout micro-batch, by default the trainer's, of which the
    rollout itself warns. Agentic learners always send prompts one by one, concurrently.
    """
    if str(config.get("training_mode") or "").startswith("agentic"):
        return None
    training = read_section(config, "rl_training_config")
    batch = config.get("batch_size") or 1
    key = "rollout_micro_batch_size"
    names = (key, "train_micro_batch_size", "mini_batch_size")
    source = next((name for name in names if training.get(name)), None)
    if source in (None, names[1]) or training[source] >= batch:
        return None
    why = "as set" if source == key else f"which is not set and follows {source}"
    # No override to copy: an override makes Tunix replace the whole section.
    return (
        f"rl_training_config.{key} is {training[source]} ({why}): the engine gets that many of a "
        f"batch's {batch} prompts at a time; with {batch} there it batches all of them, which is "
        "faster"
    )
