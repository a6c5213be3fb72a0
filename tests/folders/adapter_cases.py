"""Adapters in PEFT's form: each field of adapter_config.json, tensors of other kinds, and walks.

Runs without JAX and without torch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.folders.drafts import Draft, values, write_safetensors

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3_multimodal")
NUM_WALKS = 8
_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclasses.dataclass
class Adapter:
    """An adapter's folder before it is written.

    Attributes:
        base: The folder that it changes.
        config: The contents of adapter_config.json.
        changed: Matches the modules that have a pair.
        ranks: Ranks by patterns of modules, where they are not `r`.
        extra: Further tensors, by their names.
        missing: Matches tensors that are left out.
        dtype: Stored dtype.
    """

    base: Draft
    config: dict[str, Any]
    changed: str = r".*\.(q|v)_proj"
    ranks: dict[str, int] = dataclasses.field(default_factory=dict)
    extra: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    missing: str | None = None
    dtype: str = "F32"

    def set(self, **fields: Any) -> None:
        """Sets fields of the config."""
        self.config.update(fields)

    def modules(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all linear modules, by the names that transformers gives them in memory."""
        prefix = self.base.family.prefix
        inside = "model.language_model." if self.base.family.is_multimodal else "model."
        return {
            name.removesuffix(".weight").replace(prefix, inside, 1): shape
            for name, shape in self.base.shapes.items()
            if name.endswith(("_proj.weight", "lm_head.weight"))
        }

    def write(self, folder: Path) -> None:
        """Writes the two files."""
        text = json.dumps(self.config)
        (folder / "adapter_config.json").write_text(text, encoding="ascii")
        shapes: dict[str, tuple[int, ...]] = {}
        for module, (num_out, num_in) in self.modules().items():
            if re.fullmatch(self.changed, module):
                ranks = (rank for key, rank in self.ranks.items() if re.search(key, module))
                rank = next(ranks, self.config.get("r", 8))
                shapes[f"{module}.lora_A.weight"] = (rank, num_in)
                shapes[f"{module}.lora_B.weight"] = (num_out, rank)
        shapes |= self.extra
        arrays = {f"base_model.model.{n}": 0.3 * values(n, shape) for n, shape in shapes.items()}
        if self.missing is not None:
            arrays = {n: x for n, x in arrays.items() if not re.search(self.missing, n)}
        dtypes = dict.fromkeys(arrays, self.dtype)
        write_safetensors(folder / "adapter_model.safetensors", arrays, dtypes)


Edit = Callable[[Adapter], None]


def _sets(changed: str | None = None, ranks: dict[str, int] | None = None, **fields: Any) -> Edit:
    def edit(adapter: Adapter) -> None:
        adapter.set(**fields)
        adapter.changed = changed or adapter.changed
        adapter.ranks |= ranks or {}

    return edit


def _adds(*suffixes: str, **fields: Any) -> Edit:
    """Tensors beside the pairs: a suffix of each changed module, with the module's outputs."""

    def edit(adapter: Adapter) -> None:
        adapter.set(**fields)
        for module, (num_out, num_in) in adapter.modules().items():
            if re.fullmatch(adapter.changed, module):
                for suffix in suffixes:
                    shape = (num_out, num_in) if suffix == "weight" else (num_out,)
                    adapter.extra[f"{module}.{suffix}"] = shape

    return edit


def _stores(dtype: str) -> Edit:
    def edit(adapter: Adapter) -> None:
        adapter.dtype = dtype

    return edit


def _lacks(pattern: str) -> Edit:
    def edit(adapter: Adapter) -> None:
        adapter.missing = pattern

    return edit


def _head(adapter: Adapter) -> None:
    adapter.set(target_modules=["q_proj", "lm_head"])
    adapter.changed = r".*\.q_proj|lm_head"


def _head_saved(adapter: Adapter) -> None:
    adapter.set(modules_to_save=["lm_head"])
    adapter.extra["lm_head.weight"] = adapter.base.shapes.get("lm_head.weight", (64, 32))


def _embeddings(adapter: Adapter) -> None:
    adapter.set(target_modules=["q_proj", "v_proj", "embed_tokens"])
    num, width = adapter.base.shapes[adapter.base.embedding]
    adapter.extra["model.embed_tokens.lora_embedding_A"] = (4, num)
    adapter.extra["model.embed_tokens.lora_embedding_B"] = (width, 4)


def _drops(*names: str) -> Edit:
    def edit(adapter: Adapter) -> None:
        for name in names:
            adapter.config.pop(name, None)

    return edit


def _default_rank(adapter: Adapter) -> None:
    del adapter.config["r"]


PLAIN: dict[str, Edit] = {
    "all seven": _sets(target_modules=_ALL, changed=r".*layers.*_proj"),
    "rslora": _sets(use_rslora=True),
    "alpha 0.5": _sets(lora_alpha=0.5),
    "alpha of a kind": _sets(alpha_pattern={"q_proj": 20}),
    "alpha by regex": _sets(alpha_pattern={r".*\.1\.self_attn.q_proj": 3.5, "v_proj": 1}),
    "alpha of no end": _sets(alpha_pattern={"q_pro": 20, "self_attn": 30}),
    "rank of a kind": _sets(rank_pattern={"q_proj": 2}, ranks={"q_proj": 2}),
    "ranks, first key": _sets(
        rank_pattern={r"1\.self_attn\.q_proj": 3, "q_proj": 2},
        ranks={r"1\.self_attn\.q_proj": 3, "q_proj": 2},
    ),
    "targets by regex": _sets(target_modules=r".*self_attn\.(q|v)_proj"),
    "all-linear": _sets(target_modules="all-linear", changed=r".*layers.*_proj"),
    "a layer": _sets(layers_to_transform=[1], changed=r".*\.1\..*(q|v)_proj"),
    "a layer's number": _sets(
        layers_to_transform=0, layers_pattern="layers", changed=r".*\.0\..*(q|v)_proj"
    ),
    "patterns of layers": _sets(
        layers_to_transform=[0], layers_pattern=["h", "layers"], changed=r".*\.0\..*(q|v)_proj"
    ),
    "without v_proj": _sets(exclude_modules=["v_proj"], changed=r".*q_proj"),
    "without, by regex": _sets(exclude_modules=r".*v_proj", changed=r".*q_proj"),
    "gaussian": _sets(init_lora_weights="gaussian"),
    "bfloat16": _stores("BF16"),
    "float16": _stores("F16"),
    "null fields": _sets(
        use_rslora=None, exclude_modules=None, layers_to_transform=None, layers_pattern=None
    ),
    "few fields": _drops("task_type", "inference_mode", "lora_dropout", "bias"),
    "default alpha": _drops("lora_alpha"),
    "default rank": _default_rank,
}
"""Edits that leave an adapter plain."""

OTHERS: dict[str, Edit] = {
    "the head": _head,
    "a layer without pairs": _lacks(r"layers\.1\."),
    "half a pair": _lacks(r"layers\.1.*q_proj\.lora_B"),
    "a pair of no target": _sets(target_modules=["q_proj"]),
    "a pair of no layer": _sets(layers_to_transform=[0]),
    "a pair that is left out": _sets(exclude_modules=["v_proj"]),
    "another rank": _sets(ranks={"q_proj": 2}),
    "no targets": _drops("target_modules"),
    "dora": _adds("lora_magnitude_vector", use_dora=True),
    "dora without magnitudes": _sets(use_dora=True),
    "a bias": _adds("base_layer.bias", bias="lora_only"),
    "a bias of no tensor": _sets(bias="all"),
    "biases of B": _adds("lora_B.bias", lora_bias=True),
    "a head of its own": _head_saved,
    "whole weights": _adds("weight"),
    "embeddings": _embeddings,
    "transposed": _sets(fan_in_fan_out=True),
    "pissa": _sets(init_lora_weights="pissa"),
    "olora": _sets(init_lora_weights="olora"),
    "random": _sets(init_lora_weights=False),
    "replicated": _sets(layer_replication=[[0, 2], [1, 2]]),
    "parameters": _sets(target_parameters=["mlp.gate_proj.weight"]),
    "tokens": _sets(trainable_token_indices=[1, 2]),
    "activated by tokens": _sets(alora_invocation_tokens=[5, 6]),
    "qalora": _sets(use_qalora=True),
    "another kind": _sets(peft_type="IA3"),
    "a field of the future": _sets(lora_of_the_future=True),
    "rank 0": _sets(r=0),
    "a rank in words": _sets(r="four", ranks={"": 4}),
    "targets by a wrong regex": _sets(target_modules="(q_proj"),
    "an alpha in words": _sets(alpha_pattern={"q_proj": "20"}),
}
"""Edits that no plain adapter has, or that not all read."""


@functools.cache
def cases() -> dict[str, Adapter]:
    """All adapters by name; the same ones in each process."""
    found: dict[str, Adapter] = {}
    for family in FAMILIES:
        edits = PLAIN if family in ("gemma2", "gemma3_multimodal") else PLAIN | OTHERS
        chosen = [(), *((name,) for name in edits)]
        rng = np.random.default_rng([57, *family.encode()])
        names = list(PLAIN)
        chosen += [tuple(rng.choice(names, 3, replace=False)) for _ in range(NUM_WALKS)]
        for walk in chosen:
            adapter = Adapter(Draft.of(family), _config())
            for name in walk:
                edits[name](adapter)
            found[" + ".join([family, *walk])] = adapter
    return found


def _config() -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": 4,
        "lora_alpha": 6,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
