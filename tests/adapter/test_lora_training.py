"""LoRA actors in Tunix's own learner, and in all that a rollout does besides sampling."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from tunix.rl.grpo.grpo_learner import GRPOLearner
from tunix.rl.rl_cluster import RLCluster

from sgljax_engine import InvalidConfigError
from tests import lora_models
from tests import tunix_reference as ref
from tests.adapter import grpo_parts as parts
from tests.adapter.helpers import max_difference, new_rollout, scores
from tests.devices import run_python
from tests.geometry import SMALL
from tunix_sgljax import RLCluster as OurCluster
from tunix_sgljax import SglJaxRollout, mismatch_report

ENGINE = functools.partial(SglJaxRollout, **SMALL)

TOKENS = (
    jax.numpy.asarray([[0, 0, 3, 4], [5, 6, 7, 8]]),
    jax.numpy.asarray([[9, 10, 11, 0], [12, 13, 0, 0]]),
)

# Warnings of Tunix itself and of what it uses, while it trains.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def lora_parts(**changes):
    """The parts of a GRPO program whose actor is a LoRA model over the reference's weights."""
    made = parts.make_parts(**changes)
    rule = {"module_path": ".*(attn|mlp).*", "rank": 4, "alpha": 8.0}
    made.arguments["actor"] = lora_models.add_pairs(made.arguments["reference"], [rule])
    return made


def check_follows(cluster):
    """The rollout scores as the trainer's model does, and that is not the reference any more."""
    prompts = [np.array(prompt.split(), np.int32) for prompt in parts.PROMPTS]
    completions = ref.make_prompts(64, (8, 3, 8, 5), seed=8)
    got = scores(cluster.rollout, prompts, completions)
    actor = cluster.actor_trainer.model
    here = jax.tree.map(lambda x: jax.device_put(np.asarray(x)), nnx.state(actor))
    nnx.update(actor, here)  # from the host's memory, or from several devices
    for model, is_near in ((actor, True), (ref.make_tunix_qwen3(parts.MODEL), False)):
        logps = ref.trainer_logps(model, prompts, completions, temperature=parts.TEMPERATURE)
        assert (max_difference(got, logps) < 1e-4) == is_near


@pytest.mark.soak
@pytest.mark.parametrize(
    ("offloads", "mode"),
    [
        (False, "adapter"),
        (True, "merged"),
        (True, "adapter"),
    ],
)
def test_a_grpo_run(offloads, mode):
    engine = functools.partial(ENGINE, lora=mode)
    made = lora_parts(rollout_engine=engine, offload_to_cpu=offloads)
    cluster: Any = RLCluster(**made.arguments)
    learner = GRPOLearner(cluster, parts.grpo_config(), parts.reward)
    learner.train(parts.list_batches())
    if not offloads:  # that brings updates of its own
        assert cluster.rollout.weight_version == parts.NUM_STEPS
    # Training replaced the frozen arrays by others, and the rollout refers to those: no copy.
    model = cluster.actor_trainer.model
    base = cluster.rollout._builder.weights._lora._base()
    assert base["layers.0.mlp.up_proj.kernel"] is model.layers[0].mlp.up_proj.kernel.get_value()
    report = cluster.rollout.lora_report
    assert report.base_holder == "the actor"
    assert report.base_bytes == sum(
        x.nbytes for x in jax.tree.leaves(nnx.state(parts.make_parts().model, nnx.Param))
    )
    check_follows(cluster)
    cluster.rollout.close()


MESHES = """
import functools
import sys
import numpy as np
from absl import logging
logging.set_verbosity(logging.ERROR)
import jax
from jax.sharding import Mesh
from tests.adapter import grpo_parts as parts, test_lora_training as lora
from tunix.rl.grpo.grpo_learner import GRPOLearner
from tunix.rl.rl_cluster import RLCluster, Role
devices = np.array(jax.devices())
shared = Mesh(devices.reshape(2, 2), ("fsdp", "tp"))
trainer = Mesh(devices[:2].reshape(2, 1), ("fsdp", "tp"))
sampler = Mesh(devices[2:].reshape(1, 2), ("fsdp", "tp"))
(mode,) = sys.argv[1:]
actor, rollout = {"merged": (shared, shared), "adapter": (trainer, sampler)}[mode]
meshes = {Role.ACTOR: actor, Role.REFERENCE: actor, Role.ROLLOUT: rollout}
engine = functools.partial(lora.ENGINE, lora=mode)
made = lora.lora_parts(meshes=meshes, rollout_engine=engine)
cluster = RLCluster(**made.arguments)
GRPOLearner(cluster, parts.grpo_config(), parts.reward).train(parts.list_batches())
found = cluster.rollout.find_differing_weights(lora.lora_models.leaves(cluster.actor_trainer.model))
assert found == [], found
lora.check_follows(cluster)
cluster.rollout.close()
print("lora meshes ok")
"""


@pytest.mark.soak
def test_the_rollout_stands_in_for_the_reference():
    """With lora="adapter" a run with a KL penalty needs no second model."""
    logps = []
    for reference in (True, False):
        made = lora_parts(rollout_engine=functools.partial(ENGINE, lora="adapter"))
        if not reference:
            made.arguments["reference"] = None
        cluster: Any = OurCluster(**made.arguments)
        GRPOLearner(cluster, parts.grpo_config(), parts.reward).train(parts.list_batches())
        check_follows(cluster)
        logps.append(np.asarray(cluster.get_ref_per_token_logps(*TOKENS, pad_id=0, eos_id=1)))
        cluster.rollout.close()
    mask = np.asarray(TOKENS[1]) != 0
    assert np.abs(logps[0] - logps[1])[mask].max() < 1e-4


def test_without_a_reference_and_adapters_an_error_says_so():
    made = lora_parts(rollout_engine=ENGINE)
    made.arguments["reference"] = None
    cluster: Any = OurCluster(**made.arguments)
    with pytest.raises(InvalidConfigError, match=r"reference must be a model.*lora='adapter'"):
        cluster.get_ref_per_token_logps(*TOKENS, pad_id=0, eos_id=1)
    with pytest.raises(InvalidConfigError, match="log-probs of the base need a LoRA actor"):
        cluster.rollout.get_ref_per_token_logps(*TOKENS)
    cluster.rollout.close()


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["adapter", "merged"])
def test_on_several_devices(mode):
    """Trainer and rollout on two meshes of two devices, and on one of four."""
    done = run_python("-W", "ignore", "-c", MESHES, mode, num_devices=4)
    assert "lora meshes ok" in done.stdout


def test_the_trainers_bits():
    model = lora_models.make("gqa2_tied")
    rollout = new_rollout(model, logprobs_mode="trainer_match")
    rollout.engine  # noqa: B018
    rollout.update_params(lora_models.draw(model, 1), (nnx.LoRAParam,))
    report = mismatch_report(rollout, model, ["5 6 7", "8 9"])
    assert report.overall.max_abs == 0.0
    assert report.overall.num_tokens > 16
    rollout.close()
