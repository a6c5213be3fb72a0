"""The shape of a model. Frozen, validated on construction; no JAX."""

from __future__ import annotations

import dataclasses

from sgljax_engine.checks import check_count, check_positive, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Rope type "llama3": slow channels are slowed down further (Llama 3.1, 2024).

    Attributes:
        factor: How much the slowest channels are slowed down.
        low_freq_factor: Channels that turn less often than this in the original context are slow.
        high_freq_factor: Channels that turn more often than this are left alone.
        original_context_length: Tokens of the context before it was stretched.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        check_positive("factor", self.factor)
        check_positive("low_freq_factor", self.low_freq_factor)
        require(
            self.high_freq_factor > self.low_freq_factor,
            "high_freq_factor",
            self.high_freq_factor,
            f"above low_freq_factor ({self.low_freq_factor})",
        )
        check_count("original_context_length", self.original_context_length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: Base of the timescales.
        linear_factor: Positions are divided by it (rope type "linear").
        llama3: Set for rope type "llama3".
    """

    theta: float
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        check_positive("theta", self.theta)
        check_positive("linear_factor", self.linear_factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How attention differs from softmax(q k / sqrt(head_dim)) over all keys.

    Attributes:
        scale: Multiplies products of queries and keys; None is head_dim ** -0.5.
        logit_softcap: Scaled products s become cap * tanh(s / cap); None for no cap.
        sliding_window: Number of newest keys, its own included, that a query of a sliding layer
            sees.
        sliding_layers: Whether each layer slides; empty when none does.
        sliding_rope: Rotary embedding of sliding layers; None is that of the other layers.
    """

    scale: float | None = None
    logit_softcap: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    sliding_rope: RopeConfig | None = None

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        for name in ("scale", "logit_softcap"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.sliding_window is not None or any(self.sliding_layers):
            check_count("sliding_window", self.sliding_window)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts: each token goes through a few of many gated MLPs.

    Attributes:
        num_experts: Experts of a layer.
        num_experts_per_token: Experts that a token goes through.
        intermediate_size: Channels inside an expert.
        norm_topk_prob: The probabilities of a token's experts are divided by their sum.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        for name in ("num_experts", "num_experts_per_token", "intermediate_size"):
            check_count(name, getattr(self, name))
        require(
            self.num_experts_per_token <= self.num_experts,
            "num_experts_per_token",
            self.num_experts_per_token,
            f"at most num_experts ({self.num_experts})",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer, named as in Hugging Face's config.json.

    `models.registry.load_model_config` reads it from a model folder.

    Attributes:
        architecture: HF class name, a key of `models.registry.MODELS`.
        vocab_size: Rows of the embedding table.
        hidden_size: Channels between layers.
        intermediate_size: Channels inside an MLP; of an expert if there is no other MLP.
        num_layers: Decoder layers.
        num_heads: Query heads; a multiple of `num_kv_heads`.
        num_kv_heads: Key and value heads.
        head_dim: Channels of a head; even.
        rope: Rotary position embedding.
        rms_norm_eps: Added to the mean square in every norm.
        tie_word_embeddings: The output projection is the embedding table.
        context_length: Maximum number of tokens in one sequence (HF's max_position_embeddings).
        eos_token_ids: End-of-sequence ids; generation stops after one unless `ignore_eos`.
        attention: Scales, sliding windows and soft caps.
        final_logit_softcap: Logits x become cap * tanh(x / cap); None for no cap.
        moe: The experts of each layer; None for a dense model.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    rms_norm_eps: float
    tie_word_embeddings: bool
    context_length: int
    eos_token_ids: tuple[int, ...] = ()
    attention: AttentionConfig = AttentionConfig()
    final_logit_softcap: float | None = None
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the first field that is out of range."""
        counts = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        for name in (*counts, "num_kv_heads", "head_dim", "context_length"):
            check_count(name, getattr(self, name))
        require(
            self.num_heads % self.num_kv_heads == 0,
            "num_heads",
            self.num_heads,
            f"a multiple of num_kv_heads ({self.num_kv_heads})",
        )
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even (rotary embedding)")
        check_positive("rms_norm_eps", self.rms_norm_eps)
        if self.final_logit_softcap is not None:
            check_positive("final_logit_softcap", self.final_logit_softcap)
        num_marked = len(self.attention.sliding_layers)
        require(
            num_marked in (0, self.num_layers),
            "len(sliding_layers)",
            num_marked,
            f"0 or num_layers ({self.num_layers})",
        )
