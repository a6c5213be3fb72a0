"""From Tunix's prompts and configs to the engine's requests, and from their outputs to Tunix's."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import InvalidRequestError, RequestOutput, SamplingParams, derive_seed
from tunix_sgljax import padding, sampling
from tunix_sgljax.in_flight.outputs import VersionedRolloutOutput
from tunix_sgljax.rollout_config.end_tokens import find_end_ids
from tunix_sgljax.rollout_config.memory import ConfigMemory
from tunix_sgljax.rollout_config.vllm_sampling import with_training_kwargs

_MAX_SEEDS = 16
"""Seeds whose calls a checkpoint keeps; who gives each call a seed of its own needs none kept."""


class SamplingReader:
    """Reads sampling parameters from the configs of calls. Any thread."""

    def __init__(self, extra: Mapping[str, Any], eos_id: int) -> None:
        self._extra = extra
        self._eos_id = eos_id
        self._lock = threading.Lock()
        self._num_calls: dict[int, int] = {}
        self._first_call = 0
        self._reports_masks = False
        self._memory: ConfigMemory[SamplingParams] = ConfigMemory()

    def bind(self, training: RolloutConfig) -> None:
        """Takes end tokens and vLLM's sampling fields of the training config for all calls."""
        self._end_ids = find_end_ids(training, self._eos_id)
        self._training = training
        self._memory.clear()

    def report_masks(self) -> None:
        """Makes all requests from now on report their sampling masks."""
        self._reports_masks = True
        self._memory.clear()

    def params(
        self, config: RolloutConfig, *, shows_special_tokens: bool = False
    ) -> SamplingParams:
        def read() -> SamplingParams:
            masks = {"return_sampling_mask": True} if self._reports_masks else {}
            return sampling.to_sampling_params(
                with_training_kwargs(config, self._training),
                end_ids=self._end_ids,
                seed=None,
                extra={**self._extra, **masks},
                shows_special_tokens=shows_special_tokens,
            )

        return self._memory.get(
            config,
            read,
            shows_special_tokens=shows_special_tokens,
            training_kwargs=self._training.rollout_vllm_sampling_kwargs,
        )

    def row_params(
        self, config: RolloutConfig, count: int, *, shows_special_tokens: bool
    ) -> list[SamplingParams]:
        """Sampling parameters of each prompt; a `seed` gives the next draws of that seed."""
        seed = sampling.seed_to_int(config.seed)
        params = self.params(config, shows_special_tokens=shows_special_tokens)
        if seed is None:
            return [params] * count
        with self._lock:
            call = self._num_calls.pop(seed, self._first_call)
            self._num_calls[seed] = call + 1  # the newest seed is the last
        # Index 0 would leave the seed unmixed, and one call's row could repeat another's.
        call_seed = derive_seed(seed, call + 1)
        return [
            dataclasses.replace(params, seed=derive_seed(call_seed, row + 1))
            for row in range(count)
        ]

    @property
    def num_calls(self) -> dict[str, int]:
        """Calls with each of the newest seeds, as JSON holds them."""
        with self._lock:
            newest = list(self._num_calls.items())[-_MAX_SEEDS:]
        return {str(seed): count for seed, count in newest}

    def go_on(self, num_calls: Mapping[str, int], *, are_others: bool) -> None:
        """Draws on where an earlier process left `num_calls`, by seed.

        `are_others`: another process wrote that, which had seeds of its own but made as many calls.
        """
        with self._lock:
            self._first_call = max(num_calls.values(), default=0) if are_others else 0
            for seed, count in num_calls.items():
                self._num_calls[int(seed)] = max(count, self._num_calls.get(int(seed), 0))


def to_rollout_output(
    prompt_ids: list[list[int]],
    outputs: list[RequestOutput],
    *,
    config: RolloutConfig,
    end_ids: Collection[int],
    pad_id: int,
    logprobs_mode: str,
) -> VersionedRolloutOutput:
    """The result of a call, as Tunix's learners take it."""
    rows = [
        (output, padding.num_before_end(output.output_ids, pad_id, end_ids)) for output in outputs
    ]
    logprobs = masks = None
    if any(output.sampling_masks for output in outputs):
        masks = [output.sampling_masks[:length] for output, length in rows]
        logprobs_mode = "processed_logprobs"
    if config.return_logprobs or masks is not None:
        logprobs = [
            np.asarray(sampling.pick_logprobs(output, logprobs_mode)[:length], np.float32)
            for output, length in rows
        ]
    # A RolloutConfig of 0.1.7 cannot say what it wants: it gets what the engine has.
    wants_experts = getattr(config, "return_routed_experts", True)
    experts = [
        None
        if output.routed_experts is None
        else output.routed_experts[: len(output.prompt_ids) + length]
        for output, length in rows
    ]
    replicas = [output.replica_id for output in outputs]
    return VersionedRolloutOutput(
        text=[output.text for output in outputs],
        logits=[],
        tokens=[np.asarray(output.output_ids[:length], np.int32) for output, length in rows],
        left_padded_prompt_tokens=padding.left_pad_prompts(
            prompt_ids, config.max_prompt_length, pad_id
        ),
        logprobs=logprobs,
        routed_experts=experts if wants_experts and experts[0] is not None else None,
        weight_versions=[
            np.asarray(output.token_weight_versions[:length], np.int32) for output, length in rows
        ],
        sampling_masks=masks,
        replica_ids=replicas if any(replicas) else None,
    )


def scored_sequences(
    prompt_tokens: jax.Array, completion_tokens: jax.Array, pad_id: int
) -> tuple[list[list[int]], list[int], np.ndarray]:
    """Token ids without padding, the prompt lengths, and which completion tokens count."""
    prompts = padding.unpad_prompts(np.asarray(prompt_tokens), pad_id)
    if any(len(prompt) == 0 for prompt in prompts):
        raise InvalidRequestError("prompt_tokens has a row of padding alone; each needs a token")
    completions_BC = np.asarray(completion_tokens)
    mask_BC = padding.completion_mask(completions_BC, pad_id)
    sequences = [
        np.concatenate((prompt, completion[mask])).tolist()
        for prompt, completion, mask in zip(prompts, completions_BC, mask_BC, strict=True)
    ]
    return sequences, [len(prompt) for prompt in prompts], mask_BC
