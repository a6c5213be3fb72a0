"""Simulated rollouts: the scheduler over a table of step times."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import subprocess
import sys
from typing import Any

import pytest

from sgljax_engine import InvalidConfigError
from tests.tiers import tiered
from tools.simulation import (
    TABLES,
    LognormalLengths,
    Plan,
    RecordedLengths,
    Simulation,
    StepTable,
    compare_ways,
    find_table,
    read_lengths,
)

STEP_S = 2.0**-10
FLAT = StepTable(
    source="a test",
    rows=(1, 2, 4, 8),
    step_s=(STEP_S,) * 4,
    key_s=0.0,
    prefill_token_s=0.0,
    dispatch_s=0.0,
)
"""A step takes the same time, whatever it does."""


def num_steps(report):
    """Decode steps that a training step took."""
    return report.seconds / STEP_S


def steps_of(lengths: Any, count: int = 1, table: Any = FLAT, **plan: Any):
    """Reports of steps of groups with one sample each."""
    given: dict[str, Any] = {
        "num_groups": 4,
        "num_samples": 1,
        "num_rows": 2,
        "prompt_tokens": 4,
    } | plan
    return list(Simulation(Plan(**given), lengths, table).steps(count))


def lengths_of(*groups):
    return RecordedLengths([[each] if isinstance(each, int) else each for each in groups])


class TestSteps:
    def test_a_step_takes_its_rows_one_after_another(self):
        (report,) = steps_of(lengths_of(10, 20, 30, 40))
        # One row has 10 and 30 tokens, the other 20 and 40.
        assert num_steps(report) == 60
        assert report.tail_s / STEP_S == 40
        assert report.idle == pytest.approx(20 / 120)
        assert report.mean_length == 25
        assert (report.num_carried, report.num_dropped_tokens) == (0, 0)

    def test_longest_first_knows_the_lengths_of_earlier_steps(self):
        reports = steps_of(
            lengths_of(5, 20, 30, 55), 2, schedule_policy="longest_first", num_prompts=4
        )
        assert [num_steps(report) for report in reports] == [75, 55]
        fcfs = steps_of(lengths_of(5, 20, 30, 55), 2, num_prompts=4)
        assert [num_steps(report) for report in fcfs] == [75, 75]

    def test_keys_prompts_and_dispatches_take_time(self):
        table = dataclasses.replace(
            FLAT, key_s=0.1 * STEP_S, prefill_token_s=2 * STEP_S, dispatch_s=7 * STEP_S
        )
        (report,) = steps_of(lengths_of(3), num_groups=1, table=table)
        # A block of 16 tokens is prefilled; steps read 4, 5 and 6 keys.
        assert num_steps(report) == pytest.approx(3 + 1.5 + 32 + 7)

    def test_dropped_groups_are_thrown_away(self):
        reports = steps_of(
            lengths_of(10, 10, 10, 10, 100, 10, 10, 10, 10, 10),
            2,
            num_rows=5,
            over_sampling=1.25,
            unfinished="drop",
        )
        assert [num_steps(report) for report in reports] == [10, 10]
        assert [report.num_dropped_tokens for report in reports] == [10, 10]
        assert [report.num_carried for report in reports] == [0, 0]

    def test_carried_groups_go_on_and_are_not_older_than_asked(self):
        lengths = lengths_of(10, 10, 10, 10, 45, *[10] * 40)
        young = steps_of(lengths, 4, num_rows=5, over_sampling=1.25)
        # The long one lives through one update, and the second step waits for it.
        assert [num_steps(report) for report in young] == [10, 35, 10, 10]
        assert [report.max_age for report in young[:2]] == [0, 1]
        old = steps_of(lengths, 4, num_rows=5, over_sampling=1.25, max_age=3)
        assert max(num_steps(report) for report in old) == 15
        assert max(report.max_age for report in old) == 3
        assert all(report.num_dropped_tokens == 0 for report in young + old)

    @pytest.mark.parametrize("policy", ["fcfs", "longest_first"])
    def test_every_token_is_trained_once_or_carried(self, policy):
        lengths = LognormalLengths(median=20, max_new_tokens=80)
        reports = steps_of(
            lengths, 12, num_groups=6, num_samples=3, over_sampling=1.5, schedule_policy=policy
        )
        # Groups are asked for in order, so what was trained are the first ones but the carried.
        rng = random.Random(0)
        asked = 12 * 6 + reports[-1].num_carried
        drawn = [lengths.draw(prompt, 3, rng) for prompt in range(asked)]
        trained = sum(report.mean_length * 18 for report in reports)
        left = sum(sorted(map(sum, drawn))[-reports[-1].num_carried :])
        assert sum(map(sum, drawn)) - left <= trained + 1e-6 <= sum(map(sum, drawn))
        assert all(report.max_age <= 1 and 0 <= report.idle < 1 for report in reports)

    @pytest.mark.parametrize("hardware", tiered(TABLES, ["cpu"], ()))
    @pytest.mark.parametrize("num_prompts", tiered([1 << 30, 16], [16], ()))
    @pytest.mark.parametrize("sigmas", [(0.7, 0.5), (0.0, 0.8), (0.0, 0.0)])
    def test_longest_first_does_not_lose(self, hardware, num_prompts, sigmas):
        """Also where nothing tells lengths."""
        lengths = LognormalLengths(
            median=64, prompt_sigma=sigmas[0], sample_sigma=sigmas[1], max_new_tokens=512
        )
        took_s = {}
        for policy in ("fcfs", "longest_first"):
            reports = steps_of(
                lengths,
                10,
                table=find_table(hardware),
                num_groups=8,
                num_samples=8,
                num_rows=16,
                schedule_policy=policy,
                num_prompts=num_prompts,
                prompt_tokens=64,
            )
            took_s[policy] = sum(report.seconds for report in reports)
        assert took_s["fcfs"] / took_s["longest_first"] >= 0.97

    def test_ways_are_compared_with_first_come(self):
        lengths = LognormalLengths(median=32, max_new_tokens=256)
        plan = Plan(num_groups=8, num_samples=4, num_rows=8, num_prompts=32)
        outcomes = {each.name: each for each in compare_ways(plan, lengths, TABLES["h200"], 8)}
        assert (outcomes["first come"].speed, outcomes["first come"].error) == (1, 0)
        assert outcomes["1.5 times, carry"].speed > 1.1
        assert 0 < outcomes["longest first"].error < 0.2
        assert outcomes["1.5 times, carry"].idle < outcomes["first come"].idle
        assert outcomes["1.5 times, carry"].dropped == 0 < outcomes["1.5 times, drop"].dropped


class TestInputs:
    def test_lognormal_prompts_have_medians_of_their_own(self):
        lengths = LognormalLengths(median=100, sample_sigma=0.0, max_new_tokens=150)
        rng = random.Random(3)
        drawn = [set(lengths.draw(prompt, 5, rng)) for prompt in range(20)]
        assert all(len(each) == 1 for each in drawn)
        assert len(set.union(*drawn)) > 5
        assert max(set.union(*drawn)) == 150
        logs = [math.log(length) for each in drawn for length in each]
        assert abs(sum(logs) / len(logs) - math.log(100)) < 0.5

    def test_recorded_lengths_come_from_a_file(self, tmp_path):
        path = tmp_path / "lengths.json"
        path.write_text(json.dumps({"lengths": [[3, 5], [7]]}))
        lengths = read_lengths(path)
        rng = random.Random(0)
        assert sorted(lengths.draw(0, 2, rng)) == [3, 5]
        assert lengths.draw(1, 3, rng) == [7, 7, 7]
        assert lengths.draw(2, 1, rng)[0] in (3, 5)
        assert lengths.max_new_tokens == 7

    @pytest.mark.parametrize("text", ["{", "[]", '{"lengths": [1]}', '{"lengths": []}'])
    def test_other_files_are_refused(self, tmp_path, text):
        path = tmp_path / "lengths.json"
        path.write_text(text)
        with pytest.raises(InvalidConfigError, match="lengths"):
            read_lengths(path)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: RecordedLengths([[0]]), "lengths of prompt 0"),
            (lambda: LognormalLengths(median=0), "median"),
            (lambda: Plan(num_groups=0), "num_groups"),
            (lambda: Plan(num_groups=1, over_sampling=0.5), "over_sampling"),
            (lambda: Plan(num_groups=1, unfinished="keep"), "unfinished"),
            (lambda: find_table("h300"), "h300"),
            (lambda: dataclasses.replace(FLAT, rows=(2, 1)), "rows"),
            (lambda: dataclasses.replace(FLAT, step_s=(1.0,)), "step_s"),
            (lambda: dataclasses.replace(FLAT, key_s=-1.0), "key_s"),
        ],
    )
    def test_bad_values_are_refused_by_name(self, make, message):
        with pytest.raises(InvalidConfigError, match=message):
            make()


def test_it_needs_no_jax():
    code = "import sys, tools.simulation; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
