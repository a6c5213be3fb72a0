"""Groups that an engine samples, and that may live through weight updates."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from typing import Any, TypeVar

from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import HomeProcess
from tunix_sgljax.in_flight.outputs import VersionedRolloutOutput
from tunix_sgljax.long_tail.columns import Columns
from tunix_sgljax.long_tail.config import OverSampling
from tunix_sgljax.long_tail.early_ends import Sampled, sample_group
from tunix_sgljax.long_tail.feed import Row
from tunix_sgljax.long_tail.pausing import TrainerPause
from tunix_sgljax.observability.observers import HostSpan
from tunix_sgljax.rollout import SglJaxRollout

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """The samples of one prompt; `born` and `asked_s` are when it was asked for."""

    row: Row
    prompt_ids: list[int]
    born: int
    asked_s: float
    num_aborts: int
    future: Future[Sampled]

    @property
    def ended_early(self) -> bool:
        """Whether a complete group has samples that were cut short, and no advantage."""
        return self.future.result().ended_early


class SamplingLoop:
    """An asyncio loop on a thread of its own, on which requests wait for their answers."""

    def __init__(self) -> None:
        self._home = HomeProcess("sampling loop")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="over-sampling", daemon=True
        )
        self._thread.start()

    @property
    def thread_id(self) -> int:
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
    time; but `running` and `close` may be called by any thread. `ended` are those that the last
    `take` dropped or aborted.
    """

    def __init__(
        self,
        rollout: SglJaxRollout,
        config: OverSampling,
        num_samples: int,
        columns_of: Callable[[Sequence[Row]], Columns],
    ) -> None:
        self.config = config
        self._num_samples = num_samples
        self._columns_of = columns_of
        self._rollout = rollout
        self._home = HomeProcess("groups in flight")
        self._loop = SamplingLoop()
        self._groups: list[Group] = []
        self._aborted: list[Group] = []
        self._lock = threading.Lock()  # around the two lists and `_is_closed`
        self._is_closed = False
        self._pause = TrainerPause(rollout)
        self.ended: list[Group] = []

    def __len__(self) -> int:
        return len(self._groups)

    def ask(self, row: Row, config: RolloutConfig, num_aborts: int = 0) -> None:
        """Starts to sample a group."""
        rollout, known_rewards = self._rollout, self.config.known_rewards
        columns = self._columns_of([row])
        name = f"prompts of row {row.number}"
        prompt_ids = rollout.encode(columns["prompts"][0], config, name=name)
        params = [rollout.request_params(config) for _ in range(self._num_samples)]
        version, now_s = rollout.weight_version, time.perf_counter()
        with self._lock:
            self._check_open()
            future = self._loop.submit(
                sample_group(rollout, prompt_ids, params, columns, known_rewards)
            )
            self._groups.append(Group(row, prompt_ids, version, now_s, num_aborts, future))

    def ask_again(self, config: RolloutConfig) -> None:
        """Starts to sample the groups that the last `take` aborted. Call it before `ask`."""
        aborted, self._aborted = self._aborted, []
        for group in aborted:
            self.ask(group.row, config, group.num_aborts + 1)

    def take(self, count: int) -> list[Group]:
        """Waits for complete groups, and takes the `count` that were asked for first.

        Waits also for groups that may not be left again. What is left is dropped or aborted, or
        goes on when `take` or `running` is called again.
        """
        with self.running():
            while (taken := self._take_complete(count)) is None:
                wait(self._pending(), return_when=FIRST_COMPLETED)
        for group in taken:
            group.future.result()
            self._tell(group)
        return taken

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Lets the engine run inside the block.

        After the last of such blocks of all threads, pauses what is not complete.
        """
        return self._pause.running(lambda: bool(self._pending()))

    def close(self) -> None:
        """Ends all groups, and lets the engine run again. `ask` and `take` fail from now on.

        Does nothing in a forked child.
        """
        if not self._home.is_here:
            return
        with self._lock:
            self._is_closed = True
            groups, self._groups = self._groups, []
        _cancel(groups)
        self._pause.end()
        self._loop.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise CancelledError("the groups were ended")

    def _pending(self) -> list[Future[Sampled]]:
        with self._lock:
            return [group.future for group in self._groups if not group.future.done()]

    def _take_complete(self, count: int) -> list[Group] | None:
        with self._lock:
            self._check_open()
            assert len(self._groups) >= count, "there is nothing to wait for"
            if not self._is_over(count):
                return None
            taken = [group for group in self._groups if group.future.done()][:count]
            left = [group for group in self._groups if group not in taken]
            self._groups = left if self.config.carries else []
        self.ended = [] if self.config.carries else left
        self._aborted = self.ended if self.config.unfinished == "abort" else []
        _cancel(self.ended)
        return taken

    def _tell(self, group: Group) -> None:
        """Shows observers the life of a group, on the track of the thread that waited for it."""
        args = {
            "samples": self._num_samples,
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


def _cancel(groups: Iterable[Group]) -> None:
    for group in groups:
        group.future.cancel()


def to_output(
    groups: list[Group], rollout: SglJaxRollout, config: RolloutConfig
) -> VersionedRolloutOutput:
    """The samples of complete groups, with log-probs, as a rollout returns them."""
    samples = [(group, output) for group in groups for output in group.future.result().outputs]
    prompt_ids = [group.prompt_ids for group, _ in samples]
    outputs = [output for _, output in samples]
    return rollout.to_output(prompt_ids, outputs, dataclasses.replace(config, return_logprobs=True))
