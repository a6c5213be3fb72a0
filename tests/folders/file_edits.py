"""Edits of a folder's weights, of their names and of how files hold them.

Runs without JAX and without torch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

from tests.folders.drafts import Draft
from tests.folders.edits import ALL, DEEPSEEK, GEMMA4, HYBRID, MULTIMODAL, TEXT, Edit
from tests.folders.families import VOCAB


def _layer_zero(draft: Draft, suffix: str) -> str:
    """The first layer's weight with that suffix."""
    return next(name for name in draft.shapes if name.endswith(suffix))


def _sharded(draft: Draft) -> None:
    draft.num_shards = 3


def _extra(draft: Draft, name: str, shape: tuple[int, ...]) -> None:
    draft.shapes[f"{draft.family.prefix}{name}"] = shape


def _extra_unlisted(draft: Draft, name: str, shape: tuple[int, ...]) -> None:
    _sharded(draft)
    _extra(draft, name, shape)
    draft.index[f"{draft.family.prefix}{name}"] = None


def _missing(draft: Draft, suffix: str) -> None:
    del draft.shapes[_layer_zero(draft, suffix)]


def _wrong_shape(draft: Draft, suffix: str) -> None:
    name = _layer_zero(draft, suffix)
    draft.shapes[name] = (draft.shapes[name][0] + 8, *draft.shapes[name][1:])


def _flat_shape(draft: Draft) -> None:
    name = _layer_zero(draft, "o_proj.weight")
    draft.shapes[name] = (draft.shapes[name][0] * draft.shapes[name][1],)


def _unlisted(draft: Draft) -> None:
    _sharded(draft)
    draft.index[_layer_zero(draft, "down_proj.weight")] = None


def _listed_elsewhere(draft: Draft) -> None:
    _sharded(draft)
    draft.index[draft.embedding] = "model-00003-of-00003.safetensors"


def _listed_only(draft: Draft, name: str) -> None:
    _sharded(draft)
    draft.index[name] = "model-00001-of-00003.safetensors"


def _no_file(draft: Draft) -> None:
    _sharded(draft)
    draft.index[draft.embedding] = "model-00009-of-00009.safetensors"


def _twice(draft: Draft) -> None:
    _sharded(draft)
    draft.twice = (sorted(draft.arrays())[0],)


def _index_of_one(draft: Draft) -> None:
    draft.index["nothing"] = None


def _renamed(draft: Draft, pattern: str, into: str) -> None:
    draft.renames |= {name: re.sub(pattern, into, name, count=1) for name in draft.shapes}


def _without_prefix(draft: Draft) -> None:
    """Names as the base class saves them, which has no head."""
    draft.renames |= {name: name.removeprefix("model.") for name in draft.shapes}


def _without_prefix_sharded(draft: Draft) -> None:
    _without_prefix(draft)
    _sharded(draft)


def _base_class(draft: Draft) -> None:
    _without_prefix(draft)
    name = draft.config["architectures"][0]
    draft.config["architectures"] = [name.replace("ForCausalLM", "Model")]


def _no_architecture(draft: Draft) -> None:
    del draft.config["architectures"]


def _two_architectures(draft: Draft) -> None:
    draft.config["architectures"].append("OtherForCausalLM")


def _empty_architectures(draft: Draft) -> None:
    draft.config["architectures"] = []


def _nested_text(draft: Draft) -> None:
    """A text model's settings under text_config, with its own class named."""
    config = dict(draft.config)
    architectures = config.pop("architectures")
    outer = {
        "architectures": architectures,
        "model_type": config["model_type"].replace("_text", ""),
    }
    draft.config = {**outer, "text_config": config}


def _fused_experts(draft: Draft) -> None:
    """Experts as transformers 5 holds them: stacked, gates above ups."""
    text, names = draft.text, ("num_experts", "num_local_experts", "n_routed_experts")
    hidden, count = text["hidden_size"], next(text[name] for name in names if name in text)
    size = text.get("moe_intermediate_size") or text["intermediate_size"]
    for name in [name for name in draft.shapes if re.search(r"experts\.\d", name)]:
        del draft.shapes[name]
    for name in [name for name in draft.shapes if re.search(r"(mlp|moe)\.gate\.weight", name)]:
        experts = name.replace("gate.weight", "experts")
        draft.shapes[f"{experts}.gate_up_proj"] = (count, 2 * size, hidden)
        draft.shapes[f"{experts}.down_proj"] = (count, hidden, size)


def _drafting_layers(draft: Draft) -> None:
    draft.shapes["mtp.fc.weight"] = (32, 64)
    draft.shapes["mtp.layers.0.mlp.down_proj.weight"] = (32, 48)


def _vision(draft: Draft) -> None:
    draft.shapes["model.visual.patch_embed.proj.weight"] = (16, 3)
    draft.shapes["vision_tower.vision_model.post_layernorm.weight"] = (16,)


def _shared_keys(draft: Draft, *, stored: bool) -> None:
    """The last two layers read the keys of the layers before."""
    draft.set(num_hidden_layers=4, num_kv_shared_layers=2)
    sliding, full = "sliding_attention", "full_attention"
    draft.set(layer_types=[sliding, full, sliding, full])
    had_head = draft.family.head in draft.shapes
    draft.set(global_head_dim=8)
    draft.build()
    if not had_head:
        del draft.shapes[draft.family.head]
    pattern = r"layers\.[23]\.self_attn\.(k_proj|v_proj|k_norm)"
    if not stored:
        draft.shapes = {n: s for n, s in draft.shapes.items() if not re.search(pattern, n)}


def _int_tensor(draft: Draft) -> None:
    """Frequencies of old checkpoints."""
    _extra(draft, "layers.0.self_attn.rotary_emb.inv_freq", (4,))


def _file_edits() -> Iterator[tuple[str, tuple[str, ...], Callable[[Draft], None]]]:
    few = ("llama", "qwen3", "gemma3")
    one = functools.partial
    inv_freq = "layers.0.self_attn.rotary_emb.inv_freq"
    yield "sharded", ALL, _sharded
    yield "index of one file", ("llama", "qwen2"), _index_of_one
    yield "inv_freq", ("llama", "mistral", "gemma2", "qwen3_5_multimodal"), _int_tensor
    yield "inv_freq unlisted", ("llama", "qwen2"), one(_extra_unlisted, name=inv_freq, shape=(4,))
    yield "unexpected bias", few, one(_extra, name="layers.0.self_attn.o_proj.bias", shape=(32,))
    yield "unexpected name", few, one(_extra, name="layers.0.self_attn.extra.weight", shape=(4, 4))
    yield "layer beyond", few, one(_extra, name="layers.9.mlp.down_proj.weight", shape=(32, 48))
    yield "unlisted extra", few, one(_extra_unlisted, name="layers.0.mlp.new", shape=(4,))
    yield "missing weight", few, one(_missing, suffix="down_proj.weight")
    yield "missing norm", few, one(_missing, suffix="input_layernorm.weight")
    yield "missing table", ("llama",), one(_missing, suffix="embed_tokens.weight")
    yield "missing bias", ("qwen2",), one(_missing, suffix="q_proj.bias")
    yield "missing q_norm", ("qwen3",), one(_missing, suffix="q_norm.weight")
    yield "wrong shape", few, one(_wrong_shape, suffix="down_proj.weight")
    yield "longer table", few, one(_wrong_shape, suffix="embed_tokens.weight")
    yield "flat weight", ("llama",), _flat_shape
    yield "unlisted weight", ("llama", "qwen3"), _unlisted
    yield "listed elsewhere", ("llama", "qwen3"), _listed_elsewhere
    yield "listed, nowhere held", ("llama",), one(_listed_only, name="model.new.weight")
    yield "tied head listed", ("qwen3", "gemma", "gemma2"), one(_listed_only, name="lm_head.weight")
    yield "file that is not there", ("llama",), _no_file
    yield "in two shards", ("llama", "qwen3"), _twice
    yield "no prefix", TEXT, _without_prefix
    yield "no prefix, sharded", ("qwen3",), _without_prefix_sharded
    yield "no prefix", MULTIMODAL, _without_prefix
    yield "base class", ("llama", "qwen2", "qwen3", "gemma"), _base_class
    yield "no architectures", ("llama", "qwen2", "gemma2", "gemma3", "qwen3_5"), _no_architecture
    yield "architectures=[]", ("llama",), _empty_architectures
    yield "two architectures", ("llama",), _two_architectures
    yield "text nested", ("qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "qwen3"), _nested_text
    yield (
        "fused experts",
        ("qwen3_moe", "mixtral", *DEEPSEEK, *[n for n in HYBRID if "moe" in n or "next" in n]),
        _fused_experts,
    )
    yield "drafting layers", HYBRID, _drafting_layers
    following = one(_extra, name="layers.2.eh_proj.weight", shape=(32, 64))
    yield "drafting layer", DEEPSEEK, following
    yield "vision tower", MULTIMODAL, _vision
    yield "shared keys stored", GEMMA4, one(_shared_keys, stored=True)
    yield "shared keys", GEMMA4, one(_shared_keys, stored=False)
    for name, pattern, into in (
        ("language_model.model.", r"^model\.language_model\.", "language_model.model."),
        ("model.language_model.", r"^language_model\.model\.", "model.language_model."),
        (
            "model.language_model.model.",
            r"^(model\.language_model|language_model\.model)\.",
            "model.language_model.model.",
        ),
        ("model.", r"^(model\.language_model|language_model\.model)\.", "model."),
    ):
        yield f"named {name}", MULTIMODAL, one(_renamed, pattern=pattern, into=into)
    yield "named transformer.", ("llama",), one(_renamed, pattern=r"^model\.", into="transformer.")
    inside = one(_renamed, pattern=r"^model\.", into="model.language_model.")
    yield "text named model.language_model.", ("qwen3_5", "gemma3", "gemma4", "qwen3"), inside
    old = one(_renamed, pattern=r"^model\.", into="language_model.model.")
    yield "text named language_model.model.", ("qwen3_5", "gemma3"), old
    longer = one(_extra, name="lm_head.bias", shape=(VOCAB,))
    yield "bias of the head", ("llama",), longer


FILE_EDITS = tuple(
    Edit(f"files: {name}", "files", families, apply) for name, families, apply in _file_edits()
)
