"""What the agentic examples share: sections of their config files, a chat template, training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import optax
from omegaconf import OmegaConf
from tunix.rl.rl_cluster import RLTrainingConfig

_T = TypeVar("_T")


@dataclasses.dataclass
class GrpoSettings:
    """The section `grpo` of a config file."""

    prompts_per_step: int = 8
    num_generations: int = 8
    beta: float = 0.0
    epsilon: float = 0.2
    learning_rate: float = 1e-4
    max_grad_norm: float = 1.0

    def max_concurrency(self, off_policy_steps: int) -> int:
        """All episodes that Tunix may have in flight, so that its lock cannot deadlock."""
        return (off_policy_steps + 1) * self.prompts_per_step * self.num_generations


def read_settings(path: Path, kind: type[_T]) -> _T:
    """Returns the settings in a YAML file; `kind` is a dataclass.

    Raises:
        omegaconf.errors.OmegaConfBaseException: A key is unknown or a value has the wrong type.
    """
    settings = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(kind), OmegaConf.load(path))
    )
    assert isinstance(settings, kind)
    return settings


class PlainParser:
    """A chat template without a template: a prompt is what the user asked."""

    def parse(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = False,
        is_first_msg: bool = False,
    ) -> str:
        """Returns the contents of the messages."""
        del add_generation_prompt, is_first_msg
        # Tunix hands the question over as an array of one string.
        return "".join(np.asarray(message["content"]).item() for message in messages)

    def update_assistant_end_tokens(self, tokens: np.ndarray) -> tuple[np.ndarray, int]:
        """Returns sampled tokens with what the template puts behind them: nothing.

        Releases of Tunix after 0.1.7 ask for it.
        """
        return tokens, 0


def training_config(grpo: GrpoSettings, steps: int) -> RLTrainingConfig:
    """Returns how Tunix trains."""
    return RLTrainingConfig(
        actor_optimizer=optax.chain(
            optax.clip_by_global_norm(grpo.max_grad_norm), optax.adam(grpo.learning_rate)
        ),
        eval_every_n_steps=steps + 1,
        max_steps=steps,
        # The whole batch at once, on the training thread: the loop's thread stays free.
        mini_batch_size=grpo.prompts_per_step,
        train_micro_batch_size=grpo.prompts_per_step,
        compute_logps_micro_batch_size=grpo.prompts_per_step,
    )
