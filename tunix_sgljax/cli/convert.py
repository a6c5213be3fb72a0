"""`tunix-sgljax convert`: Tunix checkpoints and Hugging Face folders to Hugging Face folders."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgljax_engine import InvalidConfigError, RopeConfig, WeightSyncError
from tunix_sgljax.cli.engine_options import model_folder
from tunix_sgljax.cli.output import say

if TYPE_CHECKING:
    from sgljax_engine import HfTensor, ModelConfig

SUMMARY = "Write a Tunix checkpoint, or a Hugging Face folder, as a Hugging Face folder."

EXAMPLES = """examples:
  tunix-sgljax convert checkpoints --base Qwen3-0.6B --output trained
  tunix-sgljax convert checkpoints/actor/200 --base Qwen3-0.6B --output trained --dtype bfloat16
  tunix-sgljax convert Qwen3-0.6B --output Qwen3-0.6B-float32 --dtype float32 --max-shard-size 1GB

A Tunix checkpoint is the folder given as checkpoint_root_directory, its `actor`, or one step.
--base is the Hugging Face folder that training began with: the output has its config and tokenizer,
and must have all its tensors, in the same shapes."""

DTYPES = ("float32", "bfloat16", "float16")

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.npz")
_WEIGHT_INDEXES = ("*.safetensors.index.json", "*.bin.index.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `convert`."""
    parser.add_argument("source", metavar="SOURCE", help="a Tunix checkpoint, or a model's folder")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="where; must not exist")
    parser.add_argument(
        "--base", metavar="FOLDER", help="the Hugging Face folder that training began with"
    )
    parser.add_argument("--step", type=int, help="of the checkpoint; default: the latest")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: the source's")
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of a file: 500MB, 2GiB (5GB)"
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors")


def run(args: argparse.Namespace) -> int:
    """Converts; returns 0."""
    from sgljax_engine import read_hf_tensors, write_hf_tensors

    max_bytes = parse_size(args.max_shard_size)
    output = Path(args.output)
    if output.exists():
        raise InvalidConfigError(f"--output must not exist, got {args.output!r}")
    source = Path(args.source)
    if (source / "config.json").is_file():
        if args.base is not None or args.step is not None:
            raise InvalidConfigError("--base and --step go with a Tunix checkpoint, not a model")
        base, tensors = source, read_hf_tensors(source)
    else:
        if args.base is None:
            raise InvalidConfigError(
                f"--base must name a Hugging Face folder: {args.source!r} has no config.json"
            )
        base = model_folder(args.base)
        tensors = tunix_checkpoint(source, args.step, base)
    partial = output.with_name(output.name + ".partial")
    partial.mkdir(parents=True)
    try:
        copy_other_files(base, partial)
        paths = write_hf_tensors(tensors, partial, dtype=args.dtype, max_shard_bytes=max_bytes)
        write_config(base, partial, args.dtype or common_dtype(tensors))
        partial.rename(output)
    except BaseException:
        shutil.rmtree(partial)
        raise
    if not args.quiet:
        size = sum((output / path.name).stat().st_size for path in paths)
        say(f"wrote {len(tensors)} tensors, {size / 1e6:.1f} MB in {len(paths)} file(s): {output}")
    return 0


def tunix_checkpoint(source: Path, step: int | None, base: Path) -> dict[str, HfTensor]:
    """The tensors of a checkpoint, which must be those of the base.

    Raises:
        WeightLoadError: for a checkpoint that cannot be read.
        WeightSyncError: names all tensors that are missing, unknown or of another shape.
    """
    from sgljax_engine import load_model_config, read_hf_tensors, to_hf_tensors
    from tunix_sgljax.mappings import to_rules
    from tunix_sgljax.tunix_checkpoint import find_step, read_checkpoint

    model = load_model_config(base)
    folder = find_step(source, step)
    weights = read_checkpoint(folder)
    tensors = to_hf_tensors(model, weights, to_rules(None, weights, model.architecture))
    originals = {
        name: tensor
        for name, tensor in read_hf_tensors(base).items()
        if not name.endswith(".rotary_emb.inv_freq")
    }
    if model.tie_word_embeddings and _HEAD in originals:  # a copy of what it is tied to
        tensors[_HEAD] = tensors[_EMBEDDING]
    check_like(tensors, originals, str(base))
    warn_of_rope(model, base)
    return tensors


def check_like(tensors: Mapping[str, HfTensor], base: Mapping[str, HfTensor], where: str) -> None:
    """Raises WeightSyncError unless names and shapes are the same; lists all that differ."""
    problems = [f"{name!r} of {where} would be missing" for name in base if name not in tensors]
    problems += [f"{name!r} is not in {where}" for name in tensors if name not in base]
    problems += [
        f"{name!r} is {list(tensor.shape)}, but {list(base[name].shape)} in {where}"
        for name, tensor in tensors.items()
        if name in base and tensor.shape != base[name].shape
    ]
    if problems:
        listed = "\n  ".join(problems)
        raise WeightSyncError(f"the checkpoint does not fit --base:\n  {listed}")


def warn_of_rope(model: ModelConfig, base: Path) -> None:
    """Says so if the base's config.json rotates otherwise than Tunix did in training."""
    from tunix_sgljax.model_config import trained_rope_theta

    theta = trained_rope_theta(model.architecture)
    if theta is None:
        return
    if model.rope != RopeConfig(theta=theta):
        say(
            f"warning: {base}/config.json has {model.rope}, but Tunix trains such models with "
            f"theta={theta}, unscaled: edit the output's config.json to compute what was trained"
        )


def copy_other_files(base: Path, output: Path) -> None:
    """Copies config, tokenizer and the like: all but weights, hidden files and folders."""
    for path in sorted(base.iterdir()):
        is_weights = any(path.match(pattern) for pattern in _WEIGHT_FILES + _WEIGHT_INDEXES)
        if path.is_file() and not is_weights and not path.name.startswith("."):
            shutil.copyfile(path, output / path.name)


def write_config(base: Path, output: Path, dtype: str | None) -> None:
    """Writes the base's config.json with the dtype of the weights, if all have the same."""
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


def parse_size(text: str) -> int:
    """Bytes, from a number with a unit.

    Raises:
        InvalidConfigError: for something else, and for less than one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]I?B|)", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise InvalidConfigError(
            f"--max-shard-size must be a number with a unit ({units}), got {text!r}"
        )
    return size
