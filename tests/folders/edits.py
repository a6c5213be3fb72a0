"""Edits of model folders: the ways in which people's folders differ from one another.

Each takes a draft and changes it. Settings and their values are what folders in the wild have, and
what lies just outside. Runs without JAX and without torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.folders.drafts import Draft
from tests.folders.families import FAMILIES, HIDDEN, VOCAB, Config

ABSENT = object()
"""A value that removes its setting."""

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"

PLAIN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2")
PLAIN += ("mixtral", "olmo2", "smollm3")
"""Families with one rotary embedding, of whole heads."""
HYBRID = tuple(name for name in FAMILIES if name.startswith(("qwen3_5", "qwen3_next")))
GEMMA3 = ("gemma3", "gemma3_multimodal")
GEMMA4 = ("gemma4", "gemma4_multimodal", "gemma4_unified")
DEEPSEEK = ("deepseek_v2", "deepseek_v3")
WINDOWED = ("gemma2", *GEMMA3, *GEMMA4, "olmo3")
MULTIMODAL = tuple(name for name, family in FAMILIES.items() if family.is_multimodal)
TEXT = tuple(name for name in FAMILIES if name not in MULTIMODAL)
ALL = tuple(FAMILIES)


class Edit(NamedTuple):
    """A change of a folder.

    Attributes:
        name: For people.
        part: What it is about; a folder gets at most one edit of a part.
        families: Families that it makes sense for.
        apply: Changes the draft.
    """

    name: str
    part: str
    families: tuple[str, ...]
    apply: Callable[[Draft], None]


def _put(draft: Draft, **settings: Any) -> None:
    """Sets or removes settings of the language model."""
    for name, value in settings.items():
        draft.drop(name) if value is ABSENT else draft.set(**{name: value})


def _latent_edits(each: Callable[..., Iterator[Edit]]) -> Iterator[Edit]:
    v2, v3 = DEEPSEEK[:1], DEEPSEEK[1:]
    yield from each("router", v2, "topk_method", ABSENT, "greedy", "noaux_tc", None)
    yield from each("router", v3, "topk_method", "noaux_tc", "greedy")
    yield from each("router", DEEPSEEK, "scoring_func", "softmax", "sigmoid")
    yield from each("router", DEEPSEEK, "norm_topk_prob", ABSENT, None, False, True)
    yield from each("router", DEEPSEEK, "routed_scaling_factor", ABSENT, 1.0, 0.0)
    yield from each("router", DEEPSEEK, "num_experts_per_tok", ABSENT, 1, 4, 5)
    yield from each("groups", DEEPSEEK, "topk_group", ABSENT, 1, 4, 5)
    yield from each("groups", DEEPSEEK, "n_group", ABSENT, 1, 2, 3, 8)
    yield from each("heads", DEEPSEEK, "num_key_value_heads", ABSENT, None, 2)
    yield from each("latents", DEEPSEEK, "rope_interleave", False, True, None)
    yield from each("latents", DEEPSEEK, "head_dim", 8, 20)
    yield from each("layers", DEEPSEEK, "num_nextn_predict_layers", 0, 1)
    yield from each("layers", DEEPSEEK, "moe_layer_freq", 1, 2)


def _setting_edits() -> Iterator[Edit]:
    def each(part: str, families: tuple[str, ...], field: str, *found: Any) -> Iterator[Edit]:
        for value in found:
            said = "absent" if value is ABSENT else repr(value)
            apply = functools.partial(_put, **{field: value})
            yield Edit(f"{field}={said}", part, families, apply)

    yield from each("eps", ALL, "rms_norm_eps", ABSENT, 1e-4)
    yield from each("eps", ("llama", "qwen3_5"), "rms_norm_eps", 0, 1, -1e-5, "1e-5", None)
    yield from each("context", ALL, "max_position_embeddings", ABSENT)
    yield from each("context", ("llama", "gemma3"), "max_position_embeddings", 0, -1, "128", None)
    act = ("llama", "qwen3", "qwen3_next")
    yield from each("act", act, "hidden_act", ABSENT, None, "gelu", "swish", "relu")
    yield from each("act", ("gemma",), "hidden_act", ABSENT, "gelu", "gelu_new", "silu")
    yield from each("act", ("gemma",), "hidden_activation", "gelu", "gelu_pytorch_tanh")
    gelus = ("gemma2", "gemma3", "gemma4")
    yield from each("act", gelus, "hidden_activation", ABSENT, "gelu", "silu", None)
    yield from each("heads", ("llama", "qwen2", "gemma2"), "num_key_value_heads", 0, 3, "2", -2)
    yield from each("heads", ("llama", "mistral", "qwen3_moe"), "num_attention_heads", 0, 3, "4")
    yield from each("heads", ("mixtral", "olmo2", "olmo3"), "num_key_value_heads", 3, None, ABSENT)
    yield from each("dim", ("llama", "qwen3"), "head_dim", 0, 7, -8, None, 8, "8", ABSENT)
    yield from each("sizes", ("llama", "qwen3_5"), "hidden_size", 0, -32, "32", 32.0, None, 33)
    yield from each("sizes", ("qwen2",), "vocab_size", 0, 32, 128, ABSENT)
    yield from each("sizes", ("llama", "gemma3"), "num_hidden_layers", 0, 1, 3, "2")
    yield from each("sizes", ("mistral",), "intermediate_size", 0, 47, None)
    bias = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma3", "qwen3_5")
    bias += ("mixtral", "olmo2", "olmo3", "smollm3")
    yield from each("bias", bias, "attention_bias", None, False)
    yield from each("bias", ("llama", "qwen3", "gemma2"), "mlp_bias", False, None)
    quiet = ("qwen2", "qwen3", "qwen3_moe")
    yield from each("window", quiet, "sliding_window", 9, None, ABSENT, 0)
    yield from each("window", ("mistral",), "sliding_window", ABSENT, None, 0, -1, 5, 4096, "9")
    yield from each("window", WINDOWED, "sliding_window", ABSENT, None, 5)
    yield from each("window", ("gemma2", "gemma3"), "sliding_window", 0, -1, "9", 1)
    yield from each("window", ("mixtral",), "sliding_window", ABSENT, None, 5)
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        yield from each(field, ("gemma2", "gemma3"), field, ABSENT, None, 0, 5, -5.0, "30")
        yield from each(field, ("llama", "gemma"), field, 5.0)
    yield from each("cap", GEMMA4, "final_logit_softcapping", ABSENT, None)
    yield from each("scale", ("gemma2", "gemma3"), "query_pre_attn_scalar", ABSENT, 0, -1, 24, None)
    two = ("use_bidirectional_attention",)
    yield from each("causal", ("gemma", *GEMMA3), two[0], None, False, True)
    yield from each("causal", GEMMA4, two[0], None, "vision", "all")
    yield from each("experts", ("qwen3_moe", "qwen3_next"), "norm_topk_prob", ABSENT, False, None)
    yield from each("experts", ("qwen3_moe",), "num_experts_per_tok", 0, 1, 5, ABSENT, "2")
    yield from each("experts", ("qwen3_moe",), "num_experts", 3, ABSENT, 0)
    yield from each("experts", ("mixtral",), "num_experts_per_tok", 1, 4, ABSENT, None)
    yield from each("experts", ("mixtral",), "num_local_experts", ABSENT, 3)
    yield from each("experts", ("mixtral",), "norm_topk_prob", False)
    yield from _latent_edits(each)
    yield from each("nope", ("smollm3",), "no_rope_layers", ABSENT, None, [0, 1], [1], [1, 0, 1])
    yield from each("nope", ("smollm3",), "no_rope_layers", [1, 2], [True, False], "10")
    yield from each("sparse", ("qwen3_moe", "qwen3_next"), "decoder_sparse_step", 2, 0, None)
    yield from each("sparse", ("qwen3_moe", "qwen3_next"), "mlp_only_layers", [0], None, [])
    yield from each("nets", ("qwen3_next", "qwen3_5"), "linear_conv_kernel_dim", 0, 3, "4")
    yield from each("nets", ("qwen3_5",), "linear_num_value_heads", 3, 2, ABSENT)
    yield from each("nets", HYBRID, "full_attention_interval", 4, 2)
    yield from each("keys", ("gemma4",), "attention_k_eq_v", True, None)
    yield from each("keys", ("gemma4",), "num_kv_shared_layers", 1, 2, 3, None)
    yield from each("keys", ("gemma4",), "global_head_dim", ABSENT, None, 0)
    yield from each("keys", ("gemma4",), "vocab_size_per_layer_input", ABSENT, 32)
    yield from each("keys", ("gemma4",), "hidden_size_per_layer_input", 0, None, ABSENT)
    yield from each("end", ("llama", "qwen3_5_multimodal"), "eos_token_id", ABSENT, None, [1, 2])
    yield from each("end", ("llama",), "eos_token_id", "1", -1, 64, [])
    for field, value in (
        ("quantization_config", {"quant_method": "fp8"}),
        ("attention_multiplier", 0.5),
        ("logits_scaling", 4.0),
        ("residual_multiplier", 0.5),
        ("embedding_multiplier", 2.0),
        ("scale_emb", 12),
        ("logit_scale", 0.25),
        ("clip_qkv", 1.0),
        ("pretraining_tp", 2),
        ("attention_dropout", 0.5),
        ("use_qk_norm", True),
        ("no_rope_layers", [0, 1]),
        ("dual_chunk_attention_config", {"chunk_size": 16}),
        ("torchscript", True),
        ("use_cache", False),
        ("is_decoder", True),
        ("num_nextn_predict_layers", 1),
    ):
        yield from each("unknown", ("llama", "qwen3"), field, value)


def _dtype_edits() -> Iterator[Edit]:
    def apply(draft: Draft, stored: str, inner: Config, outer: Config) -> None:
        draft.dtype = stored
        draft.config.update(outer)
        draft.text.update(inner)

    usual: list[tuple[str, str, Config, Config]] = [
        ("BF16, none", "BF16", {}, {}),
        ("F32, dtype=bfloat16", "F32", {}, {"dtype": "bfloat16"}),
        ("BF16, torch_dtype=bfloat16", "BF16", {}, {"torch_dtype": "bfloat16"}),
    ]
    more: list[tuple[str, str, Config, Config]] = [
        ("F16, none", "F16", {}, {}),
        ("F16, dtype=float16", "F16", {}, {"dtype": "float16"}),
        ("BF16, dtype=float32", "BF16", {}, {"dtype": "float32"}),
        ("both differ", "BF16", {}, {"dtype": "float32", "torch_dtype": "bfloat16"}),
        ("dtype=null", "BF16", {}, {"dtype": None}),
        ("dtype=null, torch_dtype", "F32", {}, {"dtype": None, "torch_dtype": "bfloat16"}),
        ("dtype=auto", "BF16", {}, {"dtype": "auto"}),
        ("dtype=float33", "F32", {}, {"dtype": "float33"}),
        ("dtype=torch.bfloat16", "BF16", {}, {"torch_dtype": "torch.bfloat16"}),
    ]
    for name, *rest in (*usual, *more):
        families = ALL if name == "BF16, none" else (*TEXT, "qwen3_5_multimodal")
        if (name, *rest) in more:
            families = ("llama", "qwen3_5_multimodal")
        yield Edit(f"dtype: {name}", "dtype", families, functools.partial(_call, apply, *rest))
    for name, stored, inner, outer in (
        ("inside", "BF16", {"dtype": "bfloat16"}, {}),
        ("inside, torch_dtype", "BF16", {"torch_dtype": "bfloat16"}, {}),
        ("inside bfloat16 of F32", "F32", {"dtype": "bfloat16"}, {}),
        ("inside float32 of BF16", "BF16", {"dtype": "float32"}, {}),
        ("inside and outside differ", "BF16", {"dtype": "float32"}, {"dtype": "bfloat16"}),
    ):
        edit = functools.partial(_call, apply, stored, inner, outer)
        yield Edit(f"dtype: {name}", "dtype", MULTIMODAL, edit)

    def mixed(draft: Draft, first: str) -> None:
        draft.dtype = "BF16"
        names = sorted(draft.shapes)
        draft.dtypes = {names[0] if first == "one" else draft.embedding: "F32"}

    yield Edit("dtype: first F32", "dtype", ("llama",), functools.partial(_call, mixed, "one"))
    yield Edit("dtype: table F32", "dtype", ("qwen3",), functools.partial(_call, mixed, "table"))


def _call(function: Callable[..., None], *args: Any) -> None:
    """Applies a function whose first argument is the draft, which comes last."""
    *given, draft = args
    function(draft, *given)


def _tie_edits() -> Iterator[Edit]:
    heads = ("no head", "same head", "other head", "head only")

    def apply(draft: Draft, inner: Any, outer: Any, head: str) -> None:
        draft.text.pop("tie_word_embeddings", None)
        draft.config.pop("tie_word_embeddings", None)
        if inner is not ABSENT:
            draft.text["tie_word_embeddings"] = inner
        if outer is not ABSENT:
            draft.config["tie_word_embeddings"] = outer
        _head(draft, head)

    for head in heads:
        for tied in (True, False, ABSENT):
            if tied is False and head in ("same head", "other head"):
                continue
            said = "absent" if tied is ABSENT else str(tied).lower()
            edit = functools.partial(_call, apply, ABSENT, tied, head)
            families = (
                ALL
                if tied is not ABSENT or head == "no head"
                else ("llama", "gemma2", "qwen3_5_multimodal")
            )
            yield Edit(f"tie: {said}, {head}", "tie", families, edit)
    for inner, outer in ((True, False), (False, True), (True, ABSENT), (False, ABSENT)):
        for head in ("no head", "other head"):
            said = f"inside {str(inner).lower()}, outside " + (
                "absent" if outer is ABSENT else str(outer).lower()
            )
            edit = functools.partial(_call, apply, inner, outer, head)
            yield Edit(f"tie: {said}, {head}", "tie", MULTIMODAL, edit)
    for value in (None, "true", 1, 0):
        edit = functools.partial(_call, apply, ABSENT, value, "no head")
        yield Edit(f"tie: {value!r}, no head", "tie", ("llama", "gemma"), edit)


def _head(draft: Draft, kind: str) -> None:
    """Stores embeddings and the output projection, one of them, or one table twice."""
    head, table = draft.family.head, draft.embedding
    shape = draft.shapes[table]
    draft.shapes.pop(head, None)
    if kind == "other head":
        draft.shapes[head] = shape
    elif kind == "head only":
        del draft.shapes[table]
        draft.shapes[head] = shape
    elif kind == "same head":
        draft.copies[head] = table


def _layer_edits() -> Iterator[Edit]:
    kinds: list[tuple[str, tuple[str, ...], Any]] = [
        ("absent", ALL, ABSENT),
        ("full", ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma"), [FULL] * 2),
        ("sliding", ("llama", "mistral", "qwen2", "qwen3", "gemma2"), [SLIDING] * 2),
        ("mixed", ("mistral", "qwen2", "qwen3", "gemma"), [SLIDING, FULL]),
        ("mixed, full first", ("gemma2", "gemma3"), [FULL, SLIDING]),
        ("sliding last", ("olmo3",), [FULL, FULL, SLIDING, SLIDING]),
        ("four full", ("olmo3",), [FULL] * 4),
        ("sliding, with a window", ("mixtral",), [SLIDING] * 2),
        ("all full", ("gemma2", "gemma3"), [FULL, FULL]),
        ("too few", ("qwen2", "gemma2", "gemma3"), [FULL]),
        ("too many", ("qwen2", "gemma3"), [FULL] * 3),
        ("unknown", ("llama", "qwen2", "gemma2"), ["chunked_attention", FULL]),
        ("nonsense", ("qwen3", "gemma3"), ["spiral", FULL]),
        ("null", ("qwen2", "gemma3", "qwen3_5"), None),
        ("all linear", ("qwen3_5",), [LINEAR] * 4),
        ("last sliding", ("gemma4",), [SLIDING, SLIDING, SLIDING]),
        ("full first", ("gemma4",), [FULL, SLIDING, FULL]),
        ("a string", ("qwen2",), FULL),
    ]
    for name, families, value in kinds:
        edit = functools.partial(_put, layer_types=value)
        yield Edit(f"layer_types: {name}", "layers", families, edit)
    windows = {"use_sliding_window": True, "sliding_window": 9, "layer_types": ABSENT}
    for name, more in (
        ("use_sliding_window, from 1", {"max_window_layers": 1}),
        ("use_sliding_window, from 0", {"max_window_layers": 0}),
        ("use_sliding_window, from 28", {}),
        ("use_sliding_window, null", {"sliding_window": None, "max_window_layers": 0}),
        ("use_sliding_window, absent", {"sliding_window": ABSENT, "max_window_layers": 0}),
        ("use_sliding_window, types", {"layer_types": [SLIDING, FULL]}),
        (
            "use_sliding_window=false, types",
            {"use_sliding_window": False, "layer_types": [SLIDING, FULL]},
        ),
    ):
        edit = functools.partial(_put, **{**windows, **more})
        yield Edit(name, "layers", ("qwen2", "qwen3", "qwen3_moe"), edit)
    pattern = {"layer_types": ABSENT, "sliding_window_pattern": 2}
    yield Edit("sliding_window_pattern=2", "layers", WINDOWED, functools.partial(_put, **pattern))
    hidden = functools.partial(_put, layer_types=ABSENT, full_attention_interval=2)
    interval = functools.partial(_put, no_rope_layers=ABSENT, no_rope_layer_interval=2)
    yield Edit("no_rope_layer_interval=2", "layers", ("smollm3",), interval)
    yield Edit("full_attention_interval=2", "layers", HYBRID, hidden)


_SHARED = tuple(f"shared_experts.{name}_proj" for name in ("gate", "up", "down"))
_DENSE = ("first_k_dense_replace",)


def _size_edits() -> Iterator[Edit]:
    def sized(draft: Draft, settings: dict[str, Any], hide: tuple[str, ...]) -> None:
        had_head = draft.family.head in draft.shapes
        _put(draft, **settings)
        draft.build()
        if not had_head:
            del draft.shapes[draft.family.head]
        draft.drop(*hide)

    for name, families, settings, hide in (
        (
            "kv heads of all heads",
            ("llama", "qwen2", "mistral"),
            {"num_key_value_heads": 4},
            ("num_key_value_heads",),
        ),
        ("one kv head", ALL[:4], {"num_key_value_heads": 1}, ()),
        ("head_dim 4", ("llama", "qwen2", "qwen3", "mistral", "gemma"), {"head_dim": 4}, ()),
        ("head_dim left out", ("llama", "qwen2", "mistral"), {"head_dim": 8}, ("head_dim",)),
        ("head_dim 128 left out", ("qwen3",), {"head_dim": 128}, ("head_dim",)),
        ("head_dim 256 left out", ("gemma", "gemma2"), {"head_dim": 256}, ("head_dim",)),
        ("head_dim null", ("llama", "mistral"), {"head_dim": None}, ()),
        ("odd vocabulary", ("llama", "gemma3"), {"vocab_size": VOCAB + 3}, ()),
        ("experts' other name", ("qwen3_moe",), {"num_local_experts": 4}, ("num_experts",)),
        ("experts' other name", ("mixtral",), {"num_experts": 4}, ("num_local_experts",)),
        ("head_dim 16", ("mixtral", "olmo2", "olmo3"), {"head_dim": 16}, ()),
        ("kv heads of all", ("olmo2", "olmo3"), {"num_key_value_heads": 4}, ()),
        ("queries by a latent", ("deepseek_v2",), {"q_lora_rank": 12}, ()),
        ("queries without", ("deepseek_v3",), {"q_lora_rank": None}, ()),
        ("all layers dense", DEEPSEEK, {"first_k_dense_replace": 2}, ()),
        ("no layer dense", DEEPSEEK, {"first_k_dense_replace": 0}, ()),
        ("dense layers left out", DEEPSEEK, {"first_k_dense_replace": 0}, _DENSE),
        ("one shared expert", DEEPSEEK, {"n_shared_experts": 1}, ()),
        ("latents of 512", DEEPSEEK, {"kv_lora_rank": 512}, ("kv_lora_rank",)),
        ("hidden 24", ("llama", "gemma2"), {"hidden_size": HIDDEN - 8, "head_dim": 8}, ()),
    ):
        edit = functools.partial(_call, sized, settings, hide)
        yield Edit(name, "dim", families, edit)

    def biased(draft: Draft, field: str, modules: tuple[str, ...], is_stored: bool) -> None:
        draft.set(**{field: True})
        for name, shape in list(draft.shapes.items()) if is_stored else ():
            if name.endswith(tuple(f"{module}.weight" for module in modules)):
                draft.shapes[name.replace(".weight", ".bias")] = shape[:1]

    heads, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    own = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3", "gemma4", "mistral")
    own += ("mixtral", "olmo2", "olmo3", "smollm3")
    latents = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
    for field, families, modules in (
        ("attention_bias", (*own, "qwen3_5", "qwen3_next"), heads),
        ("mlp_bias", ("llama", "qwen3", "smollm3"), mlp),
        ("attention_bias", DEEPSEEK, latents),
        ("mlp_bias", DEEPSEEK, ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", *_SHARED)),
    ):
        for is_stored in (True, False):
            edit = functools.partial(_call, biased, field, modules, is_stored)
            said = "stored" if is_stored else "not stored"
            yield Edit(f"{field}, {said}", "bias", families, edit)


SETTING_EDITS = tuple(_setting_edits())
EDITS = (
    *_dtype_edits(),
    *_tie_edits(),
    *_layer_edits(),
    *_size_edits(),
)
