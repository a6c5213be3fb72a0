"""Folders that are read otherwise than by transformers, on purpose: one line a reason."""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """A difference that is meant.

    Attributes:
        pattern: Matches the reason of each such folder: our error where we refuse, what
            transformers says where it does.
        example: Name of a folder that must still differ so.
        why: Why it is right.
    """

    pattern: str
    example: str
    why: str


_RANGE = "a value that no model can have, which transformers computes with, to NaN or nonsense"
_DROPPED = "transformers drops the weight and says so in a table; trained values are not dropped"
_KERNELS = "kernels have this family's activation alone"
_NULL = "transformers 4 wrote null for a default, and reads it so"
_NAMES = "names of modules in memory, and of other versions' files, which tell the same weights"

REFUSED = (
    Difference(r"^rms_norm_eps must be a positive number", "llama + rms_norm_eps=-1e-05", _RANGE),
    Difference(r"^context_length must be an integer", "llama + max_position_embeddings=0", _RANGE),
    Difference(r"^num_layers must be an integer", "llama + num_hidden_layers=0", _RANGE),
    Difference(r"^sliding_window must be an integer", "mistral + sliding_window=0", _RANGE),
    Difference(r"^(rope_theta|factor) must be a positive number", "llama + rope: theta=0", _RANGE),
    Difference(r"^high_freq_factor must be above", "llama + rope: llama3, equal factors", _RANGE),
    Difference(
        r"^query_pre_attn_scalar must be a pos", "gemma2 + query_pre_attn_scalar=-1", _RANGE
    ),
    Difference(
        r"^logit_softcap must be a positive", "gemma2 + attn_logit_softcapping=-5.0", _RANGE
    ),
    Difference(r"^final_logit_softcap must be a", "gemma2 + final_logit_softcapping=-5.0", _RANGE),
    Difference(r"^num_experts_per_token must be", "qwen3_moe + num_experts_per_tok=0", _RANGE),
    Difference(r"^hidden_act=.* only 'silu'", "llama + hidden_act='gelu'", _KERNELS),
    Difference(
        r"^hidden_act(ivation)?=.* only 'gelu_py", "gemma2 + hidden_activation='silu'", _KERNELS
    ),
    Difference(
        r"^rope_type='longrope' is supported up to",
        "llama + rope: longrope",
        "beyond the original context, results of transformers depend on how a sequence was cut",
    ),
    Difference(r"^len\(channel_factors\) must", "llama + rope: longrope, too few", _RANGE),
    Difference(
        r"^rope_theta=.* only 500000.0$",
        "olmo3 + rope: legacy",
        "a base of all layers in transformers to 5.12, of those with full attention in later ones",
    ),
    Difference(
        r"^truncate=False is not supported where types",
        "olmo3 + rope: yarn, truncate=False",
        "a range of YaRN that transformers ignores where it is nested",
    ),
    Difference(
        r"^routed_scaling_factor must be", "deepseek_v2 + routed_scaling_factor=0.0", _RANGE
    ),
    Difference(
        r"^(topk_method|scoring_func|moe_layer_freq)=.* is not supported",
        "deepseek_v3 + topk_method='greedy'",
        "a choice of experts that this family's class in transformers ignores",
    ),
    Difference(
        r"^norm_topk_prob=True is not supported",
        "deepseek_v2 + norm_topk_prob=True",
        "a division that V2's class in transformers ignores, and DeepSeek's own code does",
    ),
    Difference(
        r"^mscale_all_dim=0.7 is not supported for rope_type='linear'",
        "deepseek_v3 + rope: linear, mscale",
        "YaRN's setting for another type, by which transformers multiplies scores all the same",
    ),
    Difference(r"^no_rope_layers must be", "smollm3 + no_rope_layers=[1, 2]", _RANGE),
    Difference(r"^beta_fast must be at least", "llama + rope: yarn, betas crossed", _RANGE),
    Difference(r"is mapped by no rule", "llama + files: unexpected bias", _DROPPED),
    Difference(
        r"^factor=4.0 is not supported for rope_type='default'",
        "llama + rope: default, factor 4",
        "a stretching that transformers ignores, and whoever wrote it did not mean to",
    ),
    Difference(
        r"^partial_rotary_factor=0.5 is not supported",
        "llama + rope: partial 0.5 inside",
        "a partial rotation that this family's class in transformers ignores",
    ),
    Difference(
        r"one rotary embedding for all layers$",
        "llama + rope: by layer type",
        "embeddings by type of layer, which this family's class in transformers ignores",
    ),
    Difference(
        r"only an embedding for each of .* transformers would ignore",
        "gemma3 + rope: flat",
        "one embedding where the class has two: transformers ignores it",
    ),
    Difference(
        r"^layer_types '\w+' is not supported",
        "mistral + layer_types: mixed",
        "types of layers that this family's class in transformers ignores",
    ),
    Difference(
        r"^quantization_config=",
        "llama + quantization_config={'quant_method': 'fp8'}",
        "quantised weights are not implemented; these are none, which transformers finds out late",
    ),
    Difference(
        r"^dual_chunk_attention_config=",
        "llama + dual_chunk_attention_config={'chunk_size': 16}",
        "attention by chunks (Qwen2.5-1M), which transformers ignores and vLLM computes",
    ),
    Difference(
        r"^use_bidirectional_attention=",
        "gemma3 + use_bidirectional_attention=True",
        "an encoder of texts, which generates nothing",
    ),
    Difference(
        r"both hold",
        "llama + files: in two shards",
        "a tensor in two shards; transformers takes the last, whatever the index says",
    ),
)
"""What we refuse, and transformers loads."""

LENIENT = (
    Difference(r"NoneType", "llama + attention_bias=None", _NULL),
    Difference(
        r"'rms_norm_eps' expected float, got int|logit_softcapping' with value 5 ",
        "llama + rms_norm_eps=1",
        "JSON has one kind of number: 1 is 1.0",
    ),
    Difference(
        r"'no_rope_layers' with value \[True",
        "smollm3 + no_rope_layers=[True, False]",
        "true and false are 1 and 0",
    ),
    Difference(r"^missing", "gemma3 + files: text named model.language_model.", _NAMES),
    Difference(
        r"ignore_mismatched_sizes",
        "qwen3_5_multimodal + files: vision tower",
        "weights beside the language model, or their sizes, are not read",
    ),
    Difference(
        r"'(llama3|yarn)': \{'original_max_position_embeddings'\}",
        "gemma4 + rope: llama3 full",
        "the context's length, as transformers takes it for all other families",
    ),
)
"""What transformers refuses, or completes with random weights, and we load."""
