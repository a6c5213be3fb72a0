"""Devices that are not here: their compiler, and the engine."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgljax_engine import EngineConfig, InvalidConfigError, ModelConfig
from tunix_sgljax.cli.engine_options import engine_config, model_folder, read_pairs

if TYPE_CHECKING:
    import jax

    from tools.aot import Chip

_QUIET = {"TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3", "TF_CPP_MIN_LOG_LEVEL": "3"}
_AXIS_NAMES = ("data", "tp")
_UNSET = "???"
_INPUT_SECTIONS = ("actor_model_config", "tokenizer_config", "task")
"""What a config has for a value that the command line must give."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """An engine, and the devices to compile it for.

    Attributes:
        title: The model's name or folder, or the config's file.
        model: The model's shape.
        folder: The model's Hugging Face folder; None if there is none.
        config: The engine's configuration.
        chip: The kind of device.
        mesh: Devices of the topology.
    """

    title: str
    model: ModelConfig
    folder: Path | None
    config: EngineConfig
    chip: Chip
    mesh: jax.sharding.Mesh


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Declares `--topology`, `--tp` and `--config`."""
    parser.add_argument(
        "--topology",
        required=True,
        metavar="CHIP:SHAPE",
        help="devices that need not be here: v5e:2x4, v6e:1x1, v5p:2x2x2, h100:8",
    )
    parser.add_argument(
        "--tp",
        type=int,
        metavar="N",
        help="devices of each engine (default: as few as the model fits)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="take model, engine and mesh from a config of `train`",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values that win over the config's"
    )


def find_target(args: argparse.Namespace) -> Target:
    """The engine and the devices that the arguments ask for. Reads no weights.

    Raises:
        InvalidConfigError: names the argument, its value and what is expected.
        ValueError: the compiler is not installed.
    """
    from tools.aot import parse_topology, topology_mesh

    if args.overrides and args.config is None:
        raise InvalidConfigError(f"key=value arguments need --config, got {args.overrides[0]!r}")
    if (args.model is None) == (args.config is None):
        raise InvalidConfigError("--topology needs --model or --config, and not both")
    chip, sizes = parse_topology(args.topology)
    prepare_compiler(args.topology)
    shape, axis_names = None, _AXIS_NAMES
    if args.config is not None:
        title, folder = str(args.config), None
        model, config, shape, axis_names = _from_config(args)
    else:
        title = args.model
        model, folder, config = _from_model(args)
    mesh = topology_mesh(args.topology, shape or (math.prod(sizes), 1), axis_names)
    return Target(title=title, model=model, folder=folder, config=config, chip=chip, mesh=mesh)


def prepare_compiler(topology: str) -> None:
    """Finds the compiler, and sets the environment in which it starts; before JAX loads it.

    Raises:
        InvalidConfigError: for a topology that cannot be compiled for.
        ValueError: the compiler is not installed.
    """
    from tools.aot import parse_topology

    chip, _ = parse_topology(topology)
    if chip.platform == "tpu":
        _prepare_libtpu(chip)
    elif not _has_cuda_plugin():
        raise ValueError(
            f"programs for {chip.title} are compiled by JAX's CUDA plugin, which is not installed: "
            "pip install jax-cuda13-plugin jax-cuda13-pjrt, of JAX's own version"
        )


def _has_cuda_plugin() -> bool:
    try:
        return importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
    except ModuleNotFoundError:  # there are no plugins
        return False


def _prepare_libtpu(chip: Chip) -> None:
    named = os.environ.get("TPU_LIBRARY_PATH")
    if named is not None and not Path(named).is_file():
        raise ValueError(f"TPU_LIBRARY_PATH must name libtpu.so, got {named!r}, which is no file")
    if named is None and importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"programs for {chip.title} are compiled by libtpu, which is not installed: "
            "pip install libtpu (or set TPU_LIBRARY_PATH to its libtpu.so)"
        )
    needed = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": chip.accelerator_type,
        "TPU_WORKER_HOSTNAMES": "localhost",
        # No TPU is used, so two processes may compile at once, or one beside one that uses a TPU.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    for name, value in (needed | _QUIET).items():
        os.environ.setdefault(name, value)


def _from_model(args: argparse.Namespace) -> tuple[ModelConfig, Path | None, EngineConfig]:
    """The model that `--model` names: a folder's, or one that Tunix knows."""
    from sgljax_engine import load_model_config

    sizes = {} if args.tp is None else {"tp_size": args.tp}
    if Path(args.model).is_dir():
        folder = model_folder(args.model)
        return load_model_config(folder), folder, _engine_config(args, sizes)
    config = _engine_config(args, {"dtype": "bfloat16"} | sizes)
    if config.max_model_len is None:
        raise InvalidConfigError(
            f"--model {args.model!r} is no folder, and a model that Tunix knows by name needs "
            "--engine max_model_len=N"
        )
    return named_model(args.model, config.max_model_len), None, config


def named_model(name: str, max_model_len: int) -> ModelConfig:
    """The shape of a model that Tunix knows by name; it need not be one that `train` reads.

    Raises:
        InvalidConfigError: when Tunix knows no such name.
        UnsupportedModelError: when the engine lacks the model.
    """
    from tunix_sgljax.model_config import to_model_config
    from tunix_sgljax.training.models import named_config

    return to_model_config(named_config(name), context_length=max_model_len)


def _engine_config(args: argparse.Namespace, defaults: dict[str, Any]) -> EngineConfig:
    if args.tp is not None and "tp_size" in read_pairs("--engine", args.engine):
        raise InvalidConfigError("give --tp or --engine tp_size, not both")
    return engine_config(args, defaults)


def _from_config(
    args: argparse.Namespace,
) -> tuple[ModelConfig, EngineConfig, list[int], tuple[str, ...]]:
    """Model, engine and mesh of a config for `train`, whose files need not exist."""
    from tunix_sgljax.model_config import to_model_config
    from tunix_sgljax.rollout.options import engine_options_of
    from tunix_sgljax.training.loading import load_config
    from tunix_sgljax.training.models import find_model

    train = load_config(args.config, [*_unset_inputs(args.config), *args.overrides])
    section, longest = train.actor_model_config, sum(train.max_tokens)
    model = to_model_config(find_model(section).config, context_length=longest)
    options = engine_options_of(train.sgljax_config) | {"max_model_len": longest}
    if section.dtype is not None:
        options["dtype"] = section.dtype
    if args.tp is not None:
        options["tp_size"] = args.tp
    mesh = train.rollout_mesh
    return model, _engine_config(args, options), mesh.shape, tuple(mesh.axis_names)


def _unset_inputs(path: Path) -> list[str]:
    """Overrides for the inputs that a config leaves to the command line; no shape needs them."""
    import yaml

    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
        sections = [given.get(name) or {} for name in _INPUT_SECTIONS]
        model, tokenizer, task = ({**section} for section in sections)
    except (OSError, yaml.YAMLError, AttributeError, TypeError):
        return []  # `load_config` says what is wrong
    overrides = []
    if model.get("model_path") == _UNSET:
        overrides.append("actor_model_config.model_path=null")
        if not tokenizer.get("function") and tokenizer.get("tokenizer_path", _UNSET) == _UNSET:
            overrides.append("tokenizer_config.tokenizer_path=unset")
    if task.get("dataset") == _UNSET:
        overrides.append("task.dataset=unset")
    return overrides
