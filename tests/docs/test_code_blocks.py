"""The Python of the pages runs, and prints what they say."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import hf_folder
from tests.docs import doc_blocks
from tunix_sgljax.cli.main import main

ADAPTERS = "## Adapters of an engine"
"""The heading in docs/lora.md behind which the blocks need no Tunix."""

QUICK_COMPILE = "that the docs' code runs, not the numbers that it gives"


@pytest.mark.slow
def test_first_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shell = [block.code for block in doc_blocks.blocks("first_steps.md") if block.kind == "bash"]
    (command,) = [line for code in shell for line in code.splitlines() if "hf_folder" in line]
    program, script, *arguments = shlex.split(command)
    assert (program, script) == ("python", "examples/hf_folder.py")
    assert hf_folder.main(arguments) == 0
    assert doc_blocks.run("first_steps.md", {}) >= 5


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix
def test_tunix_and_lora(tmp_path, monkeypatch):
    """The whole recipe, and the lines of LoRA that come on top of it."""
    monkeypatch.chdir(tmp_path)
    assert hf_folder.main(["addition-model"]) == 0
    names: dict[str, Any] = {}
    assert doc_blocks.run("tunix.md", names) == 2
    lines = range(doc_blocks.line_of("lora.md", ADAPTERS))
    assert doc_blocks.run("lora.md", names, lines) == 2


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix and orbax
def test_a_task_of_your_own(tmp_path, monkeypatch, capsys):
    """The whole config of training.md, its module and its commands, as they stand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    page = doc_blocks.blocks("training.md")
    for block in page:
        name = re.match(r"# (my_\w+\.(?:py|yaml))\n", block.code)
        if name is not None:
            Path(name[1]).write_text(block.code, encoding="utf-8")
    (shell,) = (block.code for block in page if block.kind == "bash" and "my_run" in block.code)
    made, dry_run, run = (shlex.split(line) for line in shell.splitlines())
    assert made[:2] == ["python", "examples/hf_folder.py"]
    assert hf_folder.main(made[2:]) == 0
    for command in (dry_run, run):
        assert command[0] == "tunix-sgljax"
        assert main(command[1:]) == 0
    assert "100 training rows" in capsys.readouterr().out
    records = json.loads(Path("outputs/my_run/records.json").read_text())
    assert [step["weight_version"] for step in records["steps"]] == [0, 1, 2]
    assert all(step["reward"] > 0 for step in records["steps"])


def test_installation():
    assert doc_blocks.run("installation.md", {}) == 1


@pytest.mark.slow
def test_weights():
    assert doc_blocks.run("weights.md", {}) == 3


def test_adapters():
    lines = range(doc_blocks.line_of("lora.md", ADAPTERS), sys.maxsize)
    assert doc_blocks.run("lora.md", {}, lines) == 2


def test_blocks_of_other_pages_are_python():
    """Those that are not run are at least compiled."""
    num_compiled = 0
    for path in sorted(doc_blocks.DOCS.rglob("*.md")):
        page = path.relative_to(doc_blocks.DOCS).as_posix()
        for block in doc_blocks.blocks(page):
            if block.kind == "python":
                flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
                compile(block.code, f"docs/{page}:{block.line}", "exec", flags)
                num_compiled += 1
    assert num_compiled > 20


def test_a_page_that_says_something_else_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(doc_blocks, "DOCS", tmp_path)
    page = "```python\nprint(1)\n```\n\n```text\n2\n```\n"
    (tmp_path / "page.md").write_text(page, encoding="utf-8")
    with pytest.raises(AssertionError, match=r"docs/page\.md:2 printed\n1"):
        doc_blocks.run("page.md", {})
