"""Columns under `train`: what a row holds is what a reward function gets; and what it returns."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tunix.rl.reward_manager import SequenceRewardManager
from tunix.rl.rl_learner import RLLearner

from sgljax_engine import InvalidConfigError
from tests.adapter.grpo_parts import grpo_config
from tests.adapter.test_columns import FLAT
from tunix_sgljax.reward_functions import checked, to_list
from tunix_sgljax.training.rewards import BUILT_IN
from tunix_sgljax.training.schema import TaskSection
from tunix_sgljax.training.task import NUMBER, Task, batches, load_task, to_column

JSON: dict[str, list[Any]] = {
    "int": [1, -2, 3],
    "float": [0.5, 2.0, float("inf")],
    "bool": [True, False, True],
    "string": ["a", "", "b\u5317"],
    "ends_in_zeros": ["a\0", "b", ""],
    "ints_beside_floats": [3, 2.5, 4],
    "bools_beside_ints": [True, 2, False],
    "strings_beside_ints": ["3", 3, ""],
    "some_none": [None, 1, "x"],
    "none": [None, None, None],
    "huge": [2**70, 1, 0],
    "unsigned": [2**63, 1, -1],
    "lists": [[1, 2], [3, 4], [5, 6]],
    "ragged": [[1], [2, 3], []],
    "of_lists": [[[1]], [["a"], 2], []],
    "dicts": [{"a": 1}, {"a": [2]}, {}],
    "list_beside_string": [["a", "b"], "a", ["b"]],
}
"""Columns as a file of JSON lines has them."""


def write_rows(path, columns):
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    path.write_text(
        "".join(json.dumps({"prompts": str(i), **r}) + "\n" for i, r in enumerate(rows))
    )
    return TaskSection(dataset=str(path))


@pytest.mark.parametrize("size", [None, 1, 2])
def test_reward_functions_get_what_the_rows_hold(tmp_path, size, monkeypatch):
    """17 kinds of columns through Tunix's own micro-batches, in any order and repeated."""
    given: list[dict[str, Any]] = []

    def reward(prompts, completions, **columns):
        given.append({"prompts": prompts, **columns})
        return [0] * len(completions)

    monkeypatch.setitem(BUILT_IN, "exact_match", reward)
    task = load_task(write_rows(tmp_path / "rows.jsonl", JSON), None)
    made = batches(task.rows, 2, shuffle_seed=3)
    learner: Any = None
    if size is not None:
        made = RLLearner._create_micro_batch_iterator(learner, made, size)
    manager = SequenceRewardManager(task.reward_fns, grpo_config())
    for _ in range(6):
        batch = {name: np.repeat(values, 2, axis=0) for name, values in next(made).items()}
        manager(completions=["x"] * len(batch["prompts"]), **batch)
    seen = set()
    for columns in given:
        for at, number in enumerate(map(int, columns["prompts"])):
            seen.add(number)
            for name, values in JSON.items():
                value = columns[name][at]
                plain = value.item() if isinstance(value, np.generic) else value
                assert repr(plain) == repr(values[number]), name
    assert seen == {0, 1, 2}
    assert NUMBER not in given[0]


def test_columns_of_one_type_are_arrays_as_tunix_gives_them():
    for name in ("string_list", "int_list", "float_list", "nan", "numpy_strings", "bytes_list"):
        assert repr(to_column(FLAT[name])) == repr(np.array(FLAT[name]))
    assert to_column([np.float16(2.5), np.float16(1)]).dtype == np.float16
    assert to_column([3, 2.5]).tolist() == [3, 2.5]
    assert to_column([3, 2.5]).dtype == object


def test_a_right_answer_beside_a_fraction_is_right():
    task = Task([{"prompts": "a", "answer": 3}, {"prompts": "b", "answer": 2.5}], [], [])
    function = task.with_columns(BUILT_IN["exact_match"])
    arguments: dict[str, Any] = {"prompts": ["a", "b"], NUMBER: np.array([0, 1])}
    assert function(completions=["3", "2.5"], **arguments) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"mode": [1]}, "a column must not be called 'mode', which reward functions get"),
        ({"row_number": [1]}, "must not be called 'row_number'"),
    ],
)
def test_names_of_others_are_refused(tmp_path, columns, message):
    with pytest.raises(InvalidConfigError, match=message):
        load_task(write_rows(tmp_path / "rows.jsonl", columns), None)


def test_rows_without_a_column_are_refused_by_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompts": "a", "answer": 1}\n{"prompts": "b"}\n')
    with pytest.raises(InvalidConfigError, match=r"row 1 and row 0 .* differ in the columns"):
        load_task(TaskSection(dataset=str(path)), None)


@pytest.mark.parametrize(
    "rewards",
    [[1, 2.5], (1, 2.5), np.array([1, 2.5]), jnp.array([1, 2.5]), [np.float32(1), jnp.array(2.5)]],
)
def test_rewards_may_be_any_list_of_numbers(rewards):
    assert to_list(len, rewards, 2) == [1.0, 2.5]
    assert to_list(len, (reward for reward in rewards), 2) == [1.0, 2.5]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (None, "a list of them, got None"),
        (1.0, r"a list of them, got 1\.0"),
        (np.array(1.0), "a list of them, got array"),
        ("12", "a list of them, got '12'"),
        ({0: 1.0, 1: 2.0}, "a list of them, got {0: "),
        ([1.0], "got 1$"),
        ([1.0, None], "got None for completion 1"),
        ([1.0, "2"], "got '2' for completion 1"),
        ([[1.0, 2.0], 1.0], r"got \[1\.0, 2\.0\] for completion 0"),
    ],
)
def test_wrong_rewards_name_the_function(rewards, message):
    def my_reward(**_):
        return rewards

    with pytest.raises(InvalidConfigError, match=f"function my_reward must.* {message}"):
        checked(my_reward)(prompts=["", ""], completions=["", ""])


def test_errors_inside_name_the_function():
    def my_reward(**_):
        raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        checked(my_reward)(prompts=[], completions=[])
    assert caught.value.__notes__ == ["raised in the reward function my_reward"]
