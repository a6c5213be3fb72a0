"""The `lora` section: what is trained, what is kept, what it takes, and what is refused."""

from __future__ import annotations

import json
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from tests.training.test_train import check_steps, read_records, train
from tests.training.tiny import shape_of, write_config
from tunix_sgljax.checkpoints.lora_settings import read_settings
from tunix_sgljax.checkpoints.tunix import find_step, read_checkpoint
from tunix_sgljax.training import load_config
from tunix_sgljax.training.cluster import make_cluster, make_meshes, make_optimizers, rollout_engine
from tunix_sgljax.training.lora import abstract_actor, apply_lora
from tunix_sgljax.training.memory import estimate_memory
from tunix_sgljax.training.models import find_model, load_policy, load_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix and orbax

QUICK_COMPILE = "files, steps, memory and messages of trainings, not what they learn"

LORA = {"rank": 4, "alpha": 8.0}
KEY = "actor_model_config.lora_config"
QUANTISED = {"qwen3": ".*mlp.*", "llama3": ".*(attn|mlp).*"}
"""What Tunix 0.1.7 can compute with quantised, by family."""


def config_of(tmp_path, *overrides, **changes):
    return load_config(
        write_config(tmp_path, **({"actor_model_config__lora_config": LORA} | changes)), overrides
    )


def actor_of(config) -> Any:
    spec = find_model(config.actor_model_config)
    policy = load_policy(config.actor_model_config, spec, make_meshes(config)[0])
    return apply_lora(policy, config.actor_model_config.lora_config, config.seed)


def memory_of(config):
    mesh = make_meshes(config)[0]
    return estimate_memory(
        config, find_model(config.actor_model_config), mesh, make_optimizers(config)
    )


def num_bytes(state):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


# ------------------------------------------------------------------ parts


@pytest.mark.soak
@pytest.mark.parametrize("qtype", [None, "int8", "nf4"])
@pytest.mark.parametrize("family", QUANTISED)
def test_memory_is_that_of_the_actor(tmp_path, family, qtype):
    model: dict[str, Any] = {
        "actor_model_config__family": family,
        "actor_model_config__shape": shape_of(family),
    }
    overrides = [f"{KEY}.module_path={QUANTISED[family]}"]
    overrides += [] if qtype is None else [f"{KEY}.weight_qtype={qtype}"]
    config = config_of(tmp_path, *overrides, **model)
    full = memory_of(config_of(tmp_path, **model, actor_model_config__lora_config=None))
    actor, found = actor_of(config), memory_of(config)
    pairs = num_bytes(nnx.state(actor, nnx.LoRAParam))
    assert found.policy == num_bytes(nnx.state(actor, nnx.Param))
    assert found.gradients == pairs
    assert 2 * pairs <= found.optimizer < 2 * pairs + 64  # Adam's moments and its counts
    assert found.reference == found.policy - (pairs if qtype is None else 0)
    assert found.engine_weights == full.engine_weights == full.policy
    assert found.total < full.total
    if qtype is not None:
        assert found.policy < full.policy
    for override in ("grpo_config.beta=0", "sgljax_config.lora=adapter"):
        assert memory_of(config_of(tmp_path, *overrides, override, **model)).reference == 0


@pytest.mark.slow
def test_abstract_pairs_are_the_actors(tmp_path):
    config = config_of(tmp_path, "actor_model_config.remat=block")
    assert config.actor_model_config.lora_config is not None
    abstract = abstract_actor(
        find_model(config.actor_model_config), config.actor_model_config.lora_config
    )
    for state, kind in ((abstract.pairs, nnx.LoRAParam), (abstract.base, nnx.Param)):
        real = nnx.state(actor_of(config), kind)
        shapes = {key: (leaf.shape, leaf.dtype) for key, leaf in nnx.to_flat_state(state)}
        wanted = {key: (leaf.shape, leaf.dtype) for key, leaf in nnx.to_flat_state(real)}
        if kind is nnx.Param:
            wanted = {key: value for key, value in wanted.items() if "_lora_" not in str(key[-1])}
        assert shapes == wanted


@pytest.mark.slow
def test_new_pairs_change_nothing_and_follow_the_seed(tmp_path):
    config = config_of(tmp_path)
    a, b, other = actor_of(config), actor_of(config), actor_of(config_of(tmp_path, "seed=1"))
    pair = lambda model: model.layers[0].attn.q_proj  # noqa: E731
    np.testing.assert_array_equal(pair(a).w_lora_a[...], pair(b).w_lora_a[...])  # not computed
    assert np.abs(np.asarray(pair(a).w_lora_a[...] - pair(other).w_lora_a[...])).max() > 0
    assert not np.asarray(pair(a).w_lora_b[...]).any()


def base_buffers(model):
    base = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(base)]


@pytest.mark.slow
@pytest.mark.parametrize("qtype", [pytest.param(None, marks=pytest.mark.soak), "int8"])
def test_the_frozen_model_begins_with_the_actors_arrays(tmp_path, qtype):
    int8 = [f"{KEY}.weight_qtype=int8", f"{KEY}.module_path=.*mlp.*"]
    overrides = [] if qtype is None else int8
    config = config_of(tmp_path, *overrides)
    engine, spec = rollout_engine(config), find_model(config.actor_model_config)
    cluster: Any = make_cluster(config, spec, load_tokenizer(config), engine)
    frozen = cluster.inference_worker.get_model("reference")
    assert base_buffers(frozen) == base_buffers(cluster.actor_trainer.model)
    assert cluster.rollout.lora_report.base_holder == "the actor"
    cluster.rollout.close()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (f"{KEY}.module_path=q_proj", "fits no projection of the model; it must match the"),
        (f"{KEY}.module_path=q_proj", "layers/<layer>/attn/q_proj, layers/<layer>/attn/v_proj"),
        (f"{KEY}.module_path=.*", "fits the embedding, beside which Tunix cannot train a pair"),
        ("sgljax_config.lora=mixed", "sgljax_config: lora must be one of"),
        (f"{KEY}.weight_qtype=int8", "Tunix's qwen3 cannot compute with all of these"),
    ],
)
def test_what_the_model_does_not_have_is_refused(tmp_path, capsys, overrides, message):
    path = write_config(tmp_path, actor_model_config__lora_config=LORA)
    assert train(path, "--dry-run", *overrides.split()) == 2
    assert message in capsys.readouterr().err


def test_an_untied_output_projection_may_have_a_pair(tmp_path):
    config = config_of(
        tmp_path,
        f"{KEY}.module_path=.*lm_head.*",
        "actor_model_config.shape.use_tied_embedding=false",
    )
    model = config.actor_model_config
    assert model.lora_config is not None
    pairs = nnx.to_flat_state(abstract_actor(find_model(model), model.lora_config).pairs)
    assert {key[0] for key, _ in pairs} == {"lm_head"}


# ------------------------------------------------------------------ runs


@pytest.mark.soak
def test_pairs_alone_are_trained_and_saved_and_a_run_resumes(tmp_path, capsys):
    checkpoints = tmp_path / "checkpoints"
    path = write_config(
        tmp_path,
        actor_model_config__lora_config=LORA,
        rl_training_config__checkpoint_root_directory=str(checkpoints),
    )
    config = load_config(path)
    first = {
        ".".join(map(str, key)): np.asarray(leaf[...])
        for key, leaf in nnx.to_flat_state(nnx.state(actor_of(config), nnx.LoRAParam))
    }
    assert train(path, "num_batches=1") == 0
    check_steps(read_records(tmp_path), [1], [0])
    assert json.loads((checkpoints / "lora.json").read_text()) == {
        "rank": 4,
        "alpha": 8.0,
        "module_path": ".*(attn|mlp).*",
        "weight_qtype": None,
    }
    assert train(path) == 0
    check_steps(read_records(tmp_path), [1, 2], [0, 0])
    one, two = (read_checkpoint(find_step(checkpoints, step)) for step in (1, 2))
    assert set(one) == set(two) == set(first)
    for name in first:
        if name.endswith("_lora_b"):  # the gradient of A is 0 as long as B is
            assert np.abs(one[name] - first[name]).max() > 0, name
        assert np.abs(two[name] - one[name]).max() > 0, name
    check_refusals(tmp_path, path, checkpoints, capsys)


def check_refusals(tmp_path, path, checkpoints, capsys):
    """Runs that would go on with other pairs than the checkpoint's, or none."""
    for override, message in (
        (f"{KEY}.alpha=4", "was trained with LoraSettings(rank=4, alpha=8.0"),
        (f"{KEY}.rank=2", "but lora_config is LoraSettings(rank=2, alpha=8.0"),
        (f"{KEY}=null", "holds LoRA pairs, but lora_config is null"),
    ):
        assert train(path, "--dry-run", override) == 2
        assert message in capsys.readouterr().err
    (checkpoints / "lora.json").unlink()  # as of another program
    assert train(path, "--dry-run", f"{KEY}.rank=2") == 2
    assert "k_proj.w_lora_a has shape (32, 4) there and (32, 2) in the" in capsys.readouterr().err
    assert train(path, "--dry-run", f"{KEY}.module_path=.*mlp.*") == 2
    assert "k_proj.w_lora_a has shape (32, 4) there and None in the" in capsys.readouterr().err
    assert train(path, "--dry-run") == 0
    shutil.rmtree(checkpoints)
    assert read_settings(checkpoints) is None
    assert train(path, "--dry-run", f"{KEY}.rank=2") == 0


@pytest.mark.soak
def test_a_full_checkpoint_is_no_base_of_pairs(tmp_path, capsys):
    path = write_config(
        tmp_path, rl_training_config__checkpoint_root_directory=str(tmp_path / "full")
    )
    assert train(path, "num_batches=1") == 0
    assert not (tmp_path / "full/lora.json").exists()
    assert train(path, f"{KEY}={{rank: 4, alpha: 8}}") == 2
    assert "holds whole models, but lora_config is given" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.parametrize("offloads", [False, True])
def test_quantised_bases_are_trained_beside(tmp_path, offloads):
    path = write_config(
        tmp_path,
        actor_model_config__lora_config=LORA | {"weight_qtype": "nf4"},
        actor_model_config__family="llama3",
        actor_model_config__shape=shape_of("llama3"),
        offload_to_cpu=offloads,
        rl_training_config__checkpoint_root_directory=str(tmp_path / "checkpoints"),
    )
    assert train(path) == 0
    if not offloads:  # that brings updates of its own
        check_steps(read_records(tmp_path), [1, 2], [0, 1])
    pairs = read_checkpoint(find_step(tmp_path / "checkpoints"))
    assert len(pairs) == 2 * 7 * 2
    assert all(np.abs(pair).max() > 0 for pair in pairs.values())


def test_settings_that_cannot_be_read(tmp_path):
    for text, message in (
        ('{"rank": 4}', r"lora\.json cannot be read"),
        ('{"rank": 0, "alpha": 1.0}', "must hold a rank >= 1"),
    ):
        (tmp_path / "lora.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_settings(tmp_path)
