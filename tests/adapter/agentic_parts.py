"""A tiny agentic GRPO program on Tunix, in parts: parser, environments, a cluster that records."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig
from tunix.rl.agentic.environments.base_environment import BaseTaskEnv, EnvStepResult
from tunix.rl.rl_cluster import RLCluster, RLTrainingConfig

from tests import tunix_reference as ref
from tests.adapter.grpo_parts import EOS, MODEL, make_parts, rollout_config
from tests.adapter.helpers import EndingTokenizer, text_of
from tests.geometry import SMALL
from tests.threads import LIMIT_S, start
from tunix_sgljax import AgenticGrpoLearner, SglJaxRollout

RESPONSE = 48
PER_STEP = 2
GROUP = 4
OFTEN = 51  # the token that the model samples most: as the end token, it ends most turns early


def prompts_of(step: int) -> list[str]:
    """The prompts of a step, which no other step has."""
    ids = ref.make_prompts(MODEL["vocab_size"], (3, 5), seed=100 + step)
    return [text_of([2 + step, *row]) for row in ids]


def batches(num_steps: int) -> list[dict[str, Any]]:
    """A batch of prompts for each step."""
    return [{"prompts": np.array(prompts_of(step))} for step in range(num_steps)]


def reward(prompts, completions, **_):
    """The share of even tokens: something that samples differ in."""
    assert len(prompts) == len(completions)
    ids = [[int(word) for word in text.split()] for text in completions]
    return [sum(token % 2 == 0 for token in row) / (len(row) or 1) for row in ids]


class Parser:
    """The contents, which are token ids, and after an answer the token that ended it."""

    def __init__(self, end: int = EOS):
        self._after_answer = (str(end),)

    def parse(self, messages, add_generation_prompt=False, is_first_msg=False):
        words = []
        for message in messages:
            # Tunix hands the question over as an array of one string.
            words += np.asarray(message["content"]).item().split()
            words += self._after_answer if message["role"] == "assistant" else []
        return " ".join(words)

    def update_assistant_end_tokens(self, tokens):
        """Releases of Tunix after 0.1.7 ask for it; their Qwen parser returns a new array too."""
        added = [int(word) for word in self._after_answer[1:]]
        return np.concatenate([tokens, np.array(added, np.int32)]), len(added)


class LineParser(Parser):
    """Puts one more token behind an answer, as Qwen's template has a line break there."""

    def __init__(self, end: int = EOS):
        super().__init__(end)
        self._after_answer += ("6",)


class Turns(BaseTaskEnv):
    """Says three more tokens after each of the first two answers.

    Tunix keeps no token of a turn that fills the whole response: let `OFTEN` end the answers.
    """

    def __init__(self, single_example, **kwargs):
        super().__init__(task=single_example, max_steps=3, **kwargs)

    def _initial_observation(self):
        return self.task

    def _step_impl(self, action):
        del action
        return EnvStepResult(
            observation=f"7 {self.step_count} 9", reward=1.0, done=self.step_count == 3, info={}
        )


class SnapshotRollout(SglJaxRollout):
    """Keeps the weights of every version."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        # Copies: the variables of the state are live.
        self.snapshots = {0: jax.tree.map(np.asarray, nnx.state(arguments["rollout_actor"]))}

    def update_params(self, params, filter_types=None):
        super().update_params(params, filter_types)
        self.snapshots[self.weight_version] = jax.tree.map(np.asarray, params)


class RecordingCluster(RLCluster):
    """Keeps what the trainer trains on."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.examples: list[Any] = []
        self.metrics: dict[str, list[float]] = {}
        self.with_external_metrics_logger(self._keep)

    def update_actor(self, train_ds, eval_ds, skip_jit=False):
        self.examples.extend(train_ds)
        return super().update_actor(train_ds, eval_ds, skip_jit)

    def _keep(self, buffer):
        for name, (values, _) in buffer.metrics.items():
            self.metrics.setdefault(name, []).extend(values)


def make_cluster(
    *,
    num_steps: int,
    rollout: Any = SnapshotRollout,
    engine: Any = None,
    in_consumer: bool = True,
    eos: int = EOS,
    training: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A cluster on one device; the caller closes its rollout.

    Args:
        num_steps: The learner stops after so many.
        rollout: The class of the rollout.
        engine: Tunix's name of another rollout.
        in_consumer: Whether train examples are made on the training thread.
        eos: The end token.
        training: More fields of the RLTrainingConfig.
        sampling: More fields of the RolloutConfig.
        **options: Of the rollout.
    """
    fields = {
        "actor_optimizer": optax.adam(1e-2),
        "eval_every_n_steps": 100,
        "max_steps": num_steps,
        "mini_batch_size": PER_STEP,
        "train_micro_batch_size": PER_STEP,
        "compute_logps_micro_batch_size": PER_STEP if in_consumer else 1,
    }
    parts = make_parts(
        rollout_engine=engine or functools.partial(rollout, **{**SMALL, **options}),
        rollout_config=rollout_config(
            max_tokens_to_generate=RESPONSE,
            return_logprobs=True,
            kv_cache_size=128,
            **(sampling or {}),
        ),
        training_config=RLTrainingConfig(**(fields | (training or {}))),
    )
    return RecordingCluster(**(parts.arguments | {"tokenizer": EndingTokenizer(eos=eos)}))


def make_learner(
    cluster: Any,
    *,
    config: dict[str, Any] | None = None,
    parser: Any = None,
    rewards: Any = None,
    **options: Any,
) -> Any:
    """A learner of the cluster."""
    fields = {
        "num_generations": GROUP,
        "beta": 0.04,
        "max_response_length": RESPONSE,
        "max_concurrency": 2 * PER_STEP * GROUP,
        "off_policy_steps": 1,
    }
    return AgenticGrpoLearner(
        cluster,
        GRPOConfig(**(fields | (config or {}))),
        rewards or [reward],
        chat_parser=parser or Parser(),
        **options,
    )


def train(learner: Any, num_steps: int) -> None:
    """Trains on a thread of its own, so that a deadlock fails instead of hanging."""
    start(lambda: learner.train(batches(num_steps))).result(LIMIT_S)
