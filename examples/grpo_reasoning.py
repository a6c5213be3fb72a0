"""GRPO on a real model: SmolLM2-135M-Instruct learns plain words, on two CPU cores.

    python examples/grpo_reasoning.py                      # our engine samples
    python examples/grpo_reasoning.py --rollout vanilla    # Tunix's own sampler
    python examples/grpo_reasoning.py --steps 3 --held-out 16    # what a step costs

It fetches the model (`get_smollm2.py`, 93 MB) and trains LoRA pairs with Tunix's `GRPOLearner`, as
configs/grpo_reasoning.yaml says. Before the first step, every few steps and at the end it answers
held-out prompts. records.json has, for each step, the reward and the seconds of rollout, weight
sync and trainer; training.png draws the reward over steps and over time. `--timeline FILE` records
all steps but the first, which compiles, for the Perfetto UI.
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import logging as absl_logging

from get_smollm2 import ChecksumError, MissingPackageError, UnreachableError, get_smollm2
from lines import Lines
from reasoning_plot import RECORDS, write_plot
from sgljax_engine import InvalidConfigError
from smollm2_as_qwen2 import as_qwen2
from tunix_sgljax import Timeline
from tunix_sgljax.training import TrainConfig, evaluate, load_config, prepare
from tunix_sgljax.training.cluster import make_cluster, make_learner, rollout_engine
from tunix_sgljax.training.loop import Prepared
from tunix_sgljax.training.report import StepRecord, StepRecorder
from tunix_sgljax.training.rollouts import TimedRollout
from tunix_sgljax.training.task import batches

CONFIG = Path(__file__).resolve().parents[1] / "configs/grpo_reasoning.yaml"


class Step(NamedTuple):
    """One step of training.

    Attributes:
        step: Number of the step, from 1.
        reward: The mean reward of its completions.
        rollout_s: Seconds in `generate`.
        sync_s: Seconds of the weight sync at its end.
        trainer_s: The rest of its seconds: rewards, gradients, optimizer.
        num_tokens: Tokens generated.
        end_s: Seconds of training at its end, evaluations left out.
    """

    step: int
    reward: float
    rollout_s: float
    sync_s: float
    trainer_s: float
    num_tokens: int
    end_s: float


class HeldOut(NamedTuple):
    """The mean reward of answers to held-out prompts after so many steps."""

    num_steps: int
    reward: float
    seconds: float


class Run(NamedTuple):
    """What happened in a run."""

    steps: list[Step]
    held_out: list[HeldOut]


class MeasuredRollout(TimedRollout):
    """A rollout worker whose weight syncs are timed too; `on_sync` gets their seconds."""

    def __init__(self, *, on_sync: Callable[[float], None], **options: Any) -> None:
        super().__init__(**options)
        self._on_sync = on_sync

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Passes the weights on, and waits for all of them."""
        start = time.perf_counter()
        super().update_params(params, filter_types)
        self._on_sync(time.perf_counter() - start)


class Training:
    """Trains as a config says, and keeps what happens. For one thread."""

    def __init__(
        self,
        config: TrainConfig,
        say: Callable[[str], None],
        timeline: Path | None = None,
        keep: Callable[[Run], None] = lambda run: None,
    ) -> None:
        """Checks the config and loads the model.

        Args:
            config: From `load_config`.
            say: Gets each line about the run.
            timeline: Where a timeline of all steps but the first is written.
            keep: Gets what happened so far, after each step and evaluation.
        """
        self._config, self._say, self._keep = config, say, keep
        self._every = config.rl_training_config["eval_every_n_steps"]
        # Evaluations are this program's: Tunix's would sample each problem several times.
        training = {**config.rl_training_config, "eval_every_n_steps": config.num_batches + 1}
        say("checking the config, drawing prompts, estimating memory")
        self._prepared: Prepared = prepare(config)
        self._recorder = StepRecorder(self._add_step)
        self._steps: list[Step] = []
        self._held_out: list[HeldOut] = []
        self._sync_s = self._pending_eval_s = 0.0
        say("loading the model")
        tracer = None if timeline is None else Timeline()
        self._cluster = make_cluster(
            dataclasses.replace(config, rl_training_config=training),
            self._prepared.spec,
            self._prepared.tokenizer,
            functools.partial(
                MeasuredRollout,
                engine=rollout_engine(config),
                on_generate=self._recorder.add_rollout,
                on_sync=self._add_sync,
            ),
            None if tracer is None else tracer.perf_config,
        )
        if tracer is not None and timeline is not None:
            tracer.record_steps(
                self._cluster, timeline, first_step=1, num_steps=config.num_batches - 1
            )

    def run(self) -> Run:
        """Trains to the end, and returns what happened."""
        config, cluster = self._config, self._cluster
        worker = cluster.rollout
        assert isinstance(worker, TimedRollout)
        try:
            learner = make_learner(config, cluster, self._prepared.task)
            cluster.with_external_metrics_logger(self._recorder.add_metrics)
            self._evaluate(0)
            self._pending_eval_s = 0.0
            self._recorder.start(1)
            learner.train(batches(self._prepared.task.rows, config.batch_size, None))
        finally:
            worker.close()
        return Run(self._steps, self._held_out)

    def _add_sync(self, seconds: float) -> None:
        self._sync_s += seconds

    def _add_step(self, record: StepRecord) -> None:
        """Takes a step, after its weight sync, on the thread that trains."""
        step_s = record.step_s - self._pending_eval_s
        before = self._steps[-1].end_s if self._steps else 0.0
        step = Step(
            step=record.step,
            reward=record.reward,
            rollout_s=record.rollout_s,
            sync_s=self._sync_s,
            trainer_s=step_s - record.rollout_s - self._sync_s,
            num_tokens=record.num_tokens,
            end_s=before + step_s,
        )
        self._sync_s = self._pending_eval_s = 0.0
        self._steps.append(step)
        self._keep(Run(self._steps, self._held_out))
        total = self._config.num_batches
        self._say(
            f"step {step.step:>{len(str(total))}}/{total}  reward {step.reward:.3f}  rollout "
            f"{step.rollout_s:.1f} s, sync {step.sync_s:.2f} s, trainer {step.trainer_s:.1f} s"
        )
        if step.step % self._every == 0 or step.step == total:
            self._evaluate(step.step)

    def _evaluate(self, num_steps: int) -> None:
        start = time.perf_counter()
        reward = evaluate(self._cluster, self._prepared.task)
        seconds = time.perf_counter() - start
        self._pending_eval_s += seconds
        self._held_out.append(HeldOut(num_steps, reward, seconds))
        self._keep(Run(self._steps, self._held_out))
        self._say(f"held out, after {num_steps} steps: reward {reward:.3f} ({seconds:.1f} s)")


def write_records(config: TrainConfig, run: Run) -> None:
    """Writes the settings of a run, its steps and its evaluations."""
    content = {
        "settings": {"device": jax.devices()[0].device_kind, **dataclasses.asdict(config)},
        "steps": [step._asdict() for step in run.steps],
        "held_out": [each._asdict() for each in run.held_out],
    }
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORDS).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(description="GRPO of SmolLM2, which learns plain words.")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--rollout", choices=("sgljax", "vanilla"), help="instead of the config's")
    parser.add_argument("--steps", type=int, help="instead of the config's")
    parser.add_argument("--seed", type=int, help="instead of the config's")
    parser.add_argument("--held-out", type=int, help="prompts, instead of the config's")
    parser.add_argument("--output-dir", type=Path, help="instead of the config's")
    parser.add_argument("--timeline", type=Path, help="file for a timeline of a few --steps")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="config keys")
    return parser.parse_args(argv)


def overrides(args: argparse.Namespace, model: Path) -> list[str]:
    """What the command line changes in the config."""
    given = {
        "actor_model_config.model_path": model,
        "rollout_engine": args.rollout,
        "num_batches": args.steps,
        "seed": args.seed,
        "task.eval_dataset_args.num": args.held_out,
        "output_dir": args.output_dir,
    }
    return [*(f"{key}={value}" for key, value in given.items() if value is not None), *args.set]


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    args = parse_args(argv)
    absl_logging.set_verbosity(absl_logging.ERROR)
    with Lines() as say:
        return _run(args, say)


def _run(args: argparse.Namespace, say: Lines) -> int:
    try:
        model = as_qwen2(get_smollm2(say=say))
        config = load_config(args.config, overrides(args, model))
        say(
            f"GRPO, rollout by {config.rollout_engine}, seed {config.seed}, {config.num_batches} "
            f"steps of {config.batch_size} prompts x {config.num_generations}, on "
            f"{jax.devices()[0].device_kind}; the first compiles"
        )
        run = Training(config, say, args.timeline, functools.partial(write_records, config)).run()
    except (
        UnreachableError,
        ChecksumError,
        MissingPackageError,
        InvalidConfigError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    folder = Path(config.output_dir)
    write_plot(folder / "training.png", [(config.rollout_engine, run.steps, run.held_out)])
    say(f"wrote {folder / RECORDS} and {folder / 'training.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
