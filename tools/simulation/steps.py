"""Steps of a training, simulated: the real scheduler over a table of step times.

A training step asks for groups, samples of one prompt each, and ends when enough of them are
complete. Nothing of the trainer's own time is in it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

from sgljax_engine.cache.allocator import PageAllocator
from sgljax_engine.cache.pool import PagePool
from sgljax_engine.checks import check_count
from sgljax_engine.config import TOKEN_BLOCK, SchedulerConfig
from sgljax_engine.errors import InvalidConfigError, unknown_name_message
from sgljax_engine.sampling_params import SamplingParams
from sgljax_engine.scheduler.scheduler import Scheduler
from sgljax_engine.types import FinishReason, Request, prompt_key
from tools.simulation.device import SimulatedDevice
from tools.simulation.hardware import StepTable
from tools.simulation.workload import Lengths

UNFINISHED = ("carry", "drop")

_PAGE_SIZE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A way to run a step.

    Attributes:
        num_groups: Groups that a step trains on.
        num_samples: Samples of a group.
        num_rows: `max_running_requests`.
        schedule_policy: As in `SchedulerConfig`.
        over_sampling: Groups that a step asks for, in multiples of `num_groups`; at most 2 where
            they are carried.
        unfinished: What happens to groups that a step does not wait for: "carry" goes on with them
            in the next step, "drop" throws them away.
        max_age: Most weight updates that a carried group lives through, at least 1; a step waits
            for groups that may not be carried on.
        num_prompts: Prompts of the data set, which steps go through in order, again and again.
        prompt_tokens: Tokens of a prompt.
        seed: Of the samples' lengths.
    """

    num_groups: int
    num_samples: int = 8
    num_rows: int = 64
    schedule_policy: str = "fcfs"
    over_sampling: float = 1.0
    unfinished: str = "carry"
    max_age: int = 1
    num_prompts: int = 1 << 30
    prompt_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        for name in ("num_groups", "num_samples", "num_rows", "num_prompts", "prompt_tokens"):
            check_count(name, getattr(self, name))
        check_count("max_age", self.max_age)
        most = 2 if self.unfinished == "carry" else 16
        if not 1 <= self.over_sampling <= most:
            raise InvalidConfigError(
                f"over_sampling must be in [1, {most}], got {self.over_sampling}"
            )
        if self.unfinished not in UNFINISHED:
            raise InvalidConfigError(
                unknown_name_message("unfinished", self.unfinished, UNFINISHED)
            )

    @property
    def num_asked(self) -> int:
        """Groups that are in work at the start of a step."""
        return round(self.num_groups * self.over_sampling)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    """A simulated step.

    Attributes:
        seconds: Time of its rollout.
        tail_s: Seconds after the last start of a request, while rows only empty.
        idle: Share of rows' seconds without a request.
        mean_length: Mean tokens of the samples that are trained on.
        num_carried: Groups that go on in the next step.
        num_dropped_tokens: Sampled tokens that nobody trains on.
        max_age: Most weight updates during the sampling of a group that is trained on.
    """

    seconds: float
    tail_s: float
    idle: float
    mean_length: float
    num_carried: int
    num_dropped_tokens: int
    max_age: int


@dataclasses.dataclass(eq=False)
class _Group:
    requests: list[Request]
    born: int

    @property
    def is_complete(self) -> bool:
        return all(request.finish is not None for request in self.requests)

    @property
    def num_tokens(self) -> int:
        return sum(len(request.output_ids) for request in self.requests)


class Simulation:
    """A training's rollouts on a simulated engine."""

    def __init__(
        self,
        plan: Plan,
        lengths: Lengths,
        table: StepTable,
        watch: Callable[[float, int], None] = lambda now_s, num_rows: None,
    ) -> None:
        """Starts with an idle engine that knows no lengths.

        Args:
            plan: How a step runs.
            lengths: Lengths of answers.
            table: Step times.
            watch: Called after each dispatch with the clock in seconds and the rows decoded.
        """
        self._plan, self._lengths, self._watch = plan, lengths, watch
        self._rng = random.Random(plan.seed)
        self._device = SimulatedDevice(table)
        self._params = SamplingParams(max_new_tokens=lengths.max_new_tokens)
        tokens = plan.prompt_tokens + lengths.max_new_tokens + _PAGE_SIZE
        num_pages = (plan.num_rows + plan.num_asked) * -(-tokens // _PAGE_SIZE)
        self._pool = PagePool(PageAllocator(num_pages), _PAGE_SIZE)
        config = SchedulerConfig(
            max_running_requests=plan.num_rows,
            schedule_policy=plan.schedule_policy,
            init_new_token_ratio=0.0,
            min_new_token_ratio=0.0,
        )
        budget = config.chunked_prefill_size
        self._scheduler = Scheduler(
            config,
            self._pool,
            token_block=TOKEN_BLOCK,
            max_prefill_tokens=budget,
            prefill_sizes=range(TOKEN_BLOCK, budget + 1, TOKEN_BLOCK),
        )
        self._groups: list[_Group] = []
        self._num_asked = self._version = self._num_requests = 0

    def steps(self, count: int) -> Iterator[StepReport]:
        """Runs so many steps, one after another."""
        for _ in range(count):
            yield self._step()

    def _step(self) -> StepReport:
        plan, device = self._plan, self._device
        while len(self._groups) < plan.num_asked:
            self._ask()
        start_s = last_start_s = device.now_s
        row_s = 0.0
        while not self._is_over():
            dispatch = self._scheduler.schedule()
            if dispatch.started:
                last_start_s = device.now_s
            changes = self._scheduler.update(dispatch, device.run(dispatch))
            row_s += device.last.row_s
            self._watch(device.now_s, len(dispatch.decode))
            for request in changes.finished:
                device.forget(request)
        seconds = device.now_s - start_s
        trained = [group for group in self._groups if group.is_complete][: plan.num_groups]
        self._groups = [group for group in self._groups if group not in trained]
        num_dropped = self._end_step()
        return StepReport(
            seconds=seconds,
            tail_s=device.now_s - last_start_s,
            idle=1 - row_s / (seconds * plan.num_rows),
            mean_length=sum(g.num_tokens for g in trained) / (len(trained) * plan.num_samples),
            num_carried=len(self._groups),
            num_dropped_tokens=num_dropped,
            max_age=max(self._version - 1 - group.born for group in trained),
        )

    def _ask(self) -> None:
        """Asks for a group of the next prompt."""
        plan = self._plan
        number = self._num_asked % plan.num_prompts
        self._num_asked += 1
        ids = [number % 509, number // 509 % 509, number // 509**2, *range(plan.prompt_tokens)]
        ids = ids[: plan.prompt_tokens]
        requests = []
        for length in self._lengths.draw(number, plan.num_samples, self._rng):
            request = Request(
                rid=str(self._num_requests),
                prompt_ids=ids,
                params=self._params,
                seed=0,
                prompt_key=prompt_key((number,), None),
            )
            self._num_requests += 1
            self._device.expect(request, length)
            self._scheduler.add(request)
            requests.append(request)
        self._groups.append(_Group(requests, self._version))

    def _is_over(self) -> bool:
        """Whether enough groups are complete, and all that cannot be carried on."""
        num_complete = sum(group.is_complete for group in self._groups)
        if num_complete < self._plan.num_groups:
            return False
        if self._plan.unfinished == "drop":
            return True
        oldest = self._version - self._plan.max_age
        return all(group.is_complete or group.born > oldest for group in self._groups)

    def _end_step(self) -> int:
        """Updates the weights; returns the tokens of dropped groups."""
        num_dropped = 0
        if self._plan.unfinished == "drop":
            for group in self._groups:
                num_dropped += group.num_tokens
                for request in group.requests:
                    if request.finish is None:
                        self._scheduler.finish(request, FinishReason("abort"))
                        self._device.forget(request)
            self._groups = []
        for request in list(self._scheduler.running):
            self._scheduler.retract(request)
        self._pool.reset_cache()
        self._version += 1
        self._device.version = self._version
        return num_dropped
