"""The scheduler as a state machine, with a device that only counts."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sgljax_engine.cache.allocator import PageAllocator
from sgljax_engine.cache.pool import PagePool
from sgljax_engine.cache.states import StateSlots
from sgljax_engine.cache.window import WindowPages, WindowSizes
from sgljax_engine.config import SCHEDULE_POLICIES, SchedulerConfig
from sgljax_engine.errors import EngineError
from sgljax_engine.sampling_params import SamplingParams
from sgljax_engine.scheduler.policy import FIRST_STEPS, DispatchPacer
from sgljax_engine.scheduler.scheduler import Scheduler
from sgljax_engine.types import (
    FinishReason,
    Request,
    RequestStatus,
    RowOutput,
    SchedulerOutput,
    StepOutput,
)
from tests.engine.fake_device import FakeDevice, times_of

PAGE = 4
BLOCK = 8


def make_scheduler(
    num_pages=16,
    max_running=4,
    steps=4,
    budget=32,
    *,
    page_size=PAGE,
    is_sharing=True,
    windows=None,
    states=None,
    **config,
):
    beside = windows or states
    allocator = PageAllocator(num_pages, None if beside is None else beside.forget)
    pool = PagePool(allocator, page_size, is_sharing=is_sharing, windows=windows, states=states)
    scheduler = Scheduler(
        SchedulerConfig(max_running_requests=max_running, decode_steps=steps, **config),
        pool,
        token_block=BLOCK,
        max_prefill_tokens=budget,
        prefill_sizes=range(BLOCK, budget + 1, BLOCK),
    )
    return scheduler, pool


def make_request(rid, num_prompt=5, max_new=6):
    params = SamplingParams(max_new_tokens=max_new)
    return Request(rid=str(rid), prompt_ids=list(range(num_prompt)), params=params, seed=0)


def run_device(
    output: SchedulerOutput,
    stop_chance: float = 0.0,
    rng: random.Random | None = None,
    step_s: float = 1e-3,
    token_s: float = 0.0,
) -> StepOutput:
    """What a device could answer: each row takes up to its limit, perhaps stops early."""
    rows = []
    for limit in output.step_limits:
        count = min(limit, output.num_steps)
        stopped = False
        if rng is not None and rng.random() < stop_chance:
            stopped, count = True, rng.randint(1, count)
        zeros = [0.0] * count
        rows.append(RowOutput([7] * count, zeros, zeros, zeros, stopped))
    dispatch_s = step_s * output.num_steps + token_s * output.prefill_tokens
    return StepOutput(rows, times=times_of(dispatch_s))


def check_output(output: SchedulerOutput, scheduler: Scheduler, max_running, budget, page_size):
    """What the device relies on."""
    assert not output.is_empty
    assert not (output.retracted and output.started)
    assert len(output.decode) <= len(scheduler.running) <= max_running
    cost = sum(-(-chunk.num_tokens // BLOCK) * BLOCK for chunk in output.prefill)
    assert cost <= budget
    chunk_end = {c.request.rid: c.start + c.num_tokens for c in output.prefill}
    assert len(chunk_end) == len(output.prefill)
    for chunk in output.prefill:
        assert chunk.start == chunk.request.num_computed
        assert len(chunk.pages) * page_size >= chunk.start + chunk.num_tokens
        assert chunk.request.status is RequestStatus.RUNNING
    for request, limit in zip(output.decode, output.step_limits, strict=True):
        assert request.status is RequestStatus.RUNNING
        assert chunk_end.get(request.rid, request.num_computed) == request.kv_len
        assert 1 <= limit <= request.num_remaining
        assert request.kv_len + limit <= len(request.pages) * page_size
    if any(request.is_streaming for request in output.decode):
        assert output.num_steps <= scheduler._config.stream_interval
    if any(request.is_streaming and not request.output_ids for request in output.decode):
        assert output.num_steps == 1


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, retracts, fails and steps in any order; everything finishes exactly once.

    The device checks that every request finds its own keys and values, whoever computed them.
    """

    @initialize(
        num_pages=st.integers(6, 20),
        max_running=st.integers(1, 5),
        steps=st.integers(1, 8),
        budget=st.sampled_from([8, 16, 32]),
        page_size=st.sampled_from([1, 3, 4, 16]),
        ratio=st.sampled_from([0.0, 0.3, 1.0]),
        is_sharing=st.sampled_from([True, True, True, False]),
        stream_interval=st.integers(1, 8),
        window=st.sampled_from([None, 1, 2, 5, 11]),
        spare=st.integers(0, 8),
        num_slots=st.sampled_from([0, 0, 1, 2, 5, 12]),
        policy=st.sampled_from(SCHEDULE_POLICIES),
        seed=st.integers(0, 2**16),
    )
    def start(
        self,
        num_pages,
        max_running,
        steps,
        budget,
        page_size,
        ratio,
        is_sharing,
        stream_interval,
        window,
        spare,
        num_slots,
        policy,
        seed,
    ):
        self.num_pages, self.max_running, self.budget = num_pages, max_running, budget
        self.page_size = page_size
        windows = None
        if window is not None:
            per_request = -(-(window + steps) // page_size) + 4
            for_prefill = -(-self.budget // page_size)
            sizes = WindowSizes(per_request + for_prefill + spare, window, per_request, for_prefill)
            windows = WindowPages(num_pages, sizes, page_size)
        states = StateSlots(num_slots) if num_slots and windows is None else None
        self.scheduler, self.pool = make_scheduler(
            num_pages,
            max_running,
            steps,
            self.budget,
            page_size=page_size,
            is_sharing=is_sharing,
            windows=windows,
            states=states,
            stream_interval=stream_interval,
            init_new_token_ratio=ratio,
            min_new_token_ratio=0.0,
            schedule_policy=policy,
        )
        self.device = FakeDevice(num_pages, page_size, random.Random(seed), windows, states)
        self.added: dict[str, Request] = {}
        self.finished: list[str] = []

    def add_prompt(self, prompt, max_new, count, is_streaming=False):
        room = self.num_pages * self.page_size
        prompt = prompt[:room]
        max_new = min(max_new, room - len(prompt) + 1)
        for _ in range(count):
            request = Request(
                rid=str(len(self.added)),
                prompt_ids=prompt,
                params=SamplingParams(max_new_tokens=max_new),
                seed=0,
                prompt_key=hash(tuple(prompt)),
                is_streaming=is_streaming,
            )
            self.added[request.rid] = request
            self.scheduler.add(request)

    @rule(
        family=st.integers(0, 2),
        num_prompt=st.integers(1, 40),
        max_new=st.integers(1, 12),
        count=st.sampled_from([1, 1, 2, 4]),
        is_streaming=st.sampled_from([True, False, False, False]),
    )
    def add(self, family, num_prompt, max_new, count, is_streaming):
        self.add_prompt([family] * num_prompt, max_new, count, is_streaming)

    @rule(num_shared=st.integers(1, 30), more=st.integers(1, 12))
    def add_branch(self, num_shared, more):
        self.add_prompt([0] * num_shared + [3] * more, 2, 1)

    @rule(short=st.integers(0, 3), max_new=st.integers(1, 3))
    def add_one_for_all_pages(self, short, max_new):
        self.add_prompt([0] * (self.num_pages * self.page_size - short), max_new, 1)

    @precondition(lambda self: self.finished)
    @rule(data=st.data(), more=st.integers(0, 5), max_new=st.integers(1, 12))
    def add_next_turn(self, data, more, max_new):
        last = self.added[data.draw(st.sampled_from(self.finished))]
        self.add_prompt([*last.prompt_ids, *last.output_ids, *([1] * more)], max_new, 1)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.scheduler.requests()))
        self.scheduler.finish(request, FinishReason("abort"))
        self.finished.append(request.rid)

    @precondition(lambda self: self.scheduler.running)
    @rule(count=st.integers(1, 5))
    def retract_youngest(self, count):
        for request in self.scheduler.running[-count:]:
            self.scheduler.retract(request)

    @rule()
    def flush(self):
        self.pool.reset_cache()

    @rule()
    def update_weights(self):
        for request in list(self.scheduler.running):
            self.scheduler.retract(request)
        self.pool.reset_cache()
        assert self.pool.num_cached == 0
        self.device.version += 1

    def schedule(self):
        output = self.scheduler.schedule()
        self.scheduler.check_integrity()
        check_output(output, self.scheduler, self.max_running, self.budget, self.page_size)
        started = [*self.scheduler.running, *self.scheduler.waiting.returned]
        oldest = min(started, key=lambda r: r.arrival)
        assert oldest.status is RequestStatus.RUNNING, "the oldest started request always runs"
        return output

    @precondition(lambda self: self.scheduler.has_work)
    @rule(stop_chance=st.sampled_from([0.0, 0.3]))
    def step(self, stop_chance):
        output = self.schedule()
        changes = self.scheduler.update(output, self.device.run(output, stop_chance))
        self.finished.extend(r.rid for r in changes.finished)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(loses_pages=st.booleans())
    def fail_step(self, loses_pages):
        output = self.schedule()
        self.device.spoil(output)
        self.pool.reset_cache()
        for request in output.touched:
            self.scheduler.finish(request, FinishReason("error"))
            self.finished.append(request.rid)
        if loses_pages:
            self.device.lose_everything()
            for request in list(self.scheduler.running):
                self.scheduler.retract(request)

    @invariant()
    def consistent(self):
        self.scheduler.check_integrity()
        self.device.check(self.scheduler.running)
        assert len(set(self.finished)) == len(self.finished)
        unfinished = {r.rid for r in self.scheduler.requests()}
        assert unfinished | set(self.finished) == set(self.added)
        assert not unfinished & set(self.finished)

    def teardown(self):
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self.step(0.0)
            self.consistent()
        assert sorted(self.finished) == sorted(self.added)
        assert self.pool.num_available == self.num_pages
        self.pool.reset_cache()
        assert self.pool.num_cached == 0
        self.scheduler.check_integrity()
        if self.pool.windows is not None:
            assert (self.pool.windows.num_held, self.pool.windows.num_idle) == (0, 0)
        if self.pool.states is not None:
            assert (self.pool.states.num_kept, self.pool.states.used) == (0, [])
        for request in self.added.values():
            if request.finish == FinishReason("length"):
                assert len(request.output_ids) == request.params.max_new_tokens


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_tail_without_its_window_page_is_no_prefix():
    """Another request took the window page of a prompt's end; the prompt is computed again."""
    machine = SchedulerMachine()
    machine.start(
        num_pages=7,
        max_running=1,
        steps=1,
        budget=8,
        page_size=16,
        ratio=0.0,
        is_sharing=True,
        stream_interval=1,
        window=1,
        spare=0,
        num_slots=0,
        policy="longest_first",
        seed=0,
    )
    machine.add_prompt([0] * 32, 1, 3)
    for request in machine.scheduler.requests():
        machine.scheduler.finish(request, FinishReason("abort"))
        machine.finished.append(request.rid)
    machine.add_prompt([0] * 2, 1, 2)
    machine.add_prompt([0] * 14, 3, 4)
    machine.add_prompt([0] * 32, 1, 1)
    machine.teardown()


def test_admission_keeps_room_for_running_requests():
    scheduler, _ = make_scheduler(num_pages=8, init_new_token_ratio=1.0, min_new_token_ratio=1.0)
    for i in range(3):
        scheduler.add(make_request(i, num_prompt=4, max_new=13))  # 4 pages each in the end
    for _ in range(50):
        if not scheduler.has_work:
            break
        output = scheduler.schedule()
        assert len(scheduler.running) <= 2
        assert not output.retracted
        scheduler.update(output, run_device(output))
    assert not scheduler.has_work


@pytest.mark.parametrize("num_tokens", [64, 1024])
def test_a_head_without_room_is_matched_once(monkeypatch, num_tokens):
    """Each later look costs a page of tokens, however long the prompt; gains are still seen."""
    scheduler, pool = make_scheduler(num_pages=num_tokens, max_running=2, budget=8192)
    prompt = list(range(num_tokens))
    first = Request("first", prompt[: num_tokens // 2], SamplingParams(max_new_tokens=1), 0)
    large = Request("large", [1] * (3 * num_tokens), SamplingParams(max_new_tokens=99), 0)
    for request in (first, large):
        scheduler.add(request)
        scheduler.schedule()
        request.num_computed = request.kv_len
        pool.settle()
    scheduler.finish(first, FinishReason("length"))
    head = Request("head", prompt, SamplingParams(max_new_tokens=num_tokens), 0)
    scheduler.add(head)
    scheduler.schedule()
    assert list(scheduler.waiting) == [head]
    num_read, real = [], Request.tokens

    def tokens(request, start, end):
        num_read.append(end - start)
        return real(request, start, end)

    def look() -> int:
        num_read.clear()
        scheduler.schedule()
        pool.settle()
        assert list(scheduler.waiting) == [head]
        return pool.find_prefix(head).num_pages

    monkeypatch.setattr(Request, "tokens", tokens)
    for _ in range(3):
        assert look() == (num_tokens // 2 - 1) // PAGE
        assert sum(num_read) <= 4 * PAGE
    # Another request's pages come into the cache, and go again.
    longer = Request("longer", prompt[:-9], SamplingParams(max_new_tokens=1), 0)
    prefix = pool.find_prefix(longer)
    pool.start(longer, prefix, pool.pages_for(len(longer.prompt_ids)) - prefix.num_pages)
    longer.num_computed = longer.kv_len
    pool.release(longer)
    assert look() == (num_tokens - 10) // PAGE
    pool.grow(large, pool.num_available)
    assert look() == 0


def test_finishing_twice_is_an_error():
    scheduler, _ = make_scheduler()
    request = make_request(0)
    scheduler.add(request)
    scheduler.finish(request, FinishReason("abort"))
    with pytest.raises(EngineError, match="finished twice"):
        scheduler.finish(request, FinishReason("abort"))


def test_integrity_check_finds_planted_faults():
    allocator = PageAllocator(16)
    pool = PagePool(allocator, PAGE)
    scheduler = Scheduler(
        SchedulerConfig(), pool, token_block=BLOCK, max_prefill_tokens=32, prefill_sizes=(32,)
    )
    scheduler.add(make_request(0))
    scheduler.schedule()
    scheduler.running[0].pages.append(scheduler.running[0].pages[-1])
    with pytest.raises(EngineError, match="two owners"):
        scheduler.check_integrity()
    scheduler.running[0].pages.pop()
    allocator.allocate(1)
    with pytest.raises(EngineError, match="in use"):
        scheduler.check_integrity()


class TestDecodeSteps:
    def run(self, scheduler, *, step_s=1e-3):
        """One dispatch; its decode steps."""
        output = scheduler.schedule()
        scheduler.update(output, run_device(output, step_s=step_s))
        scheduler.check_integrity()
        return output.num_steps

    def started(self, count=1, *, max_new=1000, **options):
        scheduler, _ = make_scheduler(8192, max_running=8, **options)
        for i in range(count):
            scheduler.add(make_request(i, max_new=max_new))
        return scheduler

    def test_as_many_as_fit_the_time(self):
        scheduler = self.started(steps=100, max_dispatch_s=0.5)
        assert self.run(scheduler, step_s=0.01) == FIRST_STEPS
        assert self.run(scheduler, step_s=0.01) == 50
        assert self.run(scheduler, step_s=0.03) == 50
        assert self.run(scheduler, step_s=0.03) == 25
        assert [self.run(scheduler, step_s=3.0) for _ in range(9)][-1] == 1

    def test_never_more_than_decode_steps(self):
        scheduler = self.started(steps=5, max_dispatch_s=math.inf)
        assert [self.run(scheduler) for _ in range(3)] == [5, 5, 5]

    @pytest.mark.parametrize("watched", [{"is_streaming": True}, {"stop": ("x",)}])
    def test_few_while_somebody_waits_for_text(self, watched):
        scheduler = self.started(steps=64, stream_interval=4)
        assert [self.run(scheduler) for _ in range(2)] == [FIRST_STEPS, 64]
        request = make_request("watched", max_new=10)
        if "stop" in watched:
            request.params = dataclasses.replace(request.params, **watched)
        else:
            request.is_streaming = True
        scheduler.add(request)
        expected = [4, 4, 4, 64] if "stop" in watched else [1, 4, 4, 4, 64]
        assert [self.run(scheduler) for _ in expected] == expected

    def test_dispatches_that_compiled_do_not_count(self):
        scheduler = self.started(steps=64, max_dispatch_s=1.0)
        for _ in range(3):
            output = scheduler.schedule()
            assert output.num_steps == FIRST_STEPS
            step = run_device(output)
            scheduler.update(output, StepOutput(step.rows, num_cache_misses=1))

    def test_one_step_while_a_long_prompt_is_prefilled(self):
        scheduler = self.started(1, steps=8, budget=BLOCK)
        assert self.run(scheduler) == 8
        long = make_request("long", num_prompt=3 * BLOCK + 1, max_new=10)
        scheduler.add(long)
        assert [self.run(scheduler) for _ in range(4)] == [1, 1, 8, 8]
        assert len(long.output_ids) == 10

    def test_requests_without_a_place_do_not_shorten_dispatches(self):
        scheduler = self.started(20, steps=8, budget=8 * BLOCK)
        assert [self.run(scheduler) for _ in range(3)] == [8, 8, 8]
        assert len(scheduler.waiting) == 12

    @pytest.mark.parametrize(
        ("max_running", "num_waiting", "expected"),
        [(4, 0, None), (4, 1, 1), (15, 9, 1), (32, 1, 1), (32, 9, 2), (64, 9, 4), (64, 3, 3)],
    )
    def test_dispatches_end_when_enough_rows_have_finished_for_those_that_wait(
        self, max_running, num_waiting, expected
    ):
        scheduler, _ = make_scheduler(4096, max_running, budget=512 * BLOCK)
        for rid in range(max_running + num_waiting):
            scheduler.add(make_request(rid))
        output = scheduler.schedule()
        assert len(output.decode) == max_running
        assert output.max_finished == expected

    def test_nobody_waits_for_rows_while_admission_is_closed(self):
        scheduler, _ = make_scheduler(4096, 4)
        for rid in range(9):
            scheduler.add(make_request(rid))
        scheduler.schedule()
        scheduler.admits_new = False
        assert scheduler.schedule().max_finished is None


class TestPrefillTime:
    """Prefill and decode steps of a dispatch share its time."""

    def run(self, scheduler, *, step_s=0.01, token_s=0.01):
        """One dispatch; its tokens of prefill, in blocks, and its decode steps."""
        output = scheduler.schedule()
        check_output(output, scheduler, 8, scheduler._max_prefill_tokens, PAGE)
        scheduler.update(output, run_device(output, step_s=step_s, token_s=token_s))
        scheduler.check_integrity()
        return output.prefill_tokens, output.num_steps if output.decode else 0

    def add(self, scheduler, rid, num_blocks):
        """A request that decodes for long behind so many blocks of prefill."""
        request = make_request(rid, num_prompt=num_blocks * BLOCK + 1, max_new=9000)
        scheduler.add(request)
        return request

    def knowing(self, *, num_rows=2, step_s=0.01, token_s=0.01, **options):
        """A scheduler that has seen a long prompt and then so many rows decode."""
        given: dict[str, Any] = {"max_dispatch_s": 0.5, "is_sharing": False} | options
        scheduler, _ = make_scheduler(8192, 8, steps=100, budget=8 * BLOCK, **given)
        self.add(scheduler, "long", 40)
        for row in range(1, num_rows):
            self.add(scheduler, f"row{row}", 1)
        for _ in range(40):
            self.run(scheduler, step_s=step_s, token_s=token_s)
        return scheduler

    def test_a_prefill_alone_says_what_its_tokens_take(self):
        scheduler, _ = make_scheduler(8192, steps=100, budget=8 * BLOCK, max_dispatch_s=0.5)
        self.add(scheduler, "long", 20)
        assert self.run(scheduler) == (8 * BLOCK, 0)  # nothing is known: the whole budget
        assert self.run(scheduler) == (6 * BLOCK, 0)  # 0.48 s
        assert self.run(scheduler) == (6 * BLOCK, FIRST_STEPS)

    def test_steps_get_the_time_that_a_prefill_leaves(self):
        scheduler = self.knowing()
        assert self.run(scheduler) == (0, pytest.approx(50, abs=1))
        self.add(scheduler, "new", 3)
        prefilled, num_steps = self.run(scheduler)
        assert prefilled == 3 * BLOCK
        assert num_steps == pytest.approx(50 - 24, abs=1)

    def test_a_long_prompt_leaves_time_for_one_step(self):
        scheduler = self.knowing()
        self.add(scheduler, "new", 13)
        dispatches = [self.run(scheduler) for _ in range(3)]
        assert dispatches[:2] == [(6 * BLOCK, 1), (6 * BLOCK, 1)]
        assert dispatches[2] == (BLOCK, pytest.approx(50 - 8, abs=1))

    def test_requests_with_the_same_beginning_wait_for_a_prompt_in_such_chunks(self):
        scheduler = self.knowing(is_sharing=True)
        samples = [self.add(scheduler, f"sample{i}", 13) for i in range(4)]
        for sample in samples:
            sample.prompt_key = 1
            sample.prompt_ids = [9] * len(sample.prompt_ids)
        assert [self.run(scheduler)[0] for _ in range(4)] == [6 * BLOCK, 6 * BLOCK, BLOCK, 0]
        assert [sample.num_cached > 0 for sample in samples] == [False, True, True, True]

    def test_at_least_the_smallest_size(self):
        scheduler = self.knowing(token_s=10.0)
        self.add(scheduler, "new", 3)
        assert self.run(scheduler, token_s=10.0) == (BLOCK, 1)

    def test_without_a_bound_on_time_the_budget_is_whole(self):
        scheduler = self.knowing(max_dispatch_s=math.inf, token_s=10.0)
        self.add(scheduler, "new", 7)
        assert self.run(scheduler, token_s=10.0) == (7 * BLOCK, 100)

    def test_a_dispatch_that_only_decodes_replaces_what_a_prefill_beside_it_blurred(self):
        pacer = DispatchPacer(SchedulerConfig(max_dispatch_s=1.0, decode_steps=100), (BLOCK,))
        request = make_request(0)
        for prefill_tokens, expected in ((BLOCK, 5), (0, 50)):
            output = SchedulerOutput([], [], [request], [8], 8, [], [], prefill_tokens)
            pacer.on_dispatch(output, run_device(output, step_s=0.02, token_s=0.18))
            assert pacer.num_steps(1) == expected

    def test_rows_that_never_ran_alone_take_no_more_than_larger_batches(self):
        """63 rows that are joined by one each time are paced like the 64 that they become."""
        pacer = DispatchPacer(SchedulerConfig(max_dispatch_s=0.5), (BLOCK,))
        assert pacer.num_steps(5) == FIRST_STEPS
        requests = [make_request(i) for i in range(8)]
        output = SchedulerOutput([], [], requests, [8] * 8, 8, [], [])
        pacer.on_dispatch(output, run_device(output, step_s=0.02))
        assert [pacer.num_steps(rows) for rows in (8, 5, 1, 16)] == [25, 25, 25, FIRST_STEPS]

    def test_a_size_of_prefill_costs_its_padding(self):
        pacer = DispatchPacer(SchedulerConfig(max_dispatch_s=1.0), (64, 256, 512))
        request = make_request(0)
        output = SchedulerOutput([], [], [request], [8], 8, [], [])
        pacer.on_dispatch(output, run_device(output, step_s=0.1))
        output = SchedulerOutput([], [], [], [], 1, [], [], prefill_tokens=80)
        pacer.on_dispatch(output, StepOutput([], times=times_of(0.256)))
        assert pacer.num_prefill_tokens(1) == 512
        assert [pacer.num_steps(1, tokens) for tokens in (0, 16, 80, 256, 272)] == [10, 9, 7, 7, 4]
