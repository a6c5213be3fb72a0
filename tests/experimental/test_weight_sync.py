"""Weight-sync rounds of one sampler: staging, publishing, aborting, and who waits for what."""

from __future__ import annotations

import asyncio
import contextlib

import jax
import numpy as np
import pytest
from flax import nnx

from sgljax_engine import (
    EngineStateError,
    InvalidConfigError,
    InvalidRequestError,
    WeightLoadError,
    WeightSyncError,
)
from tests import inside, lora_models
from tests import tunix_reference as ref
from tests.adapter.helpers import params_of
from tests.engine.interrupts import device_bytes
from tests.experimental.parts import (
    NUM_TOKENS,
    PROMPTS,
    TEXTS,
    greedy_tokens,
    new_sampler,
    request,
    run,
    start_long,
    sync,
    sync_request,
    tokens_of,
    wait_until,
)
from tests.threads import held, running
from tunix_sgljax.experimental import InProcessSource, InProcessTransport
from tunix_sgljax.experimental.layout import StaleRoundError

A_FEW_SCALARS = 1000
"""Bytes that a sampled request may leave on the device."""


@pytest.fixture
def sampler(model):
    """A sampler of its own: rounds leave other weights behind."""
    with new_sampler(model) as own:
        own.initialize()
        yield own


async def greedy(sampler):
    return tokens_of(await sampler.sample([request(text) for text in TEXTS]))


# ------------------------------------------------------------------ a round


def test_weights_serve_after_post_and_not_before(sampler, model, other_model):
    engine = sampler._rollout.engine
    old, new = greedy_tokens(model), greedy_tokens(other_model)
    wanted = sync_request(other_model, version=5)

    async def scenario():
        assert await greedy(sampler) == old
        assert engine.get_internal_state().cached_kv_tokens > 0
        await sampler.bind_weight_sync()
        assert await sampler.pre_weight_sync(wanted) is True
        quiet = engine.get_internal_state()
        assert (quiet.cached_kv_tokens, quiet.is_kv_allocated) == (0, False)
        late = asyncio.create_task(sampler.sample(request()))
        checksums = engine.get_weights_checksum()
        assert await sampler.weight_sync(wanted) == 5
        assert engine.get_weights_checksum() == checksums
        assert (sampler.policy_version, engine.weight_version) == (0, 0)
        assert (await sampler.get_load_info()).num_requests_waiting == 1
        assert not late.done()
        assert await sampler.post_weight_sync(wanted) is True
        response = await late
        assert response.token_ids.tolist() == new[0]
        assert response.metadata["policy_version"] == 5
        assert response.metadata["policy_versions"].tolist() == [5] * 8
        assert await greedy(sampler) == new
        assert engine.find_differing_weights(*sampler._rollout.weight_source(params_of(model)))
        assert not sampler._rollout.find_differing_weights(params_of(other_model))

    run(scenario())
    assert (sampler.policy_version, engine.weight_version) == (5, 1)
    assert engine.get_internal_state().counters.num_pauses == 1


def test_versions_count_on_where_requests_do_not_say(model, other_model):
    with new_sampler(model, policy_version=3) as sampler:
        assert run(sampler.sample(request())).metadata["policy_version"] == 3

        async def scenario():
            versions = []
            for weights in (other_model, model):
                await sync(sampler, sync_request(weights))
                versions.append(sampler.policy_version)
            await sync(sampler, sync_request(other_model, version=40))
            return [*versions, sampler.policy_version]

        assert run(scenario()) == [4, 5, 40]
        assert run(sampler.sample(request())).metadata["policy_version"] == 40


def test_requests_in_flight_go_on_under_the_new_weights(sampler, model, other_model):
    """Each token has the log-prob of the weights, and the version of the policy, that drew it."""

    async def scenario():
        task = await start_long(sampler, temperature=1.0, seed=3)
        await sync(sampler, sync_request(other_model, version=7))
        with running():
            return await task

    response = run(scenario())
    versions = response.metadata["policy_versions"]
    assert set(versions.tolist()) == {0, 7}
    assert (np.diff(versions) >= 0).all()
    assert response.metadata["policy_version"] == 0  # the oldest
    assert len(response.token_ids) == NUM_TOKENS
    for version, weights in ((0, model), (7, other_model)):
        (logps,) = ref.trainer_logps(weights, [PROMPTS[0]], [response.token_ids], pad_id=-1)
        is_its = versions == version
        np.testing.assert_allclose(response.logprobs[is_its], logps[is_its], atol=1e-4)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_requests_in_flight_end_first(model, other_model, mode):
    async def scenario(sampler):
        task = await start_long(sampler)
        with running() if mode == "wait" else contextlib.nullcontext():
            await sync(sampler, sync_request(other_model))
        with running():
            return await task, await greedy(sampler)

    with new_sampler(model, weight_update_mode=mode) as sampler:
        response, after = run(scenario(sampler))
    assert set(response.metadata["policy_versions"].tolist()) == {0}
    assert (len(response.token_ids) == NUM_TOKENS) == (mode == "wait")
    assert response.finish_reason == {"wait": "length", "abort": "cancelled"}[mode]
    assert after == greedy_tokens(other_model)


def test_a_pause_outlasts_a_round_and_a_round_a_pause(sampler, other_model):
    async def scenario():
        await sampler.pause()
        wanted = sync_request(other_model)
        await sync(sampler, wanted)
        task = asyncio.create_task(sampler.sample(request()))
        await wait_until(sampler, lambda state: state.waiting_queue_size == 1)
        await sampler.pre_weight_sync()
        await sampler.resume()  # the round holds it on
        assert (await wait_until(sampler, lambda state: True)).is_paused
        await sampler.abort_weight_sync()
        return (await task).token_ids.tolist()

    assert run(scenario()) == greedy_tokens(other_model)[0]


# ------------------------------------------------------------------ aborts and failures


@pytest.mark.parametrize("phase", ["nothing", "pre", "staged"])
def test_an_abort_keeps_the_old_weights(sampler, model, other_model, phase):
    engine = sampler._rollout.engine
    wanted = sync_request(other_model, version=5, key=1)
    memory = device_bytes()

    async def scenario():
        if phase != "nothing":
            await sampler.pre_weight_sync(wanted)
        if phase == "staged":
            prepared = device_bytes()
            await sampler.weight_sync(wanted)
            weights_bytes = engine.get_internal_state().memory.weights_bytes
            assert device_bytes() == prepared + weights_bytes
        waiting = asyncio.create_task(sampler.sample(request()))
        for _ in range(2):
            await sampler.abort_weight_sync(wanted)
            assert sampler.get_weight_sync_status()["phase"] == "aborted"
        assert (await waiting).metadata["policy_version"] == 0
        for late in (sampler.pre_weight_sync, sampler.weight_sync, sampler.post_weight_sync):
            with pytest.raises(StaleRoundError, match="aborted"):
                await late(wanted)
        assert await greedy(sampler) == greedy_tokens(model)

    run(scenario())
    assert (sampler.policy_version, engine.weight_version) == (0, 0)
    assert device_bytes() - memory < A_FEW_SCALARS
    run(sync(sampler, sync_request(other_model, version=6, key=2)))
    assert sampler.policy_version == 6


def test_an_abort_ends_the_wait_for_requests(model):
    """A `pre_weight_sync` that drains fails, and the requests go on."""

    async def scenario(sampler):
        task = await start_long(sampler)
        wanted = sync_request(None, key=1)
        pre = asyncio.create_task(sampler.pre_weight_sync(wanted))
        await wait_until(sampler, lambda state: state.pause_mode == "wait")
        await sampler.abort_weight_sync(wanted)
        with pytest.raises(EngineStateError, match="continue_generation ended the pause"):
            await pre
        assert not task.done()
        with running():
            return await task

    with new_sampler(model, weight_update_mode="wait") as sampler:
        response = run(scenario(sampler))
        assert sampler.get_weight_sync_status()["phase"] == "aborted"
    assert len(response.token_ids) == NUM_TOKENS


def test_weights_that_do_not_fit_are_not_staged(sampler, model, tmp_path):
    broken = dict(sampler._rollout.weight_source(params_of(model))[0])
    name = next(iter(broken))
    del broken[name]
    memory = device_bytes()

    async def scenario():
        for weights, error in ((broken, WeightSyncError), (str(tmp_path), WeightLoadError)):
            wanted = sync_request(weights)
            await sampler.pre_weight_sync(wanted)
            with pytest.raises(error):
                await sampler.weight_sync(wanted)
            with pytest.raises(EngineStateError, match="nothing is staged"):
                await sampler.post_weight_sync(wanted)
            await sampler.abort_weight_sync(wanted)
            assert await greedy(sampler) == greedy_tokens(model)

    run(scenario())
    assert device_bytes() - memory < A_FEW_SCALARS


def test_phases_need_the_ones_before(sampler, other_model):
    wanted = sync_request(other_model)
    for phase in (sampler.weight_sync, sampler.post_weight_sync):
        with pytest.raises(StaleRoundError, match="cannot open a round"):
            run(phase(wanted))

    async def nothing_to_stage():
        await sampler.pre_weight_sync()
        with pytest.raises(InvalidRequestError, match="weight_sync needs weights"):
            await sampler.weight_sync()
        await sampler.abort_weight_sync()
        for phase in (sampler.weight_sync, sampler.post_weight_sync):
            with pytest.raises(StaleRoundError, match="aborted"):
                await phase(sync_request(other_model))

    run(nothing_to_stage())
    assert sampler.policy_version == 0


# ------------------------------------------------------------------ keys of rounds


def test_phases_of_a_round_are_idempotent(sampler, other_model):
    engine = sampler._rollout.engine
    wanted = sync_request(other_model, version=2, key=1)

    async def scenario():
        for _ in range(2):
            await sampler.pre_weight_sync(wanted)
        assert await sampler.get_transfer_status("r1") == "IN_PROGRESS"
        memory = device_bytes()
        assert [await sampler.weight_sync(wanted) for _ in range(2)] == [2, 2]
        weights_bytes = engine.get_internal_state().memory.weights_bytes
        assert device_bytes() == memory + weights_bytes  # staged once
        for _ in range(2):
            assert await sampler.post_weight_sync(wanted) is True
            assert await sampler.pre_weight_sync(wanted) is True  # late: admission stays open
            assert await sampler.weight_sync(wanted) == 2
            await sampler.abort_weight_sync(wanted)  # too late: what serves stays
        assert await greedy(sampler) == greedy_tokens(other_model)
        assert await sampler.get_transfer_status("r1") == "SUCCESS"
        assert await sampler.get_transfer_status("r0") == "UNKNOWN"

    run(scenario())
    assert engine.weight_version == 1
    assert sampler.get_weight_sync_status() == {
        "req_id": "r1",
        "uuid": 1,
        "phase": "committed",
        "policy_version": 2,
    }


def test_calls_of_older_rounds_change_nothing(sampler, model, other_model):
    old, new = (sync_request(other_model, version=v, key=v) for v in (1, 2))

    async def scenario():
        await sampler.pre_weight_sync(old)
        await sampler.weight_sync(old)
        memory = device_bytes()
        await sampler.pre_weight_sync(new)  # the older one's staging is dropped
        assert device_bytes() < memory
        for phase in (
            sampler.pre_weight_sync,
            sampler.weight_sync,
            sampler.post_weight_sync,
            sampler.abort_weight_sync,
        ):
            with pytest.raises(StaleRoundError):
                await phase(old)
        with pytest.raises(StaleRoundError):
            sampler.check_round(old)
        assert sampler.get_weight_sync_status()["phase"] == "prepared"
        await sampler.abort_weight_sync(new)
        assert await greedy(sampler) == greedy_tokens(model)

    run(scenario())


def test_rounds_with_and_without_keys_do_not_mix(sampler, other_model):
    keyed, plain = sync_request(other_model, key=1), sync_request(other_model, version=9)

    async def scenario():
        await sampler.pre_weight_sync(keyed)
        with pytest.raises(StaleRoundError, match="another one superseded"):
            await sampler.weight_sync(plain)
        await sampler.pre_weight_sync(plain)
        with pytest.raises(StaleRoundError, match="another one superseded"):
            await sampler.weight_sync(keyed)
        await sampler.weight_sync(plain)
        await sampler.post_weight_sync(plain)

    run(scenario())
    assert sampler.policy_version == 9


@pytest.mark.parametrize("retries", [True, False])
def test_a_post_that_nobody_waits_for_converges(sampler, other_model, retries):
    """Cancelled while the swap is under way, then done again, or aborted: what serves stays."""
    engine = sampler._rollout.engine
    wanted = sync_request(other_model, version=4, key=1)

    async def scenario():
        await sampler.pre_weight_sync(wanted)
        await sampler.weight_sync(wanted)
        with held(engine):
            task = asyncio.create_task(sampler.post_weight_sync(wanted))
            while inside.tasks(engine).empty():
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert sampler.get_weight_sync_status()["phase"] == "h2d_done"
        end = sampler.post_weight_sync if retries else sampler.abort_weight_sync
        await end(wanted)
        assert sampler.get_weight_sync_status()["phase"] == "committed"
        return await greedy(sampler)

    assert run(scenario()) == greedy_tokens(other_model)
    assert (engine.weight_version, sampler.policy_version) == (1, 4)


# ------------------------------------------------------------------ by a transport


def test_weights_arrive_through_a_transport(model, other_model):
    transport = InProcessTransport()
    source = InProcessSource(transport, lambda: params_of(other_model))

    async def scenario(sampler):
        await sampler.bind_weight_sync()
        (theirs,) = await source.prepare_weight_sync()
        (ours,) = await sampler.get_weight_sync_metadata()
        assert theirs.variables == ours.variables
        assert len(ours.variables) == len(jax.tree.leaves(params_of(model)))
        wanted = sync_request(None, version=3, key=8)
        for unit in (theirs, ours):
            transport.register_work_unit(unit)
        await sampler.pre_weight_sync(wanted)
        with pytest.raises(EngineStateError, match=r"no weights arrived.*'r8'"):
            await sampler.weight_sync(wanted)
        assert not transport.transfer([theirs.unit], [ours.unit, theirs.unit, None]).success
        assert transport.transfer([theirs.unit], [ours.unit], req_id="r7").success
        with pytest.raises(EngineStateError, match="no weights arrived"):
            await sampler.weight_sync(wanted)  # those of another round
        assert transport.transfer([theirs.unit], [ours.unit], req_id="r8").success
        await source.release_weight_sync()
        await source.release_weight_sync()
        assert not transport.transfer([theirs.unit], [ours.unit], req_id="r9").success
        await sampler.weight_sync(wanted)
        await sampler.post_weight_sync(wanted)
        return await greedy(sampler)

    with new_sampler(model, transport=transport) as sampler:
        assert run(scenario(sampler)) == greedy_tokens(other_model)
        transport.close()


def test_a_source_needs_parameters():
    source = InProcessSource(InProcessTransport(), dict)
    with pytest.raises(InvalidRequestError, match="no parameters"):
        run(source.prepare_weight_sync())


def test_a_lora_actors_base_is_the_one_that_serves():
    """A whole state that was called off brings no base; one that was published does."""
    model, other = (lora_models.make(name) for name in ("gqa2_tied", "gqa2_tied"))
    lora_models.draw(model, seed=1)
    nnx.update(other, jax.tree.map(lambda x: 1.5 * x, nnx.state(other, nnx.Param)))
    lora_models.draw(other, seed=2)

    async def scenario(sampler):
        def differing(actor):
            return sampler._rollout.find_differing_weights(nnx.state(actor, nnx.Param))

        whole = sync_request(nnx.state(other, nnx.Param))
        await sampler.pre_weight_sync(whole)
        await sampler.weight_sync(whole)
        await sampler.abort_weight_sync(whole)
        await sync(sampler, sync_request(lora_models.draw(model, seed=3)))
        assert differing(model) == []
        await sync(sampler, whole)
        assert differing(other) == []
        await sync(sampler, sync_request(lora_models.draw(other, seed=4)))
        assert differing(other) == []
        folder = sync_request("somewhere")
        await sampler.pre_weight_sync(folder)
        with pytest.raises(InvalidRequestError, match=r"'somewhere'.*not as a folder"):
            await sampler.weight_sync(folder)
        await sampler.abort_weight_sync(folder)

    with new_sampler(model) as sampler:
        sampler.initialize()
        run(scenario(sampler))


def test_adapters_cannot_be_staged():
    model = lora_models.make("gqa2_tied")
    with pytest.raises(InvalidConfigError, match="lora='merged': it stages whole weights"):
        new_sampler(model, lora="adapter").__enter__()
