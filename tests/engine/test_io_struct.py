"""The structures of control calls check themselves."""

from __future__ import annotations

import pytest

from sgljax_engine import AbortReq, InvalidRequestError, PauseGenerationReqInput
from sgljax_engine.io_struct import NewVersion


def test_messages_of_aborts():
    assert AbortReq(rid="a").message == "aborted by the caller"
    assert AbortReq(rid="a", aborted_message="too slow").message == "too slow"
    reason = {"type": "abort", "message": "gone"}
    assert AbortReq(abort_all=True, finished_reason=reason).message == "gone"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"finished_reason": {"type": "abort"}, "aborted_message": "a"}, "not both"),
        ({"finished_reason": {"type": "stop"}}, r'must be \{"type": "abort"'),
        ({"finished_reason": "abort"}, r'must be \{"type": "abort"'),
    ],
)
def test_bad_reasons(fields, message):
    with pytest.raises(InvalidRequestError, match=message):
        AbortReq(rid="a", **fields)


def test_modes():
    assert PauseGenerationReqInput().mode == "abort"
    assert PauseGenerationReqInput(mode="wait").mode == "wait"
    with pytest.raises(InvalidRequestError, match="got 'in-place'"):
        PauseGenerationReqInput(mode="in-place")  # type: ignore[arg-type]


@pytest.mark.parametrize("serving", [0, 4])
def test_a_new_version_is_above_the_serving_one(serving):
    assert NewVersion().after(serving) == serving + 1
    for number in range(1, 10):
        for is_reload in (False, True):
            version = NewVersion(number=number, is_reload=is_reload)
            if number > serving or (is_reload and number == serving):
                assert version.after(serving) == number
            else:
                least = "at least" if is_reload else "above"
                message = f"version must be {least} the serving version {serving}, got {number}$"
                with pytest.raises(InvalidRequestError, match=message):
                    version.after(serving)


@pytest.mark.parametrize("number", [0, -1, True, 1.0, "2", 2**31])
def test_what_is_no_version(number):
    with pytest.raises(InvalidRequestError, match=r"version must be None or an integer in \[1, "):
        NewVersion(number=number)


def test_a_reload_names_its_version():
    with pytest.raises(InvalidRequestError, match="reload=True needs version"):
        NewVersion(is_reload=True)
    with pytest.raises(InvalidRequestError, match="reload must be True or False, got 1"):
        NewVersion(number=1, is_reload=1)  # type: ignore[arg-type]
