"""Drafts change how long tokens take, and not which they are: with every drafter and width."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from sgljax_engine import EngineCounters
from sgljax_engine.config import DRAFTERS
from tests.engine.determinism_cases import (
    MODEL,
    Asked,
    Bits,
    Interrupter,
    Way,
    differing,
    make_engine,
    requests,
    run,
)
from tests.engine.models import spread_weights
from tests.engine.native_cases import needs_machine_code
from tests.geometry import RETRACTING, SMALL


def plain(asked: Sequence[Asked]) -> list[Asked]:
    """Those that need one program of each kind."""
    return [each for each in asked if not each.params.changes_logits and not each.top_logprobs]


REQUESTS = requests(200, MODEL.vocab_size)
PLAIN = plain(REQUESTS)
SHORT = plain(requests(200, MODEL.vocab_size, max_len=155))
"""They fit the pages of `RETRACTING`, one at a time."""

OPTIONS: dict[str, Any] = {**SMALL, "speculation": "always"}


pytestmark = needs_machine_code


def without_drafts(asked: Sequence[Asked]) -> list[Bits]:
    """The bits of requests that an engine without speculation gives."""
    with make_engine(OPTIONS | {"speculation": "off"}) as engine:
        return run(engine, asked, Way({}))


@pytest.fixture(scope="module")
def expected():
    """The bits of `PLAIN`, without drafts."""
    return without_drafts(PLAIN)


@pytest.fixture(scope="module")
def short():
    """The bits of `SHORT`, without drafts."""
    return without_drafts(SHORT)


def run_twice(bits: Sequence[Bits], asked: Sequence[Asked], **options: Any) -> EngineCounters:
    """Requests, and the same ones again with the first answers as history; no bit may differ."""
    with make_engine(OPTIONS | options) as engine:
        for _ in range(2):
            assert differing(run(engine, asked, Way({})), bits) == []
        return engine.get_internal_state().counters


@pytest.mark.slow
def test_some_requests():
    """Their settings need no further programs."""
    few, options = PLAIN[:12], {"speculative_num_draft_tokens": 3}
    bits = without_drafts(few)
    counters = run_twice(bits, few, **options)
    assert counters.num_accepted_history > 100
    assert counters.num_drafted_ngram > counters.num_accepted_ngram


@pytest.mark.soak
def test_all_requests():
    """200 of all sampling kinds."""
    bits = without_drafts(REQUESTS)
    counters = run_twice(bits, REQUESTS)
    assert counters.num_accepted_history > 1000
    assert counters.num_drafted_ngram > counters.num_accepted_ngram > 50


@pytest.mark.soak
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_each_drafter(expected, drafter):
    counters = run_twice(expected[:40], PLAIN[:40], speculative_drafters=(drafter,))
    drafted = {name: getattr(counters, f"num_drafted_{name}") for name in DRAFTERS}
    assert {name for name, count in drafted.items() if count} <= {drafter}
    assert drafted[drafter] or drafter == "siblings"  # of prompts that differ there are none


@pytest.mark.soak
@pytest.mark.parametrize("num_drafts", [2, 30])
def test_each_width(expected, num_drafts):
    """Most drafts of a row, from which the widths of steps follow."""
    counters = run_twice(expected[:20], PLAIN[:20], speculative_num_draft_tokens=num_drafts)
    assert counters.num_accepted_tokens > 100
    assert 1 < counters.acceptance_length <= 1 + num_drafts


@pytest.mark.soak
def test_siblings():
    """Samples of one prompt draft from each other."""
    asked = [
        each._replace(
            prompt=PLAIN[0].prompt,
            params=dataclasses.replace(each.params, temperature=0.05, max_new_tokens=40),
        )
        for each in PLAIN[:12]
    ]
    bits = without_drafts(asked)
    with make_engine(OPTIONS | {"speculative_drafters": ("siblings",)}) as engine:
        assert differing(run(engine, asked, Way({})), bits) == []
        assert engine.get_internal_state().counters.num_accepted_siblings > 20


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 8))
def test_interruptions(short, seed):
    """Pages run out, then also pauses, updates and sleep; drafts of an older policy are drafts."""
    interrupt = Interrupter(seed, spread_weights(MODEL))
    with make_engine({**OPTIONS, **RETRACTING}) as engine:
        assert differing(run(engine, SHORT, Way({})), short) == []
        assert engine.get_internal_state().counters.num_retractions > 0
        found = run(engine, SHORT, Way({}, splits=2, interrupt=interrupt))
        assert differing(found, short) == []
        counters = engine.get_internal_state().counters
    assert len(interrupt.counts) >= 3, "of the ways to interrupt"
    assert counters.num_accepted_history > 200
