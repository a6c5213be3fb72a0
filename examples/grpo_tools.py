"""Multi-turn GRPO with a tool: the policy learns to ask the calculator instead of guessing.

    python examples/grpo_tools.py                     # about five minutes on two cores
    python examples/grpo_tools.py --no-prefix-cache   # every turn prefills its whole conversation

An agentic Tunix program: its learner plays episodes (see `calculator_task.py`) in many threads,
each turn a call of the rollout engine. A turn's prompt is the conversation so far, which the
engine's prefix cache holds already. Only the policy's own tokens are in the loss; the program
ends by showing an episode with the tool's tokens, which are not, in brackets.
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

import argparse
import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging as absl_logging
from flax import nnx
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from addition_task import load_checkpoint
from agentic_parts import GrpoSettings, read_settings, training_config
from calculator import MAX_PROMPT_LENGTH, MAX_RESPONSE_LENGTH, MAX_TURNS, Tokenizer
from calculator_task import (
    CalculatorAgent,
    CalculatorEnvironment,
    ChatParser,
    model_config,
    problem_batches,
)
from tools_report import ToolStep, format_table, summarize, write_plot
from tunix_sgljax import AgenticGrpoLearner, SglJaxRollout, VersionedRolloutOutput
from tunix_sgljax.training.report import write_whole

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass
class Settings:
    """The config file. The checkpoint's path is relative to the root of the repository."""

    checkpoint: str = "examples/data/calculator_sft.safetensors"
    steps: int = 60
    seed: int = 0
    off_policy_steps: int = 0
    grpo: GrpoSettings = dataclasses.field(default_factory=lambda: GrpoSettings(learning_rate=1e-3))
    temperature: float = 1.0
    page_size: int = 4

    @property
    def max_concurrency(self) -> int:
        """All episodes that Tunix may have in flight."""
        return self.grpo.max_concurrency(self.off_policy_steps)


def load_settings(path: Path) -> Settings:
    """Returns the settings in a YAML file; see `read_settings`."""
    return read_settings(path, Settings)


class StepCounter:
    """Puts a step's numbers together: from the episodes' threads and the training thread."""

    def __init__(self, on_step: Callable[[ToolStep], None]) -> None:
        self.steps: list[ToolStep] = []
        self._on_step = on_step
        self._lock = threading.Lock()
        self._rewards: list[float] = []
        self._prompt_tokens: list[int] = []
        self._num_cached = 0
        self._start_s = time.perf_counter()

    def add_turn(self, num_prompt_tokens: int) -> None:
        """Counts a turn of an episode; on its thread."""
        with self._lock:
            self._prompt_tokens.append(num_prompt_tokens)

    def add_rewards(self, rewards: np.ndarray, **columns: Any) -> dict[str, Any]:
        """Tunix metric function that adds no metric: Tunix logs these rewards itself."""
        del columns
        self._rewards += rewards.tolist()
        return {}

    def end_step(self, num_cached_tokens: int) -> None:
        """Ends a step, given the tokens that came from the prefix cache since the start."""
        now_s = time.perf_counter()
        with self._lock:
            prompt_tokens, self._prompt_tokens = self._prompt_tokens, []
        num_cached = num_cached_tokens - self._num_cached
        step = ToolStep(
            step=len(self.steps) + 1,
            reward=float(np.mean(self._rewards)),
            turns=len(prompt_tokens) / len(self._rewards),
            cached=num_cached / sum(prompt_tokens),
            num_prompt_tokens=sum(prompt_tokens),
            step_s=now_s - self._start_s,
        )
        self._rewards, self._num_cached, self._start_s = [], num_cached_tokens, now_s
        self.steps.append(step)
        self._on_step(step)


class CountingRollout(SglJaxRollout):
    """Tells a counter about every turn."""

    def __init__(
        self,
        *,
        counter: StepCounter,
        options: dict[str, Any],
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh,
        rollout_config: RolloutConfig,
    ) -> None:
        super().__init__(
            rollout_actor=rollout_actor,
            tokenizer=tokenizer,
            mesh=mesh,
            rollout_config=rollout_config,
            **options,
        )
        self._counter = counter

    def generate(
        self, prompts: list[str] | str, rollout_config: RolloutConfig, **kwargs: Any
    ) -> VersionedRolloutOutput:
        """Counts the turn, too. The agentic learner asks for one prompt at a time."""
        output = super().generate(prompts, rollout_config, **kwargs)
        (prompt,) = [prompts] if isinstance(prompts, str) else prompts  # Tunix 0.1.7 passes it bare
        num_begin_tokens = 1
        self._counter.add_turn(len(prompt) + num_begin_tokens)
        return output


class ShowingCluster(RLCluster):
    """Keeps the text of an episode that it trained on, with what is not in the loss in brackets."""

    shown = ""

    def update_actor(self, train_ds: Any, eval_ds: Any, skip_jit: bool = False) -> Any:
        """Keeps the text of the longest episode, then trains."""
        for example in train_ds:
            # The longest one has the most turns.
            row = int(np.argmax((np.asarray(example.completion_ids) != 0).sum(axis=1)))
            self.shown = show_masks(
                np.asarray(example.prompt_ids[row]),
                np.asarray(example.completion_ids[row]),
                np.asarray(example.completion_mask[row]).astype(bool),
            )
        return super().update_actor(train_ds, eval_ds, skip_jit)


def show_masks(prompt_ids: np.ndarray, ids: np.ndarray, is_trained: np.ndarray) -> str:
    """Returns a sequence's text; what is not in the loss after the prompt is in brackets."""
    tokenizer = Tokenizer()
    is_real = ids != tokenizer.pad_id()
    ids, is_trained = ids[is_real], is_trained[is_real]
    edges = np.flatnonzero(np.diff(is_trained)) + 1
    parts = [tokenizer.decode(prompt_ids.tolist())]
    for start, end in zip([0, *edges], [*edges, len(ids)], strict=True):
        text = tokenizer.decode(ids[start:end].tolist())
        parts.append(text if is_trained[start:end].all() else f"[{text}]")
    return " ".join(parts)


def make_cluster(settings: Settings, counter: StepCounter, use_cache: bool) -> ShowingCluster:
    """Returns Tunix's cluster: the policy and the rollout engine, on one device."""
    grpo = settings.grpo
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    options = {
        "page_size": settings.page_size,
        "max_running_requests": settings.max_concurrency,
        "disable_radix_cache": not use_cache,
        "random_seed": settings.seed,
    }
    config = ClusterConfig(
        role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
        # Tunix's annotation leaves out the partial that its code accepts.
        rollout_engine=functools.partial(  # pyright: ignore[reportArgumentType]
            CountingRollout, counter=counter, options=options
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=MAX_RESPONSE_LENGTH,
            max_prompt_length=MAX_PROMPT_LENGTH,
            kv_cache_size=MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH,
            temperature=settings.temperature,
            return_logprobs=True,
        ),
        training_config=training_config(grpo, settings.steps),
    )
    return ShowingCluster(
        actor=load_checkpoint(ROOT / settings.checkpoint, mesh, model_config()),
        tokenizer=Tokenizer(),
        cluster_config=config,
    )


def train(settings: Settings, counter: StepCounter, use_cache: bool = True) -> str:
    """Trains, and returns an episode of the last step as `ShowingCluster` shows it."""
    grpo = settings.grpo
    cluster = make_cluster(settings, counter, use_cache)
    rollout = cluster.rollout
    assert isinstance(rollout, CountingRollout)
    rollout.observers.on_updated.append(
        lambda: counter.end_step(rollout.engine.get_internal_state().counters.num_cached_tokens)
    )
    try:
        rollout.engine.warmup()  # episodes come and go: all batch sizes occur
        learner = AgenticGrpoLearner(
            cluster,
            GRPOConfig(
                num_generations=grpo.num_generations,
                beta=grpo.beta,
                epsilon=grpo.epsilon,
                max_response_length=MAX_RESPONSE_LENGTH,
                max_concurrency=settings.max_concurrency,
                off_policy_steps=settings.off_policy_steps,
            ),
            # The rewards are those that the environments give.
            metric_fns=[counter.add_rewards],
            chat_parser=ChatParser(),
            agent_class=CalculatorAgent,
            env_class=CalculatorEnvironment,
        )
        learner.train(problem_batches(settings.steps, grpo.prompts_per_step, settings.seed))
    finally:
        rollout.close()
    return cluster.shown


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(description="Multi-turn GRPO with a calculator.")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/grpo_tools.yaml")
    parser.add_argument("--steps", type=int, help="instead of the config's")
    parser.add_argument("--seed", type=int, help="instead of the config's")
    parser.add_argument("--no-prefix-cache", action="store_true", help="to see what it is worth")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/grpo_tools"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    args = parse_args(argv)
    settings = load_settings(args.config)
    for name in ("steps", "seed"):
        value = getattr(args, name)
        if value is not None:
            setattr(settings, name, value)
    absl_logging.set_verbosity(absl_logging.ERROR)

    device = jax.devices()[0].device_kind
    print(
        f"GRPO with a calculator: {settings.steps} steps of {settings.grpo.prompts_per_step} "
        f"prompts x {settings.grpo.num_generations} episodes of up to {MAX_TURNS} turns, on "
        f"{device}. The first steps compile."
    )

    def show(step: ToolStep) -> None:
        print(
            f"step {step.step}/{settings.steps}  reward {step.reward:.3f}  turns {step.turns:.2f}  "
            f"prompt tokens from the prefix cache {step.cached:.0%}  {step.step_s:.2f} s",
            flush=True,
        )

    counter = StepCounter(show)
    episode = train(settings, counter, use_cache=not args.no_prefix_cache)
    summary = summarize(counter.steps)
    print(format_table(counter.steps))
    print(f"an episode of the last step, what is not in the loss in brackets:\n  {episode}")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    content = {
        "settings": {"device": device, **dataclasses.asdict(settings)},
        "summary": summary,
        "episode": episode,
        "steps": [dataclasses.asdict(step) for step in counter.steps],
    }
    write_whole(args.output_dir / "records.json", content)
    write_plot(args.output_dir / "training.png", counter.steps)
    print(f"wrote {args.output_dir}/records.json and training.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
