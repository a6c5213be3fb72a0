"""The shape of a model. Frozen, validated on construction; no JAX."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from sgljax_engine.checks import check_count, check_positive, require

_MAX_CONV = 16
"""Tokens of a block of prefill, which holds what the next block's convolution sees."""


class KVShape(NamedTuple):
    """Shape of the keys, or values, of one token in one layer."""

    num_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Rope type "llama3": slow channels are slowed down further (Llama 3.1, 2024).

    Attributes:
        factor: Factor by which the slowest channels are slowed down.
        low_freq_factor: Channels with fewer rotations than this in the original context are slow.
        high_freq_factor: Channels with more rotations than this stay as they are.
        original_context_length: Tokens of the context before it was extended.
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
class YarnScaling:
    """Rope type "yarn": slow channels are slowed down, fast ones stay (Peng et al., 2023).

    Attributes:
        factor: Factor by which the slow channels are slowed down.
        beta_fast: Channels with more rotations than this in the original context stay.
        beta_slow: Channels with fewer rotations than this are slowed down by `factor`.
        original_context_length: Tokens of the context before it was extended.
        truncate: Whether the range of channels in between is widened to whole channels.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_context_length: int
    truncate: bool = True

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        check_positive("factor", self.factor)
        check_positive("beta_slow", self.beta_slow)
        check_positive("beta_fast", self.beta_fast)
        low = self.beta_slow
        require(self.beta_fast >= low, "beta_fast", self.beta_fast, f"at least beta_slow ({low})")
        check_count("original_context_length", self.original_context_length)
        require(isinstance(self.truncate, bool), "truncate", self.truncate, "true or false")

    @property
    def context_length(self) -> int:
        """Tokens of the extended context."""
        return int(self.original_context_length * self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: Base of the timescales.
        linear_factor: Positions are divided by it (rope type "linear").
        llama3: Set for rope type "llama3".
        rotary_fraction: Part of a head's channels that are rotated: the fastest ones (rope type
            "proportional", Gemma 4).
        rotary_dim: The first channels of a head, which alone are rotated, as if they were a head
            (Qwen3.5); None for all.
        yarn: Set for rope type "yarn".
        channel_factors: Factor by which each pair of channels is slowed down (rope type
            "longrope"); empty for none.
        attention_factor: Multiplies rotated channels (rope types "yarn" and "longrope").
    """

    theta: float
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None
    rotary_fraction: float = 1.0
    rotary_dim: int | None = None
    yarn: YarnScaling | None = None
    channel_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        check_positive("theta", self.theta)
        check_positive("linear_factor", self.linear_factor)
        check_positive("rotary_fraction", self.rotary_fraction)
        require(self.rotary_fraction <= 1, "rotary_fraction", self.rotary_fraction, "at most 1")
        check_positive("attention_factor", self.attention_factor)
        if self.yarn is not None:
            require(self.theta > 1, "theta", self.theta, "above 1 (YaRN)")
        if self.rotary_dim is not None:
            check_count("rotary_dim", self.rotary_dim, 2)
            require(self.rotary_dim % 2 == 0, "rotary_dim", self.rotary_dim, "even")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention: pages hold one latent a token for all heads (DeepSeek-V2, 2024).

    Keys and values of a head are projections of the latent. A key has a rotary part too, which is
    the same for all heads. `ModelConfig.head_dim` is what pages hold: the latent and this part.

    Attributes:
        rank: Channels of the latent.
        query_rank: Channels of the latent that queries are made of; None for the hidden states.
        nope_dim: Channels of a query and a key without rotary embedding.
        rope_dim: Channels with it.
        value_dim: Channels of a value.
        norm_eps: Added to the mean square in the norms of latents.
        is_interleaved: Whether neighbouring channels are rotated as a pair, and not the first half
            against the second.
    """

    rank: int
    query_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float
    is_interleaved: bool

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        for name in ("rank", "nope_dim", "rope_dim", "value_dim"):
            check_count(name, getattr(self, name))
        if self.query_rank is not None:
            check_count("query_rank", self.query_rank)
        require(self.rope_dim % 2 == 0, "rope_dim", self.rope_dim, "even (rotary embedding)")
        check_positive("norm_eps", self.norm_eps)

    @property
    def query_dim(self) -> int:
        """Channels of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def page_dim(self) -> int:
        """Numbers that a page has of a token."""
        return self.rank + self.rope_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How attention differs from softmax(q k / sqrt(head_dim)) over all keys.

    Attributes:
        scale: Multiplies products of queries and keys; None is head_dim ** -0.5.
        logit_softcap: Scaled products s become cap * tanh(s / cap); None for no cap.
        sliding_window: Number of newest keys that a query of a sliding layer sees, including its
            own.
        sliding_layers: Whether each layer slides; empty when none does.
        sliding_rope: Rotary embedding of sliding layers; None for the other layers' one.
        full_kv: Shape of keys in layers with full attention, if it differs from that in sliding
            layers; None for the model's `num_kv_heads` and `head_dim`. Queries of these layers have
            its `head_dim` too.
        full_values_are_keys: Layers with full attention take the projected keys as values, before
            both are normalised.
        kv_layers: For each layer, the layer whose keys and values it reads; empty when each reads
            its own.
        rope_layers: Whether each layer has the rotary embedding (SmolLM3); empty when all have.
        latent: Keys and values that are made of latents; None for others.
    """

    scale: float | None = None
    logit_softcap: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    sliding_rope: RopeConfig | None = None
    full_kv: KVShape | None = None
    full_values_are_keys: bool = False
    kv_layers: tuple[int, ...] = ()
    rope_layers: tuple[bool, ...] = ()
    latent: LatentConfig | None = None

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        for name in ("scale", "logit_softcap"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.sliding_window is not None or any(self.sliding_layers):
            check_count("sliding_window", self.sliding_window)
        if self.sliding_layers and self.kv_layers:
            num_layers = len(self.sliding_layers)
            require(
                len(self.kv_layers) == num_layers,
                "len(kv_layers)",
                len(self.kv_layers),
                f"that of sliding_layers ({num_layers})",
            )
        for layer, source in enumerate(self.kv_layers):
            require(
                0 <= source <= layer
                and self.kv_layers[source] == source
                and self.slides(source) == self.slides(layer),
                f"kv_layers[{layer}]",
                source,
                "a layer of the same kind, not after it, that has its own keys",
            )

    def slides(self, layer: int) -> bool:
        """Whether a layer's attention has the sliding window."""
        return bool(self.sliding_layers) and self.sliding_layers[layer]

    @property
    def has_values(self) -> bool:
        """Whether the cache holds values beside keys; it does not where both are of latents."""
        return self.latent is None

    def rotates(self, layer: int) -> bool:
        """Whether a layer's queries and keys have the rotary embedding."""
        return not self.rope_layers or self.rope_layers[layer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How a router chooses experts, beyond the most probable ones.

    Attributes:
        is_sigmoid: Whether scores are sigmoids of the logits, and not their softmax (DeepSeek-V3).
        has_choice_bias: Whether a bias is added to scores for the choice alone.
        num_groups: Equal groups of experts, of which each token takes `num_chosen_groups`.
        num_chosen_groups: Those whose best experts have the highest sum of scores.
        num_group_scores: How many of a group's best experts are in that sum.
        scale: Multiplies the experts' factors.
    """

    is_sigmoid: bool = False
    has_choice_bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_group_scores: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        for name in ("num_groups", "num_chosen_groups", "num_group_scores"):
            check_count(name, getattr(self, name))
        require(
            self.num_chosen_groups <= self.num_groups,
            "num_chosen_groups",
            self.num_chosen_groups,
            f"at most num_groups ({self.num_groups})",
        )
        check_positive("scale", self.scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts: each token goes through a few of many gated MLPs.

    Attributes:
        num_experts: Experts of a layer.
        num_experts_per_token: Number of experts that a token goes through.
        intermediate_size: Channels inside an expert.
        norm_topk_prob: Whether the probabilities of a token's experts are divided by their sum.
        is_beside_mlp: Whether a layer also has an MLP of `ModelConfig.intermediate_size`, and adds
            its output (Gemma 4).
        routes_experts_input: Beside an MLP: whether the router sees the experts' input, after their
            norm (as Tunix 0.1.7 computes Gemma 4), or the hidden states.
        shared_size: Channels of an expert that every token goes through; 0 without one.
        has_shared_gate: Whether its output is multiplied by a gate of its own (Qwen3-Next).
        num_dense_layers: The first layers, which have an MLP of `ModelConfig.intermediate_size` in
            the place of experts (DeepSeek).
        router: How experts are chosen.
        has_bias: Whether the router and the projections of the experts add biases (gpt-oss).
        swiglu_limit: Bound of an expert's gate from above, and of the other projection on both
            sides, whose product is that of gpt-oss; None for the model's activation.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool
    is_beside_mlp: bool = False
    routes_experts_input: bool = False
    shared_size: int = 0
    has_bias: bool = False
    swiglu_limit: float | None = None
    has_shared_gate: bool = True
    num_dense_layers: int = 0
    router: RouterConfig = RouterConfig()

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
        check_count("shared_size", self.shared_size, low=0)
        check_count("num_dense_layers", self.num_dense_layers, low=0)
        self._check_groups()
        if self.swiglu_limit is not None:
            check_positive("swiglu_limit", self.swiglu_limit)

    def _check_groups(self) -> None:
        num_groups = self.router.num_groups
        require(
            self.num_experts % num_groups == 0,
            "num_groups",
            num_groups,
            f"a divisor of num_experts ({self.num_experts})",
        )
        size = self.num_experts // num_groups
        num_scores, num_seen = self.router.num_group_scores, size * self.router.num_chosen_groups
        require(
            num_scores <= size, "num_group_scores", num_scores, f"at most those of a group: {size}"
        )
        limit = f"at most the experts of num_chosen_groups: {num_seen}"
        given = self.num_experts_per_token
        require(given <= num_seen, "num_experts_per_token", given, limit)

    @property
    def id_dtype(self) -> str:
        """Name of the smallest unsigned dtype that holds an expert's index."""
        sizes = {"uint8": 2**8, "uint16": 2**16}
        return next((name for name, size in sizes.items() if self.num_experts <= size), "uint32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleConfig:
    """Factors that a trainer keeps in its weights, or out of them, unlike Hugging Face.

    Attributes:
        embedding: Multiplies token embeddings; None for the architecture's factor.
        norm_offset: Is added to the weights of norms; None for the architecture's offset.
        logits: Multiplies logits, before `final_logit_softcap`.
    """

    embedding: float | None = None
    norm_offset: float | None = None
    logits: float = 1.0

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        if self.embedding is not None:
            check_positive("embedding", self.embedding)
        is_known = self.norm_offset in (None, 0.0, 1.0)
        require(is_known, "norm_offset", self.norm_offset, "None, 0.0 or 1.0")
        check_positive("logits", self.logits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig:
    """Gated delta nets: layers that keep a state of fixed size instead of keys (Qwen3-Next).

    Attributes:
        layers: Whether each layer is one; the others have attention.
        num_key_heads: Heads of queries and keys.
        num_value_heads: Heads of values; a multiple of `num_key_heads`.
        key_dim: Channels of a query or key.
        value_dim: Channels of a value.
        conv_size: Tokens that the convolution sees, the newest included; at most 16.
        is_grouped: Whether one projection gives queries, keys, values and gates, key head by key
            head, and another both rates (Qwen3-Next), or there are four (Qwen3.5).
    """

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    is_grouped: bool

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim"):
            check_count(name, getattr(self, name))
        check_count("conv_size", self.conv_size, 2)
        require(self.conv_size <= _MAX_CONV, "conv_size", self.conv_size, f"at most {_MAX_CONV}")
        require(
            self.num_value_heads % self.num_key_heads == 0,
            "num_value_heads",
            self.num_value_heads,
            f"a multiple of num_key_heads ({self.num_key_heads})",
        )
        num_nets = sum(self.layers)
        limit = "some layers, and not all: pages hold what a prefix is found by"
        require(0 < num_nets < len(self.layers), "sum(layers)", num_nets, limit)

    @property
    def ratio(self) -> int:
        """Value heads of each key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_values

    @property
    def head_sizes(self) -> tuple[int, int, int]:
        """Number of key heads, and channels of a key and of a value."""
        return self.num_key_heads, self.key_dim, self.value_dim

    @property
    def num_values(self) -> int:
        """Channels of the values of all heads."""
        return self.num_value_heads * self.value_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer, named as in Hugging Face's config.json.

    `models.registry.load_model_config` reads it from a model folder.

    Attributes:
        architecture: HF class name, a key of `models.registry.MODELS`.
        vocab_size: Rows of the embedding table.
        hidden_size: Channels between layers.
        intermediate_size: Channels inside an MLP; those of an expert if there is no other MLP.
        num_layers: Decoder layers.
        num_heads: Query heads; a multiple of `num_kv_heads`.
        num_kv_heads: Key and value heads.
        head_dim: Channels of a head; even.
        rope: Rotary position embedding.
        rms_norm_eps: Added to the mean square in every norm.
        tie_word_embeddings: Whether the output projection is the embedding table.
        context_length: Maximum number of tokens in one sequence (HF's max_position_embeddings).
        eos_token_ids: End-of-sequence ids; generation stops after one unless `ignore_eos`.
        attention: Scales, sliding windows and soft caps.
        final_logit_softcap: Logits x become cap * tanh(x / cap); None for no cap.
        per_layer_input_size: Channels of the extra token embedding of each layer (Gemma 4 E2B and
            E4B); 0 without one.
        shared_kv_intermediate_size: `intermediate_size` of layers that read another layer's keys;
            None for the same.
        attention_bias: Whether the four projections of attention add a bias.
        mlp_bias: Whether the three projections of the MLP add a bias.
        moe: The experts of each layer; None for a dense model.
        scales: Factors of the form in which weights come.
        linear_attention: Layers with a recurrent state in the place of attention; None without.
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
    per_layer_input_size: int = 0
    shared_kv_intermediate_size: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    moe: MoEConfig | None = None
    scales: ScaleConfig = ScaleConfig()
    linear_attention: LinearAttentionConfig | None = None

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the first field that is out of range."""
        counts = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        for name in (*counts, "num_kv_heads", "head_dim", "context_length"):
            check_count(name, getattr(self, name))
        if self.shared_kv_intermediate_size is not None:
            check_count("shared_kv_intermediate_size", self.shared_kv_intermediate_size)
        check_count("per_layer_input_size", self.per_layer_input_size, low=0)
        self._check_heads("", KVShape(self.num_kv_heads, self.head_dim))
        if self.attention.full_kv is not None:
            self._check_heads("full_kv: ", self.attention.full_kv)
        check_positive("rms_norm_eps", self.rms_norm_eps)
        if self.final_logit_softcap is not None:
            check_positive("final_logit_softcap", self.final_logit_softcap)
        for name in ("sliding_layers", "kv_layers", "rope_layers"):
            num_marked = len(getattr(self.attention, name))
            require(
                num_marked in (0, self.num_layers),
                f"len({name})",
                num_marked,
                f"0 or num_layers ({self.num_layers})",
            )
        if self.linear_attention is not None:
            num_marked = len(self.linear_attention.layers)
            expected = f"num_layers ({self.num_layers})"
            require(num_marked == self.num_layers, "len(layers)", num_marked, expected)
        latent = self.attention.latent
        if latent is not None:
            expected = KVShape(1, latent.page_dim)
            given = KVShape(self.num_kv_heads, self.head_dim)
            require(given == expected, "(num_kv_heads, head_dim)", (*given,), f"{(*expected,)}")
        full = self.attention.full_kv or self
        for rope, head_dim in (
            (self.rope, full.head_dim),
            (self.attention.sliding_rope, self.head_dim),
        ):
            if rope is not None:
                self._check_rope(rope, head_dim if latent is None else latent.rope_dim)

    def _check_rope(self, rope: RopeConfig, head_dim: int) -> None:
        size = rope.rotary_dim or head_dim
        require(size <= head_dim, "rotary_dim", size, f"at most head_dim ({head_dim})")
        num_factors, expected = len(rope.channel_factors), f"one for each of {size // 2} channels"
        require(num_factors in (0, size // 2), "len(channel_factors)", num_factors, expected)

    def _check_heads(self, where: str, kv: KVShape) -> None:
        check_count(f"{where}num_kv_heads", kv.num_heads)
        check_count(f"{where}head_dim", kv.head_dim)
        require(
            self.num_heads % kv.num_heads == 0,
            "num_heads",
            self.num_heads,
            f"a multiple of {where}num_kv_heads ({kv.num_heads})",
        )
        require(kv.head_dim % 2 == 0, f"{where}head_dim", kv.head_dim, "even (rotary embedding)")

    def kv_shape(self, layer: int) -> KVShape:
        """Shape of the keys that a layer reads; its queries have the same `head_dim`."""
        full = None if self.attention.slides(layer) else self.attention.full_kv
        return full or KVShape(self.num_kv_heads, self.head_dim)

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, or one before it."""
        return self.attention.kv_layers[layer] if self.attention.kv_layers else layer

    def values_are_keys(self, layer: int) -> bool:
        """Whether a layer takes its projected keys as values."""
        return self.attention.full_values_are_keys and not self.attention.slides(layer)

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """The layers with their own keys and values, in order; only these are in the cache."""
        layers = range(self.num_layers)
        return tuple(i for i in layers if self.kv_layer(i) == i and not self.has_state(i))

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.moe is not None and layer >= self.moe.num_dense_layers

    def has_state(self, layer: int) -> bool:
        """Whether a layer keeps a recurrent state instead of keys."""
        return self.linear_attention is not None and self.linear_attention.layers[layer]

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers with a recurrent state, in order."""
        return tuple(filter(self.has_state, range(self.num_layers)))

    @property
    def cached_kv(self) -> tuple[KVShape, ...]:
        """Shape of the keys of each of the `cached_layers`."""
        return tuple(map(self.kv_shape, self.cached_layers))

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The distinct head_dims of the layers, ascending."""
        return tuple(sorted({shape.head_dim for shape in self.cached_kv}))

    @property
    def kv_head_counts(self) -> tuple[int, ...]:
        """The distinct numbers of kv heads of the layers, ascending."""
        return tuple(sorted({shape.num_heads for shape in self.cached_kv}))

    def mlp_size(self, layer: int) -> int:
        """Channels inside a layer's MLP."""
        if self.shared_kv_intermediate_size is None or self.kv_layer(layer) == layer:
            return self.intermediate_size
        return self.shared_kv_intermediate_size
