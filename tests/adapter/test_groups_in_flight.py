"""Groups that live through weight updates, whatever happens between steps."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

from sgljax_engine import InvalidRequestError, SamplingParams
from tests.adapter.helpers import new_rollout, params_of, rollout_config, text_of
from tests.threads import LIMIT_S, gate_steps, running, start, take_steps, wait_for
from tunix_sgljax import OverSampling, SglJaxRollout
from tunix_sgljax.long_tail.columns import Columns, join_rows, repeated
from tunix_sgljax.long_tail.feed import Row
from tunix_sgljax.long_tail.groups import GroupsInFlight, to_output

NUM_SAMPLES = 3
NUM_STEPS = 8
CONFIG = rollout_config(
    max_tokens_to_generate=24,
    temperature=1.0,
    max_prompt_length=16,
    eos_tokens=list(range(8, 14)),
)

SHORT = SamplingParams(max_new_tokens=8)


@pytest.fixture
def rollout(model):
    made = new_rollout(model, rollout_config=CONFIG, weight_update_mode="retract")
    yield made
    made.close()


def update(rollout, model):
    """Weights that are a little different each time."""
    scaled = jax.tree.map(lambda x: x * 1.01, params_of(model))
    rollout.update_params(scaled)


def make_row(number: int) -> Row:
    """A row whose prompt tells its number."""
    prompt = text_of([20 + number // 30, 20 + number % 30, 21])
    return Row(number, {"prompts": np.array([prompt]), "row": np.array([number])})


def columns_of(rows: Sequence[Row]) -> Columns:
    """The columns that Tunix's learner makes of rows."""

    def names(example: Columns) -> list[str]:
        return [f"{row}_{i % NUM_SAMPLES}" for i, row in enumerate(example["row"])]

    return repeated(join_rows([row.columns for row in rows]), NUM_SAMPLES, names, None)


def make_groups(rollout: SglJaxRollout, config: OverSampling) -> GroupsInFlight:
    return GroupsInFlight(rollout, config, NUM_SAMPLES, columns_of)


def meddle(
    rollout: SglJaxRollout, groups: GroupsInFlight, others: list[Future[Any]], rng: random.Random
) -> None:
    """Does what may happen to an engine between two steps."""
    engine = rollout.engine
    for _ in range(rng.randint(0, 3)):
        kind = rng.choice(["pause", "evaluate", "score", "other user"])
        if kind == "pause":
            engine.pause_generation("in_place")
            engine.pause_generation("retract")
            engine.continue_generation()
        elif kind == "evaluate":
            with groups.running():
                rollout.generate([text_of([5, 6])], CONFIG)
        elif kind == "score":
            engine.score([[1, 2, 3]])
        else:  # it waits while the engine is paused
            others.append(start(functools.partial(engine.generate_requests, [[3, 4]], SHORT)))


@pytest.mark.parametrize(
    ("max_age", "factor", "seed"),
    [
        (1, 2.0, 0),
        pytest.param(2, 1.5, 1, marks=pytest.mark.slow),
        pytest.param(3, 1.25, 2, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_lost_or_taken_twice_and_ages_are_bounded(model, rollout, max_age, factor, seed):
    rng, num_groups = random.Random(seed), 4
    config = OverSampling(factor=factor, max_age=max_age)
    groups = make_groups(rollout, config)
    others: list[Future[Any]] = []
    taken_rows, num_asked = [], 0
    for _ in range(NUM_STEPS):
        while len(groups) < config.num_asked(num_groups):
            groups.ask(make_row(num_asked), CONFIG)
            num_asked += 1
        taken = groups.take(num_groups)
        assert len(taken) == num_groups
        assert all(rollout.weight_version - group.born <= max_age for group in taken)
        merged = columns_of([group.row for group in taken])
        output = to_output(taken, rollout, CONFIG)
        assert len(output.tokens) == len(merged["trajectory_ids"]) == num_groups * NUM_SAMPLES
        for tokens, logprobs, versions in zip(
            output.tokens, output.logprobs or (), output.weight_versions, strict=True
        ):
            assert 1 <= len(tokens) == len(logprobs) == len(versions) <= 24
            assert (np.diff(versions) >= 0).all()
            assert rollout.weight_version - versions[0] <= max_age
        taken_rows += merged["row"][::NUM_SAMPLES].tolist()
        rollout.engine.check_integrity()
        meddle(rollout, groups, others, rng)
        update(rollout, model)
    assert len(set(taken_rows)) == len(taken_rows) == NUM_STEPS * num_groups
    assert len(groups) == num_asked - len(taken_rows)
    groups.close()
    for call in others:
        assert call.result(LIMIT_S)[0].output_ids
    state = rollout.engine.get_internal_state()
    assert (state.running_batch_size, state.waiting_queue_size) == (0, 0)
    assert state.pause_mode is None
    rollout.engine.check_integrity()


def test_a_group_that_goes_on_has_tokens_of_both_weights(model, rollout):
    """The engine takes one step, in which a group of short answers ends and a longer one starts."""
    engine = gate_steps(rollout.engine)
    groups = make_groups(rollout, OverSampling(factor=2.0))
    endless = dataclasses.replace(CONFIG, eos_tokens=[])
    groups.ask(make_row(0), dataclasses.replace(endless, max_tokens_to_generate=1))
    groups.ask(make_row(1), endless)
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(groups.take, 1)
        wait_for(lambda: engine.get_internal_state().waiting_queue_size == 2 * NUM_SAMPLES)
        take_steps(engine)
        assert [group.row.number for group in taken.result(LIMIT_S)] == [0]
    update(rollout, model)
    with running():
        (group,) = groups.take(1)
    for output in group.future.result().outputs:
        assert len(output.token_weight_versions) == 24
        assert set(output.token_weight_versions) == {0, 1}
    groups.close()


def test_waiting_ends_when_another_thread_closes(rollout):
    groups = make_groups(rollout, OverSampling())
    groups.ask(make_row(0), CONFIG)
    rollout.engine.pause_generation()
    call = start(lambda: groups.take(1))
    groups.close()
    with pytest.raises(CancelledError):
        call.result(LIMIT_S)
    rollout.engine.continue_generation()


def test_a_failed_group_is_an_error(rollout):
    groups = make_groups(rollout, OverSampling())
    row = make_row(0)
    groups.ask(row._replace(columns=row.columns | {"prompts": np.array(["5000"])}), CONFIG)
    with pytest.raises(InvalidRequestError, match="got 5000 at position"):
        groups.take(1)
    groups.close()
