"""Configuration of the engine and of the model. Frozen, validated on construction; no JAX.

`EngineConfig` nests one small dataclass per concern. `EngineConfig.from_options` builds it from
the flat option names that SGLang uses (`page_size=16, max_running_requests=64, ...`); every
option name exists in exactly one of the nested classes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgljax_engine.errors import InvalidConfigError, unknown_name_message

DTYPES = ("float32", "bfloat16", "float16")

ATTENTION_BACKENDS = ("auto", "xla", "xla_tiles")
"""Names of `layers.attention.BACKENDS`, and "auto"."""

TOKEN_BLOCK = 16
"""Query tokens of one request that prefill attention handles together."""


def _require(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise InvalidConfigError(f"{name} must be {limit}, got {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_count(name: str, value: object, low: int = 1) -> None:
    _require(_is_int(value) and value >= low, name, value, f"an integer >= {low}")  # type: ignore[operator]


def _check_positive(name: str, value: float) -> None:
    _require(math.isfinite(value) and value > 0, name, value, "a positive number")


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
        _check_positive("factor", self.factor)
        _check_positive("low_freq_factor", self.low_freq_factor)
        _require(
            self.high_freq_factor > self.low_freq_factor,
            "high_freq_factor",
            self.high_freq_factor,
            f"above low_freq_factor ({self.low_freq_factor})",
        )
        _check_count("original_context_length", self.original_context_length)


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
        _check_positive("theta", self.theta)
        _check_positive("linear_factor", self.linear_factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How layers attend, where it is not softmax(q k / sqrt(head_dim)) over all keys.

    Attributes:
        scale: Multiplies products of queries and keys; None is head_dim ** -0.5.
        logit_softcap: Scaled products s become cap * tanh(s / cap); None for no cap.
        sliding_window: Newest keys, its own included, that a query of a sliding layer sees.
        sliding_layers: For each layer whether it slides; empty when none does.
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
                _check_positive(name, getattr(self, name))
        if self.sliding_window is not None or any(self.sliding_layers):
            _check_count("sliding_window", self.sliding_window)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a dense decoder-only transformer, named as in Hugging Face's config.json.

    `models.registry.load_model_config` reads one from a model folder.

    Attributes:
        architecture: HF class name, a key of `models.registry.MODELS`.
        tie_word_embeddings: The output projection is the embedding table.
        context_length: Tokens in one sequence at most (HF's max_position_embeddings).
        eos_token_ids: End-of-sequence ids; generation stops after one unless `ignore_eos`.
        final_logit_softcap: Logits x become cap * tanh(x / cap); None for no cap.
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

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the first field that is out of range."""
        counts = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        for name in (*counts, "num_kv_heads", "head_dim", "context_length"):
            _check_count(name, getattr(self, name))
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "num_heads",
            self.num_heads,
            f"a multiple of num_kv_heads ({self.num_kv_heads})",
        )
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even (rotary embedding)")
        _check_positive("rms_norm_eps", self.rms_norm_eps)
        if self.final_logit_softcap is not None:
            _check_positive("final_logit_softcap", self.final_logit_softcap)
        num_marked = len(self.attention.sliding_layers)
        _require(
            num_marked in (0, self.num_layers),
            "len(sliding_layers)",
            num_marked,
            f"0 or num_layers ({self.num_layers})",
        )


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file, or raises InvalidConfigError naming the file."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidConfigError(f"no such file: {path}") from None
    except (OSError, ValueError) as error:
        raise InvalidConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(loaded, dict):
        raise InvalidConfigError(f"{path} must hold a JSON object, got {type(loaded).__name__}")
    return loaded


def read_generation_config(folder: str | Path) -> dict[str, Any]:
    """The contents of a model folder's generation_config.json; {} when there is none."""
    path = Path(folder) / "generation_config.json"
    return read_json(path) if path.exists() else {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV pool.

    Attributes:
        page_size: Tokens in a page.
        num_kv_tokens: Tokens that the pool holds, rounded down to whole pages. None takes
            what `max_running_requests` sequences of `max_model_len` need, but at most
            `mem_fraction_static` of the memory that is free (device memory; host memory on CPU).
        mem_fraction_static: See `num_kv_tokens`. In (0, 1).
        disable_radix_cache: Share no pages between requests and keep none after they end.
    """

    page_size: int = 16
    num_kv_tokens: int | None = None
    mem_fraction_static: float = 0.2
    disable_radix_cache: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        _check_count("page_size", self.page_size)
        if self.num_kv_tokens is not None:
            _check_count("num_kv_tokens", self.num_kv_tokens, self.page_size)
        fraction = self.mem_fraction_static
        _require(
            isinstance(fraction, (int, float)) and 0 < fraction < 1,
            "mem_fraction_static",
            fraction,
            "a number in (0, 1)",
        )
        disable = self.disable_radix_cache
        _require(isinstance(disable, bool), "disable_radix_cache", disable, "True or False")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Continuous batching.

    Attributes:
        max_running_requests: Sequences decoded together at most.
        chunked_prefill_size: Tokens prefilled in one dispatch at most, rounded up to a multiple of
            `TOKEN_BLOCK`; longer prompts go in chunks.
        decode_steps: Decode steps in one dispatch at most; bounds how long a command waits.
        init_new_token_ratio: Fraction of their remaining max_new_tokens that running requests are
            expected to use; admission keeps that many KV tokens free. In [0, 1].
        min_new_token_ratio: Where the ratio decays to. In [0, init_new_token_ratio].
        new_token_ratio_decay: Subtracted from the ratio at each decode dispatch.
    """

    max_running_requests: int = 256
    chunked_prefill_size: int = 2048
    decode_steps: int = 16
    init_new_token_ratio: float = 0.7
    min_new_token_ratio: float = 0.1
    new_token_ratio_decay: float = 0.01

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        for name in ("max_running_requests", "chunked_prefill_size", "decode_steps"):
            _check_count(name, getattr(self, name))
        init, low = self.init_new_token_ratio, self.min_new_token_ratio
        _require(0 <= init <= 1, "init_new_token_ratio", init, "in [0, 1]")
        _require(0 <= low <= init, "min_new_token_ratio", low, f"in [0, {init}]")
        decay = self.new_token_ratio_decay
        _require(0 <= decay <= 1, "new_token_ratio_decay", decay, "in [0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Device programs.

    Attributes:
        dtype: Of weights, activations and KV cache; None takes the checkpoint's or float32.
        batch_buckets: Decode batch sizes to compile for; None takes powers of two.
        token_buckets: Prefill sizes in tokens to compile for; None takes powers of four.
        forbid_compile: Raise CompileForbiddenError when a step after `warmup` needs a new program.
        compilation_cache_dir: JAX's persistent compilation cache: "auto" uses a folder in the
            user's cache directory unless the process configured one, None leaves JAX alone, any
            other value is the folder to use.
        attention_backend: "auto" or a name from `layers.attention.BACKENDS`.
        random_seed: Seeds the fresh seeds of requests that bring none, and random weights. None
            takes the operating system's entropy for requests and 0 for weights.
    """

    dtype: str | None = None
    batch_buckets: tuple[int, ...] | None = None
    token_buckets: tuple[int, ...] | None = None
    forbid_compile: bool = False
    compilation_cache_dir: str | None = "auto"
    attention_backend: str = "auto"
    random_seed: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        _require(self.dtype in (None, *DTYPES), "dtype", self.dtype, f"None or one of {DTYPES}")
        if self.attention_backend not in ATTENTION_BACKENDS:
            raise InvalidConfigError(
                unknown_name_message(
                    "attention_backend", self.attention_backend, ATTENTION_BACKENDS
                )
            )
        for name in ("batch_buckets", "token_buckets"):
            buckets = getattr(self, name)
            if buckets is None:
                continue
            _require(
                isinstance(buckets, (list, tuple))
                and len(buckets) > 0
                and all(_is_int(b) and b >= 1 for b in buckets),
                name,
                buckets,
                "a non-empty list of integers >= 1",
            )
            object.__setattr__(self, name, tuple(sorted(set(buckets))))
        _require(
            not any(size % TOKEN_BLOCK for size in self.token_buckets or ()),
            "token_buckets",
            self.token_buckets,
            f"multiples of {TOKEN_BLOCK}",
        )
        _require(
            isinstance(self.forbid_compile, bool),
            "forbid_compile",
            self.forbid_compile,
            "True or False",
        )
        if self.random_seed is not None:
            _check_count("random_seed", self.random_seed, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that shapes an engine but its model, weights, tokenizer and mesh.

    Attributes:
        max_model_len: Prompt plus output tokens of one sequence at most; None takes the model's
            context length.
    """

    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        if self.max_model_len is not None:
            _check_count("max_model_len", self.max_model_len, 2)
        for name, needed, limit in (
            ("batch_buckets", self.scheduler.max_running_requests, "max_running_requests"),
            ("token_buckets", self.max_prefill_tokens, "chunked_prefill_size in whole blocks"),
        ):
            buckets = getattr(self.runtime, name)
            _require(
                buckets is None or buckets[-1] >= needed,
                name,
                buckets,
                f"None or reach {limit} ({needed})",
            )

    @property
    def max_prefill_tokens(self) -> int:
        """`chunked_prefill_size`, rounded up to whole token blocks."""
        return -(-self.scheduler.chunked_prefill_size // TOKEN_BLOCK) * TOKEN_BLOCK

    @classmethod
    def option_names(cls) -> list[str]:
        """The flat option names that `from_options` accepts."""
        return [*_OPTION_GROUPS, "max_model_len"]

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Builds from flat options; an unknown name raises InvalidConfigError with the nearest."""
        groups: dict[str, dict[str, Any]] = {"cache": {}, "scheduler": {}, "runtime": {}}
        top: dict[str, Any] = {}
        for name, value in options.items():
            if name == "max_model_len":
                top[name] = value
            elif name in _OPTION_GROUPS:
                groups[_OPTION_GROUPS[name]][name] = value
            else:
                raise InvalidConfigError(
                    unknown_name_message("engine option", name, cls.option_names())
                )
        return cls(
            cache=CacheConfig(**groups["cache"]),
            scheduler=SchedulerConfig(**groups["scheduler"]),
            runtime=RuntimeConfig(**groups["runtime"]),
            **top,
        )


_OPTION_GROUPS: dict[str, str] = {
    field.name: group
    for group, config_class in (
        ("cache", CacheConfig),
        ("scheduler", SchedulerConfig),
        ("runtime", RuntimeConfig),
    )
    for field in dataclasses.fields(config_class)
}
