"""What `offload_to_cpu` makes of a rollout: nothing on the device between the cluster's calls.

Tunix then hands an empty state to `update_params` before and after each call, here "a sign". It
takes no lock for that, so calls of several threads, their signs and updates come in any order.
"""

from __future__ import annotations

import gc
from typing import Any

import jax
import pytest
from flax import nnx

from sgljax_engine import (
    EngineShutdownError,
    EngineStateError,
    InvalidConfigError,
    InvalidRequestError,
    OffloadError,
    SamplingParams,
    WeightSyncError,
)
from tests import tunix_reference as ref
from tests.adapter.helpers import (
    VOCAB_SIZE,
    max_difference,
    new_rollout,
    params_of,
    scores,
    tokens_of,
)
from tests.threads import LIMIT_S, gate_steps, start, take_steps, wait_for

PROMPTS = ref.make_prompts(VOCAB_SIZE, (3, 7, 5, 9), seed=21)
TOO_LONG = ref.make_prompts(VOCAB_SIZE, (200,), seed=3)
EMPTY: Any = nnx.state(None)  # as Tunix makes it of `rollout.model()`


def device_bytes() -> int:
    """Bytes of all arrays in the devices' own memory."""
    kind = jax.devices()[0].default_memory().kind
    return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == kind)


def offloaded(rollout, call):
    """A call as `RLCluster(offload_to_cpu=True)` makes it; after a failure Tunix gives no sign."""
    rollout.update_params(EMPTY)
    result = call()
    rollout.update_params(EMPTY)
    return result


def generate(rollout, prompts=PROMPTS, **changes):
    """Tokens of one call of the cluster."""
    return offloaded(rollout, lambda: tokens_of(rollout, prompts, **changes))


def state_of(rollout):
    return rollout.engine.get_internal_state()


def num_sleeps(rollout):
    return state_of(rollout).counters.num_sleeps


@pytest.fixture
def base(model, other_model):
    """Bytes on the device without a rollout; the models are there."""
    del model, other_model
    gc.collect()  # what earlier tests left
    return device_bytes()


@pytest.fixture(scope="module")
def expected(model):
    """Greedy tokens of `model`."""
    rollout = new_rollout(model)
    tokens = tokens_of(rollout, PROMPTS)
    rollout.close()
    return tokens


@pytest.fixture(scope="module")
def other_expected(other_model):
    """The same of `other_model`."""
    rollout = new_rollout(other_model)
    tokens = tokens_of(rollout, PROMPTS)
    rollout.close()
    return tokens


class Watch:
    """Counts what a rollout does with its engine, and looks whether calls find it awake."""

    def __init__(self, rollout, monkeypatch):
        self.engine = rollout.engine
        self.num_wakes = 0
        self.found_asleep = []
        wake_up, generate_requests = self.engine.wake_up, self.engine.generate_requests

        def counting_wake_up(tags=None):
            self.num_wakes += 1
            return wake_up(tags)

        def watching_generate(*arguments, **keywords):
            before = self.engine.get_internal_state()
            outputs = generate_requests(*arguments, **keywords)
            after = self.engine.get_internal_state()
            slept = after.counters.num_sleeps - before.counters.num_sleeps
            self.found_asleep.append((before.is_sleeping, after.is_sleeping, slept))
            return outputs

        monkeypatch.setattr(self.engine, "wake_up", counting_wake_up)
        monkeypatch.setattr(self.engine, "generate_requests", watching_generate)


# ------------------------------------------------------------------ memory


def test_between_calls_the_rollout_holds_nothing_on_the_device(
    make_rollout, base, expected, caplog
):
    rollout = make_rollout()
    for step in range(3):
        assert generate(rollout) == expected
        state = state_of(rollout)
        assert device_bytes() == base
        assert state.asleep == ("weights", "kv_cache")
        assert state.host_bytes == state.memory.weights_bytes > 0
        assert state.counters.num_sleeps == step + 1
    assert not caplog.records  # nothing was put to sleep or woken in vain


def test_the_sign_before_a_call_costs_nothing(make_rollout):
    rollout = make_rollout()
    rollout.update_params(EMPTY)
    assert rollout._engine is None
    rollout.engine.warmup()
    rollout.update_params(EMPTY)
    assert num_sleeps(rollout) == 0


def test_log_probs_of_given_tokens_wake_it_too(make_rollout, base, expected):
    rollout = make_rollout()
    # Copies, since numpy's views of JAX's arrays keep those alive.
    awake = [row.copy() for row in scores(rollout, PROMPTS, expected)]
    for _ in range(2):
        woken = offloaded(rollout, lambda: scores(rollout, PROMPTS, expected))
        assert max_difference(awake, woken) == 0
        del woken
        assert device_bytes() == base


def test_kv_memory_is_released_between_micro_batches_as_well(make_rollout, base, expected):
    rollout = make_rollout(release_kv_between_steps=True)

    def micro_batches():
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert tokens_of(rollout, [prompt]) == [tokens]
            assert not state_of(rollout).is_kv_allocated
            assert not rollout.engine.is_sleeping()

    for _ in range(2):
        offloaded(rollout, micro_batches)
        assert device_bytes() == base


# ------------------------------------------------------------------ many threads


def test_signs_updates_and_calls_of_many_threads(make_rollout, model, base, expected, monkeypatch):
    """Whatever meets what, no call finds a sleeping engine, and in the end nothing stays."""
    rollout = make_rollout()
    generate(rollout)
    watch = Watch(rollout, monkeypatch)
    num_rounds = 12

    def caller(row):
        for _ in range(num_rounds):
            assert generate(rollout, [PROMPTS[row]]) == [expected[row]]

    def updater():
        for _ in range(num_rounds):
            rollout.update_params(params_of(model), (nnx.Param,))

    threads = [start(lambda row=row: caller(row)) for row in range(len(PROMPTS))]
    threads.append(start(updater))
    for thread in threads:
        thread.result(LIMIT_S)
    assert watch.found_asleep == [(False, False, 0)] * (num_rounds * len(PROMPTS))
    assert rollout.weight_version == num_rounds
    assert num_sleeps(rollout) <= 1 + num_rounds * (len(PROMPTS) + 1)
    assert rollout.engine.get_internal_state().asleep == ("weights", "kv_cache")
    del threads
    assert device_bytes() == base
    rollout.engine.check_integrity()


def short_call(rollout):
    """A call of the cluster that has ended after one step of a gated engine."""
    short = start(lambda: generate(rollout, PROMPTS[1:], max_tokens_to_generate=1))
    wait_for(lambda: state_of(rollout).waiting_queue_size == len(PROMPTS[1:]))
    take_steps(rollout.engine)
    wait_for(short.done)
    return short


def test_it_stays_awake_under_a_call(make_rollout, base, other_model):
    rollout = make_rollout()
    generate(rollout)
    gate_steps(rollout.engine)
    long = start(lambda: tokens_of(rollout, PROMPTS[:1], max_tokens_to_generate=96))
    while not state_of(rollout).running_batch_size:
        assert not long.done()
        take_steps(rollout.engine)
    short = short_call(rollout)
    rollout.update_params(params_of(other_model), (nnx.Param,))
    assert not long.done()
    assert num_sleeps(rollout) == 1
    assert short.result(LIMIT_S)
    long.result(LIMIT_S)
    assert num_sleeps(rollout) == 1
    rollout.update_params(EMPTY)
    assert num_sleeps(rollout) == 2
    assert device_bytes() == base


# ------------------------------------------------------------------ weights


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_an_update_of_a_sleeping_rollout(
    make_rollout, base, other_model, other_expected, kind, monkeypatch
):
    """The new weights go to sleep in the place of the old; the KV cache never wakes for it."""
    rollout = make_rollout()
    generate(rollout)
    watch = Watch(rollout, monkeypatch)
    params = jax.tree.map(
        lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), params_of(other_model)
    )
    rollout.update_params(params, (nnx.Param,))
    del params
    assert rollout.weight_version == 1
    assert state_of(rollout).asleep == ("weights", "kv_cache")
    assert device_bytes() == base
    assert watch.num_wakes == 0
    assert generate(rollout) == other_expected
    assert watch.num_wakes == 1
    assert num_sleeps(rollout) == 3


def test_an_update_that_comes_before_the_first_call(make_rollout, base, other_model):
    """It builds the engine, whose memory is the trainer's until the call."""
    rollout = make_rollout()
    rollout.update_params(EMPTY)
    rollout.update_params(params_of(other_model), (nnx.Param,))
    assert rollout.weight_version == 1
    assert device_bytes() == base


def test_an_update_that_fails_leaves_it_asleep_with_the_old_weights(
    make_rollout, base, other_model, expected, caplog
):
    rollout = make_rollout()
    generate(rollout)
    params = nnx.to_pure_dict(params_of(other_model))
    del params["layers"][1]["mlp"]
    with pytest.raises(WeightSyncError, match="mlp"):
        rollout.update_params(params, (nnx.Param,))
    assert device_bytes() == base
    assert generate(rollout) == expected
    assert rollout.weight_version == 0
    assert not caplog.records


# ------------------------------------------------------------------ failures


def test_it_sleeps_after_a_call_that_failed(make_rollout, base, expected):
    """Tunix gives no sign then."""
    rollout = make_rollout()
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="max_model_len"):
            generate(rollout, TOO_LONG)
        assert rollout.engine.is_sleeping()
    with pytest.raises(InvalidConfigError, match="data_parallel_size"):
        generate(rollout, data_parallel_size=2)
    assert num_sleeps(rollout) == 2  # what never came to the engine did not wake it
    assert device_bytes() == base
    assert generate(rollout) == expected


def fail(*_, **__):
    raise OffloadError("no memory")


def test_a_wake_that_fails_can_be_tried_again(make_rollout, expected, monkeypatch):
    rollout = make_rollout()
    generate(rollout)
    with monkeypatch.context() as patch:
        patch.setattr(rollout.engine, "wake_up", fail)
        with pytest.raises(OffloadError, match="no memory"):
            generate(rollout)
    assert rollout.engine.is_sleeping()
    assert generate(rollout) == expected
    assert rollout.engine.is_sleeping()


def test_a_sleep_that_fails_is_told(make_rollout, expected, monkeypatch, caplog):
    """The sign raises, since the trainer counts on the memory; a call shows its own error."""
    rollout = make_rollout()
    with monkeypatch.context() as patch:
        patch.setattr(rollout.engine, "sleep", fail)
        with pytest.raises(OffloadError, match="no memory"):
            generate(rollout)
        with pytest.raises(InvalidRequestError):
            tokens_of(rollout, TOO_LONG)
        assert "could not be put to sleep" in caplog.text
    assert generate(rollout) == expected
    assert num_sleeps(rollout) == 2  # the sign before the call made up for the one that failed


# ------------------------------------------------------------------ owners


@pytest.mark.parametrize("is_used", [True, False])
def test_what_its_owner_put_to_sleep_is_the_owners_to_wake(make_rollout, expected, caplog, is_used):
    rollout = make_rollout()
    assert generate(rollout) == expected
    rollout.engine.wake_up()  # ends the rollout's own sleep
    if is_used:
        tokens_of(rollout, PROMPTS)
    rollout.engine.sleep()
    rollout.update_params(EMPTY)
    assert not caplog.records
    with pytest.raises(EngineStateError, match="sleeps"):
        scores(rollout, PROMPTS, expected)
    call = start(lambda: generate(rollout))
    while not state_of(rollout).waiting_queue_size:
        assert not call.done()
    assert rollout.engine.is_sleeping()
    rollout.engine.wake_up()
    assert call.result(LIMIT_S) == expected
    assert rollout.engine.is_sleeping()
    assert generate(rollout) == expected
    (record,) = caplog.records  # of the call that waited
    assert record.getMessage().startswith("the engine sleeps: ")


def test_a_sleep_that_frees_nothing_is_the_rollouts_all_the_same(
    make_rollout, other_model, other_expected
):
    rollout = make_rollout()
    tokens_of(rollout, PROMPTS)
    rollout.engine.sleep(2)
    rollout.engine.wake_up()
    rollout.engine.release_kv_cache()
    rollout.update_params(EMPTY)
    assert rollout.engine.is_sleeping()
    rollout.update_params(params_of(other_model), (nnx.Param,))
    assert rollout.engine.is_sleeping()
    assert generate(rollout) == other_expected


def test_an_interrupted_sleep_is_woken_by_the_next_call(make_rollout, expected, monkeypatch):
    """Ctrl-C takes the thread away from the call, not the call back from the engine."""
    rollout = make_rollout()
    tokens_of(rollout, PROMPTS)
    sleep = type(rollout.engine).sleep

    def interrupted(engine):
        sleep(engine)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(rollout.engine), "sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rollout.update_params(EMPTY)
    assert rollout.engine.is_sleeping()
    assert tokens_of(rollout, PROMPTS) == expected


def test_an_update_of_what_its_owner_put_to_sleep_wakes_the_weights_alone(
    make_rollout, other_model, other_expected
):
    rollout = make_rollout()
    generate(rollout)
    rollout.engine.wake_up()
    tokens_of(rollout, PROMPTS)
    rollout.engine.sleep()
    rollout.update_params(params_of(other_model), (nnx.Param,))
    assert state_of(rollout).asleep == ("kv_cache",)
    rollout.engine.wake_up()
    assert generate(rollout) == other_expected


def test_requests_of_other_users_wait_for_the_next_call(make_rollout, expected):
    """They lose no token, and do not keep the memory from the trainer."""
    rollout = make_rollout()
    generate(rollout)
    rollout.engine.wake_up()
    params = SamplingParams(temperature=0, max_new_tokens=96)
    gate_steps(rollout.engine)
    long = start(lambda: rollout.engine.generate_requests([PROMPTS[0].tolist()], params))
    while not state_of(rollout).running_batch_size:
        assert not long.done()
        take_steps(rollout.engine)
    short = short_call(rollout)
    state = state_of(rollout)
    assert state.is_sleeping
    assert state.waiting_queue_size == 1
    assert not long.done()
    assert short.result(LIMIT_S)
    while not long.done():
        assert generate(rollout) == expected
    (output,) = long.result(LIMIT_S)
    assert output.output_ids[:16] == expected[0]
    assert len(output.output_ids) == 96


def test_closed_while_asleep(make_rollout, base):
    rollout = make_rollout()
    generate(rollout)
    rollout.close()
    assert device_bytes() == base
    rollout.update_params(EMPTY)
    with pytest.raises(EngineShutdownError):
        generate(rollout)
    rollout.close()
