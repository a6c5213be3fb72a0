"""Engines that modules of these tests share; a module that changes weights has its own."""

from __future__ import annotations

import pytest

from sgljax_engine import Engine
from tests.engine.interrupts import make_engine
from tests.geometry import SMALL
from tests.server.scripted import ScriptedTokenizer
from tests.server.served import FOLDER, serving


@pytest.fixture(scope="session")
def engine():
    """A tiny one, whose steps are gated."""
    with make_engine() as engine:
        yield engine


@pytest.fixture(scope="session")
def golden():
    """The golden model, with its tokenizer and template."""
    with Engine(FOLDER, **SMALL) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(golden):
    with serving(golden) as served:
        yield served


@pytest.fixture(scope="session")
def tokenizer():
    """Says what the model of `scripted` says."""
    return ScriptedTokenizer()


@pytest.fixture(scope="session")
def scripted(tokenizer):
    with Engine(FOLDER, tokenizer=tokenizer, **SMALL) as engine, serving(engine) as served:
        yield served
