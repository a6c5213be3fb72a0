"""The first commands of README and docs, as they stand, in a fresh clone with an empty home."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compilation import SITE
from tests.devices import CACHE_VARIABLES
from tests.docs import doc_blocks

ROOT = doc_blocks.DOCS.parent
LIMIT_S = 1800.0
COUNT = re.compile(r"\b(\d+) of (?:Tunix's own )?32\b")


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone whose .venv is what `make install` would make: this environment."""
    folder = tmp_path_factory.mktemp("first") / "tunix-sgljax"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    venv = folder / ".venv"
    venv.mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name != ".installed":
            (venv / path.name).symlink_to(path)
    (venv / ".installed").touch()
    return folder


def run(clone: Path, home: Path, commands: str, variables: dict[str, str]) -> str:
    """Runs a block of a page in a shell, as a newcomer has it, with these variables."""
    home.mkdir(exist_ok=True)
    environment = {
        **CACHE_VARIABLES,  # for what other tests compile too
        **variables,
        "HOME": str(home),
        "PATH": os.pathsep.join([str(clone / ".venv/bin"), os.environ["PATH"]]),
        # Entries of the cache are written whole. The environment's editable install is of this
        # checkout, not of the clone.
        "PYTHONPATH": os.pathsep.join([str(SITE), str(clone), str(clone / "engine")]),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
    assert "PyTorch was not found" not in done.stdout + done.stderr
    return done.stdout


def shell_blocks(page: str) -> list[str]:
    return [each.code for each in doc_blocks.blocks(page) if each.kind == "bash" and each.is_run]


@pytest.mark.first
@pytest.mark.parametrize(
    ("page", "variables"),
    [
        # The demo trains for minutes otherwise.
        pytest.param("../README.md", {"DEMO_ARGS": "--steps 2"}, marks=pytest.mark.slow),
        pytest.param("../README.md", {}, marks=pytest.mark.soak),
        pytest.param("first_steps.md", {}, marks=pytest.mark.soak),
    ],
)
def test_the_commands_of_a_page_run(clone, tmp_path, page, variables):
    found = shell_blocks(page)
    assert len(found) >= 2
    printed = [run(clone, tmp_path / "home", commands, variables) for commands in found]
    if page == "first_steps.md":
        assert "7+8=15,3+5+1=9,95" in "".join(printed)
        assert (clone / "outputs/step.pftrace").is_file()
    else:
        assert (clone / "outputs/grpo_addition/training.png").is_file()


def test_the_count_of_recipes_is_the_same_everywhere():
    counts = {
        path.name: set(COUNT.findall(path.read_text(encoding="utf-8")))
        for path in (ROOT / "README.md", *doc_blocks.DOCS.glob("*.md"))
    }
    (right,) = counts.pop("recipes.md")
    named = {page: found for page, found in counts.items() if found}
    assert {"README.md", "tunix.md"} <= named.keys()
    assert all(found == {right} for found in named.values()), f"recipes.md says {right}: {named}"


def test_no_command_needs_the_package_on_an_index():
    """It is on none yet, and a placeholder is no address."""
    pages = {path.name: path.read_text(encoding="utf-8") for path in doc_blocks.DOCS.glob("*.md")}
    pages["README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, text in pages.items():
        assert not re.search(r"pip install [^\n]*[ '\"]tunix-sgljax\b", text), name
        assert not re.search(r"git clone [A-Z]", text), name
        assert "REPOSITORY" not in text, name


def test_the_readme_is_short_and_shows_the_switch():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") < 120
    (diff,) = (each.code for each in doc_blocks.blocks("../README.md") if each.kind == "diff")
    assert len(diff.splitlines()) == 3
