"""The sizes of what gpu_ladder.py measures."""

from __future__ import annotations

import dataclasses

from benchmarks.lib import workloads
from benchmarks.lib.shapes import QWEN3_0P6B
from sgljax_engine import ModelConfig

_LONG_ANSWERS = dataclasses.replace(workloads.FULL, output_low=32, output_high=512)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured.

    Attributes:
        model: Its shape.
        rows, context, num_steps: Of the decode steps; tokens of a prompt, and steps behind it.
        check_tokens: Greedy tokens of each row that are compared.
        rollout: Sizes of the workload `rl_longtail`.
        bench_requests, bench_lengths: Of bench.py's workload: inputs and outputs.
        served_requests, served_lengths: Of kvcached's workload: tokens of each input and output.
        grpo_prompts, grpo_group, grpo_tokens: Of a training: prompts a step, completions of each,
            tokens of a prompt and of a completion.
        prefill_tokens: Prompt lengths.
        tile_rows: Rows of an MLP alone, by tiles.
        hopper_rows: Likewise, by JAX's products.
        repeats: Timed runs; the median counts.
    """

    model: ModelConfig = QWEN3_0P6B
    rows: int = 128
    context: int = 512
    num_steps: int = 128
    check_tokens: int = 16
    rollout: workloads.Sizes = _LONG_ANSWERS
    bench_requests: int = 256
    bench_lengths: tuple[int, int] = (100, 1024)
    served_requests: int = 500
    served_lengths: tuple[int, int] = (512, 128)
    grpo_prompts: int = 16
    grpo_group: int = 8
    grpo_tokens: tuple[int, int] = (256, 512)
    prefill_tokens: tuple[int, ...] = (512, 2048)
    tile_rows: tuple[int, ...] = (128, 64)
    hopper_rows: tuple[int, ...] = (64, 128, 256)
    repeats: int = 5

    @classmethod
    def smoke(cls) -> Sizes:
        """Runs in some minutes on a CPU."""
        model = dataclasses.replace(
            QWEN3_0P6B,
            num_layers=2,
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
        )
        return cls(
            model=model,
            rows=4,
            context=16,
            num_steps=8,
            check_tokens=2,
            rollout=workloads.QUICK,
            bench_requests=3,
            bench_lengths=(4, 8),
            served_requests=3,
            served_lengths=(8, 4),
            grpo_prompts=1,
            grpo_group=2,
            grpo_tokens=(8, 4),
            prefill_tokens=(16,),
            tile_rows=(16,),
            hopper_rows=(16,),
            repeats=1,
        )

    def in_words(self) -> str:
        """The model, for the report."""
        m = self.model
        return (
            f"Qwen3 of {m.num_layers} layers, hidden {m.hidden_size}, {m.num_heads}/"
            f"{m.num_kv_heads} heads of {m.head_dim}, MLP {m.intermediate_size}, vocabulary "
            f"{m.vocab_size}"
        )

    def workload(self) -> workloads.Workload:
        """A step of GRPO."""
        return workloads.make_workload("rl_longtail", self.model.vocab_size, sizes=self.rollout)
