"""Reads a Tunix checkpoint for `convert`: tensors and LoRA pairs by Hugging Face's names.

A multimodal folder has other names for its language model, which is what Tunix trains, and tensors
beside it. So tensors go by the engine's names here, and get the folder's at the end.
"""

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
    hf_rules,
    load_model_config,
    read_hf_tensors,
    to_hf_tensors,
)
from tunix_sgljax.cli.output import say

if TYPE_CHECKING:
    from tunix_sgljax.checkpoints.lora_files import HfPair, LoraScale

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseTensors:
    """The tensors of the Hugging Face folder that training began with, not loaded.

    `of_text` are those of the language model by the engine's names, and `names` the folder's names
    of these; `beside` has all others: vision, and keys that no layer reads.
    """

    of_text: Mapping[str, HfTensor]
    names: Mapping[str, str]
    beside: Mapping[str, HfTensor]

    @classmethod
    def read(cls, folder: Path, model: ModelConfig) -> BaseTensors:
        rules = hf_rules(model)
        targets = {rule.source: rule.target for rule in rules}
        prefixes = tuple(
            rule.source.removesuffix("**") for rule in rules if rule.source.endswith(".**")
        )
        of_text: dict[str, HfTensor] = {}
        names: dict[str, str] = {}
        beside: dict[str, HfTensor] = {}
        for name, tensor in read_hf_tensors(folder).items():
            if name.endswith(".rotary_emb.inv_freq"):
                continue
            target = targets.get(name)
            if target is None and name.endswith(_HEAD):
                target = _HEAD  # a copy of the tied embedding
            is_beside = name in targets or name.startswith(prefixes)
            if target is None and is_beside:
                beside[name] = tensor
                continue
            names[target or name] = name
            of_text[target or name] = tensor
        return cls(of_text=of_text, names=names, beside=beside)

    def named(self, tensors: Mapping[str, HfTensor]) -> dict[str, HfTensor]:
        """Tensors of the language model by the folder's names, with those beside it."""
        return {self.names[name]: tensor for name, tensor in tensors.items()} | dict(self.beside)

    def module(self, name: str) -> str:
        """The name that transformers has for a tensor of the language model."""
        return _module_name(self.names[name])

    @property
    def all_modules(self) -> list[str]:
        """The names that transformers has for all tensors."""
        return [*map(_module_name, [*self.names.values(), *self.beside])]


def _module_name(name: str) -> str:
    """Files of a multimodal Gemma 3 are called as modules of transformers 4 were."""
    return name.replace("language_model.model.", "model.language_model.", 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunixModel:
    """A checkpoint, and the Hugging Face folder that training began with.

    `tensors` are all weights of the checkpoint, None if it holds only LoRA pairs. Pairs go by
    Tunix's names; `scale` is theirs as `tunix-sgljax train` wrote it, None if it did not.
    """

    folder: Path
    model: ModelConfig
    base: BaseTensors
    tensors: Mapping[str, HfTensor] | None
    pairs: Mapping[str, np.ndarray]
    scale: LoraScale | None

    def hf_pairs(self, scale: LoraScale | None) -> dict[str, HfPair]:
        """The LoRA pairs by the engine's names; by default with the checkpoint's own scale."""
        from tunix_sgljax.checkpoints.lora_files import hf_pairs

        scale = scale or self.scale
        if scale is None:
            raise InvalidConfigError(
                f"nothing tells the scale of the LoRA pairs in {self.folder}: give --lora-alpha, "
                "the alpha that they were trained with, or --lora-scaling, which is alpha / rank"
            )
        return hf_pairs(self.pairs, self.model.architecture, scale, self.base.of_text)

    def merged(self, scale: LoraScale | None, dtype: np.dtype | None) -> dict[str, HfTensor]:
        """All tensors by the folder's names with their LoRA pairs, in that dtype or their own."""
        from tunix_sgljax.checkpoints.lora_files import merge_pairs

        tensors = dict(self.base.of_text if self.tensors is None else self.tensors)
        pairs = self.hf_pairs(scale) if self.pairs else {}
        if not self.pairs and scale is not None:
            raise InvalidConfigError(
                f"--lora-alpha and --lora-scaling go with LoRA parameters; {self.folder} has none"
            )
        tensors = merge_pairs(tensors, pairs, dtype)
        if self.model.tie_word_embeddings and _HEAD in tensors:  # a copy of the tied embedding
            tensors[_HEAD] = tensors[_EMBEDDING]
        return self.base.named(tensors)


def read_tunix_model(source: Path, step: int | None, base: Path) -> TunixModel:
    """Reads a checkpoint, and the headers of the folder that training began with.

    WeightSyncError names all tensors that are missing, unknown or of another shape.
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
    originals = BaseTensors.read(base, model)
    tensors = None
    if weights or not pairs:
        rules = to_rules(None, weights, model.architecture, model.attention.kv_layers)
        tensors = to_hf_tensors(model, weights, rules)
        if model.tie_word_embeddings and _HEAD in originals.of_text:
            tensors[_HEAD] = tensors[_EMBEDDING]
        check_like(tensors, originals.of_text, str(base))
    warn_of_rope(model, base)
    warn_of_unread_keys(model, originals, base)
    settings = read_settings(root_of(folder)) if pairs else None
    return TunixModel(
        folder=folder,
        model=model,
        base=originals,
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


def warn_of_unread_keys(model: ModelConfig, tensors: BaseTensors, base: Path) -> None:
    """Warns of a base without keys that no layer reads, as transformers writes it."""
    unread = [layer for layer in range(model.num_layers) if model.kv_layer(layer) != layer]
    if unread and not any(f"layers.{unread[0]}.self_attn.k_proj." in x for x in tensors.beside):
        say(
            f"warning: {base} has no keys for layers {unread[0]} to {unread[-1]}, which read those "
            "of earlier ones; transformers and this engine load the output, but Tunix's own loader "
            "refuses folders without them"
        )
