"""Many callers at once, as Tunix's agentic learner has them: right answers, one batch."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from flax import nnx

from sgljax_engine import EngineShutdownError
from tests import tunix_reference as ref
from tests.adapter.helpers import VOCAB_SIZE, new_rollout, params_of, rollout_config, text_of
from tests.threads import LIMIT_S, gate_steps, start, take_steps, wait_for

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
