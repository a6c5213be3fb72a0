"""The addition policy as a Hugging Face folder: the same tokens, the same weights."""

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

import hf_folder
from addition_task import Problem, Tokenizer, load_checkpoint, model_config
from sgljax_engine import Engine, load_model_config
from tests.geometry import SMALL
from tunix_sgljax import SglJaxRollout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "addition"
    assert hf_folder.main([str(path)]) == 0
    return path


def test_tokenizer_is_that_of_the_task(folder):
    fast, task = AutoTokenizer.from_pretrained(folder), Tokenizer()
    characters = "".join(map(chr, range(ord(" "), ord("|") + 1)))
    for text in (Problem(37, 58).prompt, Problem(999, 1).solution, characters, "  a b "):
        ids = task.encode(text)
        assert fast(text)["input_ids"] == [task.bos_id(), *ids]
        assert fast.decode(ids) == text
    assert len(fast) == task.vocab_size
    special = [fast.pad_token_id, fast.bos_token_id, fast.eos_token_id]
    assert special == [task.pad_id(), task.bos_id(), task.eos_id()]


def test_chat_template_asks_the_task(folder):
    fast = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "37+58"}]
    text = fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<bos>" + Problem(37, 58).prompt
    messages.append({"role": "assistant", "content": "95"})
    text = fast.apply_chat_template(messages, tokenize=False)
    assert text == "<bos>" + Problem(37, 58).prompt + "95"


@pytest.mark.slow
def test_engine_has_the_weights_of_the_policy(folder):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    actor = load_checkpoint(hf_folder.CHECKPOINT, mesh)
    rollout = SglJaxRollout(  # no engine that generates
        rollout_actor=actor,
        tokenizer=Tokenizer(),
        mesh=mesh,
        max_model_len=64,
        **SMALL,
    )
    with Engine(folder, **SMALL) as engine:
        assert engine.get_weights_checksum() == rollout.engine.get_weights_checksum()
        greedy = {"temperature": 0, "max_new_tokens": 4}
        assert engine.generate(Problem(37, 58).prompt, greedy)["text"] == "7+8="
    rollout.close()
    assert load_model_config(folder).num_layers == model_config().num_layers
