"""Columns of the data with agents: reward functions get what Tunix's own agentic learner gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig, GRPOLearner

from tests.adapter.agentic_parts import GROUP, PER_STEP, RESPONSE, Parser, make_cluster, prompts_of
from tests.adapter.test_columns import FLAT, WHOLE
from tests.threads import LIMIT_S, start
from tunix_sgljax import AgenticGrpoLearner, OverSampling, OverSamplingAgenticGrpoLearner

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Tunix
]

UNEVEN = ("matrix", "jax_matrix", "nested", "none", "one_string", "ragged")
"""Columns that Tunix's agentic learner flattens, has for the first prompt alone, or cannot join."""

COLUMNS = FLAT | {name: column for name, column in WHOLE.items() if name not in UNEVEN}


def over_sampling(*arguments: Any, **options: Any) -> Any:
    return OverSamplingAgenticGrpoLearner(
        *arguments, over_sampling=OverSampling(factor=1.0), **options
    )


def columns_given(make_learner: Callable[..., Any], **options: Any) -> list[dict[str, str]]:
    """What a reward function is given for each group, written out; by prompt.

    Args:
        make_learner: Makes the learner of a cluster, a config and reward functions.
        **options: Of the cluster.
    """
    given: list[dict[str, str]] = []

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        mode = columns.pop("mode")
        for first in range(0, len(prompts), GROUP):  # in the order in which groups have ended
            rows = slice(first, first + GROUP)
            group = {"prompts": prompts, **columns}
            given.append({name: repr(values[rows]) for name, values in group.items()})
            given[-1]["mode"] = mode
        return [float(len(text)) for text in completions]

    cluster = make_cluster(num_steps=100, **options)
    cluster.update_actor = lambda *_: None  # the rewards are the subject, and training compiles
    config = GRPOConfig(
        num_generations=GROUP, beta=0.0, max_response_length=RESPONSE, off_policy_steps=1
    )
    learner = make_learner(cluster, config, [reward], chat_parser=Parser())
    batch = {"prompts": np.array(prompts_of(0)), **COLUMNS}
    try:
        start(lambda: learner.train([batch])).result(LIMIT_S)
    finally:
        if make_learner is not GRPOLearner:
            cluster.rollout.close()
    return sorted(given, key=lambda each: each["prompts"])


@pytest.fixture(scope="module")
def wanted():
    """What Tunix's learner gives, with Tunix's rollout."""
    return columns_given(GRPOLearner, engine="vanilla")


@pytest.mark.parametrize("learner", [AgenticGrpoLearner, over_sampling])
def test_agents_give_what_tunix_gives(wanted, learner):
    """38 kinds of columns, by their `repr`."""
    found = columns_given(learner)
    assert len(wanted) == len(found) == PER_STEP
    for want, have in zip(wanted, found, strict=True):
        assert have.keys() == want.keys() >= COLUMNS.keys()
        assert {n: (have[n], want[n]) for n in want if have[n] != want[n]} == {}
