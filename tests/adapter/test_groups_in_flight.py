"""Groups that live through weight updates, whatever happens between steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from sgljax_engine import InvalidRequestError
from tests.adapter.helpers import new_rollout, params_of, rollout_config, text_of
from tests.threads import LIMIT_S, gate_steps, running, take_steps, wait_for
from tunix_sgljax import OverSampling, SglJaxRollout
from tunix_sgljax.long_tail.columns import Columns, join_rows, repeated
from tunix_sgljax.long_tail.feed import Row
from tunix_sgljax.long_tail.groups import GroupsInFlight

NUM_SAMPLES = 3
CONFIG = rollout_config(
    max_tokens_to_generate=24,
    temperature=1.0,
    max_prompt_length=16,
    eos_tokens=list(range(8, 14)),
)


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


def test_a_failed_group_is_an_error(rollout):
    groups = make_groups(rollout, OverSampling())
    row = make_row(0)
    groups.ask(row._replace(columns=row.columns | {"prompts": np.array(["5000"])}), CONFIG)
    with pytest.raises(InvalidRequestError, match="got 5000 at position"):
        groups.take(1)
    groups.close()
