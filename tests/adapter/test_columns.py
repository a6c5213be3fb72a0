"""Columns of the data: reward functions get what Tunix's own learner gives them, of any kind."""

from __future__ import annotations

import datetime
import decimal
import fractions
import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tunix.rl.grpo.grpo_learner import GRPOLearner
from tunix.rl.rl_cluster import RLCluster

from sgljax_engine import InvalidConfigError
from tests.adapter.grpo_parts import grpo_config, make_parts, rollout_config
from tests.geometry import SMALL
from tunix_sgljax import OverSampling, OverSamplingGrpoLearner, SglJaxRollout
from tunix_sgljax.long_tail.columns import join_rows, repeated, split_rows

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix

GROUP = 2


class Thing:
    """An object that no array knows."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Thing({self.number})"


def objects(*values: Any) -> np.ndarray:
    """An array of objects, whatever they are."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


FLAT: dict[str, Any] = {
    "strings": np.array(["a", "bbb"]),
    "string_list": ["a", "bbb"],
    "bytes": np.array([b"a", b"bbb"]),
    "bytes_list": [b"a", b"bbb"],
    "unicode": ["\u5317", "\U0001f600 z"],
    "ints": np.array([3, -4]),
    "int_list": [3, -4],
    "int8": np.array([3, 4], np.int8),
    "uint64": np.array([2**63, 1], np.uint64),
    "big_ints": objects(2**70, 1),
    "floats": np.array([2.5, 3.0]),
    "float_list": [2.5, 3.0],
    "float16": np.array([2.5, 3], np.float16),
    "nan": [float("nan"), 1.0],
    "ints_beside_floats": [3, 2.5],
    "numbers_beside_strings": [3, "3"],
    "objects_of_both": objects(3, 2.5),
    "strings_and_none": objects("a", None),
    "nones": objects(None, None),
    "bools": np.array([True, False]),
    "bools_beside_ints": [True, 7],
    "complex": np.array([1j, 2.0]),
    "numpy_scalars": [np.float32(2.5), np.int8(3)],
    "numpy_strings": [np.str_("x"), np.str_("yy")],
    "zero_dim_arrays": [np.array(3), np.array(4)],
    "jax": jnp.array([3, 4]),
    "jax_floats": jnp.array([2.5, 4.0]),
    "jax_scalars": [jnp.array(3), jnp.array(4)],
    "things": objects(Thing(1), Thing(2)),
    "object_dicts": objects({"a": 1}, {"b": [2]}),
    "dates": np.array(["2026-01-01", "2026-01-02"], "datetime64[D]"),
    "date_objects": objects(datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)),
    "decimals": objects(decimal.Decimal("2.50"), decimal.Decimal(3)),
    "fractions": objects(fractions.Fraction(1, 3), fractions.Fraction(2)),
    "paths": objects(Path("a"), Path("b/c")),
    "sets": objects({1}, {2, 3}),
}
"""Columns that Tunix can divide into micro-batches."""

WHOLE: dict[str, Any] = {
    "matrix": np.array([[1, 2], [3, 4]]),
    "jax_matrix": jnp.array([[1.0, 2.0], [3.0, 4.0]]),
    "ragged": objects([1], [2, 3]),
    "nested": {"answer": np.array([3, 4]), "of": {"lists": ["a", "bb"]}},
    "tuple": ("a", "bb"),
    "none": None,
    "one_string": "english",
    "structured": np.array([(1, "a"), (2, "b")], [("n", int), ("s", "U2")]),
}
"""Columns that it can only take in one piece."""


def rewards_columns(learner_of: Any, columns: dict[str, Any], *, size: int) -> list[dict[str, str]]:
    """What a reward function is given at each call, written out.

    Args:
        learner_of: Makes the learner of a cluster, a config and a reward function.
        columns: Of a batch of two prompts.
        size: Prompts of a micro-batch.
    """
    given: list[dict[str, str]] = []

    def reward(prompts: Any, completions: Any, **others: Any) -> list[float]:
        given.append({name: repr(values) for name, values in others.items()})
        given[-1]["prompts"] = repr(prompts)
        return [float(len(text)) for text in completions]

    engine = functools.partial(SglJaxRollout, **SMALL)
    config = rollout_config(max_tokens_to_generate=8, max_prompt_length=8)
    parts = make_parts(max_steps=100, rollout_engine=engine, rollout_config=config)
    training = parts.arguments["cluster_config"].training_config
    training.train_micro_batch_size = size
    training.gradient_accumulation_steps = 2 // size
    cluster: Any = RLCluster(**parts.arguments)
    cluster.update_actor = lambda *_: None  # the rewards are the subject, and training compiles
    learner = learner_of(cluster, grpo_config(beta=0.0, num_generations=GROUP), reward)
    try:
        learner.train([{"prompts": np.array(["5 6", "7"]), **columns}])
    finally:
        cluster.rollout.close()
    return given


def over_sampled(*arguments: Any) -> OverSamplingGrpoLearner:
    return OverSamplingGrpoLearner(*arguments, over_sampling=OverSampling(factor=1.0))


@pytest.mark.parametrize(
    ("columns", "size"), [({**FLAT, **WHOLE}, 2), (FLAT, 1)], ids=["whole", "micro_batches"]
)
def test_over_sampling_gives_what_tunix_gives(columns, size):
    """44 kinds of columns, and 36 in micro-batches, by their `repr`."""
    wanted = rewards_columns(GRPOLearner, columns, size=size)
    found = rewards_columns(over_sampled, columns, size=size)
    assert len(wanted) == len(found) > 0
    for want, have in zip(wanted, found, strict=True):
        assert have.keys() == want.keys() >= columns.keys()
        assert {n: (have[n], want[n]) for n in want if have[n] != want[n]} == {}


@pytest.mark.parametrize("column", ["matrix", "jax_matrix", "nested"])
def test_what_tunix_divides_wrongly_is_refused_by_name(column):
    with pytest.raises(InvalidConfigError, match=f"the column '{column}' is .*micro-batches"):
        repeated({column: WHOLE[column]}, GROUP, lambda _: [], lambda batches: batches)


def test_rows_can_be_put_together_in_any_order():
    rows = split_rows({"prompts": np.array(["a", "b"]), "n": {"x": [1, 2]}, "l": "en"})
    other = split_rows({"prompts": np.array(["cc"]), "n": {"x": [3]}, "l": "en"})
    joined = join_rows([rows[1], *other, rows[0]])
    assert repr(joined["prompts"]) == "array(['b', 'cc', 'a'], dtype='<U2')"
    assert (joined["n"], joined["l"]) == ({"x": [2, 3, 1]}, "en")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [1, 2, 3]}, "the column 'a' has 3 values for 2 prompts"),
        ({"a": {"b": [1]}}, r"the column 'a\.b' has 1 values for 2 prompts"),
    ],
)
def test_a_column_without_a_value_for_each_prompt_is_refused(columns, message):
    with pytest.raises(InvalidConfigError, match=message):
        split_rows({"prompts": ["x", "y"], **columns})


@pytest.mark.parametrize("other", [{}, {"a": {"b": 1}}])
def test_rows_with_other_columns_are_refused(other):
    with pytest.raises(InvalidConfigError, match="for the column 'a': "):
        join_rows([{"a": np.array([1])}, other])
