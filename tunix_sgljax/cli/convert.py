"""`tunix-sgljax convert`: Tunix checkpoints and Hugging Face folders to HF folders or adapters."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgljax_engine import InvalidConfigError, check_model_folder
from tunix_sgljax.cli.engine_options import model_folder
from tunix_sgljax.cli.output import say

if TYPE_CHECKING:
    import numpy as np

    from sgljax_engine import HfTensor
    from tunix_sgljax.checkpoints.lora_files import LoraScale

SUMMARY = "Write a Tunix checkpoint as a Hugging Face folder, or as a PEFT adapter."

EXAMPLES = """examples:
  tunix-sgljax convert checkpoints --base Qwen3-0.6B --output trained
  tunix-sgljax convert checkpoints/actor/200 --base Qwen3-0.6B --output trained --dtype bfloat16
  tunix-sgljax convert Qwen3-0.6B --output Qwen3-0.6B-float32 --dtype float32 --max-shard-size 1GB
  tunix-sgljax convert checkpoints --base Qwen3-0.6B --output merged --lora-alpha 16
  tunix-sgljax convert checkpoints --base Qwen3-0.6B --output adapter --lora-alpha 16 --peft

A Tunix checkpoint is the folder given as checkpoint_root_directory, its `actor`, or one step.
--base is the Hugging Face folder that training began with: the output has its config and tokenizer,
and must have all its tensors, in the same shapes.

LoRA pairs are added to the weights beside which they stand, or written as an adapter with --peft.
Their scale is in no checkpoint: `tunix-sgljax train` writes it beside them, and others are told."""

DTYPES = ("float32", "bfloat16", "float16")

_SHARD_SIZE = "5GB"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.npz")
_WEIGHT_INDEXES = ("*.safetensors.index.json", "*.bin.index.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a Tunix checkpoint, or a model's folder")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="where; must not exist")
    parser.add_argument(
        "--base", metavar="FOLDER", help="the Hugging Face folder that training began with"
    )
    parser.add_argument("--step", type=int, help="of the checkpoint; default: the latest")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: the source's")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help=f"of a file: 500MB, 2GiB ({_SHARD_SIZE})"
    )
    parser.add_argument(
        "--lora-alpha", type=float, metavar="ALPHA", help="of LoRA pairs, to be divided by the rank"
    )
    parser.add_argument(
        "--lora-scaling", type=float, metavar="SCALE", help="of LoRA pairs: alpha / rank"
    )
    parser.add_argument(
        "--peft", action="store_true", help="write the LoRA pairs as a PEFT adapter of --base"
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors")


def run(args: argparse.Namespace) -> int:
    """Converts; returns 0."""
    output = Path(args.output)
    if output.exists():
        raise InvalidConfigError(f"--output must not exist, got {args.output!r}")
    source = check_model_folder("SOURCE", args.source)
    if args.peft:
        if args.max_shard_size is not None:
            raise InvalidConfigError("--max-shard-size goes with a model; an adapter is one file")
        written = _write_adapter(args, source, output)
    else:
        written = _write_model(args, source, output)
    if not args.quiet:
        say(written)
    return 0


def _write_model(args: argparse.Namespace, source: Path, output: Path) -> str:
    from sgljax_engine import read_hf_tensors, write_hf_tensors
    from tunix_sgljax.cli.tunix_model import read_tunix_model

    max_bytes = parse_size(args.max_shard_size or _SHARD_SIZE)
    if (source / "config.json").is_file():
        _refuse_checkpoint_options(args)
        base, tensors = source, read_hf_tensors(source)
    else:
        base = _base_folder(args)
        scale, dtype = lora_scale(args), _numpy_dtype(args.dtype)
        tensors = read_tunix_model(source, args.step, base).merged(scale, dtype)
    with _partial_folder(output) as partial:
        copy_other_files(base, partial)
        paths = write_hf_tensors(tensors, partial, dtype=args.dtype, max_shard_bytes=max_bytes)
        write_config(base, partial, args.dtype or common_dtype(tensors))
    size = sum((output / path.name).stat().st_size for path in paths)
    return f"wrote {len(tensors)} tensors, {size / 1e6:.1f} MB in {len(paths)} file(s): {output}"


def _write_adapter(args: argparse.Namespace, source: Path, output: Path) -> str:
    from tunix_sgljax.checkpoints.lora_files import write_peft
    from tunix_sgljax.cli.tunix_model import check_same, read_tunix_model

    if (source / "config.json").is_file():
        raise InvalidConfigError(f"--peft needs a Tunix checkpoint, but {args.source!r} is a model")
    base, scale = _base_folder(args), lora_scale(args)
    found = read_tunix_model(source, args.step, base)
    if not found.pairs:
        raise InvalidConfigError(f"--peft needs LoRA parameters; {found.folder} has none")
    if found.tensors is not None:
        check_same(found.tensors, found.base.of_text, str(base))
    pairs = {found.base.module(name): pair for name, pair in found.hf_pairs(scale).items()}
    modules = found.base.all_modules
    with _partial_folder(output) as partial:
        dtype = _numpy_dtype(args.dtype)
        write_peft(partial, pairs, modules, base_name=str(args.base), dtype=dtype)
    return f"wrote an adapter of {len(pairs)} pairs for {args.base}: {output}"


@contextlib.contextmanager
def _partial_folder(output: Path) -> Iterator[Path]:
    """Yields a new folder that becomes the output on success and is removed on failure."""
    partial = output.with_name(output.name + ".partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(output)
    except BaseException:
        shutil.rmtree(partial)
        raise


def lora_scale(args: argparse.Namespace) -> LoraScale | None:
    """The scale given by the user, or None."""
    from tunix_sgljax.checkpoints.lora_files import LoraScale

    for name in ("lora_alpha", "lora_scaling"):
        value = getattr(args, name)
        if value is not None and not math.isfinite(value):
            raise InvalidConfigError(f"--{name.replace('_', '-')} must be finite, got {value}")
    if args.lora_alpha is None and args.lora_scaling is None:
        return None
    if args.lora_alpha is not None and args.lora_scaling is not None:
        raise InvalidConfigError("--lora-alpha and --lora-scaling say the same; give one of them")
    return LoraScale(args.lora_scaling, args.lora_alpha)


def _base_folder(args: argparse.Namespace) -> Path:
    if args.base is None:
        raise InvalidConfigError(
            f"--base must name a Hugging Face folder: {args.source!r} has no config.json"
        )
    return model_folder(args.base, "--base")


def _refuse_checkpoint_options(args: argparse.Namespace) -> None:
    if args.base is not None or args.step is not None:
        raise InvalidConfigError("--base and --step go with a Tunix checkpoint, not a model")
    if args.lora_alpha is not None or args.lora_scaling is not None:
        raise InvalidConfigError(
            "--lora-alpha and --lora-scaling go with a Tunix checkpoint, not a model"
        )


def copy_other_files(base: Path, output: Path) -> None:
    """Copies config, tokenizer and other files, without weights, hidden files and folders."""
    for path in sorted(base.iterdir()):
        is_weights = any(path.match(pattern) for pattern in _WEIGHT_FILES + _WEIGHT_INDEXES)
        if path.is_file() and not is_weights and not path.name.startswith("."):
            shutil.copyfile(path, output / path.name)


def write_config(base: Path, output: Path, dtype: str | None) -> None:
    """Writes the base's config.json with the dtype of the weights, if it is the same for all."""
    config: dict[str, Any] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    if dtype is not None:
        names = [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"]
        config |= dict.fromkeys(names, dtype)
    text = json.dumps(config, indent=2) + "\n"
    (output / "config.json").write_text(text, encoding="utf-8")


def common_dtype(tensors: Mapping[str, HfTensor]) -> str | None:
    """The dtype of all tensors; None if they differ."""
    names = {tensor.dtype.name for tensor in tensors.values()}
    return names.pop() if len(names) == 1 else None


def _numpy_dtype(name: str | None) -> np.dtype | None:
    import jax.numpy as jnp

    return None if name is None else jnp.dtype(name)


def parse_size(text: str) -> int:
    """Bytes, from a number with a unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]I?B|)", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise InvalidConfigError(
            f"--max-shard-size must be a number with a unit ({units}), got {text!r}"
        )
    return size
