"""Sampling through Tunix's Sampler protocol: requests, responses, pauses, load."""

from __future__ import annotations

import asyncio
import pickle

import numpy as np
import pytest
from tunix.experimental.rollout.sampler import (  # pyright: ignore[reportMissingImports]
    Sampler,
    SamplingParams,
    SamplingRequest,
)

from sgljax_engine import EngineShutdownError, InvalidConfigError, InvalidRequestError
from tests import tunix_families
from tests import tunix_reference as ref
from tests.adapter.helpers import rollout_config
from tests.experimental.parts import (
    NUM_TOKENS,
    PROMPTS,
    TEXTS,
    greedy_tokens,
    new_sampler,
    request,
    run,
    start_long,
    tokens_of,
    wait_until,
)
from tests.threads import running
from tunix_sgljax.experimental import requests


@pytest.fixture(scope="module")
def sampler(model):
    """Shared; must be left idle and as it was."""
    with new_sampler(model) as shared:
        shared.initialize()
        yield shared


# ------------------------------------------------------------------ requests and responses


def test_responses(sampler, model):
    assert isinstance(sampler, Sampler)
    wanted = [request(text, f"r{i}", return_logprobs=True) for i, text in enumerate(TEXTS)]
    responses = run(sampler.sample(wanted))
    expected = greedy_tokens(model)
    assert tokens_of(responses) == expected
    logps = ref.trainer_logps(model, PROMPTS, expected)
    for i, response in enumerate(responses):
        assert response.request_id == f"r{i}"
        assert response.prompt_token_ids.tolist() == PROMPTS[i].tolist()
        assert response.token_ids.dtype == response.prompt_token_ids.dtype == np.int32
        assert response.text == " ".join(map(str, expected[i]))
        assert (response.finish_reason, response.error) == ("length", None)
        np.testing.assert_allclose(response.logprobs, logps[i], atol=1e-4)
        assert response.metadata["policy_version"] == 0
        assert response.metadata["policy_versions"].tolist() == [0] * 8
        np.testing.assert_array_equal(response.metadata["logprobs"], response.logprobs)
        assert tokens_of([pickle.loads(pickle.dumps(response))]) == [expected[i]]


def test_experts_of_each_token():
    family = "qwen3_moe"
    one, two, *_ = tunix_families.make_prompts(family)
    with new_sampler(tunix_families.make(family), enable_return_routed_experts=True) as sampler:
        asked = {"return_routed_experts": True}
        first, second = run(sampler.sample([request(one), request(two)], **asked))
        for response in (first, second):
            length = len(response.prompt_token_ids) + len(response.token_ids)
            assert response.routed_experts.shape == (length - 1, 2, 3)
            assert response.routed_experts.dtype == np.int32
        part = run(sampler.sample(request(one), **asked, routed_experts_prompt_start=3))
        np.testing.assert_array_equal(part.routed_experts, first.routed_experts[3:])
        without = run(sampler.sample(request(one), return_routed_experts=False))
        assert without.routed_experts is None
        # Requests of c7d8950f cannot say what they want: those have them.
        can_say = hasattr(SamplingParams, "return_routed_experts")
        assert (run(sampler.sample(request(one))).routed_experts is None) == can_say
        with pytest.raises(InvalidRequestError, match="routed_experts_prompt_start must be a co"):
            run(sampler.sample(request(one), routed_experts_prompt_start=-1))


def test_experts_need_an_option_of_the_rollout(sampler):
    assert run(sampler.sample(request())).routed_experts is None
    with pytest.raises(InvalidRequestError, match="rollout with enable_return_routed_experts"):
        run(sampler.sample(request(), return_routed_experts=True))


def test_kinds_of_prompts(sampler):
    """A text, token ids in several forms; one request is answered by one response."""
    response = run(sampler.sample(request()))
    assert response.logprobs is None
    assert response.metadata["logprobs"].shape == (8,), "there even if nobody asks"
    expected = response.token_ids.tolist()
    for prompt in (PROMPTS[0], PROMPTS[0].tolist(), tuple(PROMPTS[0].tolist())):
        assert tokens_of(run(sampler.sample([request(prompt)]))) == [expected]
    # Without parameters as the rollout's config says: greedy, 16 tokens.
    for bare in (TEXTS[0], PROMPTS[0], SamplingRequest(prompt=TEXTS[0])):
        assert run(sampler.sample(bare)).token_ids.tolist()[:8] == expected
    (both,) = run(sampler.sample((TEXTS[0],)))
    assert both.token_ids.tolist()[:8] == expected
    assert run(sampler.sample([])) == []


class ChatTokenizer(ref.IntegerTokenizer):
    """Has a template: contents in order, then 7 where an answer is to follow."""

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert not tokenize
        words = [message["content"] for message in messages]
        return " ".join([*words, *(["7"] if add_generation_prompt else [])])


def test_conversations_are_written_by_the_chat_template(model):
    one = {"role": "user", "content": "3 4"}
    conversation = [{"role": "system", "content": "2"}, one]
    with new_sampler(model, tokenizer=ChatTokenizer()) as sampler:
        for given, ids in (
            (request(conversation), [2, 3, 4, 7]),
            (conversation, [2, 3, 4, 7]),
            (request(one), [3, 4, 7]),
        ):
            assert run(sampler.sample(given)).prompt_token_ids.tolist() == ids
        (both,) = run(sampler.sample([conversation]))
        assert both.prompt_token_ids.tolist() == [2, 3, 4, 7]
        with pytest.raises(InvalidRequestError, match="content"):
            run(sampler.sample([{"role": "user"}]))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (7, "must be a SamplingRequest, a prompt or a list of those, got int"),
        (None, "got NoneType"),
        ([3.5], r"prompts\[0\] must be a text.*got 3\.5"),
        (SamplingRequest(prompt={1, 2}), "prompt must be a text"),
        (request(return_logits=True), "return_logits=True is not supported"),
        (request(beam_size=4), "beam_size=4 is not supported"),
        (request(temperature=-1.0), "temperature"),
        (request(max_tokens=0), "max_tokens_to_generate must be >= 1, got 0"),
        ([request(), request([2**31])], "input_ids"),
    ],
)
def test_bad_requests_are_refused(sampler, given, match):
    with pytest.raises(InvalidRequestError, match=match):
        run(sampler.sample(given))


def test_keywords_win_over_the_requests_params(sampler):
    """Tunix's collector leaves `max_generation_steps` out of the params and hands it on."""
    wanted = [request(max_tokens=64), request(max_tokens=2)]
    responses = run(sampler.sample(wanted, max_generation_steps=3, return_logprobs=True))
    assert [len(response.token_ids) for response in responses] == [3, 3]
    assert all(response.logprobs is not None for response in responses)
    response = run(sampler.sample(request(), max_generation_steps=3, max_tokens=5))
    assert len(response.token_ids) == 5
    with pytest.raises(InvalidRequestError, match=r"takes no option \['min_q'\]"):
        run(sampler.sample(request(), min_q=1))


def test_end_tokens_and_temperatures(model):
    """The rollout's config says what ends a completion, and each request its own temperature."""
    expected = greedy_tokens(model)[0]
    config = rollout_config(eos_tokens=[expected[3]])
    with new_sampler(model, rollout_config=config) as sampler:
        greedy, drawn = run(
            sampler.sample([request(), request(temperature=3.0, seed=5, return_logprobs=True)])
        )
    assert greedy.token_ids.tolist() == expected[: expected.index(expected[3]) + 1]
    assert greedy.finish_reason == "stop"
    (logps,) = ref.trainer_logps(model, [PROMPTS[0]], [drawn.token_ids], -1, temperature=3.0)
    np.testing.assert_allclose(drawn.logprobs, logps, atol=1e-4)


def test_equal_seeds_draw_different_samples_again_and_again(model):
    """A group's requests have one prompt and one seed, together or one by one."""

    async def draws(sampler):
        wanted = request(temperature=1.0, seed=7, max_tokens=16)
        together = await sampler.sample([wanted, wanted])
        return tokens_of([*together, await sampler.sample(wanted)])

    runs = []
    for _ in range(2):
        with new_sampler(model) as sampler:
            runs.append(run(draws(sampler)))
    assert runs[0] == runs[1]
    assert len({tuple(row) for row in runs[0]}) == 3


# ------------------------------------------------------------------ many at a time


def test_a_cancelled_task_aborts_its_request(model):
    async def scenario(sampler):
        task = await start_long(sampler)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await wait_until(sampler, lambda state: state.running_batch_size == 0)

    with new_sampler(model) as sampler:
        assert run(scenario(sampler)).counters.num_aborted == 1


def test_aborted_requests_have_what_they_have(model):
    async def scenario(sampler):
        task = await start_long(sampler)
        await sampler._rollout.engine.async_abort_request(abort_all=True)
        return await task

    with new_sampler(model) as sampler:
        response = run(scenario(sampler))
    assert response.finish_reason == "cancelled"
    assert response.error.error_type == "abort"
    assert 0 < len(response.token_ids) == len(response.logprobs) < NUM_TOKENS


# ------------------------------------------------------------------ life, pauses, load


def test_start_and_stop(model):
    async def scenario(sampler):
        assert await sampler.start() is True
        assert await sampler.start() is True
        response = await sampler.sample(request())
        assert await sampler.stop() is True
        assert await sampler.stop() is True
        with pytest.raises(EngineShutdownError):
            await sampler.sample(request())
        with pytest.raises(EngineShutdownError):
            await sampler.pre_weight_sync()
        return response

    with new_sampler(model) as sampler:
        assert len(run(scenario(sampler)).token_ids) == 8
    with pytest.raises(EngineShutdownError):
        run(sampler.sample(request()))
    assert sampler.policy_version == 0


def test_a_pause_holds_requests_and_their_pages(model):
    async def scenario(sampler):
        task = await start_long(sampler)
        await sampler.pause()
        late = asyncio.create_task(sampler.sample(request()))
        await wait_until(sampler, lambda state: state.waiting_queue_size == 1)
        info = await sampler.get_load_info()
        assert (info.num_requests_running, info.num_requests_waiting) == (1, 1)
        assert 0 < info.kv_cache_usage_perc < 1
        assert info.metadata["is_paused"]
        assert not task.done()
        assert not late.done()
        await sampler.resume()
        with running():
            first, second = await asyncio.gather(task, late)
        assert len(first.token_ids) == NUM_TOKENS
        assert len(second.token_ids) == 8
        idle = await sampler.get_load_info()
        assert (idle.num_requests_running, idle.num_requests_waiting) == (0, 0)
        assert idle.kv_cache_usage_perc == 0.0
        assert idle.metadata == {
            "policy_version": 0,
            "is_paused": False,
            "is_syncing": False,
            "total_kv_tokens": info.metadata["total_kv_tokens"],
        }
        counters = (await wait_until(sampler, lambda state: True)).counters
        assert counters.num_retractions == 0

    with new_sampler(model) as sampler:
        run(scenario(sampler))


def test_there_is_no_wire_to_migrate_over(sampler):
    with pytest.raises(NotImplementedError, match=r"'one' cannot migrate KV \(2 tokens from 'a'"):
        run(sampler.migrate_kv_cache("a", "b", [1, 2]))


def test_mesh_and_unknown_options(sampler):
    assert run(sampler.get_mesh()) is None
    for method in ("start", "stop", "pause", "resume", "get_mesh", "get_load_info"):
        with pytest.raises(TypeError, match=rf"{method}\(\) got an unexpected .* 'hard'"):
            getattr(sampler, method)(hard=True)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"weight_update_mode": "in_place"}, "weight_update_mode is not 'in_place'"),
        ({"logprobs_mode": "trainer_match"}, "logprobs_mode is not 'trainer_match'"),
    ],
)
def test_rollouts_that_cannot_keep_the_contract_are_refused(model, options, match):
    with pytest.raises(InvalidConfigError, match=match), new_sampler(model, **options):
        pass


def test_params_of_tunix_are_all_known():
    """A field that Tunix adds is refused by name until somebody decides what it means."""
    known = {*requests._FIELDS, *requests._ROUTED_FIELDS, "return_logits", "beam_size"}
    assert set(SamplingParams.__dataclass_fields__) <= known
