"""The reports of accelerators are those that the script asks for; nothing is compiled."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.docs import doc_blocks
from tools.aot import __main__ as aot
from tools.aot.words import NOT_RUN
from tools.command import make_parser

maker = doc_blocks.load_script("make_accelerators")

PAGE = maker.OUTPUT.read_text(encoding="utf-8")
REPORTS_PAGE = maker.REPORTS_OUTPUT.read_text(encoding="utf-8")
REPORTS = {report.heading: report for report in maker.REPORTS}


def test_the_pages_are_up_to_date():
    """Headings, commands, notes and the summary; the numbers are the compilers'."""
    assert maker.render_reports(REPORTS_PAGE, {}) == REPORTS_PAGE, (
        "run python docs/make_accelerators.py"
    )
    assert maker.render(PAGE, REPORTS_PAGE) == PAGE, "run python docs/make_accelerators.py"


def test_the_sections_are_the_reports():
    assert re.findall(r"^## (.+)$", REPORTS_PAGE, re.MULTILINE) == list(REPORTS)
    for heading, body in maker.sections(REPORTS_PAGE).items():
        assert body.startswith(f"Made by `{REPORTS[heading].command}` with "), (
            "run python docs/make_accelerators.py"
        )
        assert body.count(NOT_RUN) == 1
        assert "It fits." in body


@pytest.mark.parametrize("heading", REPORTS)
def test_the_command_is_one_of_aot(heading):
    python, module, name, *argv = shlex.split(REPORTS[heading].command)
    assert (python, module, name) == ("python", "-m", "tools.aot")
    args = make_parser("tools.aot", aot.SUMMARY, aot.EXAMPLES, aot.add_arguments).parse_args(argv)
    assert not args.json


def test_a_report_is_replaced_and_others_are_kept():
    report = REPORTS["Qwen3-0.6B on one v5e"]
    old = maker.sections(REPORTS_PAGE)[report.heading]
    new = old.replace("for 65536 tokens", "for 32768 tokens")
    text = maker.render_reports(REPORTS_PAGE, {report.heading: new})
    assert maker.sections(text) == maker.sections(REPORTS_PAGE) | {report.heading: new}
    assert "| Qwen3-0.6B | v5e | 1 x 1 | 32,768 | " in maker.render(PAGE, text)


def test_what_is_missing_is_said():
    without = REPORTS_PAGE.replace("## Gemma 3 4B on one v6e\n", "## Another\n")
    with pytest.raises(ValueError, match="has no report of Gemma 3 4B on one v6e"):
        maker.render_reports(without, {})
    with pytest.raises(ValueError, match=r"accelerators\.md has no <!-- table"):
        maker.render("a page", REPORTS_PAGE)
    with pytest.raises(ValueError, match="a report has no "):
        maker.summary_row(maker.REPORTS[0], "Made by hand")
