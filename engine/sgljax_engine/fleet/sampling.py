"""Samples and scores on a fleet: a call for each request, to be answered by any worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from sgljax_engine.fleet.client import FleetClient
from sgljax_engine.fleet.replies import generate_body, read_output, with_text
from sgljax_engine.fleet.sessions import Sessions
from sgljax_engine.fleet.states import FleetCounts
from sgljax_engine.model_config import MoEConfig
from sgljax_engine.outputs import RequestOutput
from sgljax_engine.processing.detokenizer import Detokenizer
from sgljax_engine.processing.tokenizer import Tokenizer
from sgljax_engine.types import Request


class FleetSampler:
    """Makes calls of requests, and outputs of their answers. Coroutines of one event loop.

    An answer of older weights than the newest at the time of its call is a failure, and asked for
    again.
    """

    def __init__(
        self,
        client: FleetClient,
        counts: FleetCounts,
        tokenizer: Tokenizer | None,
        moe: MoEConfig | None,
        newest: Callable[[], int],
    ) -> None:
        """`newest` tells the version that new requests must be sampled with."""
        self._client = client
        self._counts = counts
        self._detokenizer = Detokenizer(tokenizer)
        self._moe = moe
        self._newest = newest
        self._sessions = Sessions()

    async def generate(self, requests: list[Request], *, has_rids: bool) -> list[RequestOutput]:
        """Samples requests; if one fails the others are cancelled.

        `has_rids`: their ids are a caller's, who may abort them.
        """
        self._counts.started(len(requests))
        tasks = [asyncio.ensure_future(self._sample(each, has_rid=has_rids)) for each in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._counts.ended(len(requests))

    async def _sample(self, request: Request, *, has_rid: bool) -> RequestOutput:
        version = self._newest()
        body = generate_body(request, version)
        if has_rid:
            body["rid"] = request.rid

        def read(reply: Any) -> RequestOutput:
            output = read_output(reply, request, self._moe)
            _check_version(output.first_weight_version, version)
            return output

        session = self._sessions.find(request.prompt_ids, request.lora)
        output = await self._client.ask("/generate", body, session, read)
        output = with_text(output, request, self._detokenizer)
        self._counts.finished(output)
        return output

    async def score(
        self, sequences: list[list[int]], starts: list[int], temperature: float, lora: str | None
    ) -> list[np.ndarray]:
        """Scores checked sequences; those that share their start in one call."""
        groups: dict[str, list[int]] = {}
        for row, (ids, start) in enumerate(zip(sequences, starts, strict=True)):
            groups.setdefault(self._sessions.find(ids[:start], lora), []).append(row)
        scored: list[np.ndarray] = [np.empty(0, np.float32)] * len(sequences)
        version = self._newest()
        common = {"temperature": temperature, "min_weight_version": version}
        if lora is not None:
            common["lora_path"] = lora

        async def one(session: str, rows: list[int]) -> None:
            some = {
                "input_ids": [sequences[row] for row in rows],
                "start_lens": [starts[row] for row in rows],
            }

            def read(reply: Any) -> list[np.ndarray]:
                _check_version(reply["weight_version"], version)
                found = [np.asarray(each, np.float32) for each in reply["logprobs"]]
                if [len(x) for x in found] != [len(sequences[r]) - starts[r] for r in rows]:
                    raise ValueError("another number of log-probs than of tokens")
                return found

            answer = await self._client.ask_a_worker("/score_tokens", common | some, session, read)
            for row, logprobs in zip(rows, answer, strict=True):
                scored[row] = logprobs

        await asyncio.gather(*(one(*group) for group in groups.items()))
        return scored


def _check_version(found: int | None, wanted: int) -> None:
    if found is not None and found < wanted:
        raise ValueError(f"version {found} of the weights, where {wanted} was asked for")
