"""Parses the command line of `tunix-sgljax` and runs one of its commands."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Protocol, cast


class Command(Protocol):
    """A module of this package that holds one command."""

    SUMMARY: str
    """One line, for the list of commands."""
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


COMMANDS = ("train", "generate", "bench", "doctor", "convert")


def find_command(name: str) -> Command:
    """The module of a command."""
    return cast(Command, importlib.import_module(f"tunix_sgljax.cli.{name}"))


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns the exit code."""
    parser = argparse.ArgumentParser(prog="tunix-sgljax", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name in COMMANDS:
        command = find_command(name)
        command.add_arguments(
            commands.add_parser(
                name,
                help=command.SUMMARY,
                description=command.SUMMARY,
                epilog=command.EXAMPLES,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    args = parser.parse_args(argv)
    return find_command(args.command).run(args)


if __name__ == "__main__":
    sys.exit(main())
