"""How fast a chip could run a program at best: an estimate from published rates, no measurement."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal, NamedTuple

import jax.numpy as jnp

from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.registry import get_model
from sgljax_engine.models.spec import ParamKind
from sgljax_engine.preview import EnginePreview
from tools.aot.chips import Chip
from tools.aot.report import ProgramReport

_KEYS = re.compile(r"\.self_attn\.[kv]_proj\.|\.linear_attn\.(in_proj_|conv1d|A_log|dt_bias)")
"""Parameters that keys, values and recurrent states are made with."""

_STATE_FLOPS = 7
"""Operations of a number of a recurrent state for a token: two products that read it, and one that
changes it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The least time of a step by a roofline: its bytes or its operations at the published rate.

    Exchanges between devices and the host's work take no time in it.

    Attributes:
        name: "decode" or "prefill".
        basis: "model": the operations of the matrices and of attention, and the bytes of the
            weights and of the KV, each read once. "program": what the compiler counts of the
            program, see `ProgramReport`.
        step_s: Seconds of a step.
        tokens_per_s: Tokens that all engines of the group process in a second.
        bound: What takes the time.
    """

    name: str
    basis: Literal["model", "program"]
    step_s: float
    tokens_per_s: float
    bound: Literal["memory", "compute"]


def estimate(
    chip: Chip, model: ModelConfig, preview: EnginePreview, program: ProgramReport
) -> tuple[Estimate, ...]:
    """Estimates of a decode or prefill program: by model, and by program if that is counted.

    Both are of requests that fill their page tables: each token attends to `max_model_len` keys, or
    to those in the window of a sliding layer. Prefill has as few requests as its tokens can be of.

    Args:
        chip: The chip.
        model: The model's shape.
        preview: The engine that the program is of.
        program: A program that fits.
    """
    memory = preview.memory
    assert memory is not None
    is_decode = program.name == "decode"
    used = used_parameters(model, program.size, is_decode=is_decode)
    weight_bytes = memory.weights_bytes / preview.num_parameters
    num_keys, num_scored = _attention(model, preview, program.size, is_decode=is_decode)
    num_bytes = used.num_read * weight_bytes / preview.tp_size
    num_bytes += 2 * num_keys * jnp.dtype(preview.dtype).itemsize
    # Recurrent states are read and written, float32.
    num_states = _states(model)
    num_requests = program.size if is_decode else math.ceil(program.size / preview.max_model_len)
    num_bytes += 2 * 4 * num_states * num_requests / preview.tp_size
    flops = 2 * program.size * used.num_multiplied + 4 * num_scored
    flops = (flops + _STATE_FLOPS * program.size * num_states) / preview.tp_size
    by_model = _roofline(chip, preview, program, "model", flops, num_bytes)
    if program.flops is None or program.memory_bytes is None:
        return (by_model,)
    counted = program.flops, program.memory_bytes
    return by_model, _roofline(chip, preview, program, "program", *counted)


class UsedParameters(NamedTuple):
    """Parameters that a program uses.

    Attributes:
        num_read: Those that it reads: of experts at most as many as its tokens go through.
        num_multiplied: Those that a token is multiplied with.
    """

    num_read: float
    num_multiplied: float


def used_parameters(model: ModelConfig, num_tokens: int, *, is_decode: bool) -> UsedParameters:
    """Parameters that decode or prefill uses; of tables that are looked up none.

    Prefill computes no logits, and ends with the keys and values of the last layer that has some,
    or its recurrent state.
    """
    last = max((*model.cached_layers, *model.state_layers))
    num_read = num_multiplied = 0.0
    for name, spec in get_model(model.architecture).param_specs(model).items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        index = -1 if layer is None else int(layer[1])
        is_looked_up = spec.kind is ParamKind.EMBEDDING
        is_after = index > last or (index == last and not _KEYS.search(name))
        if is_looked_up or (not is_decode and (spec.kind is ParamKind.HEAD or is_after)):
            continue
        size, share = math.prod(spec.shape), 1.0
        if spec.kind is ParamKind.EXPERTS and model.moe is not None:
            share = model.moe.num_experts_per_token / model.moe.num_experts
        num_read += size * min(share * num_tokens, 1.0)
        num_multiplied += size * share
    return UsedParameters(num_read, num_multiplied)


def _attention(
    model: ModelConfig, preview: EnginePreview, num_tokens: int, *, is_decode: bool
) -> tuple[float, float]:
    """Numbers of the keys that a device reads, and of query numbers times the keys they meet."""
    context = preview.max_model_len
    new = 1 if is_decode else min(num_tokens, context)  # tokens of a request
    num_keys = num_scored = 0.0
    for layer in range(model.num_layers if is_decode else model.cached_layers[-1]):
        if model.has_state(layer):
            continue
        slides, heads = model.attention.slides(layer), model.kv_shape(layer)
        window = (model.attention.sliding_window if slides else None) or context
        read = min(context, window - 1 + new) * math.ceil(num_tokens / new)
        num_keys += read * heads.head_dim * max(heads.num_heads / preview.tp_size, 1)
        seen = min(context, window)
        num_scored += num_tokens * seen * model.num_heads * heads.head_dim
    return num_keys, num_scored


def _states(model: ModelConfig) -> int:
    """Numbers in the matrices of a request's recurrent states."""
    net = model.linear_attention
    if net is None:
        return 0
    return len(model.state_layers) * net.num_value_heads * net.key_dim * net.value_dim


def _roofline(
    chip: Chip,
    preview: EnginePreview,
    program: ProgramReport,
    basis: Literal["model", "program"],
    flops: float,
    num_bytes: float,
) -> Estimate:
    compute_s, memory_s = flops / chip.bf16_flops_per_s, num_bytes / chip.hbm_bytes_per_s
    step_s = max(compute_s, memory_s)
    return Estimate(
        name=program.name,
        basis=basis,
        step_s=step_s,
        tokens_per_s=program.size * preview.num_engines / step_s if step_s else 0.0,
        bound="memory" if memory_s >= compute_s else "compute",
    )
