"""Reads a Tunix checkpoint for `convert`: tensors and LoRA pairs by Hugging Face's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sgljax_engine import (
    HfTensor,
    InvalidConfigError,
    ModelConfig,
    RopeConfig,
    WeightSyncError,
    load_model_config,
    read_hf_tensors,
    to_hf_tensors,
)
from tunix_sgljax.cli.output import say

if TYPE_CHECKING:
    from tunix_sgljax.checkpoints.lora_files import HfPair, LoraScale

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunixModel:
    """A checkpoint, and the Hugging Face folder that training began with.

    Attributes:
        folder: The checkpoint's parameters.
        model: The model of the parameters.
        originals: The tensors of the Hugging Face folder.
        tensors: All weights of the checkpoint; None if it holds only LoRA pairs.
        pairs: LoRA parameters by Tunix's names; empty without LoRA.
        scale: Scale of the pairs that `tunix-sgljax train` wrote; None if there is none.
    """

    folder: Path
    model: ModelConfig
    originals: Mapping[str, HfTensor]
    tensors: Mapping[str, HfTensor] | None
    pairs: Mapping[str, np.ndarray]
    scale: LoraScale | None

    def hf_pairs(self, scale: LoraScale | None) -> dict[str, HfPair]:
        """The LoRA pairs by Hugging Face's names.

        Args:
            scale: The user's scale; None takes the one written beside the checkpoint.

        Raises:
            InvalidConfigError: The scale is unknown.
            WeightSyncError: names all pairs that do not fit.
        """
        from tunix_sgljax.checkpoints.lora_files import hf_pairs

        scale = scale or self.scale
        if scale is None:
            raise InvalidConfigError(
                f"nothing tells the scale of the LoRA pairs in {self.folder}: give --lora-alpha, "
                "the alpha that they were trained with, or --lora-scaling, which is alpha / rank"
            )
        return hf_pairs(self.pairs, self.model.architecture, scale, self.originals)

    def merged(self, scale: LoraScale | None, dtype: np.dtype | None) -> dict[str, HfTensor]:
        """All tensors with their LoRA pairs added, in the given dtype or their own."""
        from tunix_sgljax.checkpoints.lora_files import merge_pairs

        tensors = dict(self.originals if self.tensors is None else self.tensors)
        pairs = self.hf_pairs(scale) if self.pairs else {}
        if not self.pairs and scale is not None:
            raise InvalidConfigError(
                f"--lora-alpha and --lora-scaling go with LoRA parameters; {self.folder} has none"
            )
        tensors = merge_pairs(tensors, pairs, dtype)
        if self.model.tie_word_embeddings and _HEAD in tensors:  # a copy of the tied embedding
            tensors[_HEAD] = tensors[_EMBEDDING]
        return tensors


def read_tunix_model(source: Path, step: int | None, base: Path) -> TunixModel:
    """Reads a checkpoint, and the headers of the folder that training began with.

    Raises:
        InvalidConfigError: for the folder of a multimodal model.
        WeightLoadError: for a checkpoint that cannot be read.
        WeightSyncError: names all tensors that are missing, unknown or of another shape.
    """
    from tunix_sgljax.checkpoints.lora_files import LoraScale
    from tunix_sgljax.checkpoints.lora_settings import read_settings
    from tunix_sgljax.checkpoints.tunix import find_step, read_checkpoint, root_of
    from tunix_sgljax.lora import is_lora_name
    from tunix_sgljax.mappings import to_rules

    model = load_model_config(base)
    folder = find_step(source, step)
    weights = read_checkpoint(folder)
    pairs = {name: weights.pop(name) for name in list(weights) if is_lora_name(name)}
    originals = {
        name: tensor
        for name, tensor in read_hf_tensors(base).items()
        if not name.endswith(".rotary_emb.inv_freq")
    }
    if any("language_model." in name for name in originals):
        raise InvalidConfigError(
            f"--base {base} is a multimodal model, of which Tunix trains the language model: "
            "convert needs a base that holds that alone"
        )
    tensors = None
    if weights or not pairs:
        rules = to_rules(None, weights, model.architecture, model.attention.kv_layers)
        tensors = to_hf_tensors(model, weights, rules)
        if model.tie_word_embeddings and _HEAD in originals:
            tensors[_HEAD] = tensors[_EMBEDDING]
        check_like(tensors, originals, str(base))
    warn_of_rope(model, base)
    settings = read_settings(root_of(folder)) if pairs else None
    return TunixModel(
        folder=folder,
        model=model,
        originals=originals,
        tensors=tensors,
        pairs=pairs,
        scale=None if settings is None else LoraScale(None, settings.alpha),
    )


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


def check_same(tensors: Mapping[str, HfTensor], base: Mapping[str, HfTensor], where: str) -> None:
    """Raises WeightSyncError unless a checkpoint's frozen weights equal the base's.

    Values are compared in the coarser of both dtypes.
    """
    for name, tensor in tensors.items():
        ours, theirs = tensor.load(), base[name].load()
        coarse = min(ours.dtype, theirs.dtype, key=lambda dtype: dtype.itemsize)
        if not np.array_equal(ours.astype(coarse), theirs.astype(coarse)):
            raise WeightSyncError(
                f"{name!r} of the checkpoint is not that of {where}: an adapter for {where} would "
                "leave out what else was trained; convert without --peft"
            )


def warn_of_rope(model: ModelConfig, base: Path) -> None:
    """Warns if the base's config.json has a different rotary embedding than Tunix in training."""
    from tunix_sgljax.model_config import trained_rope_theta

    theta = trained_rope_theta(model.architecture)
    if theta is None:
        return
    if model.rope != RopeConfig(theta=theta):
        say(
            f"warning: {base}/config.json has {model.rope}, but Tunix trains such models with "
            f"theta={theta}, unscaled: edit the output's config.json to compute what was trained"
        )
