"""`tunix-sgljax tunix`: Tunix's own command line, with this engine as a choice."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import inspect
import logging
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SUMMARY = "Run Tunix's own GRPO, PPO or PEFT command on a recipe's YAML and overrides."
EXAMPLES = """\
examples:
  tunix-sgljax tunix grpo base_config.yaml override_config_file=gemma2_2b.yaml \\
      rollout_engine=sgljax
  tunix-sgljax tunix grpo recipe.yaml rollout_engine=sgljax sgljax_config.page_size=32
  tunix-sgljax tunix ppo recipe.yaml rollout_engine=sgljax

What follows the name of the pipeline is Tunix's, as behind `python -m tunix.cli.grpo_main`: a YAML
file, key=value overrides, and flags such as --pathways_bns. `rollout_engine=sgljax` names our
engine, and `sgljax_config.KEY=VALUE` gives it options. Without it the YAML decides who samples.
"""

_SUFFIX = "_main"
_FLAG = "pathways_bns"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pipeline", help="grpo, peft, or what else the installed Tunix has (ppo from 0.1.8 on)"
    )
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="Tunix's arguments: a YAML file, then key=value overrides",
    )
    parser.set_defaults(print_help=parser.print_help)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    words = [word for word in args.arguments if word != "--debug"]  # main has handled it
    if {"-h", "--help"} & set(words):
        args.print_help()
        return 0
    from sgljax_engine import InvalidConfigError

    with _importing_from(Path.cwd()):
        name, module = _import_entry(args.pipeline)
        _check_base_config(words)
        with _parsed_flags([f"tunix.cli.{name}", *words]) as argv:
            main = _find_main(module)
            if main is None:
                raise InvalidConfigError(
                    f"tunix.cli.{name} has no pipeline that this command knows how to run"
                )
            main(argv)
    return 0


def offered_pipelines() -> list[str]:
    """The names of the commands in the installed `tunix.cli`: "grpo" of `grpo_main`, and so on."""
    import tunix.cli

    names = (found.name for found in pkgutil.iter_modules(tunix.cli.__path__))
    return sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))


def _import_entry(pipeline: str) -> tuple[str, types.ModuleType]:
    from absl import flags

    from sgljax_engine import InvalidConfigError

    short = pipeline.removesuffix(_SUFFIX)
    offered = offered_pipelines()
    if short not in offered:
        version = importlib.metadata.version("google-tunix")
        raise InvalidConfigError(
            f"the installed google-tunix {version} has no pipeline {pipeline!r}; it has "
            f"{', '.join(offered)}"
        )
    name = f"{short}{_SUFFIX}"
    full_name = f"tunix.cli.{name}"
    try:
        try:
            return name, importlib.import_module(full_name)
        except flags.DuplicateFlagError:
            # Several of Tunix's commands define it, each for a separate process.
            delattr(flags.FLAGS, _FLAG)
            return name, importlib.import_module(full_name)
    except ImportError as error:
        raise InvalidConfigError(f"{full_name} cannot be imported: {error}") from error


def _find_main(module: types.ModuleType) -> Callable[[list[str]], Any] | None:
    """Tunix's `main`, with a subclass of its pipeline if that pipeline samples.

    The function runs in a copy of its module's names that holds the subclass; the module itself
    does not change.
    """
    from tunix.cli.config import HyperParameters

    from tunix_sgljax.cli.tunix_pipeline import with_sgljax_engine

    main = getattr(module, "main", None)
    if not isinstance(main, types.FunctionType):
        return None
    for name, value in vars(module).items():
        is_pipeline = inspect.isclass(value) and issubclass(value, HyperParameters)
        if is_pipeline and name in main.__code__.co_names:
            if not hasattr(value, "create_cluster_config"):
                return main  # supervised training: nothing samples
            names = {**vars(module), name: with_sgljax_engine(value)}
            return types.FunctionType(
                main.__code__, names, main.__name__, main.__defaults__, main.__closure__
            )
    return None


def _check_base_config(words: list[str]) -> None:
    from tunix.cli import config

    from sgljax_engine import InvalidConfigError

    name = "base_config.yaml"
    if words[:1] == [name] and not (Path(config.__file__).parent / name).is_file():
        version = importlib.metadata.version("google-tunix")
        raise InvalidConfigError(
            f"Tunix looks for {name} in its package, and the wheel of google-tunix {version} ships "
            f"none; take tunix/cli/{name} from Tunix's repository at that version and give its "
            f"path, ./{name} say"
        )


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Makes modules that a config names importable from a folder, like `python -m`."""
    path = str(folder)
    sys.path.insert(0, path)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(path)


@contextlib.contextmanager
def _parsed_flags(argv: list[str]) -> Iterator[list[str]]:
    """Parses flags and installs absl's log handler like `absl.app.run`, and undoes both.

    Yields the arguments that are not flags.
    """
    from absl import flags
    from absl import logging as absl_logging
    from absl.testing import flagsaver

    from sgljax_engine import InvalidConfigError

    was_parsed, saved = flags.FLAGS.is_parsed(), flagsaver.save_flag_values()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        absl_logging.use_absl_handler()
        try:
            rest = flags.FLAGS(argv)
        except flags.Error as error:
            raise InvalidConfigError(f"Tunix's flags: {error}") from None
        yield rest
    finally:
        flagsaver.restore_flag_values(saved)
        if not was_parsed:
            flags.FLAGS.unparse_flags()
        root.handlers[:] = handlers
        root.setLevel(level)
