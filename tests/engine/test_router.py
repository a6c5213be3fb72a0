"""The router of a data-parallel group: prefixes, loads, and both against a count."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgljax_engine.core.calls import MAX_LOAD_GAP, Router, pick_move
from sgljax_engine.errors import InvalidConfigError
from sgljax_engine.sampling_params import SamplingParams
from sgljax_engine.types import Request, prompt_key

BLOCK = 4


def make_request(prompt, lora=None, output=()):
    return Request(
        rid="",
        prompt_ids=prompt,
        params=SamplingParams(),
        seed=0,
        lora=lora,
        prompt_key=prompt_key(prompt, lora),
        output_ids=list(output),
    )


def make_samples(prompt, count, lora=None):
    return [make_request(list(prompt), lora) for _ in range(count)]


def make_prompt(number, num_tokens=10):
    """Tokens that no prompt of another number has."""
    return list(range(1000 * number, 1000 * number + num_tokens))


def make_router(num_engines=4, max_rows=64, **options):
    return Router(num_engines, BLOCK, max_rows, **options)


def serve(router, request):
    """Routes a request and ends it at once."""
    (engine,) = router.route([request])
    router.finished(engine, request)
    return engine


# ---------------------------------------------------------------------------- prefixes


@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK])
@pytest.mark.parametrize("interleaved", [False, True])
def test_samples_of_a_prompt_stay_together(num_tokens, interleaved):
    router = make_router()
    requests = [r for n in range(8) for r in make_samples(make_prompt(n, num_tokens), 16)]
    if interleaved:
        requests = [requests[16 * n + sample] for sample in range(16) for n in range(8)]
    engines = {}
    for request, engine in zip(requests, router.route(requests), strict=True):
        engines.setdefault(request.prompt_key, set()).add(engine)
    assert len(engines) == 8
    assert all(len(each) == 1 for each in engines.values())
    assert router.loads == (32, 32, 32, 32)


def test_a_large_group_is_spread():
    router = make_router()
    engines = router.route(make_samples(make_prompt(0), 64))
    assert Counter(engines) == dict.fromkeys(range(4), 16)
    # It changes engines only when one has its share, so each computes the prompt once.
    assert engines == sorted(engines)
    router.route(make_samples(make_prompt(0), 8))
    assert router.loads == (18, 18, 18, 18)  # all hold it: the loads decide


def test_few_rows_end_a_group_earlier():
    router = make_router(max_rows=4)
    router.route(make_samples(make_prompt(0), 16))
    assert router.loads == (4, 4, 4, 4)


def test_turns_of_an_episode_follow():
    router = make_router()
    prompts = {n: make_prompt(n, 5) for n in range(8)}
    homes = {}
    for turn in range(4):
        for n, prompt in prompts.items():
            request = make_request(prompt, output=range(9000 + 100 * n, 9009 + 100 * n))
            (engine,) = router.route([request])
            assert homes.setdefault(n, engine) == engine
            router.finished(engine, request)
            prompts[n] = [*prompt, *request.output_ids, 7, turn]
    assert Counter(homes.values()) == dict.fromkeys(range(4), 2)


def test_turns_of_one_prompts_samples_part():
    """Each follows its own output, not just the prompt that they share."""
    router = make_router(num_engines=2)
    prompt = make_prompt(0, BLOCK)
    samples = make_samples(prompt, 2 * MAX_LOAD_GAP)
    engines = router.route(samples)
    assert set(engines) == {0, 1}
    for number, (engine, sample) in enumerate(zip(engines, samples, strict=True)):
        sample.output_ids.extend(make_prompt(1 + number, 2 * BLOCK))
        router.finished(engine, sample)
    for engine, sample in zip(engines, samples, strict=True):
        assert serve(router, make_request([*prompt, *sample.output_ids, 5])) == engine


def test_a_short_match_bears_less_load_than_a_long_one():
    system = make_prompt(0, 4 * BLOCK)
    for num_own, gap in ((0, MAX_LOAD_GAP), (4, MAX_LOAD_GAP // 2), (12, MAX_LOAD_GAP // 4)):
        router = make_router(num_engines=2)
        assert serve(router, make_request(system)) == 0
        prompts = [[*system, *make_prompt(1 + n, num_own * BLOCK)] for n in range(MAX_LOAD_GAP)]
        engines = router.route([make_request(prompt) for prompt in prompts])
        assert engines[:gap] == [0] * gap
        assert num_own == 0 or engines[gap] == 1


def test_a_longer_prefix_wins():
    router = make_router(num_engines=2)
    prompt = make_prompt(0, 4 * BLOCK)
    assert serve(router, make_request(prompt[:BLOCK])) == 0
    assert router.route([make_request(make_prompt(1))]) == [1]
    router.moved(make_request(prompt[: 3 * BLOCK]), 1, 1)  # engine 1 has a request, and holds more
    assert router.loads == (0, 1)
    assert router.route([make_request(prompt)]) == [1]


def test_adapters_share_nothing():
    router = make_router()
    prompt = make_prompt(0)
    assert serve(router, make_request(prompt)) == 0
    assert serve(router, make_request(prompt, lora="a")) == 1
    assert serve(router, make_request(prompt, lora="b")) == 2
    assert serve(router, make_request(prompt, lora="a", output=make_prompt(9))) == 1
    assert serve(router, make_request([*prompt, *make_prompt(9)], lora="a")) == 1
    assert serve(router, make_request(prompt)) == 0


def test_the_prefix_used_least_recently_is_forgotten():
    router = make_router(max_blocks=4)
    first, second, third = (make_prompt(n, 2 * BLOCK) for n in range(3))
    assert serve(router, make_request(first)) == 0
    assert serve(router, make_request(second)) == 1
    assert serve(router, make_request(first)) == 0
    assert router.num_blocks == 4
    router.route([make_request(make_prompt(9, 1))])  # on 1; it takes the place of second's end
    assert router.num_blocks == 4
    assert serve(router, make_request(first)) == 0
    assert serve(router, make_request(third)) == 2
    assert router.num_blocks == 4
    assert serve(router, make_request(second)) == 3  # all of it is forgotten


# ---------------------------------------------------------------------------- loads


def test_ties_go_round():
    router = make_router(num_engines=3)
    engines = [serve(router, make_request(make_prompt(n))) for n in range(7)]
    assert engines == [0, 1, 2, 0, 1, 2, 0]
    assert router.loads == (0, 0, 0)


def test_the_idlest_gets_what_no_engine_knows():
    router = make_router(num_engines=3)
    router.route(make_samples(make_prompt(0), 3))
    engines = router.route([make_request(make_prompt(n)) for n in range(1, 7)])
    assert Counter(engines) == {1: 3, 2: 3}
    assert router.loads == (3, 3, 3)


def test_no_engine_has_less_than_no_load():
    router = make_router()
    with pytest.raises(ValueError, match="engine 2 has no unfinished request"):
        router.finished(2, make_request([1]))
    with pytest.raises(ValueError, match="engine 1 has no unfinished request"):
        router.moved(make_request([1]), 1, 0)
    assert router.loads == (0, 0, 0, 0)


@pytest.mark.parametrize("name", ["num_engines", "block_size", "max_rows", "max_blocks"])
def test_counts_are_checked(name):
    counts = {"num_engines": 1, "block_size": 1, "max_rows": 1, "max_blocks": 1}
    with pytest.raises(InvalidConfigError, match=f"{name} must be an integer >= 1, got 0"):
        Router(**counts | {name: 0})


class CountedTokens(list):
    """A prompt that counts how many of its tokens are read."""

    num_read = 0

    def __getitem__(self, index):
        item = super().__getitem__(index)
        CountedTokens.num_read += len(item) if isinstance(index, slice) else 1
        return item


def test_samples_in_a_row_are_hashed_once(monkeypatch):
    monkeypatch.setattr(CountedTokens, "num_read", 0)
    requests = [make_request(CountedTokens(make_prompt(n // 16, 100))) for n in range(512)]
    make_router().route(requests)
    assert CountedTokens.num_read == 32 * 100


# ---------------------------------------------------------------------------- any order

PROMPTS = st.tuples(st.lists(st.integers(0, 1), max_size=12), st.sampled_from([None, "a"]))
CHANGES = st.one_of(
    st.tuples(st.just("route"), st.lists(st.tuples(PROMPTS, st.integers(1, 40)), max_size=4)),
    st.tuples(st.just("finish"), st.integers(0, 99)),
    st.tuples(st.just("move"), st.integers(0, 99)),
)


@given(st.integers(1, 4), st.integers(1, 24), st.integers(1, 12), st.lists(CHANGES))
def test_any_order_of_changes(num_engines, max_rows, max_blocks, changes):
    router = make_router(num_engines, max_rows, max_blocks=max_blocks)
    loads, unfinished = [0] * num_engines, []
    for change, draw in changes:
        if change == "route":
            requests = [r for (ids, lora), n in draw for r in make_samples(ids or [2], n, lora)]
            engines = router.route(requests)
            assert len(engines) == len(requests)
            for engine in engines:
                gap = loads[engine] - min(loads)
                assert gap == 0 or gap < min(MAX_LOAD_GAP, max_rows)
                loads[engine] += 1
            unfinished.extend(zip(engines, requests, strict=True))
        elif change == "finish" and unfinished:
            engine, request = unfinished.pop(draw % len(unfinished))
            request.output_ids.extend([draw % 2] * (draw % 10))
            router.finished(engine, request)
            loads[engine] -= 1
        elif change == "move" and unfinished:
            source, request = unfinished.pop(draw % len(unfinished))
            target = draw % num_engines
            router.moved(request, source, target)
            loads[source] -= 1
            loads[target] += 1
            unfinished.append((target, request))
        assert router.loads == tuple(loads)
        assert router.num_blocks <= max_blocks


@given(st.integers(1, 4), st.lists(st.tuples(PROMPTS, st.integers(1, 20)), max_size=6))
def test_one_call_routes_as_many_calls_do(num_engines, groups):
    requests = [r for (ids, lora), n in groups for r in make_samples(ids or [2], n, lora)]
    together, alone = make_router(num_engines), make_router(num_engines)
    engines = [alone.route([request])[0] for request in requests]
    assert together.route(requests) == engines
    assert together.num_blocks == alone.num_blocks


# ---------------------------------------------------------------------------- moves


@pytest.mark.parametrize(
    ("loads", "waiting", "expected"),
    [
        ([0, 0], [0, 0], None),
        ([80, 0], [0, 0], None),  # none waits
        ([80, 10], [16, 0], (0, 1, 16)),
        ([80, 10], [70, 0], (0, 1, 35)),  # half the difference
        ([10, 81], [0, 70], (1, 0, 35)),
        ([80, 50], [16, 0], (0, 1, 14)),  # free rows
        ([80, 64], [16, 0], None),
        ([65, 64], [1, 0], None),
        ([65, 63], [1, 0], (0, 1, 1)),
        ([64, 63], [1, 0], None),  # they would change places
        ([90, 10], [26, 2], None),  # the idler one has no pages
        ([90, 10, 40], [26, 2, 0], (0, 2, 24)),
        ([70, 90, 5, 3], [6, 26, 0, 0], (1, 3, 26)),
        ([90], [26], None),
    ],
)
def test_pick_move(loads, waiting, expected):
    assert pick_move(loads, waiting, max_rows=64) == expected


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1), st.integers(1, 64))
def test_moves_end_before_engines_change_places(engines, max_rows):
    loads = [running + waiting for running, waiting in engines]
    waiting = [each for _, each in engines]
    while (move := pick_move(loads, waiting, max_rows)) is not None:
        source, target, num_requests = move
        assert 0 < num_requests <= waiting[source]
        loads[source] -= num_requests
        waiting[source] -= num_requests
        loads[target] += num_requests  # they start there: it has rows for them
        assert loads[target] <= min(loads[source], max_rows)
    assert sum(loads) == sum(running + each for running, each in engines)
