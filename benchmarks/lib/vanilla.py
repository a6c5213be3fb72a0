"""Tunix's vanilla sampler as a peer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tunix.generate.sampler import CacheConfig, Sampler

from benchmarks.lib.shapes import IdTokenizer
from benchmarks.lib.workloads import Workload
from sgljax_engine import ModelConfig

VANILLA = "vanilla"


class VanillaPeer:
    """Tunix's vanilla sampler: compiled, left-padded to the longest prompt of the workload.

    It takes fixed batches, one after the other.
    """

    def __init__(
        self, model: Any, config: ModelConfig, workload: Workload, batch_size: int | None
    ) -> None:
        """Makes the sampler.

        Args:
            model: The Tunix model.
            config: The model's shape.
            workload: The largest workload that it will run.
            batch_size: Requests in a batch; None for all.
        """
        self.batch_size = batch_size or len(workload.output_lengths)
        self.name = VANILLA if batch_size is None else f"{VANILLA}, micro-batch"
        self._model = model
        self._max_prompt_len = workload.max_prompt_len
        self._cache_config = CacheConfig(
            cache_size=workload.max_model_len,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        self._vocab_size = config.vocab_size
        self._sampler = self._make_sampler()

    def _make_sampler(self) -> Sampler:
        return Sampler(self._model, IdTokenizer(), self._cache_config)

    def start(self, workload: Workload) -> None:
        """Compiles the loop. Every token ends a row here, so that it stops at once.

        It uses a separate sampler, since compiled programs hold the end tokens.
        """
        sampler = self._make_sampler()
        end_tokens = list(range(self._vocab_size))
        for prompts, lengths in batches(workload, self.batch_size):
            self._run(sampler, prompts, max(lengths), end_tokens=end_tokens)

    def generate(self, workload: Workload, *, is_greedy: bool = False) -> list[list[int]]:
        """Answers all requests, batch by batch."""
        outputs: list[list[int]] = []
        for prompts, lengths in batches(workload, self.batch_size):
            rows = self._run(self._sampler, prompts, max(lengths), is_greedy=is_greedy)
            outputs += [
                np.asarray(row)[:length].tolist() for row, length in zip(rows, lengths, strict=True)
            ]
        return outputs

    def first_token_s(self, workload: Workload) -> list[float]:
        """Seconds of a run with one step, which favours micro-batches."""
        seconds: list[float] = []
        start = time.perf_counter()
        for prompts, _ in batches(workload, self.batch_size):
            self._run(self._sampler, prompts, 1)
            seconds += [time.perf_counter() - start] * len(prompts)
        return seconds

    def close(self) -> None:
        """Does nothing."""

    def _run(
        self,
        sampler: Sampler,
        prompts: list[list[int]],
        num_steps: int,
        *,
        is_greedy: bool = False,
        end_tokens: list[int] | None = None,
    ) -> list[Any]:
        output = sampler(
            [IdTokenizer().decode(prompt) for prompt in prompts],
            max_generation_steps=num_steps,
            max_prompt_length=self._max_prompt_len,
            temperature=0.0 if is_greedy else 1.0,
            top_p=None if is_greedy else 1.0,
            eos_tokens=end_tokens,
            seed=time.perf_counter_ns() % 2**31,
        )
        return list(output.tokens)


def batches(workload: Workload, size: int) -> Iterator[tuple[list[list[int]], Sequence[int]]]:
    """Prompts and output lengths of each batch, in order."""
    requests, lengths = workload.requests, workload.output_lengths
    for start in range(0, len(requests), size):
        yield requests[start : start + size], lengths[start : start + size]
