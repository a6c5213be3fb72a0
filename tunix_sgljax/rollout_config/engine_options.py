"""The engine options that a RolloutConfig asks for, whichever engine it was written for."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import FOREIGN_OPTIONS, EngineConfig, InvalidConfigError
from tunix_sgljax.rollout_config.fields import (
    MODEL_FIELDS,
    SGLANG_JAX_FIELDS,
    VLLM_FIELDS,
    RolloutField,
    default_of,
    entries_of,
)

_READ_ELSEWHERE = ("enable_lora", "logprobs_mode", "max_lora_rank", "max_loras")
"""Entries of the kwargs fields that are not engine options here but have a meaning."""

_DTYPE_NAMES = {"half": "float16", "float": "float32"}
_BOUNDS = {"batch_buckets": "max_running_requests", "token_buckets": "chunked_prefill_size"}
"""Buckets, and the option whose default is the largest bucket."""


class _Wish(NamedTuple):
    """An option that a field asks for; None for an entry that changes nothing, with the reason."""

    source: str
    value: Any
    option: str | None
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedOptions:
    """The engine options that a RolloutConfig asks for, and for each the field that does.

    `unused` are fields and entries that change nothing, with the value and the reason.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, str]
    unused: Mapping[str, tuple[Any, str]]


def ask_options(config: RolloutConfig) -> AskedOptions:
    """The engine options that a config asks for.

    If several fields ask for one option, the first of these decides: `rollout_sglang_jax_kwargs`,
    the fields of `rollout_sglang_jax_` and Tunix's own, `rollout_vllm_kwargs`, the fields of
    `rollout_vllm_`.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    unused: dict[str, tuple[Any, str]] = {}
    for wish in _wishes(config):
        if wish.option is None:
            unused[wish.source] = wish.value, wish.reason
        elif wish.option not in values:
            values[wish.option], sources[wish.option] = wish.value, wish.source
        elif values[wish.option] != wish.value:
            unused[wish.source] = wish.value, f"{sources[wish.option]} decides {wish.option}"
    return AskedOptions(values=values, sources=sources, unused=unused)


def without_experts(asked: AskedOptions) -> AskedOptions:
    """The options for a model without experts, whose routing Tunix lets one ask for in vain."""
    option, field = "enable_return_routed_experts", "return_routed_experts"
    if asked.sources.get(option) != field:
        return asked
    values = {name: value for name, value in asked.values.items() if name != option}
    return dataclasses.replace(asked, values=values)


def make_engine_config(
    asked: AskedOptions, explicit: Mapping[str, Any], implied_model_len: int
) -> EngineConfig:
    """The engine's configuration."""
    options = {"max_model_len": implied_model_len} | dict(asked.values) | dict(explicit)
    try:
        return EngineConfig.from_options(options)
    except InvalidConfigError as error:
        name = str(error).partition(" ")[0]
        if name in explicit or name not in asked.sources:
            raise
        raise InvalidConfigError(
            f"{error}; asked for by RolloutConfig.{asked.sources[name]}"
        ) from None


def implied_model_len(config: RolloutConfig) -> int:
    """Default maximum sequence length: what Tunix's vanilla cache would hold."""
    return max(config.kv_cache_size, config.max_prompt_length + config.max_tokens_to_generate)


def check_same_engine(
    asked: AskedOptions, running: EngineConfig, overridden: Collection[str]
) -> None:
    """Refuses engine fields of a config that differ from those the engine was made with."""
    groups = [getattr(running, field.name) for field in dataclasses.fields(running)]
    current = {
        field.name: getattr(group, field.name)
        for group in (running, *filter(dataclasses.is_dataclass, groups))
        for field in dataclasses.fields(group)
        if not dataclasses.is_dataclass(getattr(group, field.name))
    }
    for name, value in asked.values.items():
        if name.endswith("_buckets") and isinstance(value, (list, tuple)):
            value = tuple(sorted(set(value)))  # as in the engine's config
        elif isinstance(value, list):
            value = tuple(value)
        if name not in overridden and current.get(name) != value:
            raise InvalidConfigError(
                f"RolloutConfig.{asked.sources[name]} asks for {name}={value!r}, but the engine "
                f"was made with {current.get(name)!r}; engine options cannot change after "
                "construction"
            )


def asked_logprobs_mode(config: RolloutConfig) -> str | None:
    """The rollout's `logprobs_mode` that vLLM's fields ask for; None at their default."""
    source, mode = "rollout_vllm_logprobs_mode", config.rollout_vllm_logprobs_mode
    entry = entries_of(config, "rollout_vllm_kwargs").get("logprobs_mode")
    if entry is not None:
        source, mode = "rollout_vllm_kwargs['logprobs_mode']", entry
    if mode == "processed_logprobs":
        return None
    if mode != "raw_logprobs":
        raise InvalidConfigError(
            f"RolloutConfig.{source} must be 'processed_logprobs' or 'raw_logprobs', got {mode!r}; "
            "SglJaxRollout(logprobs_mode=...) has more"
        )
    return mode


def _wishes(config: RolloutConfig) -> Iterator[_Wish]:
    yield from _wishes_of_entries(config, "rollout_sglang_jax_kwargs")
    fields = list(_wishes_of_fields(config, [*MODEL_FIELDS, *SGLANG_JAX_FIELDS]))
    yield from fields
    asked = {wish.option for wish in fields}
    for source, value, option, _ in fields:
        bound = None if option is None else _BOUNDS.get(option)
        is_bound = isinstance(value, tuple) and value and all(isinstance(n, int) for n in value)
        if is_bound and bound is not None and bound not in asked:
            yield _Wish(source, max(value), bound)
    yield from _wishes_of_entries(config, "rollout_vllm_kwargs")
    yield from _wishes_of_fields(config, VLLM_FIELDS)


def _wishes_of_fields(config: RolloutConfig, table: Sequence[RolloutField]) -> Iterator[_Wish]:
    defaults = {field.name: default_of(field) for field in dataclasses.fields(config)}
    for field in table:
        if field.target is None or field.name not in defaults:
            continue
        value, unset = getattr(config, field.name), (None, defaults[field.name])
        if field.target == "expert_parallel_size":
            unset = (*unset, -1)
        # A field at its default leaves the engine's default.
        if value not in unset:
            num_parts = config.expert_parallel_size
            if field.target == "tp_size" and isinstance(num_parts, int) and num_parts > 1:
                value = value * num_parts  # Tunix counts the devices of each part
            yield _Wish(field.name, _own_value(field.target, value), field.target)


def _wishes_of_entries(config: RolloutConfig, name: str) -> Iterator[_Wish]:
    """The wishes of a kwargs field; the engine checks unknown options under own names."""
    entries, is_own = entries_of(config, name), name == "rollout_sglang_jax_kwargs"
    known = EngineConfig.option_names()
    translated: list[_Wish] = []  # own names have priority, whatever the order
    for key, value in entries.items():
        source, foreign = f"{name}[{key!r}]", FOREIGN_OPTIONS.get(key)
        if key in _READ_ELSEWHERE:
            continue
        if key in known:
            value = _own_value(key, value)
            if is_own or value is not None:
                yield _Wish(source, value, key)
        elif value is None:
            continue
        elif foreign is not None and foreign.option is not None:
            try:
                value = foreign.translate(value)
            except InvalidConfigError as error:
                raise InvalidConfigError(f"RolloutConfig.{name}: {error}") from None
            translated.append(_Wish(source, _own_value(foreign.option, value), foreign.option))
        elif foreign is not None:
            yield _Wish(source, value, None, foreign.note)
        elif is_own:
            yield _Wish(source, value, key)
        else:
            yield _Wish(source, value, None, "it is not known here")
    yield from translated


def _own_value(option: str, value: Any) -> Any:
    """Converts a value for the engine."""
    if option == "dtype" and value is not None:
        return _dtype_name(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    return value


def _dtype_name(value: Any) -> Any:
    """A dtype's name; None (the actor's dtype) for vLLM's "auto"."""
    if value == "auto":
        return None
    value = _DTYPE_NAMES.get(value, value) if isinstance(value, str) else value
    try:
        return np.dtype(value).name
    except TypeError:
        return value  # the engine refuses it
