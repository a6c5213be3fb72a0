"""logprobs_mode="trainer_match": the very log-probs that Tunix's trainer computes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.rl.common import compute_per_token_logps

from sgljax_engine import EngineStateError, InvalidConfigError, WeightSyncError
from tests import tunix_families
from tests import tunix_reference as ref
from tests.adapter.helpers import (
    MODEL,
    VOCAB_SIZE,
    max_difference,
    named_params,
    new_rollout,
    padded,
    params_of,
    rollout_config,
    text_of,
)
from tests.devices import run_python
from tests.threads import LIMIT_S, gate_steps, start, take_steps, wait_for
from tests.tiers import tiered
from tunix_sgljax import create_sgljax_rollout

TRAINER_AS_USERS = "log-probs have the bits of the trainer's"

PROMPTS = ref.make_prompts(VOCAB_SIZE, (3, 7, 5, 16, 11), seed=21)
WIDTH, NUM_TOKENS = 16, 24
SAMPLING = {
    "temperature": 0.9,
    "max_tokens_to_generate": NUM_TOKENS,
    "return_logprobs": True,
    "max_prompt_length": WIDTH,
    "seed": 5,
}
BFLOAT16 = {
    **ref.CONFIGS[MODEL],
    "num_layers": 1,
    "dtype": jnp.bfloat16,
    "param_dtype": jnp.bfloat16,
}
MAKERS = {
    "qwen3": functools.partial(ref.make_tunix_qwen3, MODEL),
    "qwen3-bfloat16": functools.partial(ref.make_tunix_qwen3, BFLOAT16),
    "llama3": functools.partial(tunix_families.make, "llama3_untied"),
    "gemma2": functools.partial(tunix_families.make, "gemma2"),
    "gemma3": functools.partial(tunix_families.make, "gemma3"),
}


@ref.deprecations_ignored()
def trainers(model, prompts, tokens, temperature, *, width=WIDTH, num_tokens=NUM_TOKENS):
    """What a trainer calls, on arrays padded as Tunix's learners pad them."""
    graphdef, state = nnx.split(model)
    logps = compute_per_token_logps(
        graphdef,
        state,
        jnp.asarray(padded(prompts, width, left=True)),
        jnp.asarray(padded(tokens, num_tokens, left=False)),
        pad_id=ref.PAD_ID,
        eos_id=ref.NO_EOS_ID,
        temperature=temperature,
    )
    return [row[: len(ids)] for row, ids in zip(np.asarray(logps), tokens, strict=True)]


def generate_compiled(rollout, prompts=PROMPTS, **changes):
    config = rollout_config(**{**SAMPLING, **changes})
    return rollout.generate([text_of(ids) for ids in prompts], config)


generate = ref.deprecations_ignored()(generate_compiled)


@pytest.fixture
def matching(make_rollout):
    """Rollouts that match the trainer."""
    return functools.partial(make_rollout, logprobs_mode="trainer_match")


def assert_equal(got, expected):
    for row, want in zip(got, expected, strict=True):
        np.testing.assert_array_equal(row, want)


# ------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("name", tiered(MAKERS, ["qwen3"], ["qwen3-bfloat16", "gemma2"]))
def test_log_probs_are_the_trainers_to_the_bit(name):
    model = MAKERS[name]()
    prompts = [ids % 95 + 1 for ids in PROMPTS]  # in every vocabulary
    found = {}
    for mode in ("trainer_logprobs", "trainer_match"):
        rollout = new_rollout(model, logprobs_mode=mode)
        found[mode] = generate(rollout, prompts)
        rollout.close()
    output = found["trainer_match"]
    expected = trainers(model, prompts, output.tokens, 0.9)
    assert_equal(output.logprobs, expected)
    assert all(row.dtype == np.float32 for row in output.logprobs)
    # The engine's own are as good, and others.
    assert_equal(found["trainer_logprobs"].tokens, output.tokens)
    assert max_difference(found["trainer_logprobs"].logprobs, expected) > 0


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 9}])
def test_temperatures_and_filters(matching, model, sampling):
    output = generate(matching(), **sampling)
    assert_equal(output.logprobs, trainers(model, PROMPTS, output.tokens, sampling["temperature"]))


def test_rows_are_scored_in_batches_of_one_shape(matching, model, monkeypatch):
    rollout = matching(match_batch_size=2)
    output = generate(rollout)
    for start_row in (0, 2):
        rows = slice(start_row, start_row + 2)
        expected = trainers(model, PROMPTS[rows], output.tokens[rows], 0.9)
        assert_equal(output.logprobs[rows], expected)
    filled = [4, 0]
    expected = trainers(
        model, [PROMPTS[row] for row in filled], [output.tokens[row] for row in filled], 0.9
    )
    assert_equal(output.logprobs[4:], expected[:1])

    shapes = []

    def recorded(graphdef, state, prompts_BP, completions_BC, **options):
        shapes.append((prompts_BP.shape, completions_BC.shape))
        return compute_per_token_logps(graphdef, state, prompts_BP, completions_BC, **options)

    monkeypatch.setattr("tunix_sgljax.exactness.trainer_match.compute_per_token_logps", recorded)
    for count in (1, 2, 3, 5):
        generate(rollout, PROMPTS[:count])
    assert shapes == [((2, WIDTH), (2, NUM_TOKENS))] * (1 + 1 + 2 + 3)


def test_long_prompts_and_short_completions(matching, model):
    prompts = [*PROMPTS, ref.make_prompts(VOCAB_SIZE, (21,), seed=3)[0]]
    output = generate(matching(), prompts, eos_tokens=list(range(1, 17)))
    assert min(map(len, output.tokens)) < NUM_TOKENS
    assert output.left_padded_prompt_tokens.shape == (6, 32)
    assert_equal(output.logprobs, trainers(model, prompts, output.tokens, 0.9, width=32))


def test_nothing_is_scored_unasked(matching, monkeypatch):
    rollout = matching()
    monkeypatch.setattr("tunix_sgljax.exactness.trainer_match.compute_per_token_logps", None)
    assert generate(rollout, return_logprobs=False).logprobs is None


@ref.deprecations_ignored()
def test_given_tokens_are_scored_as_the_trainer_does(matching, model, other_model):
    rollout = matching(config={"temperature": 0.9})
    rng = np.random.default_rng(1)
    completions = [rng.integers(1, VOCAB_SIZE, n).astype(np.int32) for n in (1, 24, 7, 16, 2)]
    arrays = padded(PROMPTS, WIDTH, left=True), padded(completions, NUM_TOKENS, left=False)
    for policy in (model, other_model):
        got = np.asarray(rollout.get_per_token_logps(*map(jnp.asarray, arrays)))
        assert not got[arrays[1] == ref.PAD_ID].any()
        rows = [row[: len(ids)] for row, ids in zip(got, completions, strict=True)]
        assert_equal(rows, trainers(policy, PROMPTS, completions, 0.9))
        rollout.update_params(params_of(other_model), (nnx.Param,))


# ------------------------------------------------------------------ weights


def test_the_trainers_arrays_are_held_by_reference(matching, model, other_model):
    rollout = matching()
    generate(rollout)
    for version, policy in enumerate((model, other_model)):
        if version:
            params = params_of(policy)
            with (  # as around Tunix's sync on a CPU
                jax.transfer_guard_device_to_host("disallow_explicit"),
                jax.transfer_guard_host_to_device("disallow_explicit"),
            ):
                rollout.update_params(params, (nnx.Param,))
        assert rollout._match.versions == [version]
        held = jax.tree.leaves(rollout._match.state(version))
        assert [id(x) for x in held] == [id(x) for x in jax.tree.leaves(params_of(policy))]
        assert_equal(
            (output := generate(rollout)).logprobs, trainers(policy, PROMPTS, output.tokens, 0.9)
        )


def test_a_train_step_does_not_change_what_is_held(make_rollout, other_model):
    trained, copy = ref.make_tunix_qwen3(MODEL), ref.make_tunix_qwen3(MODEL)
    rollout = make_rollout(trained, logprobs_mode="trainer_match")
    for _ in range(2):
        rollout.update_params(params_of(trained), (nnx.Param,))
        nnx.update(trained, params_of(other_model))
        output = generate(rollout)
        assert_equal(output.logprobs, trainers(copy, PROMPTS, output.tokens, 0.9))
        nnx.update(trained, params_of(copy))


def test_weights_of_any_pytree(matching, other_model):
    rollout = matching()
    named = named_params(other_model)
    rollout.update_params(dict(reversed(named.items())))
    output = generate(rollout)
    assert_equal(output.logprobs, trainers(other_model, PROMPTS, output.tokens, 0.9))

    named.pop("final_norm.w")
    with pytest.raises(WeightSyncError, match=r"missing \['final_norm.w'\], extra \[\]"):
        rollout.update_params(named)
    assert rollout._match.versions == [1]


def sample_across_an_update(rollout, other_model):
    def num_decoded():
        return rollout.engine.get_internal_state().counters.num_decode_rows

    engine = gate_steps(rollout.engine)
    before = num_decoded()
    call = start(lambda: generate(rollout, max_tokens_to_generate=96))
    while num_decoded() < before + 3 * len(PROMPTS):
        assert not call.done()
        take_steps(engine)
    rollout.update_params(params_of(other_model), (nnx.Param,))
    return call, rollout._match.versions


def test_each_token_is_scored_under_the_weights_that_sampled_it(matching, model, other_model):
    rollout = matching()
    call, held = sample_across_an_update(rollout, other_model)
    assert held == [0, 1]
    output = call.result(LIMIT_S)
    assert rollout._match.versions == [1]
    scored = [
        trainers(policy, PROMPTS, output.tokens, 0.9, num_tokens=96)
        for policy in (model, other_model)
    ]
    assert max_difference(*scored) > 0.1  # the two policies can be told apart
    for row, (logps, versions) in enumerate(
        zip(output.logprobs, output.weight_versions, strict=True)
    ):
        assert set(versions.tolist()) == {0, 1}
        np.testing.assert_array_equal(
            logps, np.where(versions == 0, scored[0][row], scored[1][row])
        )


def test_several_threads_and_updates(matching, model, other_model):
    rollout = matching(match_batch_size=2)
    policies = (model, other_model)
    generate(rollout, PROMPTS[:2])  # compiles, which warns

    def one(row):
        return generate_compiled(rollout, [PROMPTS[row % len(PROMPTS)]], seed=None)

    engine = gate_steps(rollout.engine)
    calls = [start(functools.partial(one, row)) for row in range(12)]
    wait_for(lambda: engine.get_internal_state().waiting_queue_size == len(calls))
    for number in range(1, 5):
        take_steps(engine, 3)  # the first calls end, and are scored, before the last update
        rollout.update_params(params_of(policies[number % 2]), (nnx.Param,))
    outputs = [call.result(LIMIT_S) for call in calls]
    assert rollout._match.versions == [4]
    assert any(len(set(output.weight_versions[0].tolist())) > 1 for output in outputs)
    for row, output in enumerate(outputs):
        prompts, tokens = [PROMPTS[row % len(PROMPTS)]] * 2, output.tokens * 2
        scored = [trainers(policy, prompts, tokens, 0.9)[0] for policy in policies]
        versions = output.weight_versions[0]
        expected = np.where(versions % 2 == 0, *scored)
        np.testing.assert_array_equal(output.logprobs[0], expected)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tunix.rl.common import compute_per_token_logps
from tests import tunix_reference as ref
from tests.adapter.helpers import max_difference
from tests.adapter.test_trainer_match import PROMPTS, WIDTH, NUM_TOKENS, generate, trainers
from tests.adapter.helpers import new_rollout, padded

devices = np.array(jax.devices())
mesh = Mesh(devices[:2].reshape(2, 1), ("fsdp", "tp"))
model = ref.make_tunix_qwen3("gqa2_tied")
one_device = ref.make_tunix_qwen3("gqa2_tied")

def spread(x):
    return jax.device_put(x, NamedSharding(mesh, P("fsdp" if x.shape[0] % 2 == 0 else None)))

nnx.update(model, jax.tree.map(spread, nnx.state(model)))
for count in (4, 5):
    for rollout_mesh in (None, Mesh(devices[2:].reshape(1, 2), ("fsdp", "tp"))):
        rollout = new_rollout(model, logprobs_mode="trainer_match", mesh=rollout_mesh)
        output = generate(rollout, PROMPTS[:count])
        held = jax.tree.leaves(rollout._match.state(0))
        assert [id(x) for x in held] == [id(x) for x in jax.tree.leaves(nnx.state(model))]
        rollout.close()
        expected = trainers(one_device, PROMPTS[:count], output.tokens, 0.9)
        # Two shapes of one function, each as far from float64 as float32 brings it.
        assert max_difference(output.logprobs, expected) < 3e-5
        if count == 4:  # rows spread as the trainer has them
            rows = NamedSharding(mesh, P("fsdp"))
            with mesh:
                logps = compute_per_token_logps(
                    *nnx.split(model),
                    jax.device_put(padded(PROMPTS[:4], WIDTH, left=True), rows),
                    jax.device_put(padded(output.tokens, NUM_TOKENS, left=False), rows),
                    pad_id=ref.PAD_ID, eos_id=ref.NO_EOS_ID, temperature=0.9,
                )
            for got, want in zip(output.logprobs, np.asarray(logps), strict=True):
                assert np.array_equal(got, want[: len(got)])
print("sharded ok")
"""


@pytest.mark.soak
def test_a_sharded_actor_stays_where_it_is():
    assert "sharded ok" in run_python("-c", SHARDED, num_devices=4, as_users=True).stdout


# ------------------------------------------------------------------ refusals


def test_offloading_is_refused(matching):
    rollout = matching()
    with pytest.raises(InvalidConfigError, match=r"trainer_match.*offload_to_cpu=True"):
        rollout.update_params(nnx.state(None), (nnx.Param,))
    generate(rollout)


def test_weights_from_elsewhere_are_refused(matching, other_model):
    rollout = matching()
    source = rollout._builder.weights._mapper.named_source(params_of(other_model))
    rollout.engine.update_weights(source, rollout._builder.weights._mapper.rules_for(source))
    with pytest.raises(EngineStateError, match=r"weight version 1, only for \[0\].*update_params"):
        generate(rollout)
    rollout.update_params(params_of(other_model), (nnx.Param,))
    generate(rollout)


def test_donated_arrays_are_named(make_rollout):
    rollout = make_rollout(ref.make_tunix_qwen3(MODEL), logprobs_mode="trainer_match")
    generate(rollout)
    state = rollout._match.state(0)
    nnx.to_pure_dict(state)["final_norm"]["w"].delete()
    with pytest.raises(
        EngineStateError, match=r"version 0 were donated.*'final_norm.w' and 0 more"
    ):
        generate(rollout)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"match_batch_size": 4}, r"match_batch_size=4 needs logprobs_mode='trainer_match'"),
        ({"logprobs_mode": "trainer_match", "match_batch_size": 0}, r"match_batch_size.*got 0"),
        ({"logprobs_mode": "trainer_match", "match_batch_size": True}, r"match_batch_size.*True"),
        (
            {"logprobs_mode": "trainer_match", "quantization": "int8"},
            r"logprobs_mode='trainer_match' cannot be combined with quantization='int8'",
        ),
        (
            {"logprobs_mode": "trainer_match", "kv_cache_dtype": "int8"},
            r"logprobs_mode='trainer_match' cannot be combined with kv_cache_dtype='int8'",
        ),
        ({"logprobs_mode": "exact"}, r"logprobs_mode.*'trainer_match'.*'exact'"),
    ],
)
def test_bad_options_are_refused(model, options, match):
    for make in (
        functools.partial(new_rollout, model),
        functools.partial(create_sgljax_rollout, model, ref.IntegerTokenizer()),
    ):
        with pytest.raises(InvalidConfigError, match=match):
            make(**options)


def test_closing_lets_go_of_the_trainers_arrays(matching):
    rollout = matching()
    generate(rollout)
    rollout.close()
    assert rollout._match.versions == []
