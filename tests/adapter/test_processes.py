"""Several controllers: what two processes train and gather."""

from __future__ import annotations

import json

import pytest

from tests.adapter.two_processes import processes


@pytest.mark.soak
def test_grpo_with_prompts_of_its_own_in_each_process():
    with processes("train") as both:
        before = [json.loads(each.read("before")) for each in both]
        after = [json.loads(each.read("after")) for each in both]
        for each in both:
            assert each.end() == 0, each.log()
    assert before[0] == before[1]
    assert after[0] == after[1]
    assert all(after[0][name] != checksum for name, checksum in before[0].items())


@pytest.mark.slow
def test_gathered_arrays_keep_what_lies_within_a_process():
    with processes("gather") as both:
        for each in both:
            each.read("gathered")
        for each in both:
            assert each.end() == 0, each.log()
