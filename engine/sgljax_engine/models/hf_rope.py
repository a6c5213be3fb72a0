"""Rotary embeddings of Hugging Face's config.json, as transformers 4 and 5 write them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from sgljax_engine.checks import check_count, require
from sgljax_engine.errors import InvalidConfigError, UnsupportedModelError
from sgljax_engine.model_config import Llama3Scaling, RopeConfig, YarnScaling
from sgljax_engine.models import hf as hf_config
from sgljax_engine.models.hf import FULL, LINEAR, SLIDING, HfConfig, number

_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "proportional": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_LENGTH = "original_max_position_embeddings"
_OPTIONS: dict[str, tuple[str, ...]] = {
    "proportional": ("factor",),
    "llama3": (_LENGTH,),
    "yarn": (
        *(_LENGTH, "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (_LENGTH, "attention_factor", "factor"),
}
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Settings of rotary embeddings that only tell apart positions of images."""

_THETA = 10_000.0
"""Base of a rotary embedding whose config names none, as of transformers' classes."""


def read_rope(hf: HfConfig, *, theta: float = _THETA, rotates_part: bool = False) -> RopeConfig:
    """The rotary embedding of a model that has the same one in all layers.

    transformers 4 writes rope_theta at the top level and the rest, if any, in rope_scaling;
    transformers 5 writes everything in rope_parameters. Where both are, rope_scaling replaces
    rope_parameters, and what the one that counts leaves out is taken from the top level. `theta` is
    the base that the class in transformers has by default.
    """
    settings = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    for kind in (FULL, SLIDING, LINEAR):
        if kind in settings:
            raise UnsupportedModelError(
                f"rope_parameters has {kind!r}, but this architecture has one rotary embedding for "
                "all layers"
            )
    settings.setdefault("rope_theta", hf.get("rope_theta", theta))
    part = hf.get("partial_rotary_factor")
    if part is not None:
        settings.setdefault("partial_rotary_factor", part)
    return parse_rope(settings, hf, rotates_part=rotates_part)


def read_layer_rope(hf: HfConfig, kind: str, theta: float) -> RopeConfig:
    """The rotary embedding of one type of layer, of models with one for each of two types.

    transformers 5 nests one per type; 4 has top-level names, and `rope_scaling` for layers with
    full attention, whose settings replace nested ones. `theta` is the base if none is nested.
    """
    nested, kinds = hf.get("rope_parameters") or {}, (FULL, SLIDING)
    if nested and not nested.keys() & set(kinds):
        raise UnsupportedModelError(
            f"rope_parameters={nested!r} is not supported, only an embedding for each of "
            f"{', '.join(map(repr, kinds))}: transformers would ignore these settings"
        )
    settings = {"rope_theta": theta, **(nested.get(kind) or {})}
    if kind == FULL:
        settings |= hf.get("rope_scaling") or {}
    return parse_rope(settings, hf)


def parse_rope(settings: HfConfig, hf: HfConfig, *, rotates_part: bool = False) -> RopeConfig:
    """Parses `rope_scaling` of transformers 4, or (a part of) `rope_parameters` of 5.

    `rotates_part` says whether `partial_rotary_factor` has an effect on types other than
    "proportional".
    """
    kind = settings.get("rope_type", settings.get("type", "default"))
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise UnsupportedModelError(
            f"rope_type={kind!r} is not supported, only {', '.join(map(repr, _FIELDS))}"
        )
    options = _OPTIONS.get(kind, ())
    part = settings.get("partial_rotary_factor")
    part = 1.0 if part is None else part
    known = {"rope_type", "type", "rope_theta", *_FIELDS[kind], *options, *_OF_IMAGES}
    if kind == "proportional" or rotates_part or part == 1:
        known.add("partial_rotary_factor")
    if settings.get("factor") == 1:  # no stretching, of whatever type
        known.add("factor")
    for name, value in settings.items():
        if name not in known and value is not None:
            raise UnsupportedModelError(f"{name}={value!r} is not supported for rope_type={kind!r}")
    part = number("partial_rotary_factor", part)
    theta = settings.get("rope_theta")
    if theta is None:
        raise InvalidConfigError(
            "config.json has no 'rope_theta', neither top-level nor in rope_parameters"
        )
    rope = RopeConfig(theta=number("rope_theta", theta))
    for name in _FIELDS[kind]:
        hf_config.require(settings, name)
    if kind == "linear":
        rope = dataclasses.replace(rope, linear_factor=number("factor", settings["factor"]))
    elif kind == "proportional":
        factor = 1.0 if settings.get("factor") is None else number("factor", settings["factor"])
        rope = dataclasses.replace(rope, linear_factor=factor, rotary_fraction=part)
    elif kind == "dynamic":
        # It stretches sequences beyond max_position_embeddings alone, which no engine takes.
        number("factor", settings["factor"])
    elif kind == "llama3":
        fields = {name: settings[name] for name in _FIELDS[kind]}
        scaling = Llama3Scaling(**fields, original_context_length=_original_length(settings, hf))
        rope = dataclasses.replace(rope, llama3=scaling)
    elif kind == "yarn":
        rope = _with_yarn(rope, settings, hf)
    elif kind == "longrope":
        rope = _with_longrope(rope, settings, hf)
    if kind == "proportional" or part == 1:
        return rope
    head_dim = hf_config.require(hf, "head_dim")
    check_count("head_dim", head_dim)
    return dataclasses.replace(rope, rotary_dim=int(head_dim * part))


def _original_length(settings: HfConfig, hf: HfConfig) -> Any:
    """Tokens of the context before it was extended; the config's own setting comes first."""
    return hf.get(_LENGTH, settings.get(_LENGTH, hf.get("max_position_embeddings")))


def _with_yarn(rope: RopeConfig, settings: HfConfig, hf: HfConfig) -> RopeConfig:
    factor = number("factor", settings["factor"])
    scaling = YarnScaling(
        factor=factor,
        beta_fast=settings.get("beta_fast") or 32.0,
        beta_slow=settings.get("beta_slow") or 1.0,
        truncate=settings.get("truncate", True),
        original_context_length=_original_length(settings, hf),
    )
    attention_factor, scales = settings.get("attention_factor"), ("mscale", "mscale_all_dim")
    if attention_factor is not None:
        attention_factor = number("attention_factor", attention_factor)
    elif all(settings.get(name) for name in scales):
        scale, scale_all = (yarn_scale(factor, number(name, settings[name])) for name in scales)
        attention_factor = scale / scale_all
    else:
        attention_factor = yarn_scale(factor)
    return dataclasses.replace(rope, yarn=scaling, attention_factor=attention_factor)


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor of queries and of keys for contexts that are longer by `factor`.

    DeepSeek's attention multiplies its scores by the square of `yarn_scale(factor, mscale_all_dim)`
    besides.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _with_longrope(rope: RopeConfig, settings: HfConfig, hf: HfConfig) -> RopeConfig:
    """The embedding of sequences within the original context, whose length decides in transformers.

    Each of its forward passes rotates the new tokens by the longest sequence's length, and cached
    ones stay as they are, so that beyond the original context a result depends on how a sequence
    was cut.
    """
    length, context = (
        _original_length(settings, hf),
        hf_config.require(hf, "max_position_embeddings"),
    )
    check_count(_LENGTH, length)
    check_count("max_position_embeddings", context)
    if context > length:
        raise UnsupportedModelError(
            f"rope_type='longrope' is supported up to {_LENGTH} ({length}), not for "
            f"max_position_embeddings={context}: beyond it, transformers rotates new tokens by "
            "other factors than those in its cache, and results depend on how a sequence was cut. "
            f"Set max_position_embeddings to {length} to serve shorter sequences"
        )
    factors = settings["short_factor"]
    require(isinstance(factors, (list, tuple)), "short_factor", factors, "a list of numbers")
    factor, attention_factor = settings.get("factor"), settings.get("attention_factor")
    factor = context / length if factor is None else number("factor", factor)
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(max(factor, 1)) / math.log(length))
    return dataclasses.replace(
        rope,
        channel_factors=tuple(number("short_factor", each) for each in factors),
        attention_factor=number("attention_factor", attention_factor),
    )
