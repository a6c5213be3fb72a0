"""Which states of hybrids are kept: hits beside those of a simple model, without a device.

A request goes on from the longest kept state that begins its prompt. States are kept behind a
prompt, behind all that a request computed, and where a prompt leaves a cached one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from sgljax_engine.cache.pool import PagePool
from sgljax_engine.cache.states import StateSlots
from sgljax_engine.sampling_params import SamplingParams
from sgljax_engine.scheduler.scheduler import Scheduler
from sgljax_engine.types import Request
from tests.engine.fake_device import FakeDevice
from tests.engine.test_scheduler import check_output, make_scheduler, run_device
from tests.tiers import tiered

PAGE = 4
MANY = 4096
"""Pages or slots of a pool that nothing is evicted from."""


class Hybrid:
    """A scheduler with states and, unless it is quick, a device that checks all that is read."""

    def __init__(
        self,
        *,
        num_pages: int = MANY,
        num_slots: int = MANY,
        rows: int = 64,
        seed: int = 0,
        is_quick: bool = False,
    ) -> None:
        self.states = StateSlots(num_slots)
        self.scheduler: Scheduler
        self.pool: PagePool
        self.budget, self.rows = 32, rows
        self.scheduler, self.pool = make_scheduler(
            num_pages, rows, budget=self.budget, page_size=PAGE, states=self.states
        )
        self.is_quick = is_quick
        self.device = FakeDevice(num_pages, PAGE, random.Random(seed), states=self.states)
        self.room = num_pages * PAGE
        self._num_requests = 0

    def add(self, prompt: Sequence[int], max_new: int = 1) -> Request:
        request = Request(
            rid=str(self._num_requests),
            prompt_ids=list(prompt),
            params=SamplingParams(max_new_tokens=max_new),
            seed=0,
            prompt_key=hash(tuple(prompt)),
        )
        self._num_requests += 1
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        output = self.scheduler.schedule()
        if self.is_quick:
            self.scheduler.update(output, run_device(output))
            return
        self.scheduler.check_integrity()
        check_output(output, self.scheduler, self.rows, self.budget, PAGE)
        self.scheduler.update(output, self.device.run(output))
        self.scheduler.check_integrity()
        self.device.check(self.scheduler.running)

    def run(self, prompts: Iterable[Sequence[int]], max_new: int = 1) -> list[Request]:
        """Requests that wait together, until all have ended."""
        requests = [self.add(prompt, max_new) for prompt in prompts]
        while self.scheduler.has_work:
            self.step()
        return requests


class KeptStates:
    """The documented policy as two sets of prefixes; nothing is ever evicted."""

    def __init__(self) -> None:
        self._pages: set[tuple[int, ...]] = set()
        self._states: set[tuple[int, ...]] = set()

    def hit(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that need not be computed."""
        known = tuple(prompt[:-1])
        states = (len(state) for state in self._states if known[: len(state)] == state)
        return max(states, default=0)

    def note(self, prompt: Sequence[int], computed: Sequence[int]) -> None:
        """Notes a request that ran alone, and all tokens that it computed."""
        known, computed = tuple(prompt[:-1]), tuple(computed)
        branch = 0
        while branch + PAGE <= len(known) and known[: branch + PAGE] in self._pages:
            branch += PAGE
        if branch > self.hit(prompt):
            self._states.add(known[:branch])
        if len(known) >= PAGE:
            self._states.add(known)
        self._states.add(computed)
        self._pages.update(computed[:end] for end in range(PAGE, len(computed) + 1, PAGE))


def make_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts that are new, repeated, cut, or go on otherwise behind a part of another one."""
    prompts: list[list[int]] = []
    for _ in range(count):
        start: list[int] = []
        if prompts and rng.random() < 0.8:
            start = rng.choice(prompts)
            start = start[: rng.choice([len(start), rng.randint(0, len(start))])]
        new = rng.choice([0, rng.randint(0, 3), rng.randint(0, 50)])
        prompts.append([*start, *(rng.randrange(2, 9) for _ in range(new))] or [5])
    return prompts


def next_turn(request: Request, rng: random.Random) -> list[int]:
    """The prompt of the next turn of an episode."""
    new = rng.randint(0, 5)
    return [*request.tokens(0, request.kv_len + 1), *(rng.randrange(2, 9) for _ in range(new))]


@pytest.mark.parametrize("seed", tiered(range(22), fast=[0, 1], slow=[]))
def test_requests_one_after_another_hit_what_the_policy_keeps(seed):
    rng = random.Random(seed)
    hybrid, kept = Hybrid(seed=seed), KeptStates()
    (request,) = hybrid.run([[7]])
    kept.note([7], [7])
    for prompt in make_prompts(rng, 50):
        if rng.random() < 0.3:
            prompt = next_turn(request, rng)
        wanted, before = kept.hit(prompt), hybrid.device.num_prefilled
        (request,) = hybrid.run([prompt], rng.randint(1, 9))
        assert request.num_cached == wanted
        assert hybrid.device.num_prefilled - before == len(prompt) - 1 - wanted
        kept.note(prompt, request.tokens(0, request.kv_len))


@pytest.mark.parametrize("length", [2, 9, 30])
def test_samples_go_on_from_the_state_that_the_same_dispatch_computes(length):
    """The device refuses a copy from a slot that is written at the same time."""
    hybrid = Hybrid()
    requests = hybrid.run([list(range(2, 2 + length))] * 5, 3)
    assert [request.num_cached for request in requests] == [0] + [length - 1] * 4
    assert hybrid.device.num_prefilled == length - 1


@pytest.mark.parametrize("seed", tiered(range(20), fast=[0], slow=[]))
def test_requests_together_hit_in_pools_of_any_size(seed):
    """What they go on from is theirs, which the device checks, and all of them end."""
    rng = random.Random(seed)
    num_pages, num_slots = rng.randint(40, 120), rng.choice([1, 2, 3, 8, 40])
    hybrid = Hybrid(num_pages=num_pages, num_slots=num_slots, rows=rng.randint(1, 6), seed=seed)
    ended: list[Request] = []
    for _ in range(15):
        prompts = make_prompts(rng, rng.randint(1, 6))
        prompts += [next_turn(request, rng) for request in ended[-1:]]
        prompts += prompts[: rng.randint(0, 2)]  # asked again beside themselves
        ended = hybrid.run([prompt[: hybrid.room - 9] for prompt in prompts], rng.randint(1, 9))
        assert all(request.finish is not None for request in ended)
    hybrid.pool.reset_cache()
    assert (hybrid.states.num_kept, hybrid.states.used, hybrid.pool.num_cached) == (0, [], 0)


def new_prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    return [[rng.randrange(2, 99) for _ in range(length)] for _ in range(count)]


def test_prompts_that_wait_together_compute_what_they_share_twice():
    """Once for its keys, and once for the state behind it, for which the others wait."""
    rng, hybrid = random.Random(0), Hybrid()
    (start,) = new_prompts(rng, 1, 10 * PAGE)
    prompts = [[*start, *end] for end in new_prompts(rng, 9, 3 * PAGE)]
    requests = hybrid.run(prompts)
    assert sorted(request.num_cached for request in requests) == [0] * 2 + [len(start)] * 7


def test_a_prompt_waits_for_a_state_that_is_being_computed():
    """Not only one with the same tokens: it goes on from there."""
    rng, hybrid = random.Random(0), Hybrid()
    (prompt, more) = new_prompts(rng, 2, 3 * PAGE)
    first, second = hybrid.run([prompt, [*prompt[:-1], *more]])
    assert (first.num_cached, second.num_cached) == (0, len(prompt) - 1)


def episodes(*, num_slots: int, rows: int, count: int, pause: int, num_turns: int = 6) -> float:
    """The share of later turns' tokens that is cached, in episodes side by side.

    Args:
        num_slots: Slots of states.
        rows: Requests that run at a time.
        count: Episodes.
        pause: The most dispatches between two turns.
        num_turns: Of each episode.
    """
    rng, hybrid = random.Random(0), Hybrid(num_slots=num_slots, rows=rows, is_quick=True)
    waiting = [(rng.randint(0, pause), 0, prompt) for prompt in new_prompts(rng, count, 64)]
    running: list[tuple[Request, int]] = []
    num_cached = num_tokens = now = 0
    while running or waiting:
        for each in [each for each in waiting if each[0] <= now]:
            waiting.remove(each)
            running.append((hybrid.add(each[2], rng.randint(4, 40)), each[1]))
        if hybrid.scheduler.has_work:
            hybrid.step()
        for request, turn in [each for each in running if each[0].finish is not None]:
            running.remove((request, turn))
            if turn:
                num_cached += request.num_cached
                num_tokens += request.kv_len - len(request.output_ids) + 1
            if turn + 1 < num_turns:
                waiting.append((now + rng.randint(0, pause), turn + 1, next_turn(request, rng)))
        now += 1
    return num_cached / num_tokens


def test_a_request_that_needs_every_page_gives_up_what_is_beside_them():
    """States behind parts of pages, of which it would need a copy; the first tokens of each."""
    rng = random.Random(0)
    for _ in range(300):
        hybrid = Hybrid(num_pages=11, num_slots=rng.randint(1, 4))
        (prompt, other) = new_prompts(rng, 2, 11 * PAGE)
        lengths = [rng.randint(1, 11 * PAGE) for _ in range(rng.randint(1, 3))]
        for end in lengths:
            hybrid.run([prompt[:end]])
        if rng.random() < 0.3:
            prompt = [*prompt[: lengths[0] - 1], *other[lengths[0] - 1 :]]
        (request,) = hybrid.run([prompt])
        assert len(request.output_ids) == 1


@pytest.mark.parametrize(("count", "least"), [(16, 0.9), (24, 0.6)])
def test_states_for_later_prompts_do_not_push_out_those_of_episodes(count, least):
    """With as few slots as there are for 16 rows by default. LRU alone: 0.08 and 0."""
    assert episodes(num_slots=32, rows=16, count=count, pause=30) > least
