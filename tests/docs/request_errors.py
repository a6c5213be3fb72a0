"""Producers of errors that come with a request or a control call."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sgljax_engine import Engine, hf_rules
from tests import inside
from tests.adapter.helpers import new_rollout, rollout_config
from tests.docs.error_cases import OPTIONS, Parts, Producers, held_request, new_engine
from tests.engine.models import TINY, spread_weights
from tests.engine.small_tokenizers import CharTokenizer


def saved(parts: Parts, name: str) -> Path:
    """A folder with a checkpoint of no requests."""
    folder = parts.tmp_path / name
    parts.engine.save_checkpoint(folder)
    return folder


PRODUCERS = Producers()
produces = PRODUCERS.named


@produces("unknown_sampling_field")
def _(parts: Parts):
    parts.engine.generate(input_ids=[1], sampling_params={"temprature": 0.5})


@produces("renamed_sampling_field")
def _(parts: Parts):
    parts.engine.generate(input_ids=[1], sampling_params={"max_tokens": 64})


@produces("refused_sampling_field")
def _(parts: Parts):
    parts.engine.generate(input_ids=[1], sampling_params={"regex": "[0-9]+"})


@produces("out_of_range")
def _(parts: Parts):
    parts.engine.generate(input_ids=[1], sampling_params={"top_p": 0})


@produces("prompt_too_long")
def _(parts: Parts):
    parts.engine.generate(input_ids=[1] * 300)


@produces("request_too_long")
def _(parts: Parts):
    parts.engine.generate(input_ids=[1] * 200, sampling_params={"max_new_tokens": 128})


@produces("pool_too_small")
def _(parts: Parts):
    parts.engine.generate(input_ids=[1] * 100, sampling_params={"max_new_tokens": 100})


@produces("no_tokenizer")
def _(parts: Parts):
    parts.engine.generate("The capital of France is")


@produces("ids_as_prompt")
def _(parts: Parts):
    prompt: Any = [5, 6]
    parts.engine.generate(prompt)


@produces("messages_as_prompt")
def _(parts: Parts):
    messages: Any = [{"role": "user", "content": "Count to ten."}]
    parts.engine.generate(messages)


@produces("text_as_ids")
def _(parts: Parts):
    text: Any = "The capital of France is"
    parts.engine.generate(input_ids=text)


@produces("one_sequence_to_score")
def _(parts: Parts):
    sequence: Any = [1, 2, 3]
    parts.engine.score(sequence)


@produces("empty_prompt")
def _(parts: Parts):
    parts.engine.generate(input_ids=[])


@produces("token_out_of_vocabulary")
def _(parts: Parts):
    parts.engine.generate(input_ids=[5, 128])


@produces("stop_needs_tokenizer")
def _(parts: Parts):
    parts.engine.generate(input_ids=[1], sampling_params={"stop": ["</answer>"]})


@produces("no_chat_template")
def _(_: Parts):
    with new_engine(tokenizer=CharTokenizer()) as engine:
        engine.chat([{"role": "user", "content": "Count to ten."}])


@produces("rid_in_use")
def _(parts: Parts):
    parts.engine.pause_generation("retract")
    stream = parts.engine.generate(input_ids=[1], rid="sample-7", stream=True)
    try:
        parts.engine.generate(input_ids=[1], rid="sample-7")
    finally:
        stream.close()
        parts.engine.continue_generation()


@produces("logprobs_not_asked_for")
def _(parts: Parts):
    parts.engine.generate(input_ids=[1], top_logprobs_num=5)


@produces("pause_mode")
def _(parts: Parts):
    parts.engine.pause_generation("stop")  # type: ignore[arg-type]


@produces("kv_in_use")
def _(parts: Parts):
    with held_request(parts.engine):
        parts.engine.release_kv_cache()


@produces("in_place_flush")
def _(parts: Parts):
    with held_request(parts.engine):
        parts.engine.update_weights(spread_weights(), mode="in_place", flush_cache=True)


@produces("wait_in_pause")
def _(parts: Parts):
    with held_request(parts.engine):
        parts.engine.update_weights(spread_weights(), mode="wait")


@produces("asleep")
def _(parts: Parts):
    parts.engine.sleep()
    try:
        parts.engine.score([[1, 2, 3]])
    finally:
        parts.engine.wake_up()


@produces("no_weights")
def _(parts: Parts):
    parts.engine.sleep(level=2)
    parts.engine.wake_up()
    try:
        parts.engine.generate(input_ids=[1])
    finally:
        parts.engine.update_weights(spread_weights())


@produces("weights_lost")
def _(parts: Parts):
    calls = itertools.count()

    def unsteady(weight):
        """Gives other values each time, as a hook that reads something outside might."""
        number = jax.ShapeDtypeStruct((), np.float32)
        return weight + jax.pure_callback(lambda: np.float32(next(calls)), number)

    weights = spread_weights()
    rules = [
        rule._replace(hook=unsteady if "norm" in rule.source else None) for rule in hf_rules(TINY)
    ]
    try:
        parts.engine.update_weights(weights, rules, donate=True, verify=True)
    finally:
        parts.engine.update_weights(spread_weights())


@produces("shut_down")
def _(_: Parts):
    engine = new_engine()
    engine.shutdown()
    engine.generate(input_ids=[1])


@produces("rollout_closed")
def _(parts: Parts):
    rollout = new_rollout(parts.model)
    rollout.close()
    rollout.generate(["2 3"], rollout_config())


@produces("not_warm")
def _(_: Parts):
    with new_engine(forbid_compile=True) as engine:
        engine.warmup()
        engine.generate(input_ids=[1], sampling_params={"repetition_penalty": 1.1})


@produces("failed_step")
def _(_: Parts):
    with new_engine() as engine:
        # What a device that lost an array does: the program cannot run.
        next(iter(inside.runner(engine).weights.values())).delete()
        engine.generate(input_ids=[1])


@produces("failed_offload")
def _(_: Parts):
    with new_engine() as engine:
        next(iter(inside.runner(engine).weights.values())).delete()
        engine.sleep()


@produces("no_checkpoint")
def _(parts: Parts):
    parts.engine.restore_checkpoint(parts.tmp_path / "none.ckpt")


@produces("folder_without_checkpoint")
def _(parts: Parts):
    (parts.tmp_path / "empty").mkdir()
    parts.engine.restore_checkpoint(parts.tmp_path / "empty")


@produces("damaged_checkpoint")
def _(parts: Parts):
    folder = saved(parts, "damaged.ckpt")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"timestamp": 1.0}))
    parts.engine.restore_checkpoint(folder)


@produces("newer_checkpoint")
def _(parts: Parts):
    folder = saved(parts, "newer.ckpt")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"version": 2}))
    parts.engine.restore_checkpoint(folder)


@produces("checkpoint_of_another_model")
def _(parts: Parts):
    folder = saved(parts, "other.ckpt")
    model = dataclasses.replace(TINY, rms_norm_eps=1e-5)
    with Engine(model_config=model, load_format="dummy", **OPTIONS) as other:
        other.restore_checkpoint(folder)
