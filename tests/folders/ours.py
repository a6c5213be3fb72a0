"""What the engine makes of a folder: the settings and weights it reads, and their log-probs."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sgljax_engine import EngineConfig, ModelConfig, load_model_config
from sgljax_engine.attention.base import AttentionOptions, BlockTables, NewTokens
from sgljax_engine.builder.adapters import adapter_source
from sgljax_engine.builder.sources import folder_weights, pick_dtype
from sgljax_engine.cache.layer_states import LayerState, state_shapes
from sgljax_engine.models.registry import get_model
from sgljax_engine.models.spec import ModelContext, Pass
from sgljax_engine.runner.programs.recur import block_recur
from sgljax_engine.weights.forms import Form
from sgljax_engine.weights.hf_files import mapped_tensors
from sgljax_engine.weights.rules import LoraRule, WeightRule, WeightSource
from sgljax_engine.weights.specs import TargetSpec
from tests.folders.drafts import TOKENS

_MASKED = -1e30


class Found(NamedTuple):
    """What is read of a folder.

    Attributes:
        model: Its shape.
        dtype: The dtype that an engine takes if it is asked for none.
        weights: Its weights in the engine's form, rounded to that dtype, float32.
        key: Equal for folders that give equal log-probs.
    """

    model: ModelConfig
    dtype: str
    weights: dict[str, np.ndarray]
    key: str


def read(folder: Path, adapter: Path | None = None) -> Found:
    """Reads a folder, and an adapter's for it, as an engine does; raises what it raises."""
    model = load_model_config(folder)
    dtype = pick_dtype(EngineConfig(), folder)
    source = folder_weights(model, folder)
    if adapter is not None:
        pairs = adapter_source(model, adapter, None)
        source = WeightSource({**source.arrays, **pairs.arrays}, _as_stored(pairs.rules, source))
    targets = _targets(model)
    tensors = mapped_tensors(source.arrays, source.rules, targets)
    weights = {
        name: np.asarray(tensor.load().astype(jnp.dtype(dtype)), np.float32)
        for name, tensor in tensors.items()
    }
    digest = hashlib.sha256(repr(_shape(model)).encode())
    for name, weight in weights.items():
        digest.update(name.encode() + np.ascontiguousarray(weight).tobytes())
    return Found(model, dtype, weights, digest.hexdigest())


def _as_stored(rules: Sequence[WeightRule], source: WeightSource) -> tuple[WeightRule, ...]:
    """Rules whose pairs name weights as the folder does, where memory has another order."""
    stored = (
        rule._replace(weight=rule.weight.replace("model.language_model.", "language_model.model."))
        if isinstance(rule, LoraRule) and rule.weight not in source.arrays
        else rule
        for rule in rules
    )
    return tuple(stored)


def _shape(model: ModelConfig) -> ModelConfig:
    """The model without what its log-probs do not depend on."""
    return dataclasses.replace(model, eos_token_ids=(), context_length=1)


def _targets(model: ModelConfig) -> dict[str, TargetSpec]:
    """The model's parameters in their logical shapes."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    dtype = jnp.dtype("float32")
    specs = get_model(model.architecture).param_specs(model)
    return {
        name: TargetSpec(spec.shape, dtype, Form.LOGICAL, here, spec.alias)
        for name, spec in specs.items()
    }


def logprobs(found: Found) -> np.ndarray:
    """Log-probs [T - 1] of tokens 1 to T, by the model's own forward pass.

    Operation by operation: folders have hundreds of shapes, and compiling each would take minutes.
    """
    model = found.model
    definition = get_model(model.architecture)
    context = ModelContext(model)
    num_tokens = len(TOKENS)
    positions = np.arange(num_tokens, dtype=np.int32)

    def attend(
        tokens: jax.Array | NewTokens, layer: Any, options: AttentionOptions
    ) -> tuple[jax.Array, Any]:
        sinks = None
        if isinstance(tokens, NewTokens):
            values = tokens.k if tokens.v is None else tokens.v
            q, layer, sinks = tokens.q, (tokens.k, values), tokens.sinks
        else:
            q = tokens
        k, v = layer
        group = q.shape[1] // k.shape[1]
        k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) * options.scale
        if options.logit_softcap is not None:
            scores = options.logit_softcap * jnp.tanh(scores / options.logit_softcap)
        behind = positions[:, None] - positions[None]
        seen = behind >= 0
        if options.sliding_window is not None:
            seen &= behind < options.sliding_window
        scores = jnp.where(seen, scores, _MASKED)
        if sinks is not None:
            more = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
            scores = jnp.concatenate([scores, more], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : len(positions)]
        return jnp.einsum("hqk,khd->qhd", weights, v), layer

    caches: list[Any] = [None] * len(model.cached_layers)
    net, recur = model.linear_attention, None
    if net is not None:
        table = jnp.zeros((1, 1), jnp.int32)
        tables = BlockTables(table, jnp.asarray(positions)[None], jnp.full(1, num_tokens))
        recur = block_recur(net, tables, jnp.zeros(1, jnp.int32))
        state = LayerState(*(jnp.zeros(shape, jnp.float32) for shape in state_shapes(net, 1)))
        caches += [state] * len(model.state_layers)
    tokens = Pass(jnp.asarray(TOKENS), jnp.asarray(positions), attend, tuple(caches), recur=recur)
    params = {name: jnp.asarray(x) for name, x in found.weights.items()}
    with jax.disable_jit():
        hidden = definition.forward(params, context, tokens).hidden
        logits = definition.logits(params, context, hidden, None)
    wide = np.asarray(logits, np.float64)[:-1]
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return np.take_along_axis(wide, TOKENS[1:, None].astype(np.int64), axis=-1)[:, 0]
