"""Saving KV pages: a few at a time, between dispatches, and only what they were."""

from __future__ import annotations

import itertools

import pytest

from sgljax_engine import CheckpointManager
from sgljax_engine.cache.allocator import PageAllocator
from sgljax_engine.cache.pool import PagePool
from sgljax_engine.core import commands as cmd
from sgljax_engine.runner.kv.memory import KVMemory
from sgljax_engine.runner.runner import ModelRunner
from tests.engine.interrupts import (
    LONG,
    NUM_TOKENS,
    PAGES_PER_COPY,
    make_engine,
    settle,
    small_copies,
    wait_until,
)
from tests.engine.models import random_prompts
from tests.threads import LIMIT_S, running, start

PROMPTS = random_prompts(4, 20, 30, seed=4)
RIDS = [f"r{i}" for i in range(len(PROMPTS))]
PAGE_SIZE = 4


@pytest.fixture(scope="module")
def shared():
    with small_copies(), make_engine() as engine:
        engine.warmup()
        yield engine


@pytest.fixture
def engine(shared):
    shared.flush_cache()
    yield shared
    settle(shared)


@pytest.fixture(scope="module")
def expected(shared):
    return [out.output_ids for out in shared.generate_requests(PROMPTS, LONG)]


def generate(engine):
    """All requests decode, paused."""
    before = engine.get_internal_state().counters.num_first_tokens
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS}
    engine.pause_generation("in_place")
    call = start(lambda: engine.generate(input_ids=PROMPTS, sampling_params=params, rid=RIDS))
    wait_until(engine, lambda s: s.waiting_queue_size == len(PROMPTS))
    engine.continue_generation()
    wait_until(engine, lambda s: s.counters.num_first_tokens == before + len(PROMPTS))
    engine.pause_generation("in_place")
    assert not call.done()
    return call


def assert_finishes(call, expected):
    assert [out["output_ids"] for out in call.result(LIMIT_S)] == expected


def before_copies(monkeypatch, *acts):
    """Has these called on the saving thread before the first copy is asked for, the second, ..."""
    asked = []

    real = cmd.CopyPages

    def watched(stamps, future):
        if len(asked) < len(acts):
            acts[len(asked)]()
        asked.append(stamps)
        return real(stamps, future)

    monkeypatch.setattr(cmd, "CopyPages", watched)
    return asked


def flush(engine):
    engine.pause_generation("retract")
    assert engine.flush_cache().success
    engine.continue_generation()


def restored(folder, expected):
    """Finishes a checkpoint's requests in another engine; tokens that it prefilled."""
    with make_engine() as other:
        futures = other.restore_checkpoint(folder)
        outs = [futures[rid].result(LIMIT_S).output_ids for rid in RIDS]
        assert outs == expected
        return other.get_internal_state().counters.num_prefill_tokens


def num_saved_pages(folder):
    prefix = CheckpointManager(folder).load().scheduler_state.prefix_cache
    return 0 if prefix is None else len(prefix.nodes)


def test_requests_decode_between_copies(engine, expected, tmp_path, monkeypatch):
    call = generate(engine)
    events = []
    for owner, name in ((KVMemory, "save_pages"), (ModelRunner, "decode")):
        real = getattr(owner, name)

        def noted(self, arg, *rest, name=name, real=real):
            events.append((name, len(arg) if name == "save_pages" else 0))
            return real(self, arg, *rest)

        monkeypatch.setattr(owner, name, noted)
    before_copies(monkeypatch, engine.continue_generation)
    with running():
        engine.save_checkpoint(tmp_path, include_kv=True)
    seen = list(events)
    assert_finishes(call, expected)
    copies = [index for index, (name, _) in enumerate(seen) if name == "save_pages"]
    assert len(copies) > 3
    assert all(seen[index][1] <= PAGES_PER_COPY for index in copies)
    for first, second in itertools.pairwise(copies):
        assert ("decode", 0) in seen[first:second]
    assert num_saved_pages(tmp_path) > PAGES_PER_COPY * (len(copies) - 1)
    assert restored(tmp_path, expected) < PAGE_SIZE * len(PROMPTS) + 1


def test_pages_that_are_gone_are_left_out(engine, expected, tmp_path, monkeypatch):
    call = generate(engine)
    before_copies(monkeypatch, lambda: None, lambda: flush(engine))
    engine.save_checkpoint(tmp_path, include_kv=True)
    assert_finishes(call, expected)
    assert 0 < num_saved_pages(tmp_path) <= PAGES_PER_COPY
    restored(tmp_path, expected)


def test_nothing_is_left_of_a_cache_that_is_reset_first(engine, expected, tmp_path, monkeypatch):
    call = generate(engine)
    before_copies(monkeypatch, lambda: flush(engine))
    engine.save_checkpoint(tmp_path, include_kv=True)
    assert_finishes(call, expected)
    assert num_saved_pages(tmp_path) == 0
    restored(tmp_path, expected)


def test_sleep_in_between_loses_none(engine, expected, tmp_path, monkeypatch):
    call = generate(engine)
    asked = before_copies(monkeypatch, lambda: None, lambda: engine.sleep(1, preserve_state=True))
    engine.save_checkpoint(tmp_path, include_kv=True)
    assert len(asked) == 2  # a few, and then all that sleep
    engine.wake_up()
    engine.continue_generation()
    assert_finishes(call, expected)
    assert num_saved_pages(tmp_path) == len(asked[0])
    assert restored(tmp_path, expected) < PAGE_SIZE * len(PROMPTS) + 1


class TestStamps:
    def test_of_pages_that_changed_hands(self):
        allocator = PageAllocator(4)
        pool = PagePool(allocator, 4)
        pages = allocator.allocate(3)
        kept, freed, reused = (pool.stamp(page) for page in pages)
        allocator.free(pages[1:])
        (again,) = allocator.allocate(1)
        found = {stamp.page: pool.is_unchanged(stamp) for stamp in (kept, freed, reused)}
        assert found[kept.page]
        assert not found[freed.page]
        assert not found[reused.page]
        assert again in (freed.page, reused.page)
        pool.reset_cache()
        assert not pool.is_unchanged(kept)
