"""The engine as Tunix's own samplers are called: by programs that evaluate the rollout's policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tunix.generate.base_sampler import SamplerOutput
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput

from sgljax_engine import InvalidRequestError


class RolloutSampler:
    """A rollout, called as the `_sampler` that Tunix's rollouts have.

    Tunix's scripts read that private attribute to evaluate a policy with other settings than those
    of its training. Any thread, as `SglJaxRollout.generate`.
    """

    def __init__(
        self,
        generate: Callable[[list[str], RolloutConfig], RolloutOutput],
        training: Callable[[], RolloutConfig],
    ) -> None:
        self._generate = generate
        self._training = training

    def __call__(
        self,
        input_strings: str | list[str],
        max_generation_steps: int,
        max_prompt_length: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        beam_size: int | None = None,
        seed: Any = None,
        multi_sampling: int = 1,
        return_logits: bool = False,
        echo: bool = False,
        pad_output: bool = False,
    ) -> SamplerOutput:
        """Samples a completion for each prompt, without log-probs; arguments as of `BaseSampler`.

        `max_prompt_length` None takes the training config's. What this engine lacks (beams, several
        samples, logits, echo, padding) is refused by the argument's name.
        """
        limits = {
            "beam_size": (beam_size, None),
            "multi_sampling": (multi_sampling, 1),
            "return_logits": (return_logits, False),
            "echo": (echo, False),
            "pad_output": (pad_output, False),
        }
        for name, (value, limit) in limits.items():
            if value != limit:
                raise InvalidRequestError(
                    f"{name} must be {limit} for a sampler of SglJaxRollout, got {value!r}"
                )
        training = self._training()
        config = dataclasses.replace(
            training,
            max_tokens_to_generate=max_generation_steps,
            max_prompt_length=max_prompt_length or training.max_prompt_length,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            return_logprobs=False,
        )
        prompts = [input_strings] if isinstance(input_strings, str) else list(input_strings)
        output = self._generate(prompts, config)
        return SamplerOutput(
            text=output.text,
            logits=None,
            tokens=list(output.tokens),
            padded_prompt_tokens=output.left_padded_prompt_tokens,
            logprobs=None,
        )
