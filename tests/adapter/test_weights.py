"""Weight updates: complete or refused, never aliased, and first weights taken late."""

from __future__ import annotations

import contextlib
import gc
import weakref

import jax
import numpy as np
import pytest
from flax import nnx

from sgljax_engine import EngineError, InvalidConfigError, WeightSyncError
from tests import inside
from tests import tunix_reference as ref
from tests.adapter.helpers import (
    VOCAB_SIZE,
    max_difference,
    named_params,
    new_rollout,
    params_of,
    scores,
    tokens_of,
)

PROMPTS = ref.make_prompts(VOCAB_SIZE, (3, 9), seed=3)
FILTER = (nnx.Param,)


@pytest.fixture(scope="module")
def outputs(model, other_model):
    """Greedy tokens of both models, each from a rollout that never saw an update."""
    results = []
    for actor in (model, other_model):
        fresh = new_rollout(actor)
        results.append(tokens_of(fresh, PROMPTS))
        fresh.close()
    assert results[0] != results[1]
    return results


@pytest.fixture(scope="module")
def expected(outputs):
    """What `model` generates."""
    return outputs[0]


@pytest.fixture(scope="module")
def updated(outputs):
    """What `other_model` generates."""
    return outputs[1]


@pytest.fixture(scope="module")
def updatable(model):
    """A rollout that this module's tests may update."""
    shared = new_rollout(model)
    yield shared
    shared.close()


@pytest.fixture
def serving(updatable, model, expected):
    """The updatable rollout, back at `model`'s weights."""
    updatable.engine  # noqa: B018  built, so that updates count
    updatable.update_params(params_of(model), FILTER)
    assert tokens_of(updatable, PROMPTS) == expected
    return updatable


@contextlib.contextmanager
def sync_guards():
    """The guards under which `RLCluster.sync_weights` calls `update_params` on CPU."""
    with (
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
    ):
        yield


def copied(model):
    """A model with buffers of its own."""
    copy = nnx.clone(model)
    nnx.update(copy, jax.tree.map(lambda x: x.copy(), params_of(model)))
    return copy


def delete(arrays):
    for array in jax.tree.leaves(arrays):
        array.delete()


# ------------------------------------------------------------------ what an update takes


def test_an_update_as_sync_weights_does_it(serving, other_model, updated):
    version = serving.weight_version
    params = params_of(other_model)
    with sync_guards():
        serving.update_params(params, FILTER)
    assert serving.weight_version == version + 1 == serving.engine.weight_version
    assert tokens_of(serving, PROMPTS) == updated


def test_the_guards_are_tight():
    with sync_guards(), pytest.raises(Exception, match="Disallowed host-to-device"):
        jax.numpy.asarray(np.ones(3))


def test_all_parameters_are_updated(serving, other_model):
    """Log-probs, which depend on every single weight, are the trainer's."""
    serving.update_params(params_of(other_model), FILTER)
    completions = ref.make_prompts(VOCAB_SIZE, (16, 16), seed=4)
    expected = ref.trainer_logps(other_model, PROMPTS, completions)
    assert max_difference(scores(serving, PROMPTS, completions), expected) < 1e-4


SOURCES = {
    "state without a filter": params_of,
    "everything in the model": nnx.state,
    "pure dict": lambda model: nnx.to_pure_dict(params_of(model)),
    "dict by dotted names": named_params,
    "host arrays in a state": lambda model: jax.tree.map(np.asarray, params_of(model)),
    "host arrays by dotted names": lambda model: jax.device_get(named_params(model)),
    "read-only host arrays": lambda model: jax.tree.map(read_only, params_of(model)),
    "bfloat16": lambda model: jax.tree.map(
        lambda x: x.astype(jax.numpy.bfloat16), params_of(model)
    ),
}


def read_only(array):
    host = np.array(array)
    host.flags.writeable = False
    return host


@pytest.mark.parametrize("kind", SOURCES)
def test_kinds_of_sources(serving, other_model, updated, kind):
    serving.update_params(SOURCES[kind](other_model))
    if kind != "bfloat16":
        assert tokens_of(serving, PROMPTS) == updated
    else:
        assert tokens_of(serving, PROMPTS)


@pytest.mark.parametrize(
    "empty", [nnx.State({}), {}, nnx.state(None)], ids=["state", "dict", "None"]
)
def test_an_empty_state_changes_no_weights(make_rollout, expected, empty):
    """Tunix passes `nnx.state(rollout.model())` around generation with `offload_to_cpu`."""
    rollout = make_rollout()
    tokens_of(rollout, PROMPTS)
    assert rollout.model() is None
    version = rollout.weight_version
    rollout.update_params(empty)
    assert rollout.weight_version == version
    assert tokens_of(rollout, PROMPTS) == expected


# ------------------------------------------------------------------ what an update refuses


def without(params, name):
    return {key: value for key, value in params.items() if key != name}


GATE = "layers.1.mlp.gate_proj.kernel"
BAD_UPDATES = {
    "missing": (
        lambda p: without(p, GATE),
        [r"model\.layers\.1\.mlp\.gate_proj\.weight", "missing"],
    ),
    "unknown": (lambda p: p | {"layers.1.extra.w": p["final_norm.w"]}, [r"layers\.1\.extra\.w"]),
    "transposed": (
        lambda p: p | {GATE: p[GATE].T},
        [r"layers\.1\.mlp\.gate_proj\.kernel", r"\[96, 64\]", r"\[64, 96\]"],
    ),
    "not finite": (
        lambda p: p | {GATE: p[GATE] * np.float32("nan")},
        [r"^1 of \d+ new weights hold NaN", r"model\.layers\.1\.mlp\.gate_proj\.weight"],
    ),
    "no arrays": (lambda p: p | {"final_norm.w": "text"}, [r"final_norm\.w", "str"]),
    "several": (
        lambda p: without(p, GATE) | {"other.w": p["final_norm.w"]},
        [r"gate_proj", r"other\.w", r"2 problem"],
    ),
}


@pytest.mark.parametrize("kind", BAD_UPDATES)
def test_a_bad_update_is_refused_and_the_old_weights_serve(serving, other_model, expected, kind):
    change, words = BAD_UPDATES[kind]
    version = serving.weight_version
    with pytest.raises(WeightSyncError) as caught:
        serving.update_params(change(named_params(other_model)), FILTER)
    for word in words:
        assert caught.match(word)
    assert serving.weight_version == version
    assert tokens_of(serving, PROMPTS) == expected


def test_weights_that_are_not_finite_may_be_asked_for(make_rollout, other_model):
    rollout = make_rollout(check_finite=False)
    rollout.update_params(BAD_UPDATES["not finite"][0](named_params(other_model)), FILTER)
    assert rollout.weight_version == 1


def test_a_deleted_source_is_refused_and_the_old_weights_serve(serving, other_model, expected):
    """The transformation itself fails, after the plan was found good."""
    params = params_of(copied(other_model))
    delete(jax.tree.leaves(params)[3:])
    version = serving.weight_version
    with pytest.raises(WeightSyncError, match="deleted"):
        serving.update_params(params, FILTER)
    assert serving.weight_version == version
    assert tokens_of(serving, PROMPTS) == expected


def lora_state():
    lora = {"q_proj": {"w_lora_a": nnx.LoRAParam(np.ones((64, 2), np.float32))}}
    return nnx.State({"layers": {0: {"attn": lora}}})


def test_lora_is_refused(serving, model, expected):
    for params in (lora_state(), nnx.merge_state(params_of(model), lora_state())):
        with pytest.raises(EngineError, match=r"LoRA.*layers\.0\.attn\.q_proj\.w_lora_a"):
            serving.update_params(params, (nnx.LoRAParam,))
    assert tokens_of(serving, PROMPTS) == expected


def test_a_lora_actor_is_refused(make_rollout, model):
    actor = nnx.clone(model)
    actor.layers[0].attn.q_proj.w_lora_a = nnx.LoRAParam(jax.numpy.ones((64, 2)))
    with pytest.raises(InvalidConfigError, match="LoRA"):
        tokens_of(make_rollout(actor), PROMPTS)


# ------------------------------------------------------------------ the first weights


def test_the_first_weights_are_those_at_the_first_call(make_rollout, model, other_model, updated):
    """A checkpoint is restored into the actor after the cluster has built the rollout."""
    actor = copied(model)
    rollout = make_rollout(actor)
    nnx.update(actor, params_of(other_model))
    assert tokens_of(rollout, PROMPTS) == updated
    assert rollout.weight_version == 0


def test_an_update_before_the_first_call_counts(make_rollout, other_model):
    """`weight_version` is "one more with every `update_params`"."""
    rollout = make_rollout()
    assert rollout.weight_version == 0
    rollout.update_params(params_of(other_model), FILTER)
    assert rollout.weight_version == 1
    tokens_of(rollout, PROMPTS)
    assert rollout.weight_version == 1
    rollout.update_params(params_of(other_model), FILTER)
    assert rollout.weight_version == 2


@pytest.mark.parametrize("kind", ["missing", "not finite"])
def test_a_bad_update_before_the_first_call(make_rollout, model, expected, kind):
    """Refused right there, and the actor's weights serve."""
    change, words = BAD_UPDATES[kind]
    rollout = make_rollout()
    with pytest.raises(WeightSyncError, match=words[0]):
        rollout.update_params(change(named_params(model)), FILTER)
    assert tokens_of(rollout, PROMPTS) == expected


# ------------------------------------------------------------------ whose memory


def pointers(arrays):
    return {array.unsafe_buffer_pointer() for array in jax.tree.leaves(arrays)}


def engine_weights(rollout):
    weights = inside.runner(rollout.engine).weights
    assert len(weights) >= 10
    return weights


def test_first_weights_are_copied(make_rollout, model, expected):
    actor = copied(model)
    rollout = make_rollout(actor)
    tokens_of(rollout, PROMPTS)
    assert not pointers(engine_weights(rollout)) & pointers(params_of(actor))
    delete(params_of(actor))
    assert tokens_of(rollout, PROMPTS) == expected


def test_updates_are_copied(serving, other_model, updated):
    source = params_of(copied(other_model))
    serving.update_params(source, FILTER)
    assert not pointers(engine_weights(serving)) & pointers(source)
    delete(source)
    assert tokens_of(serving, PROMPTS) == updated


def test_host_arrays_may_be_written_to_afterwards(serving, other_model, updated):
    source = jax.tree.map(np.array, params_of(other_model))
    serving.update_params(source)
    for array in jax.tree.leaves(source):
        array.fill(np.nan)
    assert tokens_of(serving, PROMPTS) == updated


def test_an_update_before_the_first_call_is_copied(make_rollout, other_model, updated):
    source = params_of(copied(other_model))
    rollout = make_rollout()
    rollout.update_params(source, FILTER)
    delete(source)
    assert tokens_of(rollout, PROMPTS) == updated


def test_the_actor_is_not_kept_alive(make_rollout, model):
    actor = copied(model)
    dead = weakref.ref(actor)
    rollout = make_rollout(actor)
    tokens_of(rollout, PROMPTS)
    del actor
    gc.collect()
    assert dead() is None


def test_old_weights_are_let_go(serving, other_model):
    old = weakref.ref(next(iter(engine_weights(serving).values())))
    serving.update_params(params_of(other_model), FILTER)
    tokens_of(serving, PROMPTS)
    gc.collect()
    assert old() is None


def test_close_frees_the_memory(model):
    rollout = new_rollout(model)
    tokens_of(rollout, PROMPTS)
    runner = inside.runner(rollout.engine)
    arrays = [weakref.ref(a) for a in jax.tree.leaves((runner.weights, runner.kv_memory.kv))]
    del runner
    rollout.close()
    gc.collect()
    assert all(array() is None for array in arrays)
