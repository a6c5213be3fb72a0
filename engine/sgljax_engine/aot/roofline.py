"""How fast a chip could run a program at best: an estimate from published rates, no measurement."""

from __future__ import annotations

import dataclasses
from typing import Literal

from sgljax_engine.aot.chips import Chip
from sgljax_engine.aot.report import ProgramReport
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.preview import EnginePreview


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The least time of a step by a roofline: its bytes or its operations at the published rate.

    Exchanges between devices and the host's work take no time in it.

    Attributes:
        name: "decode" or "prefill".
        basis: "model": the operations of the matrices, and the bytes of these and of the KV, each
            read once. "program": what the compiler counts of the program, see `ProgramReport`.
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

    By model, decode reads the KV of rows at half of `max_model_len`, as far as pages hold them;
    prefill reads no KV and computes no logits.

    Args:
        chip: The chip.
        model: The model's shape.
        preview: The engine that the program is of.
        program: A program that fits.
    """
    memory = preview.memory
    assert memory is not None
    tokens, is_decode = program.size, program.name == "decode"
    used = num_used_parameters(model, preview.num_parameters, has_logits=is_decode)
    flops = 2 * used * tokens / preview.tp_size
    num_bytes = memory.weights_bytes / preview.tp_size * used / preview.num_parameters
    if is_decode:
        held = min(tokens * preview.max_model_len / 2, memory.kv_tokens)
        num_bytes += memory.kv_bytes / preview.tp_size * held / memory.kv_tokens
    by_model = _roofline(chip, preview, program, "model", flops, num_bytes)
    if program.flops is None or program.memory_bytes is None:
        return (by_model,)
    counted = program.flops, program.memory_bytes
    return by_model, _roofline(chip, preview, program, "program", *counted)


def num_used_parameters(model: ModelConfig, num_parameters: int, *, has_logits: bool) -> int:
    """Parameters that a token is multiplied with: not the table of embeddings."""
    table = model.vocab_size * model.hidden_size
    num_tables = 1 if model.tie_word_embeddings else 2
    return num_parameters - num_tables * table + (table if has_logits else 0)


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
