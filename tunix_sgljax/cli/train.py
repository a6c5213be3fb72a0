"""`tunix-sgljax train`: GRPO or PPO with Tunix, from a config file."""

from __future__ import annotations

import argparse
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from tunix_sgljax.cli import interrupt
from tunix_sgljax.cli.output import emit

if TYPE_CHECKING:
    from tunix_sgljax.training.loop import RunResult
    from tunix_sgljax.training.schema import TrainConfig

SUMMARY = "Train with GRPO or PPO, as a config file says."
EXAMPLES = """\
examples:
  tunix-sgljax train --config configs/grpo_addition.yaml
  tunix-sgljax train --config configs/grpo_addition.yaml num_batches=5 rollout_engine=vanilla
  tunix-sgljax train --config configs/qwen3_0p6b_gpu.yaml --dry-run \
    actor_model_config.model_path=Qwen3-0.6B
  tunix-sgljax train --config configs/ppo_addition.yaml --print-config
  tunix-sgljax train --config configs/grpo_addition.yaml num_batches=3 --timeline step.pftrace
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        help="check config, data and functions, and estimate the memory; stop before the weights",
    )
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="record the second step of this run for the Perfetto UI",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="no bars, no line for each step and no sample"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    from tunix_sgljax.training.loading import load_config, to_yaml
    from tunix_sgljax.training.task import check_task

    config = load_config(args.config, args.overrides)
    if args.print_config:
        emit(to_yaml(config), end="")
        return 0
    check_task(config.task)
    return _dry_run(config) if args.dry_run else _train(config, args.timeline, is_quiet=args.quiet)


def _dry_run(config: TrainConfig) -> int:
    from tunix_sgljax.training.loop import prepare

    prepared = prepare(config)
    task, mesh = prepared.task, config.actor_model_config.mesh
    emit(
        f"{prepared.spec.model_class.__name__} on a mesh of {mesh.shape}; "
        f"{len(task.rows)} training rows, {len(task.eval_rows)} held out; first prompt: "
        f"{task.rows[0]['prompts']!r}\n"
        f"memory of a device, activations but for the logits left out:\n{prepared.memory}"
    )
    return 0


def _train(config: TrainConfig, timeline: Path | None, *, is_quiet: bool) -> int:
    emit(
        f"{config.training_mode.upper()}, rollout by {config.rollout_engine}, "
        f"{config.num_steps} steps of {config.batch_size} prompts. Loads JAX, Tunix and the model."
    )
    import jax
    from absl import logging as absl_logging

    from tunix_sgljax.observability.progress import Progress, is_interactive
    from tunix_sgljax.training.loop import run as run_training
    from tunix_sgljax.training.report import StepLines, print_eval, print_line
    from tunix_sgljax.training.samples import describe_sample

    absl_logging.set_verbosity(absl_logging.ERROR)
    emit(f"on {jax.devices()[0].device_kind}; the first step compiles")
    stop = threading.Event()
    with (
        Progress(enabled=not is_quiet and is_interactive()) as progress,
        warnings.catch_warnings(),
        interrupt.current().on_interrupt(stop.set),
    ):
        # From Tunix's PPOLearner; `whole_numbers` ensures that nothing is lost.
        warnings.filterwarnings("ignore", "scatter inputs", FutureWarning)
        result = run_training(
            config,
            on_resume=lambda resumed: emit(
                f"resuming from step {resumed.num_done} of {config.num_steps} "
                f"(checkpoint {resumed.folder})"
            ),
            on_step=(lambda record: None) if is_quiet else StepLines(config.num_steps),
            on_eval=(lambda record: None) if is_quiet else print_eval,
            on_sample=lambda sample: None if is_quiet else print_line(describe_sample(sample)),
            should_stop=stop.is_set,
            # Without a terminal, lines instead of bars.
            progress=progress if progress.is_enabled or is_quiet else None,
            timeline=timeline,
        )
    _tell(config, result)
    if timeline is not None and timeline.is_file():
        emit(f"wrote {timeline}; open it in https://ui.perfetto.dev")
    return interrupt.EXIT_INTERRUPTED if stop.is_set() else 0


def _tell(config: TrainConfig, result: RunResult) -> None:
    from tunix_sgljax.training.report import format_summary

    if result.records:
        emit(f"\n{format_summary(result.records)}")
    elif not result.was_stopped:
        emit(
            f"nothing to train: the checkpoint holds {result.resumed_from} steps of "
            f"{config.num_steps}"
        )
    for record in result.evals:
        is_restored = result.resumed_from and record.num_steps == result.resumed_from
        whose = ", the checkpoint's weights" if is_restored else ""
        emit(f"held out, after {record.num_steps} steps{whose}: {record.reward:.3f}")
    if result.file is not None:
        emit(f"wrote {result.file}, and samples.jsonl beside it: every completion with its reward")
