"""`tunix-sgljax maxtext`: MaxText's own RL trainer, with this engine as its rollout."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator

from tunix_sgljax.cli.output import say

SUMMARY = "Run MaxText's own RL trainer on its YAML and overrides, sampling on this engine."
EXAMPLES = """\
examples:
  tunix-sgljax maxtext rl rl.yml model_name=qwen3-0.6b run_name=first \\
      base_output_directory=outputs load_parameters_path=path/to/checkpoint/0/items \\
      tokenizer_path=Qwen/Qwen3-0.6B
  tunix-sgljax maxtext rl my_rl.yml use_pathways=False sgljax_config.page_size=32

What follows `rl` is MaxText's, as behind `python -m maxtext.trainers.post_train.rl.train_rl`: a
YAML file, or the name of one of MaxText's own (rl.yml), then key=value overrides. It samples on
this engine in any case; `sgljax_config.KEY=VALUE` gives the engine options. docs/maxtext.md has
whole commands for a CPU, a GPU and a TPU.
"""

_OPTION = "sgljax_config."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trainer", choices=["rl"], help="rl: maxtext.trainers.post_train.rl.train_rl"
    )
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="MaxText's arguments: a YAML file, then key=value overrides",
    )
    parser.set_defaults(print_help=parser.print_help)


def run(args: argparse.Namespace) -> int:
    """Runs the trainer and returns the exit code."""
    words = [word for word in args.arguments if word != "--debug"]  # main has handled it
    if {"-h", "--help"} & set(words):
        args.print_help()
        return 0
    from tunix_sgljax.maxtext.requirements import check_requirements

    config, overrides, options = split_words(words)
    check_requirements()
    from tunix_sgljax.maxtext.rollout import SglJaxMaxTextRollout
    from tunix_sgljax.maxtext.trainer import run_rl
    from tunix_sgljax.rollout.options import rollout_options

    with _environment_restored():
        run_rl(config, overrides, SglJaxMaxTextRollout, rollout_options(options), say)
    return 0


def split_words(words: list[str]) -> tuple[str, list[str], dict[str, object]]:
    """The config file, MaxText's overrides, and the options of our rollout."""
    from omegaconf import OmegaConf

    from sgljax_engine import InvalidConfigError

    if not words or "=" in words[0] or words[0].startswith("-"):
        raise InvalidConfigError(
            "maxtext rl needs a YAML file first, a path or the name of one of MaxText's own "
            f"(rl.yml), got {words[0] if words else 'nothing'!r}"
        )
    config, *overrides = words
    for word in overrides:
        if "=" not in word:
            raise InvalidConfigError(f"MaxText takes key=value after the YAML file, got {word!r}")
    ours = [word.removeprefix(_OPTION) for word in overrides if word.startswith(_OPTION)]
    theirs = [word for word in overrides if not word.startswith(_OPTION)]
    options = OmegaConf.to_container(OmegaConf.from_dotlist(ours))
    assert isinstance(options, dict)
    return config, theirs, {str(key): value for key, value in options.items()}


@contextlib.contextmanager
def _environment_restored() -> Iterator[None]:
    """Sets environment variables back that MaxText sets, at import and with its config."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
