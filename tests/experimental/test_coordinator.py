"""Rounds of Tunix's own coordinator over our workers, samplers and transport, and its episodes."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from tunix.experimental.common.datatypes import (  # pyright: ignore[reportMissingImports]
    RolloutRequest,
    WorkerState,
)
from tunix.experimental.orchestrator.weight_sync import (  # pyright: ignore[reportMissingImports]
    TransferResult,
)
from tunix.experimental.orchestrator.weight_sync_coordinator import (  # pyright: ignore[reportMissingImports]
    RoundState,
    WeightSyncCoordinator,
    WeightSyncError,
)
from tunix.experimental.orchestrator.worker_registry import (  # pyright: ignore[reportMissingImports]
    WorkerRegistry,
)
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.agentic.agents.model_agent import ModelAgent
from tunix.rl.agentic.environments.task_environment import TaskEnvironment

from sgljax_engine import InvalidConfigError
from tests import tunix_reference as ref
from tests.adapter.agentic_parts import LineParser
from tests.adapter.helpers import params_of
from tests.experimental.parts import PROMPTS, TEXTS, greedy_tokens, new_sampler, run
from tunix_sgljax.experimental import InProcessSource, InProcessTransport, SglJaxRolloutWorker

NUM_TOKENS = 6


class FailingTransport(InProcessTransport):
    """Says that transfers fail, or does something when weights are taken, once it is told to."""

    fails = False

    def __init__(self):
        super().__init__()
        self.on_take = {}

    def transfer(self, src_units, dst_units, req_id=None, generation=None):
        if self.fails:
            return TransferResult(req_id=req_id, success=False, message="the wire broke")
        return super().transfer(src_units, dst_units, req_id, generation)

    def pop(self, unit, req_id):
        self.on_take.get(unit.job_replica_id, lambda: None)()
        return super().pop(unit, req_id)


class Fleet:
    """A trainer, two workers with an engine each, and Tunix's coordinator over them."""

    def __init__(self, stack, model):
        self.transport = FailingTransport()
        self.trained = model
        self.samplers = [
            stack.enter_context(new_sampler(model, transport=self.transport, server_id=name))
            for name in ("left", "right")
        ]
        self.workers = [make_worker(sampler) for sampler in self.samplers]
        self.source = InProcessSource(self.transport, lambda: params_of(self.trained))
        registry = WorkerRegistry()
        for worker in (self.source, *self.workers):
            registry.register(worker)
        self.coordinator = WeightSyncCoordinator(registry, self.transport)
        for worker in self.workers:
            worker.initialize()

    async def tokens(self):
        """Greedy tokens of both workers, which must be the same."""
        outputs = [
            await worker.sample_prompts(TEXTS, max_generation_steps=NUM_TOKENS, temperature=0.0)
            for worker in self.workers
        ]
        left, right = ([row.tolist() for row in output.tokens] for output in outputs)
        assert left == right
        return left

    def check(self, version, engine_version):
        """Everybody names the same policy, and serves."""
        for worker, sampler in zip(self.workers, self.samplers, strict=True):
            assert worker.state == WorkerState.READY
            assert sampler.policy_version == version
            assert worker.heartbeat().policy_version == version
            assert worker.info().resources["policy_version"] == version
            assert sampler._rollout.weight_version == engine_version


def make_worker(sampler, **options):
    tokenizer = TokenizerAdapter(ref.IntegerTokenizer())
    return SglJaxRolloutWorker(
        sampler.server_id, sampler, tokenizer=tokenizer, chat_parser=LineParser(), **options
    )


@pytest.fixture
def fleet(model):
    with contextlib.ExitStack() as stack:
        yield Fleet(stack, model)


def test_rounds_commit_everywhere(fleet, model, other_model):
    old, new = (greedy_tokens(weights, NUM_TOKENS) for weights in (model, other_model))

    async def scenario():
        assert await fleet.tokens() == old
        for version, weights, expected in ((3, other_model, new), (4, model, old)):
            fleet.trained = weights
            result = await fleet.coordinator.sync(version)
            assert result.state == RoundState.COMMITTED
            assert [worker.phase for worker in result.workers] == ["committed"] * 2
            assert await fleet.tokens() == expected
            fleet.check(version, version - 2)

    run(scenario())


def test_a_failed_round_is_rolled_back_everywhere(fleet, model, other_model):
    async def scenario():
        fleet.trained, fleet.transport.fails = other_model, True
        with pytest.raises(WeightSyncError, match="transfer failed") as failure:
            await fleet.coordinator.sync(3)
        assert failure.value.result.state == RoundState.ABORTED
        assert fleet.coordinator.poisoned is None
        assert await fleet.tokens() == greedy_tokens(model, NUM_TOKENS)
        fleet.check(0, 0)
        fleet.transport.fails = False
        await fleet.coordinator.sync(3)
        assert await fleet.tokens() == greedy_tokens(other_model, NUM_TOKENS)
        fleet.check(3, 1)

    run(scenario())


def test_weights_of_one_that_fails_are_published_nowhere(fleet, model, other_model):
    """The right one's engine is gone when the weights are staged."""
    fleet.transport.on_take["right"] = fleet.samplers[1]._rollout.close

    async def scenario():
        fleet.trained = other_model
        with pytest.raises(WeightSyncError, match="H2D") as failure:
            await fleet.coordinator.sync(3)
        assert failure.value.result.state == RoundState.FAILED_NEEDS_RESTART
        left = await fleet.workers[0].sample_prompts(TEXTS, max_generation_steps=NUM_TOKENS)
        return [row.tolist() for row in left.tokens]

    assert len(run(scenario())) == len(TEXTS)
    assert fleet.samplers[0].policy_version == 0
    assert fleet.samplers[0].get_weight_sync_status()["phase"] == "aborted"


# ------------------------------------------------------------------ episodes


class EnvironmentPool:
    """One question for each episode."""

    def acquire_env(self, config):
        return TaskEnvironment({"prompts": config["text"]})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Tunix's own, while it collects
def test_episodes_carry_their_log_probs(model):
    """Through Tunix's manager and collector to what a learner gets."""

    async def scenario(sampler):
        worker = make_worker(
            sampler, env_pool=EnvironmentPool(), agent_factory=lambda: ModelAgent("2")
        )
        worker.initialize()
        wanted = [
            RolloutRequest(
                prompt=text,
                prompt_id=f"p{i}",
                generation_kwargs={
                    "max_tokens": NUM_TOKENS,
                    "temperature": 0.0,
                    "return_logprobs": True,
                },
                metadata={"env_config": {"text": text}},
            )
            for i, text in enumerate(TEXTS)
        ]
        return await worker.generate(wanted)

    with new_sampler(model) as sampler:
        responses = run(scenario(sampler))
    for prompt, response in zip(PROMPTS, responses, strict=True):
        assert response.error is None
        (segment,) = response.segments
        assert response.prompt_tokens.tolist() == [2, *prompt.tolist()]
        # The parser's token is behind those that were sampled, and in no loss.
        assert segment.tokens[NUM_TOKENS:].tolist() == [6]
        assert segment.loss_mask.tolist() == [1] * NUM_TOKENS + [0]
        (logps,) = ref.trainer_logps(model, [response.prompt_tokens], [segment.tokens])
        np.testing.assert_allclose(segment.logps[:NUM_TOKENS], logps[:NUM_TOKENS], atol=1e-4)


def test_other_samplers_are_refused():
    other: Any = object()
    with pytest.raises(InvalidConfigError, match="needs a SglJaxSampler, got object"):
        SglJaxRolloutWorker("w", other, tokenizer=1, chat_parser=1)
