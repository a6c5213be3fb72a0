"""Many callers at once, as Tunix's agentic learner has them: right answers, one batch."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from flax import nnx

from sgljax_engine import EngineShutdownError, SamplingParams
from tests import inside
from tests import tunix_reference as ref
from tests.adapter.helpers import VOCAB_SIZE, new_rollout, params_of, rollout_config, text_of
from tests.geometry import WIDE
from tests.threads import LIMIT_S, gate_steps, held, start, take_steps, wait_for

NUM_CALLERS = 8
NUM_TOKENS = 96
PROMPTS = ref.make_prompts(VOCAB_SIZE, tuple(range(1, NUM_CALLERS + 1)), seed=6)


def generate(rollout, prompt, **changes):
    """One call as the agentic learner makes it: a bare string and a config of its own."""
    output = rollout.generate(
        text_of(prompt), rollout_config(max_tokens_to_generate=NUM_TOKENS, **changes)
    )
    assert len(output.tokens) == len(output.text) == 1
    return output.tokens[0].tolist()


def at_once(call, arguments):
    """Calls from as many threads as there are arguments, all started together."""
    barrier = threading.Barrier(len(arguments))

    def run(argument):
        barrier.wait(timeout=600)
        return call(argument)

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(run, arguments, timeout=600))


def num_dispatches(rollout):
    return rollout.engine.get_internal_state().counters.num_dispatches


@pytest.fixture(scope="module")
def busy(model):
    """A rollout with room for all callers."""
    shared = new_rollout(model)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def sequential(busy):
    """Each prompt's greedy tokens alone, and the dispatches that took in all."""
    before = num_dispatches(busy)
    tokens = [generate(busy, prompt) for prompt in PROMPTS]
    return tokens, num_dispatches(busy) - before


def test_callers_are_batched_and_get_their_own_answers(busy, sequential):
    tokens, dispatches = sequential
    before = num_dispatches(busy)
    assert at_once(lambda prompt: generate(busy, prompt), PROMPTS) == tokens
    assert num_dispatches(busy) - before < dispatches / 2


def test_the_engine_is_built_once(model, sequential):
    """The first calls of all threads come before there is an engine."""
    rollout = new_rollout(model)
    try:
        tokens = at_once(lambda prompt: generate(rollout, prompt), PROMPTS)
        assert tokens == sequential[0]
        assert rollout.engine.get_internal_state().counters.num_requests == NUM_CALLERS
    finally:
        rollout.close()


def test_concurrent_calls_with_the_same_prompt_differ(busy):
    for seed in (None, 4):
        samples = at_once(
            lambda prompt, seed=seed: generate(busy, prompt, temperature=1.0, seed=seed),
            [PROMPTS[2]] * NUM_CALLERS,
        )
        assert len({tuple(row) for row in samples}) == NUM_CALLERS


def test_each_caller_has_its_own_config(busy, sequential):
    def call(number):
        config = rollout_config(max_tokens_to_generate=number + 1, return_logprobs=number % 2 == 0)
        return busy.generate(text_of(PROMPTS[number]), config)

    for number, output in enumerate(at_once(call, range(NUM_CALLERS))):
        assert output.tokens[0].tolist() == sequential[0][number][: number + 1]
        assert (output.logprobs is None) == (number % 2 == 1)


def num_waiting(engine):
    return engine.get_internal_state().waiting_queue_size


def test_updates_during_generation(make_rollout, model, sequential):
    """New weights retract running requests; with equal weights nobody can tell."""
    rollout, num_updates = make_rollout(), 12
    engine = gate_steps(rollout.engine)
    calls = [start(lambda prompt=prompt: generate(rollout, prompt)) for prompt in PROMPTS]
    wait_for(lambda: num_waiting(engine) == NUM_CALLERS)
    for _ in range(num_updates):
        take_steps(engine)
        rollout.update_params(params_of(model), (nnx.Param,))
    assert not any(call.done() for call in calls)
    assert engine.get_internal_state().counters.num_retractions >= num_updates
    assert [call.result(LIMIT_S) for call in calls] == sequential[0]
    assert rollout.weight_version == num_updates


def test_close_ends_calls_in_flight(model):
    """With an answer or with the error, but never with a hang."""
    rollout = new_rollout(model)
    rollout.generate("1", rollout_config(max_tokens_to_generate=1))
    started = threading.Event()

    def call(number):
        if number == 0:
            started.wait(timeout=600)
            rollout.close()
            return "closed"
        started.set()
        try:
            return len(generate(rollout, PROMPTS[number]))
        except EngineShutdownError:
            return "refused"

    results = at_once(call, range(NUM_CALLERS))
    assert set(results[1:]) <= {NUM_TOKENS, "refused"}
    with pytest.raises(EngineShutdownError):
        generate(rollout, PROMPTS[0])


CROWD = WIDE["max_running_requests"]
STEPS = WIDE["decode_steps"]
CROWD_TOKENS = 2 * STEPS


@pytest.fixture(scope="module")
def wide(model):
    """A rollout with room for a crowd, whose dispatches are as long whatever they take."""
    shared = new_rollout(model, **WIDE, max_dispatch_s=math.inf)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def crowd(model):
    """Each caller's prompt and config, greedy or seeded, and what it gets alone."""
    # 15 prompts of up to 15 tokens, 16 each when padded: 240 of 256.
    lengths = [1 + (i < 16) * i for i in range(CROWD)]
    prompts = ref.make_prompts(VOCAB_SIZE, lengths, seed=8)
    calls = [
        (text_of(ids), {"temperature": 1.0, "top_p": 0.95, "seed": 100 + i} if i % 2 else {})
        for i, ids in enumerate(prompts)
    ]
    alone = new_rollout(model, **WIDE)  # a seed's samples depend on the rollout's earlier calls
    try:
        return calls, [crowd_call(alone, call) for call in calls]
    finally:
        alone.close()


def crowd_call(rollout, call):
    """One caller's tokens and log-probs."""
    text, changes = call
    config = rollout_config(
        max_tokens_to_generate=CROWD_TOKENS, return_logprobs=True, max_prompt_length=16, **changes
    )
    output = rollout.generate(text, config)
    assert len(output.tokens) == 1
    return output.tokens[0].tolist(), output.logprobs[0]


@pytest.fixture
def sizes(wide, monkeypatch):
    """The decode rows of each dispatch from now on."""
    runner, sizes = inside.runner(wide.engine), []
    decode = runner.decode

    def recorded(output):
        sizes.append(len(output.decode))
        return decode(output)

    monkeypatch.setattr(runner, "decode", recorded)
    return sizes


def test_64_callers_are_one_batch_on_the_device(wide, crowd, sizes):
    """The engine's thread is held until all calls are in its queue, so nothing is left to luck."""
    calls, expected = crowd
    engine = wide.engine
    before = engine.get_internal_state().counters
    with held(engine):
        callers = [start(lambda call=call: crowd_call(wide, call)) for call in calls]
        wait_for(lambda: inside.tasks(engine).qsize() >= CROWD)
    outputs = [caller.result(LIMIT_S) for caller in callers]
    counters = engine.get_internal_state().counters
    told = f"decode rows of each dispatch: {sizes}"
    assert counters.max_decode_batch == CROWD == 64, told
    # All of them in each; the first one has half the steps unless so many were timed before.
    assert set(sizes) == {CROWD}, told
    assert len(sizes) in (2, 3), told
    assert counters.num_dispatches - before.num_dispatches == len(sizes), told
    assert counters.num_decode_rows - before.num_decode_rows == sum(sizes), told
    assert [tokens for tokens, _ in outputs] == [tokens for tokens, _ in expected]
    for (_, logprobs), (_, alone) in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(logprobs, alone, atol=1e-5)
    seeded = {tuple(tokens) for tokens, _ in outputs[1::2]}
    assert len(seeded) == CROWD // 2


def test_63_callers_join_a_running_batch(wide, sizes):
    """They come while another request runs, and leave it together."""
    engine = gate_steps(wide.engine)
    prompts = ref.make_prompts(VOCAB_SIZE, [3] * CROWD, seed=9)
    long = SamplingParams(temperature=0, max_new_tokens=112)
    lone = start(lambda: engine.generate_requests([prompts[0].tolist()], long))
    wait_for(lambda: num_waiting(engine) == 1)
    take_steps(engine)
    assert sizes == [1]
    callers = [start(lambda ids=ids: generate(wide, ids)) for ids in prompts[1:]]
    wait_for(lambda: num_waiting(engine) == CROWD - 1)
    assert {len(caller.result(LIMIT_S)) for caller in callers} == {NUM_TOKENS}
    assert len(lone.result(LIMIT_S)[0].output_ids) == 112
    told = f"decode rows of each dispatch: {sizes}"
    assert max(sizes) == CROWD, told
    # One after the other they would take 63 times 6 dispatches.
    assert len(sizes) < 2 * NUM_TOKENS // STEPS, told


def engine_threads():
    return {t for t in threading.enumerate() if t.name.startswith("sgljax-engine")}


def test_threads_end_with_the_rollout(model):
    """After `close`, and also when somebody forgot it."""
    before = engine_threads()
    for forgets in (False, True):
        rollout = new_rollout(model)
        rollout.generate("1", rollout_config(max_tokens_to_generate=1))
        started = engine_threads() - before
        assert started
        if not forgets:
            rollout.close()
        del rollout
        for thread in started:
            thread.join(timeout=600)
            assert not thread.is_alive()
