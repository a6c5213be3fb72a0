"""An engine without threads: commands are done at once, and steps when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from sgljax_engine import ModelConfig, RequestOutput, SamplingParams
from sgljax_engine.builder import group
from sgljax_engine.builder.endable_progress import EndableProgress
from sgljax_engine.config import EngineConfig
from sgljax_engine.core import commands as cmd
from sgljax_engine.models.weight_rules import hf_rules
from sgljax_engine.processing.futures import Answer
from sgljax_engine.processing.input_processor import LogprobArgs, RequestFactory
from sgljax_engine.sampling_params import SeedSource
from sgljax_engine.types import FinishReason, Request
from sgljax_engine.weights.apply import apply
from sgljax_engine.weights.rules import WeightSource
from tests.engine.models import TINY, spread_weights


def _no_text(request: Request, reason: FinishReason) -> None:
    """Without a tokenizer no text ends a request."""
    raise AssertionError(f"{request.rid} was ended: {reason}")


class SteppedEngine:
    """An `EngineCore` that is driven by the test's own thread: the `Recipients` of its commands.

    Attributes:
        core: The core.
        groups: The calls that it has.
        num_engines: One.
    """

    num_engines = 1

    def __init__(self, model: ModelConfig = TINY, **options: Any) -> None:
        """Builds a tiny model's core; options are those of `Engine`."""
        built, limits = group.build_group(
            model=model,
            config=EngineConfig.from_options(options),
            dtype="float32",
            weights=WeightSource(spread_weights(model), hf_rules(model)),
            adapters={},
            tokenizer=None,
            mesh=None,
            progress=EndableProgress(None),
        )
        (self.core,) = built.cores
        self.groups = built.groups
        self._planner = built.planner
        self.core.outputs.connect(_no_text, thread_name=None)
        self._factory = RequestFactory(model, limits, None, SeedSource(0))

    def ask(self, make: Callable[[Future[Any]], cmd.Command]) -> Future[Any]:
        """Does a command; its future may have to wait for steps."""
        future: Future[Any] = Future()
        self.core.outputs.flush()
        make(future).hand_out(self)
        self.core.settle()
        return future

    def enqueue(self, index: int, task: cmd.Task) -> None:
        """Does a task at once."""
        assert index == 0
        task.run(self.core)

    def route(self, requests: Sequence[Request]) -> None:
        """There is one engine."""

    def add(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[Future[RequestOutput]]:
        """Submits prompts together; a future a request."""
        requests, _ = self._factory.make(
            None, params, prompts, LogprobArgs(), None, None, is_streaming=False
        )
        answers = [Answer(Future()) for _ in requests]
        self.ask(lambda _: cmd.AddRequests(requests, answers))
        return [answer.future for answer in answers]

    def step(self, count: int = 1) -> int:
        """Takes steps while there is something to do; returns how many."""
        for taken in range(count):
            self.core.settle()
            if not self.core.can_step:
                return taken
            self.core.step()
        self.core.outputs.flush()
        self.core.settle()
        return count

    def finish(self) -> int:
        """Takes steps until there is nothing to do; returns how many."""
        return sum(iter(self.step, 0))

    def update(self, weights: dict[str, np.ndarray], **options: Any) -> Future[int]:
        """Swaps weights in, as an update does once it has made them."""
        given: dict[str, Any] = {"mode": "retract", "flush_cache": False} | options
        plan, arrays = self._planner.plan(weights, hf_rules(TINY))
        made = apply(plan, arrays)
        future: Future[int] = Future()

        def swap(done: Future[None]) -> None:
            del done
            cmd.SwapWeights(build=lambda _: [made], future=future, **given).hand_out(self)

        drained: Future[None] = Future()
        drained.add_done_callback(swap)
        if given["mode"] == "wait":
            self.ask(lambda _: cmd.Drain("update_weights", drained))
        else:
            drained.set_result(None)
        return future
