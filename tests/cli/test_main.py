"""The command line's frame: help, versions, errors and exit codes."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from sgljax_engine import EngineStepError, InvalidConfigError
from tests.threads import LIMIT_S
from tunix_sgljax.cli import main as cli

QWEN = "Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"
CONFIG = Path(__file__).parents[2] / "configs/grpo_addition.yaml"


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
for name in ("train", "tunix", "generate", "doctor", "convert", "evaluate"):
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
        (
            ["serve", "--model", "x", "--max-model-len", "4096"],
            "--max-model-len; options of the engine are given as --engine max_model_len=VALUE (see",
        ),
        (
            ["serve", "--model", "x", "--tensor-parallel-size=2"],
            "--tensor-parallel-size; options of the engine are given as --engine tp_size=VALUE (",
        ),
        (
            ["generate", "--model", "x", "--enforce-eager"],
            "--enforce-eager; it is an option of another engine with",
        ),
        (["generate", "--model", "x", "--num-beams", "2"], "beam search is not implemented (see"),
        (["train", "--config", "x", "--step=3"], "unknown option --step (see tunix-sgljax train"),
        (["serve", "--model", "x", "now"], "unexpected argument 'now' (see tunix-sgljax serve"),
        (["convert", "/no/such", "--output", "/no"], "SOURCE must be a folder, and there is no"),
        (
            ["generate", "--model", "nowhere", "hi"],
            "error: --model must be a folder, and there is no 'nowhere'; models are not "
            "downloaded: `hf download OWNER/NAME --local-dir nowhere` fetches one of Hugging Face",
        ),
        *(
            ([*words, "Qwen/Qwen3-0.6B"], f"`hf download {QWEN}` fetches one of")
            for words in (
                ["generate", "hi", "--model"],
                ["serve", "--model"],
                ["doctor", "--model"],
                ["evaluate", "--config", str(CONFIG), "--model"],
                ["convert", "--output", "/no/such", "--base", "x"],
                ["convert", str(Path(__file__).parent), "--output", "/no/such", "--base"],
            )
        ),
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


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        *((name, "server") for name in ("uvicorn", "fastapi", "pydantic", "prometheus_client")),
        *(
            ("matplotlib", "demo"),
            ("libtpu", "aot"),
            ("gguf.reader", "real"),
        ),
    ],
)
def test_a_missing_module_of_an_extra_is_said_with_the_extra(monkeypatch, capsys, module, extra):
    error = ModuleNotFoundError(f"No module named {module!r}", name=module)
    assert cli.main(failing(monkeypatch, error)) == 1
    assert capsys.readouterr().err == (
        f"error: this needs {module}, which the extra [{extra}] installs: pip install '.[{extra}]' "
        "in the folder of a checkout\n"
    )


def test_serve_without_its_extra(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("sgljax_engine.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    folder = Path(__file__).parents[1] / "golden/qwen3_gqa_tied"
    assert cli.main(["serve", "--model", str(folder)]) == 1
    assert "error: this needs uvicorn, which the extra [server] installs" in capsys.readouterr().err


def test_a_missing_module_of_no_extra(monkeypatch, capsys):
    error = ModuleNotFoundError("No module named 'my_task'", name="my_task")
    assert cli.main(failing(monkeypatch, error)) == 1
    assert capsys.readouterr().err == (
        "error: ModuleNotFoundError: No module named 'my_task' (--debug shows where)\n"
    )


def test_debug_shows_the_traceback(monkeypatch, capsys):
    argv = failing(monkeypatch, InvalidConfigError("page_size must be >= 1"))
    assert cli.main([*argv, "--debug"]) == cli.EXIT_BAD_INPUT
    text = capsys.readouterr().err
    assert text.startswith("Traceback")
    assert text.endswith("error: page_size must be >= 1\n")
