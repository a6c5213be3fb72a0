"""The least time that useful work takes on a machine: FLOPs and bytes over measured ceilings.

Counted is what any engine must do for the tokens that were asked for, and nothing else:

- A forward pass over each distinct prompt once, and over each output token but the last of its
  request (nothing comes after it).
- Weights are read once a decode step. There are as few steps as the engine's rows allow: no less
  than the longest output, and no less than all tokens over the rows.
- Each decoded token reads the keys and values of its own context. (Rows of one group can share the
  reads of their prompt; that is not counted, since among the peers only ours does it, and in part.)
- Logits of the last prompt token, once a prompt, and of each decoded token; the embedding table
  is read with them. Sampling reads each logit once.

A part takes the longer of its FLOPs and its bytes; parts add up. Norms, rotary embeddings, the
writing of keys and the host count as nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.hardware.ceilings import Ceilings
from benchmarks.lib.workloads import Workload
from sgljax_engine import ModelConfig

ITEM_BYTES = 4
"""Bytes of a weight, key or value: float32."""

_LOGIT_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartWork:
    """What one part of the model has to do.

    Attributes:
        part: "projections" and the like.
        flops: Operations, a multiply-add being two.
        num_bytes: Bytes that it has to read.
    """

    part: str
    flops: float
    num_bytes: float

    def limit_s(self, ceilings: Ceilings) -> float:
        """Seconds that it takes at least."""
        return max(self.flops / ceilings.flops_per_s, self.num_bytes / ceilings.read_bytes_per_s)


def projection_params(config: ModelConfig) -> int:
    """Weights in the projections of all layers."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)


def embedding_params(config: ModelConfig) -> int:
    """Weights in the embedding table."""
    return config.vocab_size * config.hidden_size


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of all projections and of the embedding table, once."""
    return (projection_params(config) + embedding_params(config)) * ITEM_BYTES


def decode_work(
    config: ModelConfig, *, num_tokens: int, num_keys: int, num_passes: int
) -> list[PartWork]:
    """What decoding takes.

    Args:
        config: The model.
        num_tokens: Tokens decoded.
        num_keys: Keys that they see, each its own included, all together.
        num_passes: Times that the weights are read.
    """
    return [
        PartWork(
            part="projections",
            flops=2.0 * projection_params(config) * num_tokens,
            num_bytes=float(projection_params(config)) * ITEM_BYTES * num_passes,
        ),
        PartWork(
            part="attention",
            flops=_attention_flops(config, num_keys),
            num_bytes=_kv_bytes(config, num_keys),
        ),
        *_logit_work(config, num_tokens, num_passes),
    ]


def prefill_work(config: ModelConfig, prompt_lens: Sequence[int]) -> list[PartWork]:
    """What the prompts take, all in one pass, with the logits of their last tokens."""
    num_tokens = sum(prompt_lens)
    num_keys = sum(length * (length + 1) // 2 for length in prompt_lens)
    return [
        PartWork(
            part="prefill projections",
            flops=2.0 * projection_params(config) * num_tokens,
            num_bytes=float(projection_params(config)) * ITEM_BYTES,
        ),
        PartWork(
            part="prefill attention",
            flops=_attention_flops(config, num_keys),
            num_bytes=_kv_bytes(config, num_tokens),
        ),
        *_logit_work(config, len(prompt_lens), 1),
    ]


def _attention_flops(config: ModelConfig, num_keys: int) -> float:
    """Scores and weighted values: each key meets each query head twice."""
    return 4.0 * config.num_layers * config.num_heads * config.head_dim * num_keys


def _kv_bytes(config: ModelConfig, num_keys: int) -> float:
    per_key = 2 * config.num_layers * config.num_kv_heads * config.head_dim * ITEM_BYTES
    return float(per_key) * num_keys


def _logit_work(config: ModelConfig, num_rows: int, num_passes: int) -> list[PartWork]:
    table = embedding_params(config)
    logits = PartWork(
        part="logits",
        flops=2.0 * table * num_rows,
        num_bytes=float(table) * ITEM_BYTES * num_passes,
    )
    sampling = PartWork(
        part="sampling", flops=0.0, num_bytes=float(num_rows) * config.vocab_size * _LOGIT_BYTES
    )
    return [logits, sampling]


def min_decode_steps(workload: Workload) -> int:
    """Decode steps that cannot be avoided: the first token of a request comes from its prompt."""
    num_tokens = sum(length - 1 for length in workload.output_lengths)
    return max(-(-num_tokens // workload.num_rows), workload.max_output_len - 1)


def useful_work(config: ModelConfig, workload: Workload) -> list[PartWork]:
    """All that a workload needs, a part each; see the module."""
    prompt_lens = [len(prompt) for prompt in workload.prompts]
    return [*prefill_work(config, prompt_lens), *_decode_work(config, workload)]


def _decode_work(config: ModelConfig, workload: Workload) -> list[PartWork]:
    num_tokens = num_keys = 0
    for prompt, length in zip(workload.requests, workload.output_lengths, strict=True):
        num_tokens += length - 1
        # The i-th output token, counted from 0, sees the prompt, those before it, and itself.
        num_keys += (length - 1) * (len(prompt) + 1) + (length - 1) * (length - 2) // 2
    return decode_work(
        config,
        num_tokens=num_tokens,
        num_keys=num_keys,
        num_passes=min_decode_steps(workload),
    )


def decode_step_bytes(config: ModelConfig, workload: Workload) -> int:
    """Bytes that a decode step reads on average: all weights, and the keys of its rows.

    It is what goes through a machine's caches before the same weight is read again.
    """
    work = _decode_work(config, workload)
    num_bytes = sum(entry.num_bytes for entry in work if entry.part != "sampling")
    return round(num_bytes / min_decode_steps(workload))


def limit_by_part(work: Sequence[PartWork], ceilings: Ceilings) -> dict[str, float]:
    """Seconds by part; entries of the same part add up."""
    seconds: dict[str, float] = {}
    for entry in work:
        seconds[entry.part] = seconds.get(entry.part, 0.0) + entry.limit_s(ceilings)
    return seconds
