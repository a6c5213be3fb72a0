"""Folders of all families, read by us and by transformers 5.24: equal, or listed in kept.py.

The folders are made from seeds, and transformers' answers are stored: see make_goldens.py.
"""

from __future__ import annotations

import re

import pytest

from tests.folders.answers import Comparer, Verdict, answers
from tests.folders.cases import cases
from tests.folders.families import FAMILIES
from tests.folders.kept import LENIENT, REFUSED
from tests.tiers import tiered

FAST = ("llama", "gemma3_multimodal")
"""A text model and a nested one."""

IN_CI = ("qwen3", "gemma4")
"""The others, whose forward passes are compiled too, are for the soak."""

KEPT = {"refused": REFUSED, "lenient": LENIENT}


def family_of(name: str) -> str:
    return name.split(" + ")[0]


@pytest.mark.parametrize("family", tiered(FAMILIES, FAST, IN_CI))
def test_a_folder_means_what_transformers_makes_of_it(family):
    comparer = Comparer()
    verdicts = {
        name: comparer.compare(draft)
        for name, draft in cases().items()
        if family_of(name) == family
    }
    wrong = {name: verdict for name, verdict in verdicts.items() if not is_explained(verdict)}
    assert wrong == {}
    for kind, kept in KEPT.items():
        for each in kept:
            if family_of(each.example) == family:
                verdict = verdicts[each.example]
                assert verdict.kind == kind, (each, verdict)
                assert re.search(each.pattern, verdict.reason), (each, verdict)


def is_explained(verdict: Verdict) -> bool:
    """Whether a folder is read as by transformers, or is listed as one that is not."""
    kept = KEPT.get(verdict.kind, ())
    is_listed = any(re.search(each.pattern, verdict.reason) for each in kept)
    return verdict.kind in ("equal", "both refuse") or is_listed


def test_the_answers_are_of_these_folders():
    facts, rows = answers()
    assert facts.keys() == cases().keys()
    assert len(facts) >= 450
    used = {fact["row"] for fact in facts.values() if "row" in fact}
    assert used == set(range(len(rows)))
