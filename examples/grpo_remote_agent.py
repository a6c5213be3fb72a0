"""GRPO with an agent in another process, which plays episodes against the policy over HTTP.

    python examples/grpo_remote_agent.py     # about five minutes on two cores

The trainer serves the policy while it trains it, and starts `remote_agent.py`, a program that knows
OpenAI's client but neither JAX nor this engine. Weights change while the agent's episodes are in
flight. An environment hands a task to the agent and replays the recorded episode to Tunix, so that
the train examples hold the very token ids, log-probs and weight versions of the HTTP replies: each
step asserts it.
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

import argparse
import asyncio
import contextlib
import functools
import logging
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging as absl_logging
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig
from tunix.rl.agentic.environments.base_environment import BaseTaskEnv, EnvStepResult
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from addition_task import load_checkpoint
from agent_process import AgentError, AgentProcess
from agentic_parts import PlainParser, training_config
from calculator import MAX_PROMPT_LENGTH, MAX_RESPONSE_LENGTH, MAX_TURNS, Tokenizer
from calculator_task import model_config, problem_batches
from grpo_tools import ROOT, Settings, load_settings
from remote_steps import RemoteStep, StepLog
from tunix_sgljax import AgenticGrpoLearner, SglJaxRollout, VersionedRolloutOutput
from tunix_sgljax.cli.interrupt import EXIT_INTERRUPTED, Interrupts, current

AGENT = (sys.executable, str(Path(__file__).with_name("remote_agent.py")))


class ReplayEnvironment(BaseTaskEnv):
    """An episode that the agent plays as a whole when Tunix resets it; then Tunix steps through."""

    def __init__(self, task: dict[str, Any], *, agent: AgentProcess, **numbers: Any) -> None:
        super().__init__(task, max_steps=MAX_TURNS, **numbers)
        self._agent = agent
        self._episode: dict[str, Any] = {}

    def _initial_observation(self) -> dict[str, Any]:
        # Tunix hands the question over as an array of one string. The episode becomes a column too.
        self._episode = self._agent.play(str(self.task["prompts"].item()))
        return {**self.task, "episode": [self._episode]}

    def output(self) -> VersionedRolloutOutput:
        """What the policy wrote in the current turn, as if it had been sampled just now."""
        turn = self._episode["turns"][self.step_count]
        return VersionedRolloutOutput(
            text=[turn["text"]],
            logits=[],
            tokens=[np.array(turn["ids"], np.int32)],
            left_padded_prompt_tokens=np.array([turn["prompt_ids"]], np.int32),
            logprobs=[np.array(turn["logprobs"], np.float32)],
            weight_versions=[np.array(turn["versions"], np.int32)],
        )

    def _step_impl(self, action: Any) -> EnvStepResult:
        del action  # the agent has acted already
        turns = self._episode["turns"]
        if self.step_count == len(turns):  # counted before this call
            return EnvStepResult(None, self._episode["reward"], True, {})
        return EnvStepResult(turns[self.step_count - 1]["tool"], 0.0, False, {})


class ReplayLearner(AgenticGrpoLearner):
    """Takes the policy's turns from the recorded episodes, and checks what becomes of them."""

    def __init__(self, *arguments: Any, agent: AgentProcess, log: StepLog, **options: Any) -> None:
        super().__init__(
            *arguments, env_class=ReplayEnvironment, env_kwargs={"agent": agent}, **options
        )
        self._agent = agent
        self._log = log

    def _model_call(
        self,
        chat_lists: list[dict[str, str]],
        env: Any = None,
        max_generation_steps: int | None = None,
    ) -> VersionedRolloutOutput:
        del chat_lists, max_generation_steps
        env.task["policy_version"] = self.policy_version  # until the learner has seen the tokens
        return env.output()

    def _process_results(self, trajectories: list[Any], *arguments: Any, **options: Any) -> Any:
        self._agent.check()  # else it would train on what is left of the batch
        examples: list[Any] = super()._process_results(trajectories, *arguments, **options)
        episodes = [item.traj["original_input"]["episode"][0] for item in trajectories]
        (example,) = examples
        assert_exact(example, episodes)
        versions = example.token_versions[np.asarray(example.completion_mask, bool)]
        self._log.add_batch(episodes, lag=self.policy_version - float(np.mean(versions)))
        return examples

    def stop_episodes(self) -> None:
        """Ends what still waits for prompts or for the agent after an error; any thread."""
        self.loop.call_soon_threadsafe(
            lambda: [task.cancel() for task in asyncio.all_tasks(self.loop)]
        )


def assert_exact(example: Any, episodes: Sequence[dict[str, Any]]) -> None:
    """Asserts that each row of a train example holds exactly what its HTTP replies held."""
    for row, episode in enumerate(episodes):
        turns = episode["turns"]
        prompt = turns[0]["prompt_ids"]
        limit = len(prompt) + MAX_RESPONSE_LENGTH
        ids = turns[-1]["prompt_ids"] + turns[-1]["ids"]
        if len(ids) >= limit:  # Tunix drops the turn that uses the room up
            ids, turns = turns[-1]["prompt_ids"], turns[:-1]
        rest = [Tokenizer().pad_id()] * (limit - len(ids))
        assert example.prompt_ids[row].tolist()[-len(prompt) :] == prompt
        assert example.completion_ids[row].tolist() == ids[len(prompt) :] + rest
        is_sampled = np.asarray(example.completion_mask[row], bool)
        for array, name in (
            (example.old_per_token_logps, "logprobs"),
            (example.token_versions, "versions"),  # policies and engine both count from 0 here
        ):
            replied = [value for turn in turns for value in turn[name]]
            np.testing.assert_array_equal(array[row][is_sampled], np.array(replied, array.dtype))


def make_cluster(settings: Settings) -> RLCluster:
    """Returns Tunix's cluster: the policy and the rollout engine, on one device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    config = ClusterConfig(
        role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
        # Tunix's annotation leaves out the partial that its code accepts.
        rollout_engine=functools.partial(  # pyright: ignore[reportArgumentType]
            SglJaxRollout,
            page_size=settings.page_size,
            max_running_requests=settings.max_concurrency,
            random_seed=settings.seed,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=MAX_RESPONSE_LENGTH,
            max_prompt_length=MAX_PROMPT_LENGTH,
            kv_cache_size=MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH,
            temperature=settings.temperature,
            return_logprobs=True,
        ),
        training_config=training_config(settings.grpo, settings.steps),
    )
    actor = load_checkpoint(ROOT / settings.checkpoint, mesh, model_config())
    return RLCluster(actor=actor, tokenizer=Tokenizer(), cluster_config=config)


def train(
    settings: Settings, on_step: Callable[[RemoteStep], None], agent_command: Sequence[str] = AGENT
) -> list[RemoteStep]:
    """Trains, and returns what happened.

    Raises:
        AgentError: The agent's process has ended.
    """
    if settings.temperature != 1:
        raise ValueError(f"temperature must be 1, as the agent samples; got {settings.temperature}")
    grpo = settings.grpo
    cluster = make_cluster(settings)
    rollout = cluster.rollout
    assert isinstance(rollout, SglJaxRollout)
    log = StepLog(on_step)
    rollout.observers.on_updated.append(log.end_step)
    with contextlib.ExitStack() as ends:
        ends.callback(rollout.close)  # stops the server too
        rollout.engine.warmup()  # episodes come and go: all batch sizes occur
        key = secrets.token_urlsafe()
        # Nobody knows the second key: the agent may sample, and no more.
        server = rollout.serve(port=0, api_key=key, admin_key=secrets.token_urlsafe())
        address = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": key}
        agent = ends.enter_context(AgentProcess(agent_command, address))
        # A KeyboardInterrupt may be lost in a callback of JAX; without its agent the training ends.
        ends.enter_context(current().on_interrupt(agent.close))
        learner = ReplayLearner(
            cluster,
            GRPOConfig(
                num_generations=grpo.num_generations,
                beta=grpo.beta,
                epsilon=grpo.epsilon,
                max_response_length=MAX_RESPONSE_LENGTH,
                max_concurrency=settings.max_concurrency,
                off_policy_steps=settings.off_policy_steps,
            ),
            chat_parser=PlainParser(),
            agent=agent,
            log=log,
        )
        ends.callback(learner.stop_episodes)
        learner.train(problem_batches(settings.steps, grpo.prompts_per_step, settings.seed))
    return log.steps


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    parser = argparse.ArgumentParser(description="GRPO with an agent in another process.")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/grpo_remote_agent.yaml")
    parser.add_argument("--steps", type=int, help="instead of the config's")
    args = parser.parse_args(argv)
    settings = load_settings(args.config)
    settings.steps = args.steps or settings.steps
    absl_logging.set_verbosity(absl_logging.ERROR)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # Tunix forgets failed episodes
    print(
        f"GRPO with an agent in another process: {settings.steps} steps of "
        f"{settings.grpo.prompts_per_step} prompts x {settings.grpo.num_generations} episodes, on "
        f"{jax.devices()[0].device_kind}. The first steps compile."
    )

    def show(step: RemoteStep) -> None:
        print(
            f"step {step.step}/{settings.steps}  reward {step.reward:.3f}  turns {step.turns:.2f}  "
            f"weight lag {step.lag:.2f}  mixed {step.mixed:.0%}  {step.step_s:.2f} s",
            flush=True,
        )

    interrupts = Interrupts()
    try:
        with interrupts:
            steps = train(settings, show)
    except (AgentError, KeyboardInterrupt) as error:
        if interrupts.is_interrupted:
            print("interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        print(f"error: {error}", file=sys.stderr)
        return 1
    first, last = (np.mean([each.reward for each in part]) for part in (steps[:10], steps[-10:]))
    print(f"mean reward of the first ten steps {first:.3f}, of the last ten {last:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
