"""The page of results has a row for every report, and what it and the archive link to is there."""

import re

import pytest

from benchmarks.lib.page import ENDED, report_rows
from benchmarks.lib.reporting import ROOT

RESULTS = ROOT / "benchmarks/results"


def test_the_page_has_the_row_of_every_report():
    rows = report_rows(RESULTS)
    assert len(rows) == 2 + len(list(RESULTS.glob("*.md"))) - 1
    assert "\n".join(rows) in (RESULTS / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.md")), ids=lambda path: path.name)
def test_links_and_commands_lead_to_files(path):
    text = path.read_text()
    links = [path.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    ended = (RESULTS / "README.md").read_text().partition(ENDED)[2]
    scripts = set(re.findall(r"benchmarks/[\w/]+\.py", text)) - set(re.findall(r"`([^`]+)`", ended))
    missing = [str(each) for each in links if not each.exists()]
    missing += [script for script in scripts if not (ROOT / script).exists()]
    assert not missing
