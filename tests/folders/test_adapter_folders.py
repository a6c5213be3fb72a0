"""Adapters in PEFT's form, read by us and by PEFT 0.21.2: equal, or refused with a reason.

The adapters are made from seeds, and PEFT's answers are stored: see make_adapter_goldens.py.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest

from sgljax_engine import Engine, EngineError, InvalidRequestError, WeightLoadError
from tests.folders import ours
from tests.folders.adapter_cases import FAMILIES, OTHERS, PLAIN, cases
from tests.geometry import SMALL
from tests.tiers import tiered

ANSWERS = Path(__file__).with_name("adapter_answers.npz")
GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 5e-3

REFUSED = {
    "a pair of no target": "leave out 'model.layers.0.self_attn.v_proj'",
    "a pair of no layer": "leave out 'model.layers.1.self_attn.q_proj'",
    "a pair that is left out": "leave out 'model.layers.0.self_attn.v_proj'",
    "half a pair": "is alone: half a pair",
    "no targets": "target_modules and the fields beside it leave out",
    "dora": "use_dora=True is not supported",
    "dora without magnitudes": "use_dora=True is not supported",
    "a bias": "bias='lora_only'; only",
    "a bias of no tensor": "bias='all'; only",
    "biases of B": "lora_bias=True is not supported",
    "a head of its own": r"modules_to_save=\['lm_head'\] is not supported",
    "whole weights": "is no half of a linear layer's pair",
    "embeddings": "lora_embedding_A' .* is no half",
    "transposed": "fan_in_fan_out=True is not supported",
    "pissa": "init_lora_weights='pissa'; only",
    "olora": "init_lora_weights='olora'; only",
    "random": "init_lora_weights=False; only",
    "replicated": "layer_replication=.* is not supported",
    "activated by tokens": "alora_invocation_tokens=.* is not supported",
    "qalora": "use_qalora=True is not supported",
    "another kind": "peft_type='IA3'; only",
    "a field of the future": "lora_of_the_future=True is not supported",
}
"""What PEFT computes with, or leaves out with a warning, and we refuse."""


def test_the_answers_are_of_these_adapters():
    facts, rows = answers()
    assert facts.keys() == cases().keys()
    assert len(facts) >= 150
    assert {fact["row"] for fact in facts.values() if "row" in fact} == set(range(len(rows)))


def answers():
    with np.load(ANSWERS, allow_pickle=False) as stored:
        return json.loads(stored["facts"].tobytes()), stored["logprobs"]


@pytest.mark.parametrize("family", tiered(FAMILIES, ["qwen3"], ["gemma2"]))
def test_a_folder_means_what_peft_makes_of_it(family):
    facts, rows = answers()
    equal = 0
    for name, adapter in cases().items():
        if name.split(" + ")[0] != family:
            continue
        found, edits = read(adapter), name.split(" + ")[1:]
        reason = REFUSED.get(edits[0]) if len(edits) == 1 else None
        if "error" in facts[name]:
            assert isinstance(found, EngineError), (name, facts[name])
        elif reason is not None:
            assert re.search(reason, str(found)), (name, found)
        elif len(edits) > 1 and isinstance(found, EngineError):  # edits that contradict each other
            assert "target_modules and the fields beside it leave out" in str(found), (name, found)
        else:
            assert isinstance(found, ours.Found), (name, found)
            error = np.abs(ours.logprobs(found) - rows[facts[name]["row"]]).max()
            assert error <= TOLERANCE, (name, error)
            equal += 1
    assert equal >= len(PLAIN)


def read(adapter):
    """What we read of an adapter and its base; the error that refuses it."""
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / "base"
        base.mkdir()
        adapter.base.write(base)
        adapter.write(Path(scratch))
        try:
            return ours.read(base, Path(scratch))
        except EngineError as error:
            return error


def test_every_refusal_has_a_case():
    assert REFUSED.keys() <= OTHERS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_gqa_tied", "gemma2_window"])
def test_an_engine_computes_what_peft_does(name):
    """PEFT has loaded these files, which `convert --peft` wrote: golden/make_peft_goldens.py."""
    folder = GOLDEN / "adapters" / name
    known = np.load(folder / "peft.npz")
    options = {**SMALL, "max_loras": 2, "max_lora_rank": 4, "adapters": {"first": folder}}
    with Engine(GOLDEN / name, **options) as engine:
        engine.load_adapter("second", folder)
        assert engine.find_differing_adapter("second", folder) == []
        for i in range(int(known["num_prompts"])):
            prompt, logits = known[f"prompt_{i}"], known[f"logits_{i}"].astype(np.float64)
            logits -= logits.max(-1, keepdims=True)
            logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            expected = logps[np.arange(len(prompt) - 1), prompt[1:]]
            for adapter in ("first", "second"):
                (found,) = engine.score([prompt.tolist()], lora=adapter)
                np.testing.assert_allclose(found, expected, atol=1e-4)
        with pytest.raises(WeightLoadError, match="no such folder of an adapter: 'nowhere'"):
            engine.load_adapter("third", "nowhere")
        with pytest.raises(InvalidRequestError, match="a PEFT folder has none"):
            engine.load_adapter("third", folder, [])
        with pytest.raises(InvalidRequestError, match="are needed for them"):
            engine.load_adapter("third", {})
