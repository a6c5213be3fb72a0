"""Configs of all modes of a cluster, which the rollout checks and sizes its engine by."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
from tunix.rl.rl_cluster import Mode
from tunix.rl.rl_cluster import RLCluster as TunixRLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import InvalidConfigError
from tests.adapter.grpo_parts import EOS, PROMPTS, make_parts, rollout_config
from tests.geometry import SMALL
from tunix_sgljax import RLCluster, SglJaxRollout, create_sgljax_rollout

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix

LONG = {"max_tokens_to_generate": 100, "kv_cache_size": 128}


def make_cluster(kind: str, configs: Any) -> Any:
    """A cluster of Tunix's or of ours, which makes the rollout or is given one."""
    engine = "vanilla" if kind == "worker" else functools.partial(SglJaxRollout, **SMALL)
    parts = make_parts(rollout_config=configs, rollout_engine=engine)
    if kind == "tunix":
        return TunixRLCluster(**parts.arguments)
    tokenizer = parts.arguments["tokenizer"]
    worker = create_sgljax_rollout(model=parts.model, tokenizer=tokenizer, **SMALL)
    return RLCluster(**parts.arguments, rollout_worker=worker)


@pytest.mark.parametrize("kind", ["tunix", "worker"])
def test_an_evaluation_longer_than_training(kind):
    """Vanilla's cache is as long as the longest config needs, and so is the engine's context."""
    configs = {
        Mode.TRAIN: rollout_config(max_tokens_to_generate=16, kv_cache_size=64, eos_tokens=[]),
        Mode.EVAL: rollout_config(**LONG, eos_tokens=[]),
    }
    cluster = make_cluster(kind, configs)
    try:
        for mode, length in ((Mode.TRAIN, 16), (Mode.EVAL, 100)):
            output = cluster.generate(PROMPTS[:2], mode=mode)
            assert [len(row) for row in output.tokens] == [length] * 2
        assert cluster.rollout.engine.max_model_len == 128
    finally:
        cluster.rollout.close()


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"max_tokens_to_generate": 57}, r"EVAL: max_prompt_length 8 .* 57 = 65 exceeds .* 64 tok"),
        ({"temperature": -1.0}, r"EVAL: .*temperature"),
        ({"seed": 1 << 63}, r"EVAL: RolloutConfig\.seed"),
        ({"rollout_sglang_jax_page_size": 32}, r"EVAL: .* asks for page_size=32"),
    ],
)
def test_what_evaluation_would_be_refused_for_is_refused_before_the_first_step(evaluation, message):
    context = {"rollout_sglang_jax_context_length": 64}
    configs = {Mode.TRAIN: rollout_config(**context), Mode.EVAL: rollout_config(**evaluation)}
    for cluster in (TunixRLCluster, RLCluster):
        parts = make_parts(rollout_engine=SglJaxRollout, rollout_config=configs)
        with pytest.raises(InvalidConfigError, match=message):
            cluster(**parts.arguments)


def test_a_training_config_longer_than_the_context(caplog):
    """Its prompts may be shorter, and it is used at once: a warning."""
    parts = make_parts()
    config = RolloutConfig(max_prompt_length=60, max_tokens_to_generate=8, eos_tokens=[EOS])
    with caplog.at_level(logging.WARNING, logger="tunix_sgljax"):
        SglJaxRollout(  # no engine
            rollout_actor=parts.model,
            tokenizer=parts.arguments["tokenizer"],
            rollout_config=config,
            max_model_len=64,
        ).close()
    assert "TRAIN: max_prompt_length 60 + max_tokens_to_generate 8 = 68 exceeds" in caplog.text


def test_a_script_is_told_once_that_its_batches_come_in_parts(caplog):
    parts = make_parts(rollout_engine=functools.partial(SglJaxRollout, **SMALL))
    training = parts.arguments["cluster_config"].training_config
    training.rollout_micro_batch_size, training.train_micro_batch_size = None, 1
    cluster: Any = TunixRLCluster(**parts.arguments)
    try:
        with caplog.at_level(logging.WARNING, "tunix_sgljax"):
            config = cluster.cluster_config.rollout_config
            cluster.rollout.generate(PROMPTS[0], config)  # as agentic learners call
            assert "rollout_micro_batch_size" not in caplog.text
            cluster.generate(PROMPTS[:2], micro_batch_size=1)
        assert caplog.text.count("the engine gets 1 of a mini-batch's 2 prompts at a time") == 1
    finally:
        cluster.rollout.close()
