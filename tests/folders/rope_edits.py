"""Edits of rotary embeddings: both generations' spellings, beside one another and cut short.

Runs without JAX and without torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from tests.folders.drafts import Draft
from tests.folders.edits import (
    ABSENT,
    DEEPSEEK,
    FULL,
    GEMMA3,
    GEMMA4,
    HYBRID,
    PLAIN,
    SLIDING,
    Edit,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
DEFAULT = {"rope_type": "default", "rope_theta": 20_000.0}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 128,
}


def _rope(draft: Draft, **settings: Any) -> None:
    """Sets settings of the rotary embedding in the place of those that the family has."""
    draft.drop("rope_parameters")
    draft.set(**settings)


def _rope_inner(draft: Draft, **settings: Any) -> None:
    """Changes what is inside of rope_parameters."""
    for name, value in settings.items():
        if value is ABSENT:
            draft.text["rope_parameters"].pop(name, None)
        else:
            draft.text["rope_parameters"][name] = value


def _rope_edits() -> Iterator[Edit]:
    flat: list[tuple[str, dict[str, Any]]] = [
        ("none", {}),
        ("theta", {"rope_theta": 20_000}),
        ("theta=null", {"rope_theta": None}),
        ("theta=0", {"rope_theta": 0}),
        ("theta='1e4'", {"rope_theta": "1e4"}),
        ("scaling=null", {"rope_theta": 2e4, "rope_scaling": None}),
        ("scaling={}", {"rope_theta": 2e4, "rope_scaling": {}}),
        ("linear", {"rope_theta": 2e4, "rope_scaling": LINEAR_ROPE}),
        ("type=linear", {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 2}}),
        ("linear, no theta", {"rope_scaling": LINEAR_ROPE}),
        (
            "linear, theta inside",
            {"rope_theta": 1e3, "rope_scaling": {**LINEAR_ROPE, "rope_theta": 2e4}},
        ),
        ("linear, no factor", {"rope_theta": 2e4, "rope_scaling": {"rope_type": "linear"}}),
        ("linear, factor 0", {"rope_theta": 2e4, "rope_scaling": {**LINEAR_ROPE, "factor": 0}}),
        ("linear, factor '4'", {"rope_theta": 2e4, "rope_scaling": {**LINEAR_ROPE, "factor": "4"}}),
        ("linear, factor 0.5", {"rope_theta": 2e4, "rope_scaling": {**LINEAR_ROPE, "factor": 0.5}}),
        ("both types", {"rope_theta": 2e4, "rope_scaling": {**LINEAR_ROPE, "type": "default"}}),
        ("parameters", {"rope_parameters": DEFAULT}),
        ("parameters={}", {"rope_parameters": {}, "rope_theta": 2e4}),
        ("parameters=null", {"rope_parameters": None, "rope_theta": 2e4}),
        ("parameters, no theta", {"rope_parameters": {"rope_type": "default"}}),
        (
            "parameters, theta outside",
            {"rope_parameters": {"rope_type": "default"}, "rope_theta": 2e4},
        ),
        (
            "parameters, theta=null",
            {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        ),
        ("parameters, no type", {"rope_parameters": {"rope_theta": 2e4}}),
        ("parameters, type=null", {"rope_parameters": {"rope_type": None, "rope_theta": 2e4}}),
        ("linear parameters", {"rope_parameters": {**LINEAR_ROPE, "rope_theta": 2e4}}),
        ("two thetas", {"rope_parameters": DEFAULT, "rope_theta": 1e3}),
        ("scaling beside parameters", {"rope_parameters": DEFAULT, "rope_scaling": LINEAR_ROPE}),
        ("all three", {"rope_parameters": DEFAULT, "rope_scaling": LINEAR_ROPE, "rope_theta": 1e3}),
        (
            "llama3",
            {"rope_theta": 2e4, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32}},
        ),
        (
            "llama3 parameters",
            {
                "rope_parameters": {
                    **LLAMA3,
                    "original_max_position_embeddings": 32,
                    "rope_theta": 2e4,
                }
            },
        ),
        ("llama3, no context", {"rope_theta": 2e4, "rope_scaling": LLAMA3}),
        (
            "llama3, context outside",
            {"rope_theta": 2e4, "rope_scaling": LLAMA3, "original_max_position_embeddings": 32},
        ),
        (
            "llama3, both contexts",
            {
                "rope_theta": 2e4,
                "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64},
                "original_max_position_embeddings": 32,
            },
        ),
        (
            "llama3, no factor",
            {
                "rope_theta": 2e4,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                },
            },
        ),
        (
            "llama3, equal factors",
            {"rope_theta": 2e4, "rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
        ),
        ("default, factor 1", {"rope_parameters": {**DEFAULT, "factor": 1.0}}),
        ("default, factor 4", {"rope_parameters": {**DEFAULT, "factor": 4.0}}),
        ("yarn", {"rope_theta": 2e4, "rope_scaling": YARN}),
        ("yarn parameters", {"rope_parameters": {**YARN, "rope_theta": 500.0, "beta_fast": 4}}),
        ("yarn, no context", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
        (
            "yarn, context outside",
            {"rope_scaling": YARN, "original_max_position_embeddings": 16, "rope_theta": 300},
        ),
        ("yarn, no factor", {"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 2e4}),
        (
            "yarn, truncate=False",
            {"rope_scaling": {**YARN, "truncate": False, "beta_fast": 4, "beta_slow": 0.25}},
        ),
        ("yarn, attention factor", {"rope_scaling": {**YARN, "attention_factor": 0.75}}),
        ("yarn, mscale", {"rope_scaling": {**YARN, "mscale": 1.4, "mscale_all_dim": 0.6}}),
        ("yarn, mscale alone", {"rope_scaling": {**YARN, "mscale": 1.4}}),
        ("yarn, factor 0.5", {"rope_scaling": {**YARN, "factor": 0.5}}),
        ("yarn, betas crossed", {"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 4}}),
        ("dynamic", {"rope_theta": 2e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        (
            "longrope",
            {
                "rope_theta": 2e4,
                "rope_scaling": {**LONG, "original_max_position_embeddings": 32},
            },
        ),
        ("longrope, short", {"rope_scaling": LONG}),
        ("longrope, factor", {"rope_scaling": {**LONG, "factor": 4.0}}),
        (
            "longrope, attention factor",
            {"rope_parameters": {**LONG, "attention_factor": 1.25, "rope_theta": 2e4}},
        ),
        ("longrope, too few", {"rope_scaling": {**LONG, "short_factor": [1.0]}}),
        ("dynamic, no factor", {"rope_scaling": {"type": "dynamic"}}),
        (
            "mrope",
            {"rope_theta": 2e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
        ),
        ("default with mrope", {"rope_parameters": {**DEFAULT, "mrope_section": [2, 1, 1]}}),
        ("unknown type", {"rope_theta": 2e4, "rope_scaling": {"type": "spiral", "factor": 2.0}}),
        (
            "proportional",
            {
                "rope_parameters": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 2e4,
                }
            },
        ),
        ("partial 1.0 outside", {"rope_parameters": DEFAULT, "partial_rotary_factor": 1.0}),
        ("partial 1.0 inside", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 1.0}}),
        ("partial 0.5 outside", {"rope_parameters": DEFAULT, "partial_rotary_factor": 0.5}),
        ("partial 0.5 inside", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}),
        (
            "by layer type",
            {"rope_parameters": {FULL: DEFAULT, SLIDING: {**DEFAULT, "rope_theta": 5e3}}},
        ),
    ]
    for name, settings in flat:
        usual = ("none", "theta", "linear", "two thetas", "scaling beside parameters", "yarn")
        is_usual = name in usual
        families = PLAIN if is_usual else ("llama", "qwen3", "gemma2")
        few = name in (
            "all three",
            "llama3, no context",
            "parameters, theta outside",
            "partial 1.0 inside",
        )
        families += HYBRID if is_usual or few else ("qwen3_5", "qwen3_next")
        yield Edit(f"rope: {name}", "rope", families, functools.partial(_rope, **settings))

    nested = functools.partial(dict, rope_type="default", rope_theta=20_000.0)
    for name, settings in (
        ("none", {}),
        ("legacy", {"rope_theta": 2e4, "rope_local_base_freq": 5e3}),
        (
            "legacy linear",
            {"rope_theta": 2e4, "rope_local_base_freq": 5e3, "rope_scaling": LINEAR_ROPE},
        ),
        ("legacy, local only", {"rope_local_base_freq": 5e3}),
        ("legacy, theta only", {"rope_theta": 2e4}),
        ("scaling only", {"rope_scaling": LINEAR_ROPE}),
        ("scaling={}", {"rope_scaling": {}, "rope_theta": 2e4}),
        ("flat", {"rope_parameters": nested()}),
        ("full only", {"rope_parameters": {FULL: nested()}}),
        ("sliding only", {"rope_parameters": {SLIDING: nested()}}),
        ("sliding=null", {"rope_parameters": {FULL: nested(), SLIDING: None}}),
        (
            "no thetas",
            {
                "rope_parameters": {
                    FULL: {"rope_type": "default"},
                    SLIDING: {"rope_type": "default"},
                }
            },
        ),
        (
            "thetas outside",
            {
                "rope_parameters": {
                    FULL: {"rope_type": "default"},
                    SLIDING: {"rope_type": "default"},
                },
                "rope_theta": 2e4,
                "rope_local_base_freq": 5e3,
            },
        ),
        (
            "scaling beside parameters",
            {"rope_parameters": {FULL: nested(), SLIDING: nested()}, "rope_scaling": LINEAR_ROPE},
        ),
        (
            "linear sliding",
            {"rope_parameters": {FULL: nested(), SLIDING: {**LINEAR_ROPE, "rope_theta": 2e4}}},
        ),
        (
            "llama3 full",
            {"rope_parameters": {FULL: {**LLAMA3, "rope_theta": 2e4}, SLIDING: nested()}},
        ),
        (
            "yarn full",
            {
                "rope_parameters": {
                    FULL: {"rope_type": "yarn", "factor": 2.0, "rope_theta": 2e4},
                    SLIDING: nested(),
                }
            },
        ),
        ("yarn scaling", {"rope_theta": 2e4, "rope_scaling": YARN}),
        (
            "yarn, truncate=False",
            {
                "rope_parameters": {
                    FULL: {**YARN, "rope_theta": 2e4, "truncate": False, "beta_slow": 0.25},
                    SLIDING: nested(),
                }
            },
        ),
        (
            "partial 1.0",
            {
                "rope_parameters": {
                    FULL: {**nested(), "partial_rotary_factor": 1.0},
                    SLIDING: nested(),
                }
            },
        ),
        (
            "partial 0.5",
            {
                "rope_parameters": {
                    FULL: {**nested(), "partial_rotary_factor": 0.5},
                    SLIDING: nested(),
                }
            },
        ),
        (
            "proportional, factor",
            {
                "rope_parameters": {
                    FULL: {"rope_type": "proportional", "rope_theta": 2e4, "factor": 4.0},
                    SLIDING: nested(),
                }
            },
        ),
        ("parameters=null", {"rope_parameters": None}),
        (
            "unknown layer type",
            {"rope_parameters": {FULL: nested(), SLIDING: nested(), "chunked_attention": nested()}},
        ),
    ):
        families = ("gemma3", "gemma4") if name != "legacy linear" else (*GEMMA3, *GEMMA4)
        families += ("olmo3",)
        yield Edit(f"rope: {name}", "rope", families, functools.partial(_rope, **settings))

    yield from _latent_edits()
    # Published Qwen3.5 folders have these.
    image = {"mrope_section": [1, 1, 2], "mrope_interleaved": True}
    yield Edit("rope: of images", "rope", HYBRID, functools.partial(_rope_inner, **image))
    for value in (0.25, 1.0, ABSENT):
        inner = functools.partial(_rope_inner, partial_rotary_factor=value)
        said = "absent" if value is ABSENT else value
        yield Edit(f"rope: part {said}", "rope", HYBRID, inner)


def _latent_edits() -> Iterator[Edit]:
    for name, settings in (
        ("default", {"rope_parameters": DEFAULT}),
        ("parameters=null", {"rope_parameters": None}),
        ("linear", {"rope_theta": 2e4, "rope_scaling": LINEAR_ROPE}),
        ("linear, mscale", {"rope_scaling": {**LINEAR_ROPE, "mscale_all_dim": 0.7}}),
        ("legacy yarn", {"rope_theta": 2e4, "rope_scaling": {**YARN, **_MSCALES}}),
    ):
        yield Edit(f"rope: {name}", "rope", DEEPSEEK, functools.partial(_rope, **settings))
    for name, inner in (
        ("no mscale", {"mscale": ABSENT}),
        ("no mscale_all_dim", {"mscale_all_dim": ABSENT}),
        ("mscale_all_dim=0", {"mscale_all_dim": 0}),
        ("attention_factor", {"attention_factor": 1.2}),
        ("neither", {"mscale": ABSENT, "mscale_all_dim": ABSENT}),
    ):
        yield Edit(f"rope: {name}", "rope", DEEPSEEK, functools.partial(_rope_inner, **inner))


_MSCALES = {"mscale": 0.7, "mscale_all_dim": 0.7}
ROPE_EDITS = tuple(_rope_edits())
