"""Rules for weights that go by a model's own names, Hugging Face's.

Names do not tell in which orientation a projection is stored: Hugging Face has it [out, in], the
engine and most JAX models [in, out], and a square one fits both ways. So each way has its rules.
"""

from __future__ import annotations

from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.registry import get_model
from sgljax_engine.models.spec import ParamKind
from sgljax_engine.weights.rules import Rule


def hf_rules(model_config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for weights as Hugging Face stores them; what holds where no rules are given.

    Projections are [out, in], embeddings and an untied `lm_head` [vocabulary, hidden], norms and
    biases vectors. What a checkpoint may carry beside its parameters is ignored: the frequencies
    of old rotary embeddings, and a copy of tied embeddings as `lm_head.weight`.

    Args:
        model_config: The model that they are of.

    Raises:
        UnsupportedModelError: for an architecture that is not implemented.
    """
    specs = get_model(model_config.architecture).param_specs(model_config)
    rules = [
        Rule(name, name, (1, 0) if spec.kind is ParamKind.LINEAR else None)
        for name, spec in specs.items()
    ]
    rules.append(Rule("model.layers.*.self_attn.rotary_emb.inv_freq", None))
    if model_config.tie_word_embeddings:
        rules.append(Rule("lm_head.weight", None))
    return tuple(rules)


def logical_rules(model_config: ModelConfig) -> tuple[Rule, ...]:
    """Rules for weights by Hugging Face's names in the engine's shapes: projections are [in, out].

    Args:
        model_config: The model that they are of.

    Raises:
        UnsupportedModelError: for an architecture that is not implemented.
    """
    specs = get_model(model_config.architecture).param_specs(model_config)
    return tuple(Rule(name, name) for name in specs)
