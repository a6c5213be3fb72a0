"""The policy of a run, its reference and its critic, as Tunix's models."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sgljax_engine import (
    InvalidConfigError,
    ModelConfig,
    WeightLoadError,
    find_weight_files,
    load_model_config,
    read_safetensors,
)
from tunix_sgljax.model_config import as_trained
from tunix_sgljax.training.checks import CRITIC_FAMILIES, FAMILIES
from tunix_sgljax.training.schema import ModelSection, ShapeConfig

_ARCHITECTURES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama3",
}
_CLASSES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama3": "Llama3"}
_TIED = {"qwen2": "use_tied_embedding", "qwen3": "use_tied_embedding", "llama3": "weight_tying"}
"""The field of each family's config that ties the output projection to the embedding."""

_SHAPE_FIELDS = (
    *("num_layers", "vocab_size", "embed_dim", "hidden_dim", "num_heads", "num_kv_heads"),
    *("head_dim", "num_experts", "num_experts_per_tok"),
)
_EMPTY_KERNELS = ("gate_proj", "up_proj", "down_proj")


class ModelSpec(NamedTuple):
    """A model: a Tunix class and its config.

    Attributes:
        family: One of `FAMILIES`.
        model_class: The NNX class.
        config: Tunix's ModelConfig.
    """

    family: str
    model_class: Callable[..., Any]
    config: Any

    def abstract(self) -> nnx.Module:
        """The model without weights: shapes and dtypes only."""
        return nnx.eval_shape(lambda: self.model_class(self.config, rngs=nnx.Rngs(0)))


def find_model(section: ModelSection) -> ModelSpec:
    """The model that a config names. Reads config.json, but no weights.

    Raises:
        InvalidConfigError: names the key, for a model that Tunix or the loader lacks.
        WeightLoadError: for a folder with weights of two models.
    """
    if section.model_path is not None:
        family, fields = _read_folder(section.model_path)
        check_weight_files(section.model_path)
        config = _make_config(family, fields)
        if section.model_name is not None:
            _check_same_shape(section, config)
        as_trained(_engine_config(section.model_path), config)
    elif section.model_name is not None:
        family, config = _named_config(section.model_name)
    else:
        assert section.family is not None
        assert section.shape is not None
        family = section.family
        config = _make_config(family, section.shape)
    if section.checkpoint is not None and not Path(section.checkpoint).is_file():
        raise InvalidConfigError(f"checkpoint {section.checkpoint} is no file")
    module = importlib.import_module(f"tunix.models.{family}.model")
    changes: dict[str, Any] = {"remat_config": module.RematConfig[section.remat.upper()]}
    names = {field.name for field in dataclasses.fields(config)}
    if section.dtype is not None:
        dtype = jnp.dtype(section.dtype)
        changes |= {name: dtype for name in ("dtype", "param_dtype") if name in names}
    config = dataclasses.replace(config, **changes)
    return ModelSpec(family, getattr(module, _CLASSES[family]), config)


def check_weight_files(folder: str | Path) -> None:
    """Refuses a folder of which Tunix's loader would read other weights than transformers.

    Tunix reads every safetensors file of the folder, so that shards of an older model would win
    over, or mix with, the files of the newer one.

    Raises:
        WeightLoadError: names the files that are not the model's.
    """
    files = find_weight_files(folder)
    beside = sorted({path.name for path in files.folder.glob("*.safetensors")} - {*files.names})
    if beside:
        raise WeightLoadError(
            f"{folder} holds {', '.join(beside)} beside the model's {', '.join(files.names)}: "
            "Tunix would read them too; move them away"
        )


def load_policy(section: ModelSection, spec: ModelSpec, mesh: jax.sharding.Mesh) -> nnx.Module:
    """The policy with its first weights, sharded over the mesh.

    Raises:
        InvalidConfigError: the folder or the checkpoint does not hold this model.
    """
    if section.model_path is not None:
        params = importlib.import_module(f"tunix.models.{spec.family}.params")
        dtype = None if section.dtype is None else jnp.dtype(section.dtype)
        return params.create_model_from_safe_tensors(section.model_path, spec.config, mesh, dtype)
    if section.checkpoint is not None:
        arrays = _read_checkpoint(Path(section.checkpoint), spec)
    else:
        arrays = _random_weights(spec, section.rng_seed)
    graphdef, state = nnx.split(spec.abstract())
    for (key, param), (_, sharding) in zip(
        nnx.to_flat_state(state),
        nnx.to_flat_state(nnx.get_named_sharding(state, mesh)),
        strict=True,
    ):
        dtype = section.dtype or param.dtype
        array = arrays[_name(key)].astype(dtype)
        param.set_value(jax.device_put(array, sharding.get_value()))
    return nnx.merge(graphdef, state)


def copy_of(model: nnx.Module) -> nnx.Module:
    """A second model with the same arrays, which Tunix's trainer replaces and never changes."""
    return nnx.merge(*nnx.split(model))


def make_critic(
    spec: ModelSpec, policy: nnx.Module, mesh: jax.sharding.Mesh, seed: int
) -> nnx.Module:
    """A model that gives each token a value: the policy with one output instead of logits.

    Like Tunix's `create_critic_model`, but also for models with tied embeddings.
    """
    critic = abstract_critic(spec)
    graphdef, state = nnx.split(critic)
    of_policy = dict(nnx.to_flat_state(nnx.state(policy)))
    head = _value_head(spec, seed)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for key, param in nnx.to_flat_state(state):
        if key[0] == "lm_head":
            like = next(iter(of_policy.values()))
            array = head.kernel[...].astype(like[...].dtype)
            param.set_value(jax.device_put(array, replicated))
        else:
            param.set_value(of_policy[key][...])
    return nnx.merge(graphdef, state)


def abstract_critic(spec: ModelSpec) -> nnx.Module:
    """The critic without weights.

    Raises:
        InvalidConfigError: Tunix cannot train a critic of this family.
    """
    if spec.family not in CRITIC_FAMILIES:
        raise InvalidConfigError(
            f"training_mode ppo needs a model of {' or '.join(CRITIC_FAMILIES)}, got "
            f"{spec.family}: Tunix 0.1.7 asks a critic with arguments that it does not take"
        )
    untied = dataclasses.replace(spec.config, **{_TIED[spec.family]: False})

    def make() -> Any:
        critic = spec.model_class(untied, rngs=nnx.Rngs(0))
        critic.lm_head = _value_head(spec, 0)
        return critic

    return nnx.eval_shape(make)


def _value_head(spec: ModelSpec, seed: int) -> nnx.Linear:
    return nnx.Linear(spec.config.embed_dim, 1, use_bias=False, rngs=nnx.Rngs(seed))


def _engine_config(folder: str) -> ModelConfig:
    if not (Path(folder) / "config.json").is_file():
        raise InvalidConfigError(f"model_path {folder} has no config.json; it must be an HF folder")
    return load_model_config(folder)


def _read_folder(folder: str) -> tuple[str, ShapeConfig]:
    model = _engine_config(folder)
    if model.architecture not in _ARCHITECTURES:
        raise InvalidConfigError(
            f"model_path {folder} holds a {model.architecture}; training reads "
            f"{', '.join(_ARCHITECTURES)}"
        )
    shape = ShapeConfig(
        num_layers=model.num_layers,
        vocab_size=model.vocab_size,
        embed_dim=model.hidden_size,
        hidden_dim=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        norm_eps=model.rms_norm_eps,
        rope_theta=int(model.rope.theta),
        use_tied_embedding=model.tie_word_embeddings,
        num_experts=None if model.moe is None else model.moe.num_experts,
        num_experts_per_tok=None if model.moe is None else model.moe.num_experts_per_token,
    )
    return _ARCHITECTURES[model.architecture], shape


def _make_config(family: str, shape: ShapeConfig) -> Any:
    module = importlib.import_module(f"tunix.models.{family}.model")
    fields = dataclasses.asdict(shape)
    if shape.num_experts is None or family != "qwen3":
        if shape.num_experts is not None:
            raise InvalidConfigError(
                f"shape.num_experts must be null for {family}: only qwen3 has experts"
            )
        del fields["num_experts"], fields["num_experts_per_tok"]
    fields[_TIED[family]] = fields.pop("use_tied_embedding")
    return module.ModelConfig(**fields)


def named_config(name: str) -> Any:
    """Tunix's own ModelConfig of a name, also of families that training does not read.

    Raises:
        InvalidConfigError: when Tunix knows no such name.
    """
    from tunix.models import automodel

    try:
        return automodel.call_model_config(name)
    except (ValueError, AttributeError, ImportError) as error:
        raise InvalidConfigError(
            f"model_name {name!r} is no model that Tunix knows: {str(error).splitlines()[0]}"
        ) from None


def _named_config(name: str) -> tuple[str, Any]:
    config = named_config(name)
    family = type(config).__module__.split(".")[-2]
    if family not in FAMILIES:
        raise InvalidConfigError(
            f"model_name {name!r} is a {family}; training reads {', '.join(FAMILIES)}"
        )
    return family, config


def _check_same_shape(section: ModelSection, config: Any) -> None:
    assert section.model_name is not None
    _, named = _named_config(section.model_name)
    if type(named) is not type(config):
        raise InvalidConfigError(
            f"model_path {section.model_path} is no {section.model_name}: it holds a "
            f"{type(config).__module__}"
        )
    for name in _SHAPE_FIELDS:
        ours, theirs = getattr(config, name, None), getattr(named, name, None)
        if ours != theirs:
            raise InvalidConfigError(
                f"model_path {section.model_path} is no {section.model_name}: its {name} is "
                f"{ours}, not {theirs}"
            )


def _read_checkpoint(path: Path, spec: ModelSpec) -> dict[str, np.ndarray]:
    try:
        arrays = read_safetensors(path)
    except WeightLoadError as error:
        raise InvalidConfigError(f"checkpoint {path} cannot be read: {error}") from None
    _, state = nnx.split(spec.abstract())
    wanted = {_name(key): tuple(param.shape) for key, param in nnx.to_flat_state(state)}
    stored = {name: array.shape for name, array in arrays.items()}
    for name in sorted(wanted.keys() | stored.keys()):
        if wanted.get(name) != stored.get(name):
            raise WeightLoadError(
                f"checkpoint {path} does not fit the model: {name} has shape "
                f"{stored.get(name)} there and {wanted.get(name)} in the model"
            )
    return arrays


def _random_weights(spec: ModelSpec, seed: int) -> dict[str, np.ndarray]:
    """Random weights. A new Tunix model has zero MLP kernels, which would stay zero."""
    rngs = nnx.Rngs(seed)
    model = spec.model_class(spec.config, rngs=rngs)
    init = nnx.initializers.lecun_normal()
    arrays = {}
    for key, param in nnx.to_flat_state(nnx.state(model)):
        array = param[...]
        if len(key) > 1 and key[-2] in _EMPTY_KERNELS:
            array = init(rngs.params(), array.shape, array.dtype)
        arrays[_name(key)] = np.asarray(array)
    return arrays


def _name(key: Sequence[Any]) -> str:
    return ".".join(map(str, key))
