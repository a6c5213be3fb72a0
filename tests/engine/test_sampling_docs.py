"""docs/sampling.md says what is so."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
from pathlib import Path

import pytest

from sgljax_engine import FOREIGN_FIELDS, Engine, SamplingParams

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location(
    "make_sampling_table", ROOT / "docs" / "make_sampling_table.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
maker = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(maker)


@pytest.fixture(scope="module")
def text():
    return maker.OUTPUT.read_text(encoding="utf-8")


def rows_of(text):
    """First cell to whole row, of all tables."""
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return {row.split("`")[1]: row for row in rows}


def test_is_up_to_date(text):
    assert text == maker.render(), "run python docs/make_sampling_table.py"


def test_every_field_and_every_refused_field_is_in_it(text):
    rows = rows_of(text)
    fields = [field.name for field in dataclasses.fields(SamplingParams)]
    arguments = [
        name for name in inspect.signature(Engine.generate).parameters if "logprob" in name
    ]
    assert list(rows) == [*fields, *arguments, *FOREIGN_FIELDS]


def test_docstrings_cover_the_fields():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(maker.attribute_docs(SamplingParams)) == fields


def named_tests():
    nodes = {maker.test_of(field.name) for field in dataclasses.fields(SamplingParams)}
    nodes |= {test for _, test in maker.LOGPROB_ARGUMENTS.values()}
    return sorted(nodes | {maker.REFUSAL_TEST})


@pytest.mark.parametrize("node", named_tests())
def test_named_tests_exist(node):
    """As pytest collects them: functions of classes called Test..., in files called test_..."""
    path, class_name, function_name = node.split("::")
    assert Path(path).name.startswith("test_")
    assert class_name.startswith("Test")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = [
        function.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == class_name
        for function in node.body
        if isinstance(function, ast.FunctionDef)
    ]
    assert found.count(function_name) == 1
