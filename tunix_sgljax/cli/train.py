"""`tunix-sgljax train`: GRPO or PPO with Tunix, from a config file."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunix_sgljax.training.loop import RunResult
    from tunix_sgljax.training.schema import TrainConfig

SUMMARY = "Train with GRPO or PPO, as a config file says."
EXAMPLES = """\
examples:
  tunix-sgljax train --config configs/grpo_addition.yaml
  tunix-sgljax train --config configs/grpo_addition.yaml training.steps=5 rollout_engine=vanilla
  tunix-sgljax train --config configs/qwen3_0p6b_gpu.yaml model.path=Qwen3-0.6B --dry-run
  tunix-sgljax train --config configs/ppo_addition.yaml --print-config
"""

EXIT_BAD_CONFIG = 2
EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("--config", type=Path, required=True, help="a YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values that win over the file's"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the whole config and stop"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything and estimate the memory; stop before the weights",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    from sgljax_engine import EngineError
    from tunix_sgljax.training.loading import load_config, to_yaml

    try:
        config = load_config(args.config, args.overrides)
        if args.print_config:
            sys.stdout.write(to_yaml(config))
            return 0
        if args.dry_run:
            return _dry_run(config)
        return _train(config)
    except EngineError as error:
        if not isinstance(error, ValueError):
            raise
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_CONFIG


def _dry_run(config: TrainConfig) -> int:
    from tunix_sgljax.training.loop import prepare

    prepared = prepare(config)
    task = prepared.task
    sys.stdout.write(
        f"{prepared.spec.model_class.__name__} on a mesh of {config.mesh.shape}; "
        f"{len(task.rows)} training rows, {len(task.eval_rows)} held out; first prompt: "
        f"{task.rows[0]['prompts']!r}\n"
        f"memory of a device, activations but for the logits left out:\n{prepared.memory}\n"
    )
    return 0


def _train(config: TrainConfig) -> int:
    import jax
    from absl import logging as absl_logging

    from tunix_sgljax.training import report
    from tunix_sgljax.training.loop import run as run_training

    absl_logging.set_verbosity(absl_logging.ERROR)
    training, device = config.training, jax.devices()[0].device_kind
    sys.stdout.write(
        f"{config.title}: {config.algorithm.name.upper()}, rollout by {config.rollout_engine}, "
        f"{training.steps} steps of {training.batch_size} prompts, on {device}. The first step "
        "compiles.\n"
    )
    progress = report.ProgressReporter(training.steps)
    try:
        with _stop_on_interrupt() as should_stop:
            result = run_training(config, on_step=progress.show, should_stop=should_stop)
            was_interrupted = should_stop()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    finally:
        progress.close()
    _tell(config, result)
    return EXIT_INTERRUPTED if was_interrupted else 0


def _tell(config: TrainConfig, result: RunResult) -> None:
    from tunix_sgljax.training import report

    if not result.records:
        sys.stdout.write(
            f"nothing to do: the checkpoint holds {result.resumed_from} steps of "
            f"{config.training.steps}\n"
        )
    else:
        text = f"{report.format_table(result.records)}\n\n{report.format_summary(result.records)}"
        sys.stdout.write(f"\n{text}\n")
    for record in result.evals:
        sys.stdout.write(f"held out, after {record.num_steps} steps: {record.reward:.3f}\n")
    for path in result.files:
        sys.stdout.write(f"wrote {path}\n")


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks to stop after the step; a second one raises KeyboardInterrupt at once."""
    was_asked = False

    def ask(signum: int, frame: object) -> None:
        nonlocal was_asked
        if was_asked:
            raise KeyboardInterrupt
        was_asked = True
        sys.stderr.write("\nfinishing the step; Ctrl-C again stops at once\n")

    try:
        previous = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread, which alone gets signals
        yield lambda: False
        return
    try:
        yield lambda: was_asked
    finally:
        signal.signal(signal.SIGINT, previous)
