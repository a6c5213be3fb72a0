"""MaxText's own RL trainer, `train_rl`, with this engine's rollout in the place of vLLM's.

`train_rl` has no option that names a rollout: it looks one class up among its module's names. So
that name is set for the time of a run, and set back. Where vLLM is not installed, two modules that
need it are stood in for, only so that `train_rl` can be imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sgljax_engine import InvalidConfigError
from tunix_sgljax.maxtext.known_faults import padding_fault
from tunix_sgljax.maxtext.pairs import split_lora, with_pairs

TRAINER = "maxtext.trainers.post_train.rl.train_rl"
ROLLOUT = "MaxTextVllmRollout"
"""The name in `TRAINER` of the class that it samples with."""

_VLLM_ADAPTER = "maxtext.integration.vllm.maxtext_vllm_adapter"
_VLLM_ROLLOUT = "maxtext.integration.vllm.maxtext_vllm_rollout"
_VLLM_PACKAGES = ("tpu_inference", "vllm")
"""What those two modules import."""

_VLLM_KEYS = frozenset(
    {
        "async_scheduling",
        "debug_converter",
        "enable_dp_attention",
        "free_kv_cache_during_weight_sync",
        "gcs_debug_path",
        "rl.reshard_chunk_size",
        "swap_space_vllm_gb",
        "vllm_additional_config",
        "vllm_hf_config_path",
        "vllm_hf_overrides",
        "vllm_load_format",
        "vllm_tpu_backend_type",
    }
)
"""Keys of MaxText's config that configure vLLM and nothing that this engine has."""

_AGENTIC_FIELDS = ("force_on_policy_ratio", "log_sampler_trainer_agreement")
"""Fields of Tunix's agentic GRPOConfig that train_rl 0.2.5 sets and google-tunix 0.1.7 lacks."""

Say = Callable[[str], None]


def run_rl(
    config_path: str, overrides: Sequence[str], rollout_class: Any, options: Any, say: Say
) -> None:
    """Trains with MaxText's `train_rl.main`, sampling with a rollout of ours."""
    path = find_config(config_path)
    overrides, lora = split_lora(overrides)
    named = named_keys(path, overrides)
    check_keys(named)
    meaningless = sorted(named & _VLLM_KEYS)
    if meaningless:
        say(f"these configure vLLM and mean nothing here: {', '.join(meaningless)}")
    with contextlib.ExitStack() as stack:
        module = stack.enter_context(trainer(functools.partial(rollout_class, **options), say))
        argv = ["", str(path), *overrides]
        config = _load_config(argv)
        if lora is not None:
            stack.enter_context(_pairs(lora, say))
        if config.rl.use_agentic_rollout:
            check_agentic()
        fault = padding_fault(config)
        if fault is not None:
            say(f"the trainer's log-probs of padded rows are off: {fault}")
        module.main(argv)


# ---------------------------------------------------------------------- what is put where


@contextlib.contextmanager
def trainer(rollout: Any, say: Say) -> Iterator[types.ModuleType]:
    """MaxText's `train_rl` module, sampling with another rollout inside the block.

    The rollout is called like MaxText's own. When the block ends, also by an error, its names and
    `sys.modules` are as before; a module that was imported beside stand-ins is forgotten.
    """
    with contextlib.ExitStack() as stack:
        missing = [name for name in _VLLM_PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            stack.enter_context(_stand_ins(rollout))
            say(
                f"not installed: {' and '.join(missing)}. Empty modules stand in for "
                f"{_VLLM_ADAPTER} and {_VLLM_ROLLOUT}, so that {TRAINER} can be imported"
            )
        module = importlib.import_module(TRAINER)
        stack.enter_context(_replaced(module, ROLLOUT, rollout))
        say(f"{TRAINER}.{ROLLOUT} is {_name_of(rollout)} until the command ends")
        yield module


@contextlib.contextmanager
def _pairs(fields: dict[str, Any], say: Say) -> Iterator[None]:
    """The actors that MaxText makes inside the block have LoRA pairs."""
    module = importlib.import_module("maxtext.utils.model_creation_utils")
    name = "create_models_and_meshes"
    with _replaced(module, name, with_pairs(vars(module)[name], fields)):
        say(
            f"{module.__name__}.{name} gives the actor LoRA pairs of rank {fields['lora_rank']} "
            "until the command ends: train_rl has no LoRA of its own"
        )
        yield


@contextlib.contextmanager
def _stand_ins(rollout: Any) -> Iterator[None]:
    """Modules in the place of those that need vLLM; forgets what is imported beside them."""
    adapter, sampler = types.ModuleType(_VLLM_ADAPTER), types.ModuleType(_VLLM_ROLLOUT)
    adapter.__dict__["register"] = lambda: None
    sampler.__dict__[ROLLOUT] = rollout
    with contextlib.ExitStack() as stack:
        stack.enter_context(_forgotten(TRAINER))
        for module in (adapter, sampler):
            stack.enter_context(_installed(module))
        yield


@contextlib.contextmanager
def _installed(module: types.ModuleType) -> Iterator[None]:
    """Makes a module importable by its name, also as an attribute of its package."""
    package, _, attribute = module.__name__.rpartition(".")
    parent = importlib.import_module(package)
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        with _replaced(parent, attribute, module):
            yield
    finally:
        _put_back(sys.modules, module.__name__, before)


@contextlib.contextmanager
def _forgotten(name: str) -> Iterator[None]:
    """Imports of a module inside the block are new, and forgotten after it."""
    package, _, attribute = name.rpartition(".")
    parent = importlib.import_module(package)
    before, attribute_before = sys.modules.pop(name, None), vars(parent).get(attribute)
    try:
        yield
    finally:
        _put_back(sys.modules, name, before)
        _put_back(vars(parent), attribute, attribute_before)


@contextlib.contextmanager
def _replaced(module: types.ModuleType, name: str, value: Any) -> Iterator[None]:
    """A name of a module has another value inside the block."""
    before = vars(module).get(name)
    setattr(module, name, value)
    try:
        yield
    finally:
        _put_back(vars(module), name, before)


def _put_back(names: dict[str, Any], name: str, before: Any) -> None:
    if before is None:
        names.pop(name, None)
    else:
        names[name] = before


def _name_of(rollout: Any) -> str:
    return getattr(rollout, "func", rollout).__name__


# ---------------------------------------------------------------------- the config


def find_config(name: str) -> Path:
    """The file of that path, else MaxText's own of that name."""
    path = Path(name)
    if path.is_file():
        return path.resolve()
    own = _configs() / "post_train" / name
    if own.is_file():
        return own
    raise InvalidConfigError(
        f"there is no config file {name!r}, neither here nor in MaxText's {own.parent}"
    )


def named_keys(path: Path, overrides: Sequence[str]) -> set[str]:
    """Dotted keys that the user set, by a file or a word; not what MaxText's files set."""
    named = {word.partition("=")[0] for word in overrides}
    if not path.is_relative_to(_configs()):
        named |= set(_dotted(yaml.safe_load(path.read_text(encoding="utf-8")) or {}))
    return named


def check_keys(named: Collection[str]) -> None:
    """Refuses LoRA in a file, for which MaxText's own answer is a list of all its fields."""
    if "lora" in named:
        raise InvalidConfigError(
            "lora: MaxText's RL config has no such section; give its keys as words, as in "
            "lora.enable_lora=True lora.lora_rank=8 lora.lora_alpha=16"
        )


def check_agentic() -> None:
    """Refuses agentic rollouts where MaxText's trainer expects a newer Tunix."""
    from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig

    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    missing = [name for name in _AGENTIC_FIELDS if name not in known]
    if missing:
        version = importlib.metadata.version("google-tunix")
        raise InvalidConfigError(
            "rl.use_agentic_rollout=True: MaxText's train_rl sets fields of Tunix's agentic "
            f"GRPOConfig that google-tunix {version} lacks: {', '.join(missing)}. Leave it False, "
            "or train with Tunix's agentic learner and SglJaxMaxTextRollout (docs/maxtext.md)"
        )


def _dotted(tree: Mapping[str, Any]) -> Iterator[str]:
    for key, value in tree.items():
        yield key
        if isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in _dotted(value))


def _load_config(argv: list[str]) -> Any:
    pyconfig = importlib.import_module("maxtext.configs.pyconfig")
    config_class = importlib.import_module("maxtext.configs.types").RLConfig
    try:
        return pyconfig.initialize_pydantic(argv, config_class=config_class)
    except ValueError as error:
        raise InvalidConfigError(f"MaxText's config: {error}") from error


def _configs() -> Path:
    return Path(importlib.import_module("maxtext.utils.globals").MAXTEXT_CONFIGS_DIR)
