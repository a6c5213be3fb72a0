"""The structures of a checkpoint check themselves and survive a trip to the disk."""

from __future__ import annotations

import dataclasses
import math
import time
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgljax_engine import (
    CheckpointError,
    CheckpointManager,
    EngineCheckpoint,
    RequestCheckpoint,
    SamplingParams,
)
from sgljax_engine.checkpoint.request import FRESH
from sgljax_engine.sampling_params import LogprobOptions
from sgljax_engine.types import (
    FinishReason,
    PromptLogprobs,
    Request,
    RequestStatus,
    TopLogprobs,
    prompt_key,
)
from tests.engine.checkpoint_cases import (
    RICH_PARAMS,
    fingerprint,
    make_checkpoint,
    make_request,
)

FLOATS = st.floats(width=32)  # NaN and infinities among them
IDS = st.integers(0, 2**31 - 1)
WAITING, RUNNING, FINISHED = RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.FINISHED
# Lone surrogates too: Python's strings may have them, and two of them must not become one letter.
TEXTS = st.text(st.characters(), max_size=8) | st.just("\ud83d\ude00")


def lists(each: st.SearchStrategy[Any], size: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(each, min_size=size, max_size=size)


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    stop = tuple(draw(st.lists(TEXTS.filter(bool), max_size=3)))
    allowed = draw(st.none() | st.lists(IDS, min_size=1, max_size=4).map(tuple))
    spared = allowed[0] if allowed else None  # one must be left
    return SamplingParams(
        n=draw(st.integers(1, 9)),
        temperature=draw(st.floats(0, 1e6)),
        top_k=draw(st.none() | st.just(-1) | st.integers(1, 2**40)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.floats(0, 1)),
        presence_penalty=draw(st.floats(-2, 2)),
        logit_bias=draw(st.none() | st.dictionaries(IDS, st.floats(-100, 100), max_size=4)),
        allowed_token_ids=allowed,
        bad_token_ids=draw(st.lists(IDS.filter(lambda x: x != spared), max_size=3).map(tuple)),
        seed=draw(st.none() | st.integers(0, 2**63 - 1)),
        max_new_tokens=draw(st.integers(6, 2**40)),
        stop=stop,
        stop_token_ids=draw(st.lists(IDS, max_size=3).map(tuple)),
        ignore_eos=draw(st.booleans()),
        detokenize=bool(stop) or draw(st.booleans()),
    )


@st.composite
def requests(draw: st.DrawFn, rid: str) -> RequestCheckpoint:
    num_prompt, num_tokens = draw(st.integers(1, 5)), draw(st.integers(0, 6))
    options = LogprobOptions()
    if draw(st.booleans()):
        options = LogprobOptions(
            enabled=True,
            start_len=draw(st.integers(-1, num_prompt - 1)),
            top_num=draw(st.integers(0, 3)),
            token_ids=draw(st.lists(IDS, max_size=2).map(tuple)),
        )
    width = draw(st.integers(0, options.top_num))

    def extras(count: int) -> list[TopLogprobs]:
        if not options.has_extras:
            return []
        chosen = lists(FLOATS, len(options.token_ids))
        each = st.builds(TopLogprobs, lists(FLOATS, width), lists(IDS, width), chosen)
        return draw(lists(each, count))

    scored = None
    if options.start_len >= 0 and draw(st.booleans()):
        head = [None] if options.start_len == 0 else []
        count = num_prompt - options.start_len - len(head)
        more = extras(count)
        scored = PromptLogprobs(
            [*head, *draw(lists(FLOATS, count))], [*head, *more] if options.has_extras else []
        )
    finish = draw(
        st.none()
        | st.builds(
            FinishReason,
            st.sampled_from(["stop", "length", "abort", "error"]),
            st.none() | IDS | TEXTS,
            TEXTS,
        )
    )
    error = draw(st.none() | TEXTS)
    is_finished = finish is not None or error is not None
    return RequestCheckpoint(
        rid=rid,
        group=draw(TEXTS),
        call=draw(st.integers(0, 2**40)),
        prompt_ids=draw(lists(IDS, num_prompt)),
        params=draw(params()),
        seed=draw(st.integers(0, 2**63 - 1)),
        logprob_options=options,
        status=FINISHED if is_finished else draw(st.sampled_from([WAITING, RUNNING])),
        finish=finish,
        error=error,
        output_ids=draw(lists(IDS, num_tokens)),
        logprobs=draw(lists(FLOATS, num_tokens)),
        scaled_logprobs=draw(lists(FLOATS, num_tokens)),
        processed_logprobs=draw(lists(FLOATS, num_tokens)),
        extra_logprobs=extras(num_tokens),
        prompt_logprobs=scored,
        token_versions=draw(lists(st.integers(0, 2) | IDS, num_tokens)),
        num_cached=draw(st.integers(0, 9)),
        num_retractions=draw(st.integers(0, 9)),
        num_cache_misses=draw(st.integers(0, 9)),
        age_s=draw(st.floats(0, 1e300)),
        first_token_s=draw(st.none() | st.floats(0, 1e9)),
    )


@st.composite
def checkpoints(draw: st.DrawFn) -> EngineCheckpoint:
    rids = draw(st.lists(TEXTS.filter(bool), max_size=4, unique=True))
    leaves = st.none() | st.booleans() | st.integers() | TEXTS
    leaves |= st.floats(allow_nan=False, allow_infinity=False)
    trees = st.recursive(leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(TEXTS, x))
    each = [draw(requests(rid)) for rid in rids]
    return make_checkpoint(each, metadata=draw(st.dictionaries(TEXTS, trees, max_size=3)))


@pytest.mark.parametrize("num_examples", [25, pytest.param(200, marks=pytest.mark.soak)])
def test_any_checkpoint_comes_back_as_it_was(tmp_path, num_examples):
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(checkpoint=checkpoints())
    def check(checkpoint):
        expected = fingerprint(checkpoint)
        assert fingerprint(EngineCheckpoint.from_dict(checkpoint.to_dict())) == expected
        # The same folder each time: what was there before must not shine through.
        manager = CheckpointManager(tmp_path)
        manager.save(checkpoint)
        assert fingerprint(manager.load()) == expected

    check()


def test_only_settings_that_differ_are_stored():
    params = SamplingParams(top_p=0.5, max_new_tokens=64)
    plain = dataclasses.replace(make_request(1), params=params, sampling_masks=[])
    assert plain.to_dict()["params"] == {"top_p": 0.5, "max_new_tokens": 64}
    with pytest.raises(CheckpointError, match="max_new_tokens must be a number, got None"):
        dataclasses.replace(plain, params=SamplingParams())


# ---------------------------------------------------------------------- requests


def make_live_request() -> Request:
    now = time.perf_counter()
    return Request(
        rid="a-1",
        group="a",
        call=4,
        prompt_ids=[4, 5],
        params=RICH_PARAMS,
        seed=9,
        stop_ids=(1, 2),
        lora="policy",
        arrival_s=now - 2.0,
        first_token_s=now - 1.5,
        status=RUNNING,
        output_ids=[7, 8, 9],
        logprobs=[-1.0, -2.0, -3.0],
        scaled_logprobs=[-1.5, -2.5, -3.5],
        processed_logprobs=[0.0, -0.5, -0.25],
        sampling_masks=[array("i", [7]), array("i", [8, 1]), array("i", [9, 2, 3])],
        token_versions=array("i", [1, 1, 2]),
        pages=array("i", [3, 4]),
        num_computed=4,
        num_cached=1,
        num_retractions=1,
        num_cache_misses=2,
    )


def test_of_a_request_that_grows_meanwhile():
    live = make_live_request()
    kept = RequestCheckpoint.of(live, num_tokens=2, now_s=live.arrival_s + 2.0, status=RUNNING)
    live.output_ids.append(10)
    live.finish = FinishReason("length")
    assert (kept.output_ids, kept.token_versions) == ([7, 8], [1, 1])
    assert (kept.logprobs, kept.processed_logprobs) == ([-1.0, -2.0], [0.0, -0.5])
    assert (kept.finish, kept.status, kept.call) == (None, RUNNING, 4)
    assert kept.age_s == pytest.approx(2.0)
    assert kept.first_token_s == pytest.approx(0.5)
    before = RequestCheckpoint.of(live, num_tokens=0, now_s=0.0, status=WAITING)
    assert (before.output_ids, before.first_token_s, before.age_s) == ([], None, 0.0)


def test_a_request_goes_on_after_a_checkpoint():
    live = make_live_request()
    now = live.arrival_s + 2.0
    kept = RequestCheckpoint.of(live, num_tokens=3, now_s=now, status=RUNNING)
    back = RequestCheckpoint.from_dict(kept.to_dict()).to_request((1, 2), None, now + 100.0)
    for field in dataclasses.fields(Request):
        ours, theirs = getattr(back, field.name), getattr(live, field.name)
        match field.name:
            case "status":
                assert ours is WAITING
            case "pages" | "num_computed" | "arrival" | "call":
                assert not ours
            case "prompt_key":
                assert ours == prompt_key([4, 5], "policy")
            case "arrival_s" | "first_token_s":
                assert ours == pytest.approx(theirs + 100.0)
            case _:
                assert ours == theirs, field.name
                assert type(ours) is type(theirs), field.name
    back.output_ids.append(1)
    assert kept.output_ids == [7, 8, 9]


def test_every_field_of_a_request_is_kept_or_made_anew():
    """Whoever adds one says which: here, or by a field of `RequestCheckpoint`."""
    fields = {field.name for field in dataclasses.fields(Request)}
    kept = {field.name for field in dataclasses.fields(RequestCheckpoint)}
    assert fields >= FRESH
    assert fields - kept == FRESH - {"call"}  # kept to know which belong together
    assert kept - fields == {"error", "age_s"}


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [0.0]}, "logprobs must have 5 entries, got 1"),
        ({"token_versions": []}, "token_versions must have 5 entries, got 0"),
        ({"extra_logprobs": []}, "extra_logprobs must have 5 entries, got 0"),
        ({"prompt_ids": []}, "prompt_ids must not be empty"),
        ({"prompt_logprobs": PromptLogprobs([None], [None])}, "must have 6 entries, got 1"),
        ({"params": dataclasses.replace(RICH_PARAMS, max_new_tokens=4)}, "5 tokens exceed"),
        ({"sampling_masks": []}, "sampling_masks must have 5 entries, got 0"),
        ({"status": FINISHED}, "RequestStatus.FINISHED contradicts"),
        ({"error": "lost"}, "RequestStatus.RUNNING contradicts"),
        ({"age_s": math.nan}, "age_s must be float or int, finite and >= 0, got nan"),
        ({"age_s": "1"}, "age_s must be float or int"),
        ({"first_token_s": -1.0}, "first_token_s must be float or NoneType or int"),
        ({"call": -1}, "call must be int, finite and >= 0, got -1"),
        ({"call": True}, "call must be int"),
        ({"rid": None}, "rid must be str"),
        ({"lora": 1}, "lora must be str or NoneType"),
        ({"rid": ""}, "rid and prompt_ids must not be empty"),
    ],
)
def test_requests_that_contradict_themselves(changes, message):
    with pytest.raises(CheckpointError, match=message):
        dataclasses.replace(make_request(1), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": 1}, "unexpected keyword argument 'colour'"),
        ({"status": "asleep"}, "'asleep' is not a valid RequestStatus"),
        ({"finish": {"kind": "stop"}}, "unexpected keyword argument 'kind'"),
        ({"params": []}, "must be a mapping"),
        ({"params": {"heat": 1}}, "heat"),
        ({"params": {"temperature": "hot"}}, "temperature must be a number"),
        ({"logprob_options": {"top_num": 999}}, "top_logprobs_num must be between"),
        ({"prompt_ids": [1]}, "prompt_ids must be an array of int32 in 1 dimensions"),
        ({"prompt_ids": np.zeros(2, np.int64)}, "prompt_ids must be an array of int32"),
        ({"output_ids": np.zeros((5, 1), np.int32)}, "output_ids must be an array of int32 in 1"),
        ({"logprobs": np.zeros(4, np.float32)}, "logprobs must have 5 entries, got 4"),
        ({"extra_logprobs.values": np.zeros(5, np.float32)}, "float32 in 2 dimensions"),
    ],
)
def test_dicts_that_are_no_requests(changes, message):
    fields = make_request(1).to_dict()
    assert RequestCheckpoint.from_dict(fields)
    with pytest.raises(CheckpointError, match=message) as caught:
        RequestCheckpoint.from_dict(fields | changes)
    assert len(str(caught.value)) < 600


def test_each_request_is_in_the_queue_of_its_status():
    each = [
        dataclasses.replace(make_request(i, status=status), rid=rid)
        for i, (rid, status) in enumerate((("a", RUNNING), ("b", WAITING), ("c", FINISHED)))
    ]
    state = make_checkpoint(each).scheduler_state
    assert (state.running_queue, state.waiting_queue) == (["a"], ["b"])
    assert state.finished_req_ids == ["c"]
    twice = make_checkpoint(each).to_dict()
    twice["scheduler_state"]["requests"] *= 2
    with pytest.raises(CheckpointError, match="is there twice"):
        EngineCheckpoint.from_dict(twice)
