"""What the tests of the sampler share: making one, running it, and requests for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
from flax import nnx
from tunix.experimental.rollout.sampler import (  # pyright: ignore[reportMissingImports]
    SamplingParams,
    SamplingRequest,
    WeightSyncRequest,
)

from sgljax_engine import EngineState
from tests import tunix_reference as ref
from tests.adapter.helpers import VOCAB_SIZE, new_rollout, params_of, text_of
from tests.threads import LIMIT_S, gate_steps, is_gated, take_steps
from tunix_sgljax.experimental import InProcessTransport, SglJaxSampler

PROMPTS = ref.make_prompts(VOCAB_SIZE, (5, 3, 9), seed=4)
TEXTS = [text_of(ids) for ids in PROMPTS]
NUM_TOKENS = 80
"""Tokens of a request that is to be in flight."""


@contextlib.contextmanager
def new_sampler(
    model: nnx.Module,
    *,
    transport: InProcessTransport | None = None,
    policy_version: int = 0,
    server_id: str = "one",
    **arguments: Any,
) -> Iterator[SglJaxSampler]:
    """A sampler over a new rollout of the model."""
    rollout = new_rollout(model, **arguments)
    try:
        yield SglJaxSampler(server_id, rollout, transport, policy_version=policy_version)
    finally:
        rollout.close()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a test on an event loop; what hangs fails."""

    async def limited() -> Any:
        return await asyncio.wait_for(coroutine, LIMIT_S)

    return asyncio.run(limited())


def request(prompt: Any = TEXTS[0], request_id: str = "", **params: Any) -> SamplingRequest:
    """A greedy request of 8 tokens, unless told otherwise."""
    fields = {"temperature": 0.0, "max_tokens": 8} | params
    return SamplingRequest(
        prompt=prompt, request_id=request_id, sampling_params=SamplingParams(**fields)
    )


def sync_request(model: Any, version: int = 0, key: int | None = None) -> WeightSyncRequest:
    """A request of a round that brings a model's weights itself; with a coordinator's key."""
    extra = {} if key is None else {"req_id": f"r{key}", "uuid": key}
    if model is not None:
        extra["weights"] = params_of(model) if isinstance(model, nnx.Module) else model
    return WeightSyncRequest(policy_version=version, extra_config=extra)


async def sync(sampler: SglJaxSampler, wanted: WeightSyncRequest) -> None:
    """A whole round."""
    await sampler.pre_weight_sync(wanted)
    await sampler.weight_sync(wanted)
    await sampler.post_weight_sync(wanted)


async def wait_until(sampler: SglJaxSampler, holds: Callable[[EngineState], bool]) -> EngineState:
    """Looks at the engine between its steps until something holds; a gated one takes them."""
    engine = sampler._rollout.engine
    while not holds(state := await engine.async_get_internal_state()):
        if is_gated(engine):
            take_steps(engine)
        await asyncio.sleep(0)
    return state


async def start_long(sampler: SglJaxSampler, **params: Any) -> asyncio.Task[Any]:
    """A request that has a token and many to come; the engine's steps are gated from now on."""
    engine = gate_steps(sampler._rollout.engine)
    before = engine.get_internal_state().counters.num_first_tokens
    wanted = request(max_tokens=NUM_TOKENS, return_logprobs=True, **params)
    task = asyncio.create_task(sampler.sample(wanted))
    await wait_until(sampler, lambda state: state.counters.num_first_tokens > before)
    return task


def greedy_tokens(model: Any, num_tokens: int = 8) -> list[list[int]]:
    """What Tunix's own sampler makes of the prompts."""
    return [row.tolist() for row in ref.vanilla_greedy(model, PROMPTS, num_tokens)]


def tokens_of(responses: Any) -> list[list[int]]:
    """Tokens of a list of responses."""
    return [np.asarray(response.token_ids).tolist() for response in responses]
