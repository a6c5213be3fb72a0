"""Sampling a group, which may end early: once its rewards are known and equal."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from sgljax_engine import RequestOutput, SamplingParams
from tunix_sgljax.long_tail.config import KnownRewards
from tunix_sgljax.reward_functions import called, to_list
from tunix_sgljax.rollout import SglJaxRollout


class Sampled(NamedTuple):
    """The samples of a group; some are cut short if it ended early."""

    outputs: list[RequestOutput]
    ended_early: bool


async def sample_group(
    rollout: SglJaxRollout,
    prompt_ids: list[int],
    params: list[SamplingParams],
    columns: Mapping[str, Any],
    known_rewards: KnownRewards | None,
) -> Sampled:
    """Samples a prompt; cancelling the task aborts it."""
    if known_rewards is None:
        outputs = await rollout.async_generate_ids([prompt_ids] * len(params), params)
        return Sampled(outputs, ended_early=False)
    watch = _Watch(columns, known_rewards)
    name = uuid.uuid4().hex
    rids = [f"{name}-{index}" for index in range(len(params))]

    async def sample(index: int) -> RequestOutput:
        def add(_: int, piece: RequestOutput) -> None:
            watch.add(index, piece.text)

        (output,) = await rollout.async_generate_ids(
            [prompt_ids], [params[index]], rid=[rids[index]], on_piece=add
        )
        watch.finish(index, output.text)
        return output

    samples = asyncio.gather(*map(sample, range(len(params))))
    known = asyncio.ensure_future(watch.wait_until_known())
    try:
        await asyncio.wait({samples, known}, return_when=asyncio.FIRST_COMPLETED)
        is_early = not samples.done()
        if is_early:
            known.result()
            for rid in rids:  # those that have ended are not found
                await rollout.engine.async_abort_request(rid)
        return Sampled(await samples, ended_early=is_early)
    finally:
        known.cancel()
        samples.cancel()
        await asyncio.gather(samples, known, return_exceptions=True)


class _Watch:
    """The texts of a group, and whether they decide its rewards. On the loop's thread."""

    def __init__(self, columns: Mapping[str, Any], known_rewards: KnownRewards) -> None:
        self._columns = {name: values for name, values in columns.items() if name != "prompts"}
        self._prompts = list(columns["prompts"])
        self._known_rewards = known_rewards
        self._texts = [""] * len(self._prompts)
        self._finished = [False] * len(self._prompts)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def add(self, index: int, text: str) -> None:
        """Adds text to a sample. Any thread."""
        self._loop.call_soon_threadsafe(self._add, index, text)

    def finish(self, index: int, text: str) -> None:
        self._texts[index], self._finished[index] = text, True
        self._changed.set()

    async def wait_until_known(self) -> None:
        """Returns when all rewards are known and equal."""
        while not self._is_known():
            await self._changed.wait()
            self._changed.clear()

    def _add(self, index: int, text: str) -> None:
        if not self._finished[index]:
            self._texts[index] += text
            self._changed.set()

    def _is_known(self) -> bool:
        function = self._known_rewards
        given = called(
            function,
            prompts=self._prompts,
            completions=list(self._texts),
            finished=list(self._finished),
            **self._columns,
        )
        rewards = to_list(function, given, len(self._texts), may_be_open=True)
        return None not in rewards and len(set(rewards)) == 1
