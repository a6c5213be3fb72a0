"""docs/sampling.md says what is so."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from sgljax_engine import FOREIGN_FIELDS, Engine, SamplingParams

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location(
    "make_sampling_table", ROOT / "docs" / "make_sampling_table.py"
)
NAMES = r"`\w+`(, `\w+`)*"
assert _SPEC is not None
assert _SPEC.loader is not None
maker = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(maker)


@pytest.fixture(scope="module")
def text():
    return maker.OUTPUT.read_text(encoding="utf-8")


def names_of(lines, beginning):
    """Names that lines with this beginning are about, in order."""
    chosen = [line.removeprefix(beginning) for line in lines if line.startswith(f"{beginning}`")]
    plain = [re.sub(r" \(.*?\)", "", line) for line in chosen]
    found = [match[0] for match in map(re.compile(NAMES).match, plain) if match is not None]
    assert len(found) == len(plain)
    return [name for names in found for name in names.split("`")[1::2]]


def test_is_up_to_date(text):
    assert text == maker.render(), "run python docs/make_sampling_table.py"


def test_every_field_and_every_refused_field_is_in_it(text):
    supported, refused = (text.split(f"## {title}\n")[1] for title in ("Supported", "Refused"))
    fields = [field.name for field in dataclasses.fields(SamplingParams)]
    arguments = [
        name for name in inspect.signature(Engine.generate).parameters if "logprob" in name
    ]
    lines = supported.split("\n## ")[0].splitlines()
    assert names_of(lines, "- ") == [*fields, *arguments]
    lines = names_of(refused.split("\n## ")[0].splitlines(), "- ")
    assert sorted(lines) == sorted(FOREIGN_FIELDS)


def test_docstrings_cover_the_fields():
    body = inspect.cleandoc(SamplingParams.__doc__ or "").split("Attributes:\n")[1]
    fields = [field.name for field in dataclasses.fields(SamplingParams)]
    assert re.findall(r"^    (\w+): ", body, re.MULTILINE) == fields


def named_tests():
    nodes = {maker.test_of(field.name) for field in dataclasses.fields(SamplingParams)}
    nodes |= set(maker.LOGPROB_ARGUMENTS.values())
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
