"""Configuration of the engine. Frozen, validated on construction; no JAX.

`EngineConfig` nests one small dataclass per concern. `EngineConfig.from_options` builds it from
the flat option names that SGLang uses (`page_size=16, max_running_requests=64, ...`); every
option name exists in exactly one of the nested classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from sgljax_engine.checks import check_count, check_names, is_int, require
from sgljax_engine.errors import InvalidConfigError, unknown_name_message
from sgljax_engine.foreign_options import FOREIGN_OPTIONS

QUANTIZATIONS = ("int8",)

KV_CACHE_DTYPES = ("auto", "int8")

DTYPES = ("float32", "bfloat16", "float16")

ATTENTION_BACKENDS = ("auto", "native", "xla", "pallas", "tpu")
"""Names that `attention.registry.engine_attention` knows."""

DETERMINISTIC_BACKENDS = ("auto", "native", "pallas")
"""Attention backends that `enable_deterministic_sampling` accepts."""

LINEAR_BACKENDS = ("auto", "native", "pallas", "xla")
"""Names that `layers.kernels.pick_kernels` knows."""

LORA_TARGETS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate",
    "router",
    "gate_proj",
    "up_proj",
    "down_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "per_layer_input_gate",
    "per_layer_projection",
    "per_layer_model_projection",
    "in_proj_qkvz",
    "in_proj_ba",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
    "lm_head",
)
"""Kinds of projections that adapters may change; "gate" is the router of a mixture of experts,
"router" gpt-oss'; those called "per_layer" are Gemma 4's, and "in_proj" and "out_proj" those of
gated delta nets."""

SPECULATION = ("off", "auto", "always")

SCHEDULE_POLICIES = ("fcfs", "longest_first")

DRAFTERS = ("history", "siblings", "ngram")
"""Sources of draft tokens, in the order of preference for matches of one length."""

MAX_DRAFT_TOKENS = 63

TOKEN_BLOCK = 16
"""Query tokens of one request that prefill attention handles together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV pool.

    Attributes:
        page_size: Tokens in a page.
        num_kv_tokens: Tokens that the pool holds, rounded down to whole pages. None takes what
            `max_running_requests` sequences of `max_model_len` need, but at most
            `mem_fraction_static` of the memory left free by the weights (device memory; host memory
            on CPU). On accelerators it also leaves what the largest programs need, as their
            compiler reports it.
        mem_fraction_static: See `num_kv_tokens`. In (0, 1).
        disable_radix_cache: Do not share pages between requests or keep pages after a request ends.
        disable_hybrid_swa_memory: Use the same pages for all layers: keys of sliding layers stay
            after they leave the window.
        enable_return_routed_experts: Return the experts that each token went through, see
            `RequestOutput.routed_experts`. They are kept beside the keys of each token. For models
            with experts.
        num_state_slots: Recurrent states that the pool holds, for models that have some: one for
            each running request, the others for cached prefixes. None takes twice
            `max_running_requests`, or what fits half of `mem_fraction_static`.
    """

    page_size: int = 16
    num_kv_tokens: int | None = None
    mem_fraction_static: float = 0.2
    disable_radix_cache: bool = False
    disable_hybrid_swa_memory: bool = False
    enable_return_routed_experts: bool = False
    num_state_slots: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        check_count("page_size", self.page_size)
        if self.num_kv_tokens is not None:
            check_count("num_kv_tokens", self.num_kv_tokens, self.page_size)
        if self.num_state_slots is not None:
            check_count("num_state_slots", self.num_state_slots)
        fraction = self.mem_fraction_static
        require(
            isinstance(fraction, (int, float)) and 0 < fraction < 1,
            "mem_fraction_static",
            fraction,
            "a number in (0, 1)",
        )
        for name in (
            "disable_radix_cache",
            "disable_hybrid_swa_memory",
            "enable_return_routed_experts",
        ):
            flag = getattr(self, name)
            require(isinstance(flag, bool), name, flag, "True or False")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Continuous batching.

    Attributes:
        max_running_requests: Maximum number of sequences decoded together.
        chunked_prefill_size: Maximum number of tokens prefilled in one dispatch, rounded up to a
            multiple of `TOKEN_BLOCK`; longer prompts are prefilled in chunks.
        decode_steps: Maximum number of decode steps in one dispatch.
        max_dispatch_s: Target for the longest dispatch in seconds; bounds how long a command waits.
            From earlier dispatches the engine estimates how many prefill tokens fit beside one
            decode step, up to `chunked_prefill_size`, and how many decode steps fit the remaining
            time, up to `decode_steps`. A dispatch takes at least the smallest prefill program and
            one decode step. Above 0; infinity leaves only the other two limits.
        stream_interval: Maximum number of decode steps in one dispatch while any running request
            streams or has stop strings; all requests share the shorter dispatch. With drafts a step
            may give several tokens. A stream gets its first token by itself, and then the tokens of
            each dispatch. A stop string is found at the end of a dispatch, and tokens decoded after
            it are discarded.
        init_new_token_ratio: Expected fraction of their remaining max_new_tokens that running
            requests will use; admission keeps that many KV tokens free. In [0, 1].
        min_new_token_ratio: The value that the ratio decays to. In [0, init_new_token_ratio].
        new_token_ratio_decay: Subtracted from the ratio at each decode dispatch.
        schedule_policy: Order in which waiting requests start: "fcfs", first come, first served, or
            "longest_first", by the tokens that earlier answers to the same prompt and other samples
            of it let expect. Samples are the same. See docs/performance.md.
    """

    max_running_requests: int = 256
    chunked_prefill_size: int = 2048
    decode_steps: int = 64
    max_dispatch_s: float = 1.0
    stream_interval: int = 16
    init_new_token_ratio: float = 0.7
    min_new_token_ratio: float = 0.1
    new_token_ratio_decay: float = 0.01
    schedule_policy: str = "fcfs"

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        for name in (
            "max_running_requests",
            "chunked_prefill_size",
            "decode_steps",
            "stream_interval",
        ):
            check_count(name, getattr(self, name))
        seconds = self.max_dispatch_s
        require(
            isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and seconds > 0,
            "max_dispatch_s",
            seconds,
            "a number > 0",
        )
        init, low = self.init_new_token_ratio, self.min_new_token_ratio
        require(0 <= init <= 1, "init_new_token_ratio", init, "in [0, 1]")
        require(0 <= low <= init, "min_new_token_ratio", low, f"in [0, {init}]")
        decay = self.new_token_ratio_decay
        require(0 <= decay <= 1, "new_token_ratio_decay", decay, "in [0, 1]")
        order = self.schedule_policy
        require(isinstance(order, str), "schedule_policy", order, f"one of {SCHEDULE_POLICIES}")
        if order not in SCHEDULE_POLICIES:
            raise InvalidConfigError(
                unknown_name_message("schedule_policy", order, SCHEDULE_POLICIES)
            )


def _dtype_name(dtype: Any) -> Any:
    """The name of a dtype, also of numpy's and JAX's; returns what is no dtype unchanged."""
    if isinstance(dtype, str):
        return dtype
    import numpy as np  # reads the environment; importing this package must not

    try:
        return np.dtype(dtype).name
    except TypeError:
        return dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Device programs.

    Attributes:
        dtype: Dtype of weights, activations and the KV cache; norm weights stay float32. One of
            `DTYPES` or JAX's dtype of that name. None takes the checkpoint's dtype, or float32.
        batch_buckets: Decode batch sizes to compile for; None takes powers of four, and more on
            CPUs.
        token_buckets: Prefill sizes in tokens to compile for; None takes powers of two; on CPUs, 64
            and one program whose time grows with the number of tokens.
        forbid_compile: Raise CompileForbiddenError when a step after `warmup` needs a new program.
        compilation_cache_dir: JAX's persistent compilation cache: "auto" uses a folder in the
            user's cache directory unless the process configured one, None leaves JAX alone, any
            other value is the folder to use. When the engine turns the cache on, it keeps programs
            that took 0.1 s or more to compile, unless the process has changed JAX's limit of 1 s.
        attention_backend: One of `ATTENTION_BACKENDS`. "auto" picks "native" where it is
            available, on one x86-64 or ARM64 CPU, "tpu" on TPUs, "pallas" on NVIDIA GPUs, and a
            portable one elsewhere. See docs/performance.md.
        linear_backend: Backend of all but attention (projections, norms, sampling): one of
            `LINEAR_BACKENDS`. "auto" picks "native" where it is available, "pallas" for
            one Hopper GPU an engine, and "xla" elsewhere. "pallas" fuses them with one another and
            with attention.
        quantization: "int8" stores projections and output tables as 8-bit numbers with one scale
            per output, computed at each weight sync. They take a quarter of float32's memory, and
            of its time where memory is the limit. The log-probs are those of the rounded model, see
            docs/weights.md. None stores them in `dtype`.
        kv_cache_dtype: Dtype of keys and values in pages. "auto" takes `dtype`. "int8" stores them
            as 8-bit numbers with one float32 scale per token and kv head, in a quarter of float32's
            memory. Tokens are drawn, and scored, from the rounded keys and values, see
            docs/weights.md.
        enable_deterministic_sampling: Make tokens and log-probs of a greedy or seeded request
            batch-invariant: the same bits whatever else is in the batch, and however the request is
            batched, chunked, cached, paused or put to sleep. None, the default, does so where it is
            free: with "native" attention and projections. True asks for it: on one NVIDIA GPU other
            kernels do so at a price, and elsewhere it is refused. `attention_backend` must then be
            "auto", "native" or "pallas". See docs/sampling.md.
        random_seed: Seed of random weights, and of the seeds drawn for requests without one. None
            takes the operating system's entropy for requests and 0 for weights.
        check_finite: Refuse weights that hold NaN or infinity, at the start and in each update that
            does not override it.
    """

    dtype: str | None = None
    batch_buckets: tuple[int, ...] | None = None
    token_buckets: tuple[int, ...] | None = None
    forbid_compile: bool = False
    compilation_cache_dir: str | None = "auto"
    attention_backend: str = "auto"
    linear_backend: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    enable_deterministic_sampling: bool | None = None
    random_seed: int | None = None
    check_finite: bool = True

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        if self.dtype is not None:
            name = _dtype_name(self.dtype)
            require(name in DTYPES, "dtype", self.dtype, f"None or one of {DTYPES}")
            object.__setattr__(self, "dtype", name)
        for name, known in (
            ("attention_backend", ATTENTION_BACKENDS),
            ("linear_backend", LINEAR_BACKENDS),
        ):
            value = getattr(self, name)
            require(isinstance(value, str), name, value, "the name of a backend")
            if value not in known:
                raise InvalidConfigError(unknown_name_message(name, value, known))
        if self.quantization is not None:
            value = self.quantization
            expected = f"None or one of {QUANTIZATIONS}"
            require(value in QUANTIZATIONS, "quantization", value, expected)
        name, expected = _dtype_name(self.kv_cache_dtype), f"one of {KV_CACHE_DTYPES}"
        require(name in KV_CACHE_DTYPES, "kv_cache_dtype", self.kv_cache_dtype, expected)
        object.__setattr__(self, "kv_cache_dtype", name)
        for name in ("batch_buckets", "token_buckets"):
            buckets = getattr(self, name)
            if buckets is None:
                continue
            require(
                isinstance(buckets, (list, tuple))
                and len(buckets) > 0
                and all(is_int(b) and b >= 1 for b in buckets),
                name,
                buckets,
                "a non-empty list of integers >= 1",
            )
            object.__setattr__(self, name, tuple(sorted(set(buckets))))
        require(
            not any(size % TOKEN_BLOCK for size in self.token_buckets or ()),
            "token_buckets",
            self.token_buckets,
            f"multiples of {TOKEN_BLOCK}",
        )
        for name in ("forbid_compile", "check_finite"):
            value = getattr(self, name)
            require(isinstance(value, bool), name, value, "True or False")
        is_deterministic = self.enable_deterministic_sampling
        require(
            is_deterministic is None or isinstance(is_deterministic, bool),
            "enable_deterministic_sampling",
            is_deterministic,
            "None, True or False",
        )
        if self.enable_deterministic_sampling:
            backend = self.attention_backend
            expected = "'auto', 'native' or 'pallas' with enable_deterministic_sampling"
            require(backend in DETERMINISTIC_BACKENDS, "attention_backend", backend, expected)
        if self.random_seed is not None:
            check_count("random_seed", self.random_seed, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA adapters, kept apart from the weights; see `Engine.load_adapter`.

    Attributes:
        max_loras: Maximum number of adapters loaded at once. 0 turns adapters off, at no cost.
        max_lora_rank: The largest rank of an adapter. Every slot takes the memory and time of this
            rank, whatever the rank of its adapter.
        lora_targets: Kinds of projections that adapters may change, out of `LORA_TARGETS`; None
            takes all but "lm_head". Kinds left out cost nothing.
    """

    max_loras: int = 0
    max_lora_rank: int = 16
    lora_targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        check_count("max_loras", self.max_loras, 0)
        check_count("max_lora_rank", self.max_lora_rank)
        if self.lora_targets is not None:
            limit = f"None or some of {LORA_TARGETS}"
            targets = check_names("lora_targets", self.lora_targets, LORA_TARGETS, limit)
            object.__setattr__(self, "lora_targets", targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Draft tokens: a step verifies several at once; see docs/performance.md.

    Attributes:
        speculation: "off" decodes token by token. "auto" verifies drafts where measured costs and
            acceptance say that this is faster. "always" verifies all there are, whatever it costs:
            for tests.
        speculative_drafters: Where drafts come from, out of `DRAFTERS`: "history" (earlier answers
            to the same prompt), "siblings" (other samples of the group), "ngram" (the request's own
            tokens).
        speculative_num_draft_tokens: Most draft tokens of a request in a step.
        speculative_history_bytes: Most bytes of host memory that earlier answers take; the prompts
            that were answered the longest time ago are forgotten first.
    """

    speculation: str = "off"
    speculative_drafters: tuple[str, ...] = DRAFTERS
    speculative_num_draft_tokens: int = 15
    speculative_history_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        if self.speculation is False:  # what YAML reads in a bare off
            object.__setattr__(self, "speculation", "off")
        require(
            self.speculation in SPECULATION,
            "speculation",
            self.speculation,
            f"one of {SPECULATION}",
        )
        drafters = check_names(
            "speculative_drafters", self.speculative_drafters, DRAFTERS, f"some of {DRAFTERS}"
        )
        object.__setattr__(self, "speculative_drafters", drafters)
        check_count("speculative_num_draft_tokens", self.speculative_num_draft_tokens)
        require(
            self.speculative_num_draft_tokens <= MAX_DRAFT_TOKENS,
            "speculative_num_draft_tokens",
            self.speculative_num_draft_tokens,
            f"at most {MAX_DRAFT_TOKENS}",
        )
        check_count("speculative_history_bytes", self.speculative_history_bytes, 0)

    @property
    def max_drafts(self) -> int:
        """Most draft tokens of a request in a step; 0 without speculation."""
        return 0 if self.speculation == "off" else self.speculative_num_draft_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the devices of a mesh are shared out: tensor, data and expert parallelism.

    The mesh is cut into `data_parallel_size` submeshes of `tp_size` devices. Each has an engine of
    its own, with a copy of the weights and a KV pool; requests are distributed among them.

    Attributes:
        tp_size: Devices that share one copy of the weights. None takes the size of the mesh's
            tensor axis, or all that `data_parallel_size` leaves. "auto" takes the smallest number
            whose share of the weights, and of the KV cache of one sequence of `max_model_len`
            tokens, fits the free memory of a device.
        data_parallel_size: Number of engines. None takes all devices that `tp_size` leaves.
        expert_parallel_size: Parts into which the experts of each layer are divided over the
            `tp_size` devices of an engine, each of which holds num_experts / expert_parallel_size
            experts. It divides `tp_size`; the devices of a part share the width of its experts. A
            `tp_size` of None is then the least common multiple with the mesh's tensor axis. 1 takes
            the widths of all experts, or whole experts on each device where TPUs want those.
        tensor_axes: Names that a mesh's tensor axis may have; the first one found counts. All other
            axes are data axes.
    """

    tp_size: int | Literal["auto"] | None = None
    data_parallel_size: int | None = None
    expert_parallel_size: int = 1
    tensor_axes: tuple[str, ...] = ("tp", "model", "tensor")

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        if isinstance(self.tp_size, str):
            require(self.tp_size == "auto", "tp_size", self.tp_size, "'auto', None or a count")
        elif self.tp_size is not None:
            check_count("tp_size", self.tp_size)
        if self.data_parallel_size is not None:
            check_count("data_parallel_size", self.data_parallel_size)
        check_count("expert_parallel_size", self.expert_parallel_size)
        axes = self.tensor_axes
        require(
            isinstance(axes, (list, tuple)) and all(isinstance(name, str) for name in axes),
            "tensor_axes",
            axes,
            "a list of names",
        )
        object.__setattr__(self, "tensor_axes", tuple(dict.fromkeys(axes)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All options of an engine. Model, weights, tokenizer and mesh are arguments of `Engine`.

    `max_running_requests`, `num_kv_tokens` and `batch_buckets` count the requests and tokens of all
    engines together, if there are several.

    Attributes:
        cache: The KV pool and the prefix cache.
        scheduler: Batches, chunks and the length of dispatches.
        runtime: Dtype, buckets, compilation, attention, determinism and seeds.
        lora: Adapters.
        speculation: Draft tokens.
        parallel: Tensor and data parallelism.
        max_model_len: Maximum number of prompt plus output tokens of one sequence; None takes the
            model's context length.
    """

    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    lora: LoraConfig = LoraConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    parallel: ParallelConfig = ParallelConfig()
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidConfigError naming the field."""
        if self.max_model_len is not None:
            check_count("max_model_len", self.max_model_len, 2)
        for name, needed, limit in (
            ("batch_buckets", self.scheduler.max_running_requests, "max_running_requests"),
            ("token_buckets", self.max_prefill_tokens, "chunked_prefill_size in whole blocks"),
        ):
            buckets = getattr(self.runtime, name)
            require(
                buckets is None or buckets[-1] >= needed,
                name,
                buckets,
                f"None or reach {limit} ({needed})",
            )

    @property
    def max_prefill_tokens(self) -> int:
        """`chunked_prefill_size`, rounded up to whole token blocks."""
        return -(-self.scheduler.chunked_prefill_size // TOKEN_BLOCK) * TOKEN_BLOCK

    def per_engine(self, num_engines: int) -> EngineConfig:
        """The part of one engine of a group: counts that the engines share are divided.

        Raises:
            InvalidConfigError: when a pool would be too small for a sequence of `max_model_len`,
                though all pools together are not.
        """
        if num_engines == 1:
            return self
        scheduler, cache, runtime = self.scheduler, self.cache, self.runtime
        num_rows = -(-scheduler.max_running_requests // num_engines)
        scheduler = dataclasses.replace(scheduler, max_running_requests=num_rows)
        total, longest = cache.num_kv_tokens, self.max_model_len
        if total is not None:
            part = total // num_engines
            if longest is not None and part < longest <= total:
                raise InvalidConfigError(
                    f"num_kv_tokens {total} gives each of {num_engines} engines a pool of {part} "
                    f"tokens, and a sequence of max_model_len {longest} must fit one of them; at "
                    f"least {longest * num_engines}, or a smaller data_parallel_size"
                )
            cache = dataclasses.replace(cache, num_kv_tokens=max(part, cache.page_size))
        if runtime.batch_buckets is not None:
            buckets = tuple(-(-size // num_engines) for size in runtime.batch_buckets)
            runtime = dataclasses.replace(runtime, batch_buckets=buckets)
        return dataclasses.replace(self, scheduler=scheduler, cache=cache, runtime=runtime)

    @classmethod
    def option_names(cls) -> list[str]:
        """The flat option names that `from_options`, and `Engine` as keywords, accept."""
        return [*_OPTION_GROUPS, "max_model_len"]

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Builds from flat options.

        Args:
            options: Values by name; `option_names` has the names.

        Raises:
            InvalidConfigError: for a value out of range, or an unknown name; then the message names
                the option that another engine calls so, or the nearest known one.
        """
        groups: dict[str, dict[str, Any]] = {name: {} for name in _GROUPS}
        top: dict[str, Any] = {}
        for name, value in options.items():
            if name == "max_model_len":
                top[name] = value
            elif name in _OPTION_GROUPS:
                groups[_OPTION_GROUPS[name]][name] = value
            elif name in FOREIGN_OPTIONS:
                raise InvalidConfigError(
                    f"unknown engine option {name!r}; {FOREIGN_OPTIONS[name].hint}"
                )
            else:
                raise InvalidConfigError(
                    unknown_name_message("engine option", name, cls.option_names())
                )
        return cls(
            cache=CacheConfig(**groups["cache"]),
            scheduler=SchedulerConfig(**groups["scheduler"]),
            runtime=RuntimeConfig(**groups["runtime"]),
            lora=LoraConfig(**groups["lora"]),
            speculation=SpeculationConfig(**groups["speculation"]),
            parallel=ParallelConfig(**groups["parallel"]),
            **top,
        )


_GROUPS: dict[str, type[Any]] = {
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "runtime": RuntimeConfig,
    "lora": LoraConfig,
    "speculation": SpeculationConfig,
    "parallel": ParallelConfig,
}

_OPTION_GROUPS: dict[str, str] = {
    field.name: group
    for group, config_class in _GROUPS.items()
    for field in dataclasses.fields(config_class)
}
