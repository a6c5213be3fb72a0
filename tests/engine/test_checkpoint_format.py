"""The structures of a checkpoint check themselves and survive a trip to the disk."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from sgljax_engine import (
    CheckpointError,
    CheckpointManager,
    EngineCheckpoint,
    RequestCheckpoint,
    SamplingParams,
    SchedulerCheckpoint,
)
from sgljax_engine.checkpoint.codecs import codecs
from sgljax_engine.checkpoint.prefix import LayerPages, PrefixCheckpoint
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
    make_prefix,
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
        is_streaming=draw(st.booleans()),
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
    @given(checkpoint=checkpoints(), compression=st.sampled_from([None, "zstd"]))
    def check(checkpoint, compression):
        check_round_trip(tmp_path, checkpoint, compression)

    check()


def check_round_trip(tmp_path, checkpoint, compression):
    expected = fingerprint(checkpoint)
    assert fingerprint(EngineCheckpoint.from_dict(checkpoint.to_dict())) == expected
    # The same folder each time: what was there before must not shine through.
    manager = CheckpointManager(tmp_path, compression=compression)
    manager.save(checkpoint)
    assert fingerprint(manager.load()) == expected


def test_log_probs_that_are_not_numbers_or_not_float32():
    odd = [math.nan, -math.inf, math.inf, -0.0, 0.1]
    plain = dataclasses.replace(make_request(1), logprobs=odd)
    back = RequestCheckpoint.from_dict(plain.to_dict())
    assert repr(back.logprobs) == "[nan, -inf, inf, -0.0, 0.1]"  # 0.1 has no float32
    assert plain.to_dict()["logprobs"].dtype == np.float64
    assert plain.to_dict()["scaled_logprobs"].dtype == np.float32


def test_stored_arrays_are_plain_safetensors(tmp_path):
    """Any reader of the format can open the files; the columns are what they say."""
    both = [make_request(1), make_request(2, num_tokens=0)]
    CheckpointManager(tmp_path).save(make_checkpoint(both, make_prefix()))
    columns = load_file(tmp_path / "requests-000001.safetensors")
    assert columns["output_ids"].dtype == np.int32
    assert columns["output_ids"].tolist() == both[0].output_ids
    assert columns["prompt_ids"].tolist() == both[0].prompt_ids + both[1].prompt_ids
    assert columns["logprobs"].dtype == np.float32
    assert columns["logprobs"].tolist() == both[0].logprobs
    pages = load_file(tmp_path / "prefix-000001.safetensors")
    assert pages["parents"].tolist() == [-1, 0, -1]
    assert pages["tokens"].tolist()[1] == [5, 6, 7, 8]
    assert (pages["layer.1.v"] == make_prefix().pages[1].v).all()
    records = json.loads((tmp_path / "requests-000001.json").read_bytes())["requests"]
    assert [record["rid"] for record in records] == [request.rid for request in both]


def test_only_settings_that_differ_are_stored():
    params = SamplingParams(top_p=0.5, max_new_tokens=64)
    plain = dataclasses.replace(make_request(1), params=params)
    assert plain.to_dict()["params"] == {"top_p": 0.5, "max_new_tokens": 64}
    with pytest.raises(CheckpointError, match="max_new_tokens must be a number, got None"):
        dataclasses.replace(plain, params=SamplingParams())
    assert make_request(1).to_dict()["params"]["logit_bias"] == {"17": -1.5, "4": 2.0}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_prefix_cache(tmp_path, dtype, compression):
    checkpoint = make_checkpoint([make_request(1)], make_prefix(dtype=dtype))
    manager = CheckpointManager(tmp_path, compression=compression)
    manager.save(checkpoint)
    loaded = manager.load()
    assert fingerprint(loaded) == fingerprint(checkpoint)
    prefix = loaded.scheduler_state.prefix_cache
    assert prefix is not None
    assert not isinstance(prefix.pages[0].k, np.memmap), "a file that is cut off ends the process"
    # What was loaded stays good, and can be saved again, when its file is gone.
    manager.save(loaded)
    assert fingerprint(manager.load()) == fingerprint(loaded) == fingerprint(checkpoint)
    manager.save(make_checkpoint([]))
    assert manager.load().scheduler_state.prefix_cache is None
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert fingerprint(loaded) == fingerprint(checkpoint)


def test_prefix_cache_with_nothing_in_it(tmp_path):
    empty = np.empty((0, 2, 4, 8), np.uint16)
    prefix = PrefixCheckpoint(
        page_size=4,
        dtype="bfloat16",
        kv_shapes=[(2, 8)],
        nodes=[],
        pages=[LayerPages(empty, empty)],
    )
    manager = CheckpointManager(tmp_path)
    manager.save(make_checkpoint([], prefix))
    loaded = manager.load().scheduler_state.prefix_cache
    assert loaded is not None
    assert (list(loaded.nodes), loaded.pages[0].v.shape) == ([], (0, 2, 4, 8))


# ---------------------------------------------------------------------- requests


def make_live_request() -> Request:
    now = time.perf_counter()
    return Request(
        rid="a-1",
        group="a",
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
        token_versions=array("i", [1, 1, 2]),
        pages=array("i", [3, 4]),
        num_computed=4,
        num_cached=1,
        num_retractions=1,
        num_cache_misses=2,
    )


def test_of_a_request_that_grows_meanwhile():
    live = make_live_request()
    kept = RequestCheckpoint.of(
        live, call=4, num_tokens=2, now_s=live.arrival_s + 2.0, status=RUNNING
    )
    live.output_ids.append(10)
    live.finish = FinishReason("length")
    assert (kept.output_ids, kept.token_versions) == ([7, 8], [1, 1])
    assert (kept.logprobs, kept.processed_logprobs) == ([-1.0, -2.0], [0.0, -0.5])
    assert (kept.finish, kept.status, kept.call) == (None, RUNNING, 4)
    assert kept.age_s == pytest.approx(2.0)
    assert kept.first_token_s == pytest.approx(0.5)
    before = RequestCheckpoint.of(live, call=4, num_tokens=0, now_s=0.0, status=WAITING)
    assert (before.output_ids, before.first_token_s, before.age_s) == ([], None, 0.0)


def test_a_request_goes_on_after_a_checkpoint():
    live = make_live_request()
    now = live.arrival_s + 2.0
    kept = RequestCheckpoint.of(live, call=4, num_tokens=3, now_s=now, status=RUNNING)
    back = RequestCheckpoint.from_dict(kept.to_dict()).to_request((1, 2), None, now + 100.0)
    for field in dataclasses.fields(Request):
        ours, theirs = getattr(back, field.name), getattr(live, field.name)
        match field.name:
            case "status":
                assert ours is WAITING
            case "pages" | "num_computed" | "arrival":
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


def test_a_finished_request_stays_finished():
    kept = make_request(1, status=FINISHED)
    back = RequestCheckpoint.from_dict(kept.to_dict()).to_request((), None, 50.0)
    assert (back.status, back.finish) == (FINISHED, FinishReason("stop", matched="</answer>"))


def test_every_field_of_a_request_is_kept_or_made_anew():
    """Whoever adds one says which: here, or by a field of `RequestCheckpoint`."""
    fields = {field.name for field in dataclasses.fields(Request)}
    kept = codecs(RequestCheckpoint).keys()
    assert fields >= FRESH
    assert fields - kept == FRESH - {"call"}  # kept to know which belong together
    assert kept - fields == {"error", "age_s"}


@pytest.mark.parametrize(
    "kind", [EngineCheckpoint, SchedulerCheckpoint, RequestCheckpoint, PrefixCheckpoint]
)
def test_every_field_of_a_structure_is_stored(kind):
    assert list(codecs(kind)) == [field.name for field in dataclasses.fields(kind)]


def test_a_field_that_nobody_says_how_to_store_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Careless(SchedulerCheckpoint):
        added: int = 0

    with pytest.raises(TypeError, match=r"Careless\.added is not annotated with its codec"):
        codecs(Careless)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [0.0]}, "logprobs must have 5 entries, got 1"),
        ({"token_versions": []}, "token_versions must have 5 entries, got 0"),
        ({"extra_logprobs": []}, "extra_logprobs must have 5 entries, got 0"),
        ({"prompt_ids": []}, "prompt_ids must hold a token"),
        ({"prompt_logprobs": PromptLogprobs([None], [None])}, "6 entries and 6 extras"),
        ({"prompt_logprobs": PromptLogprobs([None] * 6, [None] * 6)}, "None at 1"),
        ({"params": SamplingParams(max_new_tokens=4)}, "5 tokens exceed"),
        ({"status": FINISHED}, "status 'finished' contradicts"),
        ({"error": "lost"}, "status 'running' contradicts"),
        ({"age_s": math.nan}, "age_s must be finite"),
        ({"call": -1}, r"call must be an integer in \[0"),
        ({"rid": ""}, "rid must not be empty"),
    ],
)
def test_requests_that_contradict_themselves(changes, message):
    with pytest.raises(CheckpointError, match=message):
        dataclasses.replace(make_request(1), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": 1}, "unknown field 'colour'"),
        ({"rid": None}, "rid must be a string, got None"),
        ({"call": True}, "call must be an integer"),
        ({"call": 1.0}, "call must be an integer"),
        ({"is_streaming": 0}, "is_streaming must be true or false"),
        ({"status": "asleep"}, "status must be one of waiting, running, finished"),
        ({"finish": {"type": "stop"}}, "finish lacks matched, message"),
        ({"finish": {"type": "x", "matched": None, "message": ""}}, "finish.type must be one of"),
        ({"finish": {"type": "stop", "matched": 1.5, "message": ""}}, "finish.matched must be"),
        ({"params": []}, "params must be a dict"),
        ({"params": {"heat": 1}}, "unknown field 'heat'"),
        ({"params": {"temperature": "hot"}}, "temperature must be a number"),
        ({"params": {"temperature": 10**400}}, "temperature must be a number"),
        ({"logprob_options": {"top_num": 999}}, "top_logprobs_num must be between"),
        ({"prompt_ids": [[1]]}, "prompt_ids must hold integers in 1 dim"),
        ({"prompt_ids": [-1]}, r"prompt_ids must be integers in \[0"),
        ({"output_ids": [2**31] * 5}, r"output_ids must be integers in \[0"),
        ({"output_ids": ["1"] * 5}, "output_ids must hold integers"),
        ({"output_ids": "11111"}, "output_ids must be a list or array"),
        ({"logprobs": [None] * 5}, "logprobs must hold numbers"),
        ({"token_versions": [[1, 4]]}, "token_versions must have 5 entries, got 4"),
        ({"token_versions": [[1, 2, 3]]}, r"token_versions must be \[R, 2\]"),
        ({"token_versions": [[1, 2**31 - 1]] * 3}, "must have 5 entries, got 6442450941"),
        ({"extra_values": [[0.0] * 3] * 5}, r"must be \[N, <= 2\]"),
        ({"extra_values": [[0.0], [0.0, 0.0]]}, "extra_values must hold numbers in 2 dim"),
        ({"age_s": "1"}, "age_s must be a number"),
        ({"age_s": 10**400}, "age_s must be finite"),
        ({"first_token_s": -1.0}, "first_token_s must be finite and >= 0"),
    ],
)
def test_dicts_that_are_no_requests(changes, message):
    fields = make_request(1).to_dict()
    assert RequestCheckpoint.from_dict(fields)
    with pytest.raises(CheckpointError, match=message) as caught:
        RequestCheckpoint.from_dict(fields | changes)
    assert len(str(caught.value)) < 600
    for name in fields:
        with pytest.raises(CheckpointError, match=f"lacks {name}"):
            RequestCheckpoint.from_dict({k: v for k, v in fields.items() if k != name})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"waiting_queue": ["b", "b"]}, "'b' is in waiting_queue already"),
        ({"running_queue": ["a", "b"]}, "'b' is in waiting_queue already"),
        ({"waiting_queue": ["b", "d"]}, "there is no request 'd'"),
        ({"waiting_queue": []}, r"in no queue: \['b'\]"),
        ({"waiting_queue": ["a"], "running_queue": ["b"]}, "waiting_queue: 'a' is running"),
        ({"new_token_ratio": math.inf}, "new_token_ratio must be finite"),
        ({"waiting_queue": [1]}, "must be a list of strings"),
        ({"waiting_queue": None}, "must be a list"),
        ({"requests": {}}, "requests must be a list"),
    ],
)
def test_queues_that_contradict_the_requests(changes, message):
    each = [
        dataclasses.replace(make_request(i, status=status), rid=rid)
        for i, (rid, status) in enumerate((("a", RUNNING), ("b", WAITING), ("c", FINISHED)))
    ]
    fields = make_checkpoint(each).scheduler_state.to_dict()
    assert SchedulerCheckpoint.from_dict(fields)
    with pytest.raises(CheckpointError, match=message):
        SchedulerCheckpoint.from_dict(fields | changes)


def test_a_request_that_is_there_twice():
    fields = make_checkpoint([make_request(1)]).scheduler_state.to_dict()
    with pytest.raises(CheckpointError, match="is there twice"):
        SchedulerCheckpoint.from_dict(fields | {"requests": fields["requests"] * 2})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parents": [-1, 1, -1]}, r"node 1: its parent must be in \[-1, 0\], got 1"),
        ({"parents": [-1, 2, -1]}, "node 1: its parent"),
        ({"parents": [-2, 0, -1]}, "parents must be integers"),
        ({"parents": [-1, 0, 0]}, "node 2 is there twice"),
        ({"tokens": [[1, 2, 3]] * 3}, "node 0 must have 4 tokens, got 3"),
        ({"num_nodes": 2}, "num_nodes must be"),
        ({"dtype": "int4"}, "dtype must be one of"),
        ({"dtype": "float32"}, "layer 0 must be uint32"),
        ({"kv_shapes": [[2, 8]] * 3}, "must have 3 layers, got 2"),
        ({"kv_shapes": [[2, 4]] * 2}, "layer 0 must be uint16"),
        ({"kv_shapes": []}, "kv_shapes must be 1 to 65536 pairs"),
        ({"pages": [1, 2]}, "must be a list of LayerPages"),
        ({"page_size": 0}, "page_size must be an integer"),  # no engine
    ],
)
def test_prefix_caches_that_are_none(changes, message):
    fields = make_prefix().to_dict()
    assert PrefixCheckpoint.from_dict(fields)
    with pytest.raises(CheckpointError, match=message):
        PrefixCheckpoint.from_dict(fields | changes)


def test_versions_and_metadata():
    fields = make_checkpoint([]).to_dict()
    with pytest.raises(CheckpointError, match=r"version 2, newer than 1"):
        EngineCheckpoint.from_dict(fields | {"version": 2, "what_it_brings": 1})
    for version in (0, "1", True, None, 1.0):
        with pytest.raises(CheckpointError, match="which never was"):
            EngineCheckpoint.from_dict(fields | {"version": version})
    assert make_checkpoint([], metadata={"ids": (1, (2,))}).metadata == {"ids": [1, [2]]}
    deep: Any = 1
    for _ in range(2000):
        deep = [deep]
    refused: list[Any] = [math.inf, np.float32(1), b"", {1: 2}, deep]
    for bad in [[], {1: 2}, *({"a": each} for each in refused)]:
        with pytest.raises(CheckpointError, match="metadata"):
            make_checkpoint([], metadata=bad)
