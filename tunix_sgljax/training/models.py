"""The policy of a run, its reference and its critic, as Tunix's models; and its tokenizer."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import automodel

from sgljax_engine import (
    InvalidConfigError,
    ModelConfig,
    WeightLoadError,
    check_model_folder,
    find_weight_files,
    load_hf_tokenizer,
    load_model_config,
    read_safetensors,
)
from tunix_sgljax.model_config import as_trained
from tunix_sgljax.training.checks import FAMILIES, make_checked
from tunix_sgljax.training.schema import ModelSection, TrainConfig
from tunix_sgljax.training.task import add_code_dir, import_function

_ARCHITECTURES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama3",
}
_TIED = {"qwen2": "use_tied_embedding", "qwen3": "use_tied_embedding", "llama3": "weight_tying"}
"""The field of each family's config that ties the output projection to the embedding."""

_CRITIC_FAMILIES = ("qwen2", "qwen3")
"""Families that support a critic: Tunix 0.1.7 cannot ask its Llama 3 for values."""

_SHAPE_FIELDS = (
    *("num_layers", "vocab_size", "embed_dim", "hidden_dim", "num_heads", "num_kv_heads"),
    *("head_dim", "num_experts", "num_experts_per_tok"),
)
_EMPTY_KERNELS = ("gate_proj", "up_proj", "down_proj")


class ModelSpec(NamedTuple):
    """A model: one of `FAMILIES`, Tunix's NNX class and its ModelConfig."""

    family: str
    model_class: Callable[..., Any]
    config: Any

    def abstract(self) -> nnx.Module:
        return nnx.eval_shape(lambda: self.model_class(self.config, rngs=nnx.Rngs(0)))


def find_model(section: ModelSection) -> ModelSpec:
    """The model that a config names. Reads config.json, but no weights.

    Raises:
        InvalidConfigError: names the key, for a model that Tunix or the loader lacks.
        WeightLoadError: for a folder with weights of two models.
    """
    if section.model_path is not None:
        family, config = _read_folder(section.model_path)
        if section.model_name is not None:
            _check_name(section, family, config)
    elif section.model_name is not None:
        family, config = _read_name(section.model_name)
    else:
        assert section.family is not None
        family, config = section.family, _make_config(section.family, section.shape)
    if section.checkpoint is not None and not Path(section.checkpoint).is_file():
        raise InvalidConfigError(f"checkpoint {section.checkpoint} is no file")
    module = _module(family)
    changes: dict[str, Any] = {"remat_config": module.RematConfig[section.remat.upper()]}
    if section.dtype is not None:
        names = {"dtype", "param_dtype"} & {field.name for field in dataclasses.fields(config)}
        changes |= dict.fromkeys(names, jnp.dtype(section.dtype))
    config = dataclasses.replace(config, **changes)
    return ModelSpec(family, getattr(module, family.capitalize()), config)


def _module(family: str) -> Any:
    return importlib.import_module(f"tunix.models.{family}.model")


def _make_config(family: str, shape: Mapping[str, Any]) -> Any:
    return make_checked(_module(family).ModelConfig, "actor_model_config.shape", shape)


def _read_folder(folder: str) -> tuple[str, Any]:
    if not (check_model_folder("model_path", folder) / "config.json").is_file():
        raise InvalidConfigError(f"model_path {folder} has no config.json; it must be an HF folder")
    model = load_model_config(folder)
    if model.architecture not in _ARCHITECTURES:
        raise InvalidConfigError(
            f"model_path {folder} holds a {model.architecture}; training reads "
            f"{', '.join(_ARCHITECTURES)}"
        )
    files = find_weight_files(folder)
    beside = sorted({path.name for path in files.folder.glob("*.safetensors")} - {*files.names})
    if beside:  # such as shards of an older model, with which Tunix would mix the newer one's
        raise WeightLoadError(
            f"{folder} holds {', '.join(beside)} beside the model's {', '.join(files.names)}: "
            "Tunix would read them too; move them away"
        )
    config = tunix_config(model)
    as_trained(model, config)
    return _ARCHITECTURES[model.architecture], config


def tunix_config(model: ModelConfig) -> Any:
    family = _ARCHITECTURES[model.architecture]
    shape = {
        "num_layers": model.num_layers,
        "vocab_size": model.vocab_size,
        "embed_dim": model.hidden_size,
        "hidden_dim": model.intermediate_size,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "norm_eps": model.rms_norm_eps,
        "rope_theta": int(model.rope.theta),
        _TIED[family]: model.tie_word_embeddings,
    }
    if model.moe is not None:
        shape["num_experts"] = model.moe.num_experts
        shape["num_experts_per_tok"] = model.moe.num_experts_per_token
    return _make_config(family, shape)


def named_config(name: str) -> Any:
    """Tunix's own ModelConfig of a name, also of families that training does not read."""
    try:
        return automodel.call_model_config(name)
    except (ValueError, AttributeError, ImportError) as error:
        raise InvalidConfigError(
            f"model_name {name!r} is no model that Tunix knows: {str(error).splitlines()[0]}"
        ) from None


def _read_name(name: str) -> tuple[str, Any]:
    config = named_config(name)
    family = type(config).__module__.split(".")[-2]
    if family not in FAMILIES:
        raise InvalidConfigError(
            f"model_name {name!r} is a {family}; training reads {', '.join(FAMILIES)}"
        )
    return family, config


def _check_name(section: ModelSection, family: str, config: Any) -> None:
    """Refuses a folder that holds another model than `model_name`."""
    assert section.model_name is not None
    named_family, named = _read_name(section.model_name)
    ours, theirs = (
        {"family": of, **{name: getattr(shape, name, None) for name in _SHAPE_FIELDS}}
        for of, shape in ((family, config), (named_family, named))
    )
    for name, value in ours.items():
        if value != theirs[name]:
            raise InvalidConfigError(
                f"model_path {section.model_path} is no {section.model_name}: its {name} is "
                f"{value}, not {theirs[name]}"
            )


def load_policy(section: ModelSection, spec: ModelSpec, mesh: jax.sharding.Mesh) -> nnx.Module:
    """The policy with its first weights, sharded over the mesh."""
    if section.model_path is not None:
        params = importlib.import_module(f"tunix.models.{spec.family}.params")
        dtype = None if section.dtype is None else jnp.dtype(section.dtype)
        return params.create_model_from_safe_tensors(section.model_path, spec.config, mesh, dtype)
    if section.checkpoint is not None:
        arrays = _read_checkpoint(Path(section.checkpoint), spec)
    else:
        arrays = _random_weights(spec, section.rng_seed)
    graphdef, state = nnx.split(spec.abstract())
    shardings = nnx.to_flat_state(nnx.get_named_sharding(state, mesh))
    for (key, param), (_, sharding) in zip(nnx.to_flat_state(state), shardings, strict=True):
        array = arrays[_name(key)].astype(section.dtype or param.dtype)
        param.set_value(jax.device_put(array, sharding.get_value()))
    return nnx.merge(graphdef, state)


def _read_checkpoint(path: Path, spec: ModelSpec) -> dict[str, np.ndarray]:
    try:
        arrays = read_safetensors(path)
    except WeightLoadError as error:
        raise InvalidConfigError(f"checkpoint {path} cannot be read: {error}") from None
    stored = {name: array.shape for name, array in arrays.items()}
    check_shapes(f"checkpoint {path}", stored, nnx.state(spec.abstract()))
    return arrays


def check_shapes(where: str, stored: Mapping[str, Sequence[int]], state: nnx.State) -> None:
    """Refuses stored parameters that are not those of a state."""
    wanted = {_name(key): tuple(param.shape) for key, param in nnx.to_flat_state(state)}
    for name in sorted(wanted.keys() | stored.keys()):
        if wanted.get(name) != stored.get(name):
            raise InvalidConfigError(
                f"{where} does not fit: {name} has shape {stored.get(name)} there and "
                f"{wanted.get(name)} in the model"
            )


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


def copy_of(model: nnx.Module) -> nnx.Module:
    """A second model with the same arrays, which Tunix's trainer replaces and never changes."""
    return nnx.merge(*nnx.split(model))


def make_critic(
    spec: ModelSpec, policy: nnx.Module, mesh: jax.sharding.Mesh, seed: int
) -> nnx.Module:
    """A model that gives each token a value: the policy with one output instead of logits.

    Like Tunix's `create_critic_model`, but also for models with tied embeddings.
    """
    graphdef, state = nnx.split(abstract_critic(spec))
    of_policy = dict(nnx.to_flat_state(nnx.state(policy)))
    dtype = next(iter(of_policy.values()))[...].dtype
    head = _value_head(spec, seed).kernel[...].astype(dtype)
    head = jax.device_put(head, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    for key, param in nnx.to_flat_state(state):
        param.set_value(head if key[0] == "lm_head" else of_policy[key][...])
    return nnx.merge(graphdef, state)


def abstract_critic(spec: ModelSpec) -> nnx.Module:
    """The critic without weights."""
    if spec.family not in _CRITIC_FAMILIES:
        raise InvalidConfigError(
            f"training_mode ppo needs a model of {' or '.join(_CRITIC_FAMILIES)}, got "
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


def load_tokenizer(config: TrainConfig) -> TokenizerAdapter:
    """Tunix's adapter around the tokenizer."""
    section = config.tokenizer_config
    if section.function is not None:
        add_code_dir(config.task.code_dir)
        tokenizer = import_function("tokenizer_config.function", section.function)()
    else:
        tokenizer = _read_tokenizer(section.tokenizer_path or config.actor_model_config.model_path)
    adapter = TokenizerAdapter(tokenizer)
    if section.pad_token is not None:
        if section.pad_token not in tokenizer.get_vocab():
            raise InvalidConfigError(
                f"tokenizer_config.pad_token {section.pad_token!r} is no token"
            )
        adapter.tokenizer.pad_token = section.pad_token
    return adapter


def _read_tokenizer(folder: str | None) -> Any:
    if folder is not None:
        check_model_folder("tokenizer_path", folder)
    try:
        return load_hf_tokenizer(str(folder))
    except InvalidConfigError as error:
        raise InvalidConfigError(
            f"tokenizer_path {folder} holds no tokenizer: {str(error).splitlines()[0]}"
        ) from None
