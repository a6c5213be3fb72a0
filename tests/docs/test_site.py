"""The documentation site builds without a warning, and every public name is in its reference."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("sgljax_engine", "sgljax_engine.fleet", "sgljax_engine.server", "tunix_sgljax")


@pytest.mark.slow
def test_the_site(tmp_path):
    """One test, so that it is built once."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr
    check_that_public_names_are_in_the_reference(tmp_path)
    check_that_public_methods_are_in_the_reference(tmp_path)
    check_that_pages_fetch_nothing_from_elsewhere(tmp_path)


def inventory(folder: Path) -> dict[str, str]:
    """Page and anchor of every documented name, from Sphinx's inventory format."""
    data = (folder / "objects.inv").read_bytes()
    body = data.split(b"\n", 4)[4]
    places = {}
    for line in zlib.decompress(body).decode().splitlines():
        name, _, _, place, _ = line.split(" ", 4)
        places[name] = place.replace("$", name)
    return places


def check_that_public_names_are_in_the_reference(site):
    places = inventory(site)
    for package in PACKAGES:
        for name in importlib.import_module(package).__all__:
            page, _, anchor = places[f"{package}.{name}"].partition("#")
            assert page.startswith("reference/"), name
            assert f'id="{anchor}"' in (site / page).read_text(encoding="utf-8"), name


def check_that_public_methods_are_in_the_reference(site):
    engine = importlib.import_module("sgljax_engine").Engine
    rollout = importlib.import_module("tunix_sgljax").SglJaxRollout
    places = inventory(site)
    for path, public in (("sgljax_engine.Engine", engine), ("tunix_sgljax.SglJaxRollout", rollout)):
        for name in vars(public):
            if not name.startswith("_"):
                assert f"{path}.{name}" in places


def test_the_index_of_the_reference_lists_every_name():
    index = (ROOT / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\.md#([\w.]+)\)", index))
    public = {
        f"{package}.{name}"
        for package in PACKAGES
        for name in importlib.import_module(package).__all__
    }
    assert listed == public


def check_that_pages_fetch_nothing_from_elsewhere(site):
    """No script, style, font or picture of another server; links to click on are fine."""
    fetched = re.compile(r"<(?:script|img|iframe)[^>]*src=\"?https?:|<link[^>]*href=\"?https?:")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        found = fetched.search(page.read_text(encoding="utf-8"))
        assert found is None, f"{page.name}: {found and found[0]}"
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.search(r"url\([\"']?https?:|@import", styles)


def test_every_page_is_in_the_navigation():
    lines = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2].splitlines()
    listed = {line.split()[-1] for line in lines if line and not line.lstrip().startswith("#")}
    docs = ROOT / "docs"
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    assert pages <= listed, f"not in mkdocs.yml: {pages - listed}"


@pytest.mark.slow
def test_a_dead_link_to_the_repository_fails_the_build(tmp_path):
    """The check that `--strict` stands on can fail."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "site_hooks.py").write_bytes((ROOT / "docs" / "site_hooks.py").read_bytes())
    (docs / "index.md").write_text("# A page\n\n[gone](../benchmarks/gone.md)\n", encoding="utf-8")
    config = "site_name: one\nhooks: [docs/site_hooks.py]\nexclude_docs: '*.py'\n"
    (tmp_path / "mkdocs.yml").write_text(config, encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", "site"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert built.returncode != 0
    assert "docs/index.md links to benchmarks/gone.md, which is not in the repository" in (
        built.stderr
    )
