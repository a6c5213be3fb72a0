"""The page of results is what the reports say, and what they name is there."""

import re
import shutil

import pytest

from benchmarks.lib.reporting import GONE, ROOT, write_page

RESULTS = ROOT / "benchmarks/results"


def test_the_page_is_made_of_the_reports(tmp_path):
    for path in RESULTS.glob("*.md"):
        if path.name != "README.md":
            shutil.copy(path, tmp_path)
    write_page(tmp_path)
    page = (RESULTS / "README.md").read_text()
    assert (tmp_path / "README.md").read_text() == page
    assert len(re.findall(r"^\| \[", page, re.MULTILINE)) == len(list(RESULTS.glob("*.md"))) - 1


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.md")), ids=lambda path: path.name)
def test_links_and_commands_lead_to_files(path):
    text = path.read_text()
    links = [path.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    scripts = set(re.findall(r"benchmarks/[\w/]+\.py", text)) - GONE.keys()
    missing = [str(each) for each in links if not each.exists()]
    missing += [script for script in scripts if not (ROOT / script).exists()]
    assert not missing
