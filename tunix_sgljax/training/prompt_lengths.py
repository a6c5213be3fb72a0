"""Whether the prompts of a run's data fit, before weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from tunix.rl.rl_cluster import Mode

from sgljax_engine import InvalidConfigError, InvalidRequestError
from tunix_sgljax.rollout.options import rollout_options
from tunix_sgljax.rollout.prompts import PromptEncoder
from tunix_sgljax.rollout_config.engine_options import implied_model_len
from tunix_sgljax.training.cluster import rollout_configs
from tunix_sgljax.training.schema import TrainConfig
from tunix_sgljax.training.task import Task


def check_prompts(config: TrainConfig, tokenizer: Any, task: Task) -> None:
    """Refuses data with a prompt that the engine would refuse in the middle of a run.

    Raises:
        InvalidConfigError: names the row, its tokens and the limit.
    """
    if config.rollout_engine != "sgljax":
        return
    encoder, configs = PromptEncoder(tokenizer), rollout_configs(config, None)
    given = rollout_options(config.sgljax_config).get("max_model_len")
    longest = implied_model_len(configs[Mode.TRAIN]) if given is None else given
    for key, rows, mode in (
        ("dataset", task.rows, Mode.TRAIN),
        ("eval_dataset", task.eval_rows, Mode.EVAL),
    ):
        for number, row in enumerate(rows):
            name = f"task.{key}, row {number}: prompts"
            try:
                encoder.encode(
                    row["prompts"], configs[mode], name=name, max_model_len=longest, render=_refuse
                )
            except InvalidRequestError as error:
                raise InvalidConfigError(
                    f"{error}; raise rollout_config.max_prompt_length, or drop the row"
                ) from None


def _refuse(messages: Sequence[Any]) -> NoReturn:
    raise AssertionError(f"a task's prompts are texts, got {messages!r}")
