"""Log-probs of a real model under LoRA: those of the rollout are those of Tunix's trainer."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from flax import nnx
from transformers import AutoTokenizer

from smollm2_as_qwen2 import as_qwen2
from tests import lora_models
from tests.golden import smollm2_texts as texts
from tunix_sgljax import mismatch_report
from tunix_sgljax.lora import LoraMode

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Tunix
]

NUM_ROWS = 16
SIZE = 0.02
"""Size of the pairs' values: they change what is sampled, and the model still writes words."""


@pytest.fixture(scope="module")
def prompts(smollm2):
    """Chats of the goldens, in many scripts."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    chats = [each.messages for each in texts.prompts() if each.messages is not None]
    rendered = [
        str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        for chat in chats
    ]
    return [text for text in rendered if len(tokenizer.encode(text)) <= 112][:NUM_ROWS]


@pytest.mark.soak
@pytest.mark.parametrize("mode", get_args(LoraMode))
def test_mismatch_under_lora(smollm2, prompts, mode):
    """The config is that of examples/grpo_reasoning.py; pairs that were not synced are noticed."""
    from grpo_reasoning import CONFIG
    from tunix_sgljax.training import load_config
    from tunix_sgljax.training.cluster import make_cluster, rollout_engine
    from tunix_sgljax.training.models import find_model, load_tokenizer

    options = {
        "actor_model_config.model_path": as_qwen2(smollm2),
        "rollout_config.total_generation_steps": 24,
        "sgljax_config.lora": mode,
        "sgljax_config.max_running_requests": NUM_ROWS,
        "sgljax_config.batch_buckets": f"[{NUM_ROWS}]",
    }
    config = load_config(CONFIG, [f"{key}={value}" for key, value in options.items()])
    spec, tokenizer = find_model(config.actor_model_config), load_tokenizer(config)
    cluster: Any = make_cluster(config, spec, tokenizer, rollout_engine(config))
    rollout, actor = cluster.rollout, cluster.actor_trainer.model

    def report():
        return mismatch_report(rollout, actor, prompts, batch_size=NUM_ROWS)

    sampled = []
    for seed in (1, 2):
        rollout.update_params(lora_models.draw(actor, seed, SIZE), (nnx.LoRAParam,))
        found = report()
        assert found.is_within(), str(found)
        assert found.overall.num_tokens > 10 * NUM_ROWS
        assert found.overall.k3 < 1e-8
        sampled.append(found.tokens.tolist())
    assert sampled[0] != sampled[1]
    lora_models.draw(actor, 3, SIZE)
    assert len(report().rows_off()) > NUM_ROWS // 2
    rollout.close()
