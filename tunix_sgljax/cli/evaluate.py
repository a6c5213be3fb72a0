"""`tunix-sgljax evaluate`: the rewards of a checkpoint, or of a model's folder, on a task."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tunix_sgljax.cli.engine_options import model_folder
from tunix_sgljax.cli.output import emit, say

if TYPE_CHECKING:
    from tunix_sgljax.training.evaluation import Evaluation

SUMMARY = "Evaluate a checkpoint, or a model's folder, on the task of a training's config."
EXAMPLES = """\
examples:
  tunix-sgljax evaluate --config run.yaml
  tunix-sgljax evaluate --config run.yaml --checkpoint outputs/checkpoints --step 20
  tunix-sgljax evaluate --config run.yaml --model trained --temperature 0
  tunix-sgljax evaluate --config run.yaml --num-samples 8 --k 1 --k 8 --output evaluation.json

The config is the one that `train` reads: its task's held-out rows, prompts, reward functions and
eval_rollout_config. Without --checkpoint and --model the newest checkpoint of the config's
checkpoint_root_directory is taken, or else the weights that training starts with.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, help="the YAML file of the training")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values that win over the file's"
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="Tunix's checkpoints, or one step"
    )
    parser.add_argument(
        "--step", type=int, help="of the checkpoints; default: the latest; 0: before any training"
    )
    parser.add_argument(
        "--model", metavar="FOLDER", help="a Hugging Face folder instead, such as `convert` writes"
    )
    parser.add_argument(
        "--split",
        choices=("eval", "train"),
        default="eval",
        help="rows of task.eval_dataset, or of task.dataset (eval)",
    )
    parser.add_argument(
        "--num-prompts", type=int, metavar="N", help="the first N rows; default: all"
    )
    parser.add_argument(
        "--num-samples", type=int, default=1, metavar="N", help="completions of each prompt (1)"
    )
    parser.add_argument(
        "--temperature", type=float, help="0 is greedy; default: eval_rollout_config's"
    )
    parser.add_argument(
        "--k",
        type=int,
        action="append",
        metavar="K",
        help="report pass@K, as often as needed (1 and --num-samples)",
    )
    parser.add_argument(
        "--pass-reward",
        type=float,
        default=1.0,
        metavar="R",
        help="a completion passes whose reward is at least R (1)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="JSON; default: evaluation.json in output_dir"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    from tunix_sgljax.training.loading import load_config

    config = load_config(args.config, args.overrides)
    model = None if args.model is None else model_folder(args.model)
    output = args.output or Path(config.output_dir) / "evaluation.json"
    output.parent.mkdir(parents=True, exist_ok=True)

    from absl import logging as absl_logging

    from tunix_sgljax.observability.progress import Progress, is_interactive
    from tunix_sgljax.training.evaluation import EvaluationOptions, run_evaluation
    from tunix_sgljax.training.report import write_whole

    absl_logging.set_verbosity(absl_logging.ERROR)
    options = EvaluationOptions(
        checkpoint=args.checkpoint,
        step=args.step,
        model=model,
        split=args.split,
        num_prompts=args.num_prompts,
        num_samples=args.num_samples,
        temperature=args.temperature,
        ks=tuple(args.k or sorted({1, args.num_samples})),
        pass_reward=args.pass_reward,
    )
    is_drawn = not args.quiet and is_interactive()
    with Progress(enabled=is_drawn) as progress:
        found = run_evaluation(config, options, progress if is_drawn or args.quiet else None)
    write_whole(output, {**found._asdict(), "weights": found.weights._asdict()})
    emit(in_words(found))
    if not args.quiet:
        say(f"wrote {output}")
    return 0


def in_words(found: Evaluation) -> str:
    sampling, data = found.sampling, found.data
    temperature = sampling["temperature"]
    how = "greedy" if temperature == 0 else f"at temperature {temperature}"
    error = "" if found.standard_error is None else f" +- {found.standard_error:.3f}"
    passed = "".join(f", pass@{k} {share:.3f}" for k, share in found.pass_at_k.items())
    cut = f"; {found.num_cut} cut at {sampling['max_tokens_to_generate']} tokens"
    return (
        f"weights: {found.weights.in_words()}\n"
        f"{data['num_prompts']} prompts of {data['dataset']}, {sampling['num_samples']} "
        f"completion(s) each, {how}{cut if found.num_cut else ''}\n"
        f"mean reward {found.mean_reward:.3f}{error}{passed}"
    )
