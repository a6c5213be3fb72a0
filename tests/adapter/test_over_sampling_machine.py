"""Steps of over-sampling under interruptions, as a state machine: what is asked, taken and left.

The feed, the source of groups and the groups in flight are the real ones. The engine is a model,
which gives its requests tokens at a pace that the machine chooses: hundreds of steps take seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import types
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tunix.rl.rollout.base_rollout import RolloutConfig

from tests.devices import run_python
from tests.threads import LIMIT_S, start, wait_for
from tunix_sgljax import OverSampling
from tunix_sgljax.checkpoints.data_place import DataPlace
from tunix_sgljax.long_tail.asking import GroupSource
from tunix_sgljax.long_tail.columns import join_rows, repeated
from tunix_sgljax.long_tail.early_ends import sample_group
from tunix_sgljax.long_tail.feed import ROW, PromptFeed, Row
from tunix_sgljax.long_tail.groups import GroupsInFlight
from tunix_sgljax.observability.observers import RolloutObservers

NUM_SAMPLES = 2
MAX_TOKENS = 12


class Request:
    """A request of the model, whose tokens are the weights that sampled them."""

    def __init__(self, num_tokens: int, on_piece: Any) -> None:
        self.versions: list[int] = []
        self.num_tokens = num_tokens
        self.on_piece = on_piece
        self.is_aborted = False

    @property
    def is_over(self) -> bool:
        return self.is_aborted or len(self.versions) == self.num_tokens


class ModelRollout:
    """What groups ask of a rollout and its engine; requests run on the loop of those who wait."""

    weight_update_mode = "retract"

    def __init__(self, seed: int) -> None:
        self.engine: Any = self
        self.observers = RolloutObservers(None)
        self.weight_version = 0
        self.is_paused = False
        self.pace = 1.0
        self.num_live = 0
        self._rng = random.Random(seed)
        self._requests: dict[str, Request] = {}
        self._names = itertools.count()

    def encode(self, prompt: str, config: Any, *, name: str) -> list[int]:
        return [int(prompt)]

    def request_params(self, config: Any) -> Any:
        return config

    def pause_generation(self, mode: str) -> None:
        assert not self.is_paused
        self.is_paused = True

    def continue_generation(self) -> None:
        assert self.is_paused
        self.is_paused = False

    async def async_abort_request(self, rid: str) -> None:
        if rid in self._requests:
            self._requests[rid].is_aborted = True

    async def async_generate_ids(self, prompt_ids, params, *, rid=None, on_piece=None):
        names = rid or [f"own-{next(self._names)}" for _ in prompt_ids]
        return await asyncio.gather(*(self._generate(name, on_piece) for name in names))

    async def _generate(self, name: str, on_piece: Any) -> Any:
        request = self._requests[name] = Request(self._rng.randint(1, MAX_TOKENS), on_piece)
        self.num_live += 1
        try:
            while not request.is_over:
                await asyncio.sleep(0.0002 if self.is_paused else 0)
                if not self.is_paused and self._rng.random() < self.pace and not request.is_over:
                    request.versions.append(self.weight_version)
                    if on_piece is not None:
                        on_piece(0, types.SimpleNamespace(text="x"))
        finally:
            self.num_live -= 1
            del self._requests[name]
        return types.SimpleNamespace(
            output_ids=request.versions,
            token_weight_versions=request.versions,
            text="x" * len(request.versions),
        )


def known_rewards(*, prompts, completions, finished, row, **_):
    """Every third prompt is decided once each of its samples has a token."""
    assert len(prompts) == len(completions) == len(finished) == len(row) == NUM_SAMPLES
    is_decided = row[0] % 3 == 0
    return [1.0 if is_decided and text else None for text in completions]


def test_a_group_ends_early_once_its_rewards_are_known_and_equal():
    for rewards in ([1.0, 1.0], [1.0, 2.0], [1.0, None]):
        rollout: Any = ModelRollout(seed=0)
        params: Any = [None] * len(rewards)
        columns = {"prompts": ["7"] * len(rewards)}
        group = sample_group(rollout, [7], params, columns, lambda rewards=rewards, **_: rewards)
        assert asyncio.run(group).ended_early == (rewards == [1.0, 1.0])


def columns_of(rows: Sequence[Row]) -> dict[str, Any]:
    columns = join_rows([row.columns for row in rows])
    return repeated(columns, NUM_SAMPLES, lambda example: [""] * len(example["row"]), None)


def ask(groups: GroupsInFlight, number: int) -> None:
    columns = {"prompts": np.array([str(number)]), "row": np.array([number])}
    groups.ask(Row(number, columns), RolloutConfig())


def stalled(over_sampling: OverSampling) -> tuple[ModelRollout, GroupsInFlight]:
    """Groups of a rollout that gives no tokens yet."""
    rollout: Any = ModelRollout(seed=0)
    rollout.pace = 0.0
    return rollout, GroupsInFlight(rollout, over_sampling, NUM_SAMPLES, columns_of)


def test_the_end_of_an_evaluation_does_not_pause_a_step_that_waits():
    rollout, groups = stalled(OverSampling(factor=1.0))
    ask(groups, 1)
    with groups.running():  # a step on another thread
        with groups.running():
            assert not rollout.is_paused
        assert not rollout.is_paused
    assert rollout.is_paused
    with groups.running():
        assert not rollout.is_paused
        taken = start(lambda: groups.take(1))
        rollout.pace = 1.0
        assert len(taken.result(LIMIT_S)) == 1
        assert not rollout.is_paused
    assert not rollout.is_paused  # nothing is left to pause
    groups.close()


def test_a_step_that_waits_ends_when_the_training_does():
    rollout, groups = stalled(OverSampling(factor=1.0))
    ask(groups, 1)
    taken = start(lambda: groups.take(1))
    wait_for(lambda: rollout.num_live > 0)
    groups.close()
    assert isinstance(taken.exception(LIMIT_S), CancelledError)
    with pytest.raises(CancelledError, match="the groups were ended"):
        ask(groups, 2)
    assert (rollout.num_live, rollout.is_paused) == (0, False)


class OverSamplingMachine(RuleBasedStateMachine):
    """Every prompt is trained on once, or is told as dropped; tokens are not older than allowed."""

    @initialize(
        unfinished=st.sampled_from(["carry", "abort", "drop"]),
        factor=st.floats(1, 2),
        max_age=st.integers(1, 3),
        batch_size=st.integers(1, 5),
        num_batches=st.integers(1, 6),
        is_early=st.booleans(),
        seed=st.integers(0, 99),
    )
    def begin(self, unfinished, factor, max_age, batch_size, num_batches, is_early, seed):
        self.config = OverSampling(
            factor=factor,
            unfinished=unfinished,
            max_age=max_age,
            known_rewards=known_rewards if is_early else None,
        )
        self.rollout: Any = ModelRollout(seed)
        self.batch_size, self.num_prompts = batch_size, batch_size * num_batches
        self.trained: list[int] = []
        self.dropped: list[int] = []
        self.num_steps = 0
        self.has_stepped = False
        self.start(None)
        self.save()

    def start(self, kept: dict[str, Any] | None) -> None:
        """Starts the first process, or another one where a checkpoint was."""
        numbers = np.arange(self.num_prompts).reshape(-1, self.batch_size)
        batches = ({"prompts": each.astype(str), "row": each} for each in numbers)
        self.feed = PromptFeed(batches, DataPlace(kept=kept))
        self.is_over = not self.feed.has_batch()
        self.groups = GroupsInFlight(self.rollout, self.config, NUM_SAMPLES, columns_of)
        self.source = GroupSource(self.feed, self.groups)

    def save(self) -> None:
        """What is kept beside the weights, and what is in them."""
        self.kept = json.dumps(self.feed.place.to_json())
        self.saved = ([*self.trained], [*self.dropped], self.num_steps)

    @precondition(lambda self: not self.is_over)
    @rule(pace=st.sampled_from([1.0, 0.5, 0.1]), is_evaluated=st.booleans())
    def step(self, pace, is_evaluated):
        """What Tunix does in a step, up to the weight update; an evaluation may outlast it."""
        self.rollout.pace = pace
        with contextlib.ExitStack() as evaluation:
            if is_evaluated:
                evaluation.enter_context(self.groups.running())
            self._step()

    def _step(self):
        batch = next(self.feed, None)
        if batch is None:
            self.is_over = True
            return
        numbers = batch[ROW].tolist()
        count = len(numbers)
        self.source.ask(numbers, RolloutConfig())
        assert count == self.batch_size
        assert len(self.groups) <= max(self.config.num_asked(count), count)
        taken = self.source.take(count)
        assert len(taken) == count
        for group in taken:
            self.check(group)
        self.trained += columns_of([group.row for group in taken])["row"][::NUM_SAMPLES].tolist()
        if not self.config.keeps_prompts:
            self.dropped += [group.row.number for group in self.groups.ended]
        self.num_steps += 1
        self.has_stepped = True

    def check(self, group):
        """A trained group is whole, or ended early; its tokens are in order and young."""
        version, sampled = self.rollout.weight_version, group.future.result()
        number = group.row.number
        assert sampled.ended_early <= (number % 3 == 0 and self.config.known_rewards is not None)
        for output in sampled.outputs:
            versions = output.token_weight_versions
            assert sampled.ended_early or versions
            assert versions == sorted(versions)
            oldest = min(versions, default=version)
            assert version - oldest <= (self.config.max_age if self.config.carries else 0)
        assert version - group.born <= (self.config.max_age if self.config.carries else 0)
        assert group.num_aborts <= (self.config.max_age if self.config.unfinished == "abort" else 0)

    @precondition(lambda self: self.has_stepped)
    @rule(is_saved=st.sampled_from([True, True, True, False]))
    def update_weights(self, is_saved):
        """Once a step at most, as Tunix does, perhaps with a checkpoint."""
        self.rollout.weight_version += 1
        self.has_stepped = False
        if is_saved:
            self.save()

    @precondition(lambda self: self.saved[2] and not self.is_over)
    @rule()
    def die_and_resume(self):
        """Nothing is left but the checkpoint."""
        self.groups.close()
        trained, dropped, self.num_steps = self.saved
        self.trained, self.dropped = [*trained], [*dropped]
        self.has_stepped = False
        self.rollout.weight_version = 0
        self.start(json.loads(self.kept))

    @rule()
    def evaluate(self):
        """Evaluation, during which groups go on."""
        with self.groups.running():
            assert not self.rollout.is_paused

    @rule()
    def interrupt(self):
        """Others' pauses: nothing may depend on the engine being as it was left."""
        was_paused = self.rollout.is_paused
        if not was_paused:
            self.rollout.pause_generation("in_place")
        self.rollout.continue_generation()
        if was_paused:
            self.rollout.pause_generation("retract")

    @invariant()
    def nothing_is_trained_twice(self):
        assert len(self.trained) == self.num_steps * self.batch_size
        in_work = [group.row.number for group in self.groups._groups]
        rows = self.trained + self.dropped + in_work
        assert len(set(rows)) == len(rows)

    @invariant()
    def requests_are_those_of_groups(self):
        """Between steps, and the engine rests as long as there are any."""
        self.settle()
        unfinished = [group for group in self.groups._groups if not group.future.done()]
        assert (self.rollout.num_live > 0) <= bool(unfinished)
        assert bool(unfinished) <= self.rollout.is_paused  # the last may end while it is paused
        assert self.config.carries or not unfinished

    def settle(self):
        """Waits for what was cancelled on the loop."""
        for _ in range(3):
            self.groups._loop.submit(asyncio.sleep(0.001)).result(LIMIT_S)

    def teardown(self):
        while not self.is_over:
            self.step(1.0, False)
            if not self.is_over:
                self.update_weights(False)
        if self.config.keeps_prompts:
            assert sorted(self.trained) == list(range(self.num_prompts))
        else:
            num_used = len(self.dropped) + len(self.trained)
            assert num_used <= self.num_prompts < num_used + self.batch_size
        self.groups.close()
        assert not self.rollout.num_live
        assert not self.rollout.is_paused


TestOverSamplingMachine = OverSamplingMachine.TestCase
TestOverSamplingMachine.settings = hypothesis.settings(
    max_examples=25,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.soak
def test_twenty_thousand_steps(record_property):
    """Under random yields at each lock; tests/soak.txt says how many of what."""
    run = run_python(
        "-m", "tests.adapter.over_sampling_steps", 20_000, 1, num_devices=1, limit_s=6 * LIMIT_S
    )
    record_property("over-sampling", run.stdout.strip())
