"""Tunix rollouts and Hugging Face models on the embedded JAX engine, from the command line.

A run of one command imports no other; `--help` imports no JAX.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, cast

from tunix_sgljax.cli import pathways
from tunix_sgljax.cli.interrupt import EXIT_INTERRUPTED, Interrupts
from tunix_sgljax.cli.output import say

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2


class Command(Protocol):
    """A module of this package that holds one command."""

    SUMMARY: str
    """One line, as in `COMMANDS`."""
    EXAMPLES: str
    """Command lines to copy, shown at the end of its `--help`."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Declares its options."""
        ...

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Does the work and returns the exit code."""
        ...


COMMANDS = {
    "train": "Train with GRPO or PPO, as a config file says.",
    "evaluate": "Evaluate a checkpoint, or a model's folder, on the task of a training's config.",
    "tunix": "Run Tunix's own GRPO, PPO or PEFT command on a recipe's YAML and overrides.",
    "maxtext": "Run MaxText's own RL trainer on its YAML and overrides, sampling on this engine.",
    "generate": "Complete prompts with a model in a Hugging Face folder.",
    "serve": "Serve a model in a Hugging Face folder over HTTP.",
    "doctor": "Say what is installed, what will be used, and what is wrong.",
    "convert": "Write a Tunix checkpoint as a Hugging Face folder, or as a PEFT adapter.",
}
"""Commands by name; each is a module of this package."""

_EXAMPLES = """examples:
  tunix-sgljax doctor --model path/to/Qwen3-0.6B
  tunix-sgljax generate --model path/to/Qwen3-0.6B "The capital of France is"
  tunix-sgljax serve --model path/to/Qwen3-0.6B --port 30000
  tunix-sgljax train --config configs/grpo_addition.yaml
  tunix-sgljax evaluate --config configs/grpo_addition.yaml --split train --temperature 0
  tunix-sgljax tunix grpo base_config.yaml rollout_engine=sgljax
  tunix-sgljax maxtext rl rl.yml model_name=qwen3-0.6b run_name=first
  tunix-sgljax convert checkpoints/actor --base path/to/Qwen3-0.6B --output trained

`tunix-sgljax COMMAND --help` has the options of a command, and more examples.
Exit codes: 0 success, 1 failure, 2 bad input, 130 interrupted."""


class Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong, and what was meant."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  it has overloads
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As its base class, but a command's own parser refuses what it does not know."""
        parsed, unknown = super().parse_known_args(args, namespace)
        options = [word for word in unknown if word.startswith("-")]
        if options:
            name = options[0].partition("=")[0]
            known = [option for option in self._option_string_actions if option.startswith("--")]
            hint = _engine_hint(name) if "--engine" in known else None
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            hint = hint or (f"did you mean {near[0]}?" if near else "")
            self.error(f"unknown option {name}" + (f"; {hint}" if hint else ""))
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Says it in one line, with where the options are; exits with 2."""
        self.exit(EXIT_BAD_INPUT, f"error: {message} (see {self.prog} --help)\n")


def _engine_hint(name: str) -> str | None:
    """What to write for an option of an engine, ours or another: as vLLM's servers take it."""
    from sgljax_engine import FOREIGN_FIELDS, FOREIGN_OPTIONS, EngineConfig

    key = name.removeprefix("--").replace("-", "_")
    foreign = FOREIGN_OPTIONS.get(key)
    if foreign is not None and (foreign.option is None or foreign.is_opposite):
        return foreign.hint
    option = key if foreign is None else foreign.option
    if option in EngineConfig.option_names():
        return f"options of the engine are given as --engine {option}=VALUE"
    return FOREIGN_FIELDS[key].instead if key in FOREIGN_FIELDS else None


def find_command(name: str) -> Command:
    return cast(Command, importlib.import_module(f"tunix_sgljax.cli.{name}"))


def make_parser(argv: list[str]) -> argparse.ArgumentParser:
    """The parser of all commands, with options only for the command in these arguments."""
    parser = Parser(
        prog="tunix-sgljax",
        description=(__doc__ or "").partition("\n")[0],
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = importlib.metadata.version("tunix-sgljax")
    parser.add_argument("--version", action="version", version=f"tunix-sgljax {version}")
    _add_debug(parser, default=False)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    named = next((word for word in argv if word in COMMANDS), None)
    for name, summary in COMMANDS.items():
        if name != named:
            subparsers.add_parser(name, help=summary)
            continue
        command = find_command(name)
        subparser = subparsers.add_parser(
            name,
            help=summary,
            description=command.SUMMARY,
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(subparser)
        _add_debug(subparser, default=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0, 1 failure, 2 bad input, 130 interrupted."""
    is_process = argv is None
    argv = sys.argv[1:] if argv is None else argv
    is_debug = "--debug" in argv
    # transformers says at every import that torch is missing; only its tokenizers are used.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

    def run() -> int:
        args = make_parser(argv).parse_args(argv)
        if args.command != "doctor":  # it reports what is wrong with it
            pathways.initialize()
        return find_command(args.command).run(args)

    return guarded(run, is_process=is_process, is_debug=is_debug)


def guarded(run: Callable[[], int], *, is_process: bool, is_debug: bool) -> int:
    """Runs a command, says in one line what stopped it, and returns the exit code."""
    with Interrupts(stays=is_process):
        try:
            return run()
        except SystemExit as exit_:  # argparse: help and version, or a message and code 2
            return exit_.code if isinstance(exit_.code, int) else EXIT_FAILURE
        except KeyboardInterrupt:
            say("interrupted")
            return EXIT_INTERRUPTED
        except BrokenPipeError:  # the reader of the output is gone, as with `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_FAILURE
        except Exception as error:
            if is_debug:
                traceback.print_exc()
            say(f"error: {describe(error)}")
            return EXIT_BAD_INPUT if is_bad_input(error) else EXIT_FAILURE


def is_bad_input(error: Exception) -> bool:
    """Whether the user can fix the error: wrong values, missing files."""
    missing = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
    return isinstance(error, (ValueError, FileExistsError, *missing))


def describe(error: Exception) -> str:
    """An error's text for the terminal; for an unexpected error, with its class."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {str(error.filename)!r}"
    # By name, since importing the engine's errors is slow for commands without an engine.
    is_ours = any(base.__name__ == "EngineError" for base in type(error).__mro__)
    if is_ours or type(error) is ValueError:
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        extra = _extra_with(error.name)
        if extra is not None:
            return (
                f"this needs {error.name}, which the extra [{extra}] installs: "
                f"pip install '.[{extra}]' in the folder of a checkout"
            )
    return f"{type(error).__name__}: {error} (--debug shows where)"


def _extra_with(module: str) -> str | None:
    """The smallest of this package's extras that installs a module that is missing."""
    distribution = module.partition(".")[0].replace("_", "-")
    extras: dict[str, list[str]] = {}
    for line in importlib.metadata.requires("tunix-sgljax") or ():
        found = re.match(r"([\w.-]+).*\bextra == ['\"]([\w-]+)['\"]", line)
        if found is not None:
            extras.setdefault(found[2], []).append(found[1].replace("_", "-"))
    having = [name for name, names in extras.items() if distribution in names]
    return min(having, key=lambda name: len(extras[name]), default=None)


def _add_debug(parser: argparse.ArgumentParser, default: object) -> None:
    parser.add_argument(
        "--debug", action="store_true", default=default, help="show the traceback of an error"
    )


if __name__ == "__main__":
    sys.exit(main())
