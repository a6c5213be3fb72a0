"""The structures of control calls check themselves."""

from __future__ import annotations

import pytest

from sgljax_engine import AbortReq, InvalidRequestError, PauseGenerationReqInput


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
