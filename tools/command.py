"""The command line of a tool."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from tunix_sgljax.cli.main import Parser, guarded


def main(
    module: str,
    summary: str,
    examples: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    argv: list[str] | None = None,
) -> int:
    """Runs a tool and returns the exit code: 0, 1 failure, 2 bad input, 130 interrupted.

    Args:
        module: What `python -m` runs.
        summary: One line.
        examples: Command lines to copy, shown at the end of its `--help`.
        add_arguments: Declares its options.
        run: Does the work and returns the exit code.
        argv: Arguments; None takes the process's.
    """
    parser = make_parser(module, summary, examples, add_arguments)
    words = sys.argv[1:] if argv is None else argv
    return guarded(
        lambda: run(parser.parse_args(words)),
        is_process=argv is None,
        is_debug="--debug" in words,
    )


def make_parser(
    module: str,
    summary: str,
    examples: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
) -> Parser:
    """The parser of a tool; see `main`."""
    parser = Parser(
        prog=f"python -m {module}",
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser
