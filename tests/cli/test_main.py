"""The command line's frame: help, versions, errors and exit codes."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys

import pytest

from sgljax_engine import EngineStepError, InvalidConfigError
from tests.threads import LIMIT_S
from tunix_sgljax.cli import main as cli


def failing(monkeypatch, error):
    """A command that raises."""

    def fail(args):
        raise error

    module = importlib.import_module("tunix_sgljax.cli.generate")
    monkeypatch.setattr(module, "run", fail)
    return ["generate", "--model", "folder"]


def test_help_lists_all_commands_with_examples(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"    {name} " in text
        assert f"  tunix-sgljax {name} " in text


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command(name, capsys):
    assert cli.COMMANDS[name] == cli.find_command(name).SUMMARY
    assert cli.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert f"  tunix-sgljax {name} " in text


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    version = importlib.metadata.version("tunix-sgljax")
    assert capsys.readouterr().out == f"tunix-sgljax {version}\n"


def test_help_imports_no_jax_and_no_tunix():
    code = """
import sys
from tunix_sgljax.cli.main import main
assert main(["--help"]) == 0
for name in ("train", "tunix", "generate", "bench", "doctor", "aot", "convert"):
    assert main([name, "--help"]) == 0
assert not {"jax", "tunix", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S, capture_output=True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: command"),
        (["generat"], "invalid choice: 'generat'"),
        (["generate", "--model"], "argument --model: expected one argument"),
        (
            ["generate", "--model", "x", "--temprature", "0"],
            "error: unknown option --temprature; did you mean --temperature? "
            "(see tunix-sgljax generate --help)",
        ),
        (["train", "--config", "x", "--step=3"], "unknown option --step (see tunix-sgljax train"),
        (["serve", "--model", "x", "now"], "unexpected argument 'now' (see tunix-sgljax serve"),
        (["convert", "/no/such", "--output", "/no"], "SOURCE must be a folder, and there is no"),
        (["generate", "--model", "nowhere", "hi"], "error: --model must be a folder"),
    ],
)
def test_bad_input_is_said_in_one_line(argv, message, capsys):
    assert cli.main(argv) == cli.EXIT_BAD_INPUT
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InvalidConfigError("page_size must be >= 1"), 2, "error: page_size must be >= 1\n"),
        (FileNotFoundError(2, "No such file", "a.txt"), 2, "error: No such file: 'a.txt'\n"),
        (EngineStepError("a step failed"), 1, "error: a step failed\n"),
        (ZeroDivisionError("oh"), 1, "error: ZeroDivisionError: oh (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_become_a_line_and_an_exit_code(monkeypatch, capsys, error, code, message):
    assert cli.main(failing(monkeypatch, error)) == code
    assert capsys.readouterr().err == message


def test_debug_shows_the_traceback(monkeypatch, capsys):
    argv = failing(monkeypatch, InvalidConfigError("page_size must be >= 1"))
    assert cli.main([*argv, "--debug"]) == cli.EXIT_BAD_INPUT
    text = capsys.readouterr().err
    assert text.startswith("Traceback")
    assert text.endswith("error: page_size must be >= 1\n")
