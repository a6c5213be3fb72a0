"""Groups that an engine samples, and that may live through weight updates."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from typing import Any, TypeVar

import numpy as np
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import EngineShutdownError, HomeProcess
from tunix_sgljax.in_flight.outputs import VersionedRolloutOutput
from tunix_sgljax.long_tail.config import OverSampling
from tunix_sgljax.long_tail.early_ends import Sampled, sample_group
from tunix_sgljax.observability.observers import HostSpan
from tunix_sgljax.rollout import SglJaxRollout

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """The samples of one prompt.

    Attributes:
        columns: The data's columns: for each sample a value, as Tunix repeats them.
        prompt_ids: Token ids of the prompt.
        born: The engine's weight version when it was asked for.
        asked_s: The reading of `time.perf_counter` then.
        num_aborts: Times that it was aborted before.
        future: The samples.
    """

    columns: Mapping[str, Any]
    prompt_ids: list[int]
    born: int
    asked_s: float
    num_aborts: int
    future: Future[Sampled]

    @property
    def num_samples(self) -> int:
        """Samples of the group."""
        return len(self.columns["prompts"])

    @property
    def ended_early(self) -> bool:
        """Whether a complete group has samples that were cut short, and no advantage."""
        return self.future.result().ended_early


class SamplingLoop:
    """An asyncio loop on a thread of its own, on which requests wait for their answers."""

    def __init__(self) -> None:
        """Starts the thread."""
        self._home = HomeProcess("sampling loop")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="over-sampling", daemon=True
        )
        self._thread.start()

    @property
    def thread_id(self) -> int:
        """As `threading.get_ident` gives it there."""
        assert self._thread.ident is not None
        return self._thread.ident

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Runs a coroutine; what is submitted first starts first. Cancelling cancels it."""
        self._home.check()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Ends the thread, once all that was cancelled has ended; nothing in a forked child."""
        if not self._home.is_here:
            return
        asyncio.run_coroutine_threadsafe(_others_end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _others_end() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


class GroupsInFlight:
    """Groups on the rollout's engine, of which a step takes the first complete ones.

    Between steps the engine is paused, so that the trainer has its devices alone. One thread at a
    time.

    Attributes:
        config: How many there are, and what happens to the others.
        num_ended: Groups that the last `take` dropped or aborted.
    """

    def __init__(self, rollout: SglJaxRollout, config: OverSampling) -> None:
        """Starts without groups.

        Args:
            rollout: Whose engine samples them.
            config: What happens to groups that are not complete.
        """
        self.config = config
        self._rollout = rollout
        self._loop = SamplingLoop()
        self._groups: list[Group] = []
        self._aborted: list[Group] = []
        self._is_paused = False
        self.num_ended = 0

    def __len__(self) -> int:
        """Groups that nobody has taken yet."""
        return len(self._groups)

    def ask(self, columns: Mapping[str, Any], config: RolloutConfig, num_aborts: int = 0) -> None:
        """Starts to sample a group.

        Args:
            columns: The data's columns, with a value for each sample.
            config: Sampling settings.
            num_aborts: Times that it was aborted before.
        """
        rollout, prompts = self._rollout, columns["prompts"]
        prompt_ids = rollout.encode(str(prompts[0]))
        params = [rollout.request_params(config) for _ in prompts]
        future = self._loop.submit(
            sample_group(rollout, prompt_ids, params, columns, self.config.known_rewards)
        )
        version, now_s = rollout.weight_version, time.perf_counter()
        self._groups.append(Group(columns, prompt_ids, version, now_s, num_aborts, future))

    def ask_again(self, config: RolloutConfig) -> None:
        """Starts to sample the groups that the last `take` aborted. Call it before `ask`."""
        aborted, self._aborted = self._aborted, []
        for group in aborted:
            self.ask(group.columns, config, group.num_aborts + 1)

    def take(self, count: int) -> list[Group]:
        """Waits for complete groups, and takes the `count` that were asked for first.

        Waits also for groups that may not be left again. What is left is dropped or aborted, or
        goes on when `take` or `running` is called again.

        Raises:
            EngineError: when a group of these failed.
            CancelledError: when `close` was called meanwhile.
        """
        with self.running():
            while not self._is_over(count):
                pending = [each.future for each in self._groups if not each.future.done()]
                if not pending:  # another thread has closed this
                    raise CancelledError("the groups were ended")
                wait(pending, return_when=FIRST_COMPLETED)
            taken = [group for group in self._groups if group.future.done()][:count]
            self._groups = [group for group in self._groups if group not in taken]
            self.num_ended = 0 if self.config.carries else len(self._groups)
            if self.config.unfinished == "abort":
                self._aborted = self._groups
            if not self.config.carries:
                self._end_all()
        for group in taken:
            group.future.result()
            self._tell(group)
        return taken

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Lets the engine run inside the block; after it, pauses what is not complete."""
        self._go_on()
        try:
            yield
        finally:
            if any(not group.future.done() for group in self._groups):
                mode = self._rollout.weight_update_mode
                self._rollout.engine.pause_generation(
                    "in_place" if mode == "in_place" else "retract"
                )
                self._is_paused = True
                self._rollout.observers.rest(True)

    def close(self) -> None:
        """Ends all groups, and lets the engine run again."""
        self._end_all()
        with contextlib.suppress(EngineShutdownError):
            self._go_on()
        self._loop.close()

    def _end_all(self) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            group.future.cancel()

    def _go_on(self) -> None:
        if self._is_paused:
            self._rollout.observers.rest(False)
            self._rollout.engine.continue_generation()
            self._is_paused = False

    def _tell(self, group: Group) -> None:
        """Shows observers the life of a group, on the track of the thread that waited for it."""
        args = {
            "samples": group.num_samples,
            "tokens": sum(len(output.output_ids) for output in group.future.result().outputs),
            "weight updates": self._rollout.weight_version - group.born,
            "aborts": group.num_aborts,
        }
        thread, now_s = self._loop.thread_id, time.perf_counter()
        self._rollout.observers.tell(
            HostSpan(thread, "over-sampling", "group", group.asked_s, now_s, args)
        )

    def _is_over(self, count: int) -> bool:
        done = [group.future.done() for group in self._groups]
        if sum(done) < count:
            return False
        if not self.config.keeps_prompts:
            return True
        return all(
            is_done or self._may_be_left(group)
            for group, is_done in zip(self._groups, done, strict=True)
        )

    def _may_be_left(self, group: Group) -> bool:
        """Whether a step may end without an unfinished group."""
        if self.config.carries:
            return self._rollout.weight_version - group.born < self.config.max_age
        return group.num_aborts < self.config.max_age


def merge_columns(groups: list[Group]) -> dict[str, Any]:
    """The columns of groups one after another, as Tunix merges batches."""
    merged: dict[str, Any] = {}
    for name in groups[0].columns:
        values = [group.columns[name] for group in groups]
        if isinstance(values[0], list):
            merged[name] = [each for some in values for each in some]
        else:
            merged[name] = np.concatenate(values)
    return merged


def to_output(
    groups: list[Group], rollout: SglJaxRollout, config: RolloutConfig
) -> VersionedRolloutOutput:
    """The samples of complete groups, with log-probs, as a rollout returns them."""
    prompt_ids = [group.prompt_ids for group in groups for _ in range(group.num_samples)]
    outputs = [output for group in groups for output in group.future.result().outputs]
    return rollout.to_output(prompt_ids, outputs, dataclasses.replace(config, return_logprobs=True))
