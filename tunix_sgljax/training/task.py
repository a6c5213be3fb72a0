"""The task of a run: rows of data, prompts, reward functions, and the batches of a step."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sgljax_engine import InvalidConfigError
from tunix_sgljax.reward_functions import checked, find_wrong_call
from tunix_sgljax.training.checks import unknown_choice
from tunix_sgljax.training.loading import is_function
from tunix_sgljax.training.rewards import BUILT_IN
from tunix_sgljax.training.schema import TaskSection

Row = dict[str, Any]

NUMBER = "row_number"
"""The only column that goes through Tunix: the number of a row, training rows first."""

GIVEN = ("prompts", "completions", "mode", "trajectory_ids")
"""Keywords of a reward function that are no columns."""


class Task(NamedTuple):
    """The data and rewards of a run.

    Rows hold the prompt as `prompts`, and the columns of the reward functions, which are made for
    Tunix's learners. `eval_rows` are held out; empty without evaluation.
    """

    rows: list[Row]
    eval_rows: list[Row]
    reward_fns: list[Callable[..., Any]]

    def with_columns(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, called with the columns of the rows whose numbers Tunix hands over.

        Tunix makes arrays of what it divides into micro-batches, in which 3 beside 2.5 is a 3.0.
        """
        rows = [*self.rows, *self.eval_rows]

        @functools.wraps(function)
        def call(**arguments: Any) -> Any:
            picked = [rows[int(number)] for number in arguments.pop(NUMBER)]
            return function(**{**arguments, **to_columns(picked)})

        return call

    def eval_batch(self, numbers: Sequence[int]) -> dict[str, Any]:
        """A batch of held-out rows, by their numbers among those."""
        return _to_batch(self.eval_rows, numbers, first=len(self.rows))


def load_task(section: TaskSection, tokenizer: Any) -> Task:
    """Reads the data and finds the reward functions; InvalidConfigError names a wrong key."""
    reward_fns = find_reward_functions(section)
    rows, eval_rows = (load_rows(section, key, tokenizer) for key in ("dataset", "eval_dataset"))
    _check_same_columns("task.dataset", rows, rows[:1])
    _check_same_columns("task.eval_dataset", eval_rows, rows[:1])
    task = Task(rows, eval_rows, reward_fns)
    return task._replace(reward_fns=[task.with_columns(checked(fn)) for fn in reward_fns])


def check_call(
    key: str,
    task: Task,
    function: Callable[..., Any],
    given: Collection[str],
    optional: Collection[str] = (),
) -> None:
    """Refuses a function that cannot be called with the columns of a task and the given keywords.

    Only a function with such parameters gets the optional keywords.
    """
    problem = find_wrong_call(function, {*task.rows[0], *given}, optional)
    if problem is not None:
        raise InvalidConfigError(f"{key} {problem}")


def load_rows(section: TaskSection, key: str, tokenizer: Any) -> list[Row]:
    """The rows of "dataset" or "eval_dataset"; none where the section has no such data."""
    return [_to_row(section, row, tokenizer) for row in _read_rows(section, key)]


def check_task(section: TaskSection) -> None:
    """Finds the functions and files of a task, in a second: before Tunix is imported."""
    find_reward_functions(section)
    for key in ("dataset", "eval_dataset"):
        source = _find_source(section, key)
        if isinstance(source, Path) and not source.is_file():
            raise InvalidConfigError(f"task.{key} {source} is no file")


def find_reward_functions(section: TaskSection) -> list[Callable[..., Any]]:
    """The functions that `task.reward_functions` names, with `task.code_dir` on the path."""
    add_code_dir(section.code_dir)
    key, functions = "task.reward_functions", []
    for name in section.reward_functions:
        if name not in BUILT_IN and not is_function(name):
            raise InvalidConfigError(unknown_choice(key, name, [*BUILT_IN, "module:function"]))
        functions.append(BUILT_IN.get(name) or import_function(key, name))
    return functions


def add_code_dir(code_dir: str | None) -> None:
    if code_dir is not None and not Path(code_dir).is_dir():
        raise InvalidConfigError(f"task.code_dir {code_dir} is no folder")
    if code_dir is not None and code_dir not in sys.path:
        sys.path.insert(0, code_dir)


def import_function(key: str, name: str) -> Callable[..., Any]:
    """The function that "module:function" names; InvalidConfigError for what is not there."""
    module_name, _, function_name = name.rpartition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # an import inside the module
        raise InvalidConfigError(
            f"{key} {name!r}: there is no module {error.name!r} (task.code_dir is searched too)"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value)]
        raise InvalidConfigError(unknown_choice(f"{key} of {module_name}", function_name, names))
    return function


def batches(
    rows: Sequence[Row], batch_size: int, shuffle_seed: int | None, num_skipped: int = 0
) -> Iterator[dict[str, Any]]:
    """Endless batches for Tunix's learners: an array for each column.

    Rows that do not fill a batch open the next epoch. A learner that skips too many rows gets
    `num_skipped` before the first. Without a seed the order is kept.
    """
    import grain  # imports JAX, which checks of a task do without

    order: Any = grain.MapDataset.source(range(len(rows)))
    if shuffle_seed is not None:
        order = order.shuffle(seed=shuffle_seed % 2**32)
    order = order.repeat()
    for first in itertools.count(-num_skipped, batch_size):
        picked = range(first, first + batch_size)
        yield _to_batch(rows, [0 if number < 0 else order[number] for number in picked])


def to_columns(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    names = [name for name in rows[0] if name != "prompts"]
    return {name: to_column([row[name] for row in rows]) for name in names}


def to_column(values: Sequence[Any]) -> np.ndarray:
    """The values of rows as an array: of numbers or strings if these stay what they are.

    Else an array of objects, since NumPy makes one type of them: 3 beside 2.5 becomes 3.0, True
    beside 2 becomes 1, a string loses zeros at its end.
    """
    kind = type(values[0])
    is_plain = issubclass(kind, (str, int, float, bytes, np.generic))
    if is_plain and all(type(value) is kind for value in values):
        array = np.array(values)
        plain = [value.item() if isinstance(value, np.generic) else value for value in values]
        if repr(array.tolist()) == repr(plain):
            return array
    return np.fromiter(values, object, len(values))  # a slice would take equal lists for a matrix


def _to_batch(rows: Sequence[Row], numbers: Sequence[int], first: int = 0) -> dict[str, Any]:
    """The prompts and numbers of rows, whose own numbers begin with `first`."""
    prompts = np.array([rows[number]["prompts"] for number in numbers])
    return {"prompts": prompts, NUMBER: np.array(numbers) + first}


def _check_same_columns(key: str, rows: Sequence[Row], first: Sequence[Row]) -> None:
    for number, row in enumerate(rows):
        for wanted in first:
            different = sorted(wanted.keys() ^ row.keys())
            if different:
                raise InvalidConfigError(
                    f"{key}: row {number} and row 0 of task.dataset differ in the columns "
                    f"{different}; choose columns that all rows have with task.columns"
                )


def _find_source(section: TaskSection, key: str) -> Callable[..., Any] | Path | None:
    """The function or file of a dataset; None where there is none."""
    source, arguments = getattr(section, key), getattr(section, f"{key}_args")
    if source is None:
        return None
    if is_function(source):
        return import_function(f"task.{key}", source)
    if arguments:
        raise InvalidConfigError(
            f"task.{key}_args needs a function as task.{key}, got the file {source}"
        )
    return Path(source)


def _read_rows(section: TaskSection, name: str) -> list[Mapping[str, Any]]:
    key, source = f"task.{name}", _find_source(section, name)
    if source is None:
        return []
    if isinstance(source, Path):
        rows = _read_file(key, source)
    else:
        arguments = getattr(section, f"{name}_args")
        try:
            rows = list(source(**arguments))
        except TypeError as error:
            raise InvalidConfigError(f"{key}_args {arguments}: {error}") from error
    where = f"{key} {getattr(section, name)}"
    if not rows:
        raise InvalidConfigError(f"{where} holds no rows")
    for row in rows:
        if not isinstance(row, Mapping):
            raise InvalidConfigError(f"{where} must hold mappings, got {row!r}")
    return rows


def _read_file(key: str, path: Path) -> list[Any]:
    if path.suffix not in (".jsonl", ".parquet"):
        raise InvalidConfigError(
            f"{key} must be a .jsonl or .parquet file or module:function, got {path}"
        )
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            return parquet.read_table(path).to_pylist()
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidConfigError(f"{key} {path} cannot be read: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError:
            message = f"{key} {path}: line {number} is no JSON: {line[:60]!r}"
            raise InvalidConfigError(message) from None
    return rows


def _to_row(section: TaskSection, row: Mapping[str, Any], tokenizer: Any) -> Row:
    try:
        prompt = section.prompt_template.format_map(row)
    except KeyError as error:
        key = "a column of task.prompt_template"
        raise InvalidConfigError(unknown_choice(key, error.args[0], row)) from None
    if section.chat:
        messages = [{"role": "user", "content": prompt}]
        if section.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": section.system_prompt})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    names = section.columns
    if names is None:
        names = [name for name in row if name != "prompts"]
    for name in names:
        if name not in row:
            raise InvalidConfigError(unknown_choice("task.columns", name, row))
        if name in (*GIVEN, NUMBER):
            raise InvalidConfigError(
                f"a column must not be called {name!r}, which reward functions get from the "
                "learner; choose others with task.columns"
            )
    return {"prompts": str(prompt), **{name: row[name] for name in names}}
