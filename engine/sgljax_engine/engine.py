"""The engine's public face: thread-safe, blocking and asyncio calls over one engine thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from sgljax_engine import builder
from sgljax_engine import commands as cmd
from sgljax_engine.config import EngineConfig, ModelConfig, read_generation_config
from sgljax_engine.errors import EngineShutdownError, InvalidConfigError, InvalidRequestError
from sgljax_engine.metrics import EngineState
from sgljax_engine.seeds import SeedSource, derive_seed
from sgljax_engine.tokenizer import load_tokenizer, wrap_tokenizer
from sgljax_engine.types import MAX_STOP_TOKEN_IDS, Request, RequestOutput, SamplingParams
from sgljax_engine.weights.rules import Rule


class Engine:
    """An inference engine inside this process.

    All methods may be called from any thread, several at a time; requests of all callers are
    batched together. Creating an engine takes device memory and starts two threads; `shutdown`,
    leaving the `with` block, or dropping the last reference gives both back.
    """

    def __init__(
        self,
        model_path: str | Path | None = None,
        *,
        model_config: ModelConfig | None = None,
        weights: Any = None,
        weight_rules: Sequence[Rule] | None = None,
        tokenizer: Any = None,
        load_format: str = "auto",
        mesh: jax.sharding.Mesh | None = None,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        """Loads the model and starts the engine.

        Args:
            model_path: A Hugging Face folder: config.json, safetensors, and a tokenizer if there
                is one.
            model_config: The model's shape, instead of `model_path`.
            weights: A pytree of arrays to start with, instead of a checkpoint.
            weight_rules: Map `weights` onto the model; None expects the engine's own names and
                logical shapes.
            tokenizer: See `tokenizer`; None takes the folder's.
            load_format: "auto" or "safetensors" reads the folder, "dummy" makes random weights.
            mesh: Where to run, sharded over its axis "tp"; None takes JAX's first device.
            config: All options as one object.
            **options: Instead of `config`: flat names of `EngineConfig`, for example
                `page_size=16, max_running_requests=64, dtype="bfloat16"`.

        Raises:
            InvalidConfigError: names the option, its value and its limit.
            UnsupportedModelError: for an architecture that is not implemented.
            WeightLoadError: for a missing or broken checkpoint.
            WeightSyncError: when the weights do not cover or fit the model.
        """
        if config is not None and options:
            raise InvalidConfigError(f"give config or options, not both; got {sorted(options)}")
        config = config or EngineConfig.from_options(options)
        if (model_path is None) == (model_config is None):
            raise InvalidConfigError("give exactly one of model_path and model_config")
        if model_path is not None and not Path(model_path).is_dir():
            raise InvalidConfigError(f"model_path must be a folder, got {str(model_path)!r}")
        if load_format not in builder.LOAD_FORMATS:
            raise InvalidConfigError(
                f"load_format must be one of {builder.LOAD_FORMATS}, got {load_format!r}"
            )
        if model_config is None:
            assert model_path is not None
            model_config = ModelConfig.from_hf_folder(model_path)
        self._model = model_config
        self._generation = read_generation_config(model_path) if model_path is not None else {}
        if tokenizer is not None:
            self._tokenizer = wrap_tokenizer(tokenizer)
        else:
            self._tokenizer = load_tokenizer(model_path) if model_path is not None else None
        self._eos_ids = self._find_eos_ids()
        self._seeds = SeedSource(config.runtime.random_seed)
        self._shutdown_lock = threading.Lock()
        self._loop, self._limits = builder.build_loop(
            model=model_config,
            config=config,
            dtype=_pick_dtype(config, model_path),
            weights=_pick_weights(
                model_config, config, model_path, weights, weight_rules, load_format
            ),
            tokenizer=self._tokenizer,
            mesh=mesh,
        )
        finalizer = weakref.finalize(self, self._loop.request_stop)
        finalizer.atexit = False  # the loop stops itself at exit

    # ------------------------------------------------------------------ facts

    @property
    def model_config(self) -> ModelConfig:
        """The model's shape."""
        return self._model

    @property
    def max_model_len(self) -> int:
        """Prompt plus output tokens of one request at most."""
        return self._limits.max_model_len

    @property
    def weight_version(self) -> int:
        """0 for the first weights, one more with every update."""
        return self._loop.weight_version

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters as the model's generation_config.json has them.

        Fields that it leaves out, and a model without the file, get vLLM's defaults.
        """
        known = {"temperature", "top_k", "top_p", "min_p", "max_new_tokens"}
        fields = {k: v for k, v in self._generation.items() if k in known and v is not None}
        if self._generation.get("do_sample") is False:
            fields["temperature"] = 0.0
        if fields.get("top_k") == 0:  # HF's spelling of "all"
            fields["top_k"] = -1
        return SamplingParams.from_dict(fields)

    def get_internal_state(self) -> EngineState:
        """Queue sizes, free KV tokens and counters, taken between two dispatches."""
        future: Future[EngineState] = Future()
        self._loop.submit(cmd.GetState(future))
        return future.result()

    # ------------------------------------------------------------------ generation

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
    ) -> Any:
        """Generates and waits.

        Args:
            prompt: One text or several.
            sampling_params: For all prompts, or a list with one for each; None takes
                `get_default_sampling_params()`.
            input_ids: Token ids instead of `prompt`: one prompt's, or a list of prompts'.
            return_logprob: Put `output_token_logprobs` into `meta_info`.

        Returns:
            One dict (see `RequestOutput.to_dict`) for one prompt and n = 1; else a list of them,
            the n samples of a prompt in a row.

        Raises:
            InvalidRequestError: names the field, its value and its limit.
            EngineStepError: when the device step of one of the requests failed.
            EngineShutdownError: after, or because of, `shutdown`.
        """
        outputs, is_single = self._generate(prompt, sampling_params, input_ids)
        dicts = [output.to_dict(return_logprob=return_logprob) for output in outputs]
        return dicts[0] if is_single else dicts

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
    ) -> Any:
        """`generate` for asyncio; cancelling the task aborts its requests."""
        requests, is_single = self._make_requests(prompt, sampling_params, input_ids)
        futures = self._submit(requests)
        try:
            outputs = await asyncio.gather(*(asyncio.wrap_future(f) for f in futures))
        except BaseException:
            self._abandon(requests)
            raise
        dicts = [output.to_dict(return_logprob=return_logprob) for output in outputs]
        return dicts[0] if is_single else dicts

    def generate_requests(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
    ) -> list[RequestOutput]:
        """`generate` for token ids with typed outputs, all samples of all prompts in order."""
        return self._generate(None, sampling_params, input_ids)[0]

    def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[np.ndarray]:
        """Log-probs of given tokens under the current weights.

        Args:
            sequences: Token ids, each of at least one token.
            temperature: Divides the logits; > 0.

        Returns:
            For each sequence a float32 array of its length - 1: entry t is
            log softmax(logits_t / temperature)[token t + 1].
        """
        if not temperature > 0:
            raise InvalidRequestError(f"temperature must be > 0, got {temperature!r}")
        checked = [self._check_ids(ids) for ids in sequences]
        for ids in checked:
            if len(ids) > self._limits.max_model_len:
                raise InvalidRequestError(
                    f"a sequence to score has {len(ids)} tokens, the limit is max_model_len = "
                    f"{self._limits.max_model_len}"
                )
        if not checked:
            return []
        future: Future[list[np.ndarray]] = Future()
        self._loop.submit(cmd.Score(checked, float(temperature), future))
        return future.result()

    # ------------------------------------------------------------------ control

    def warmup(self) -> int:
        """Compiles and runs all prefill and decode programs; returns how many were new."""
        future: Future[int] = Future()
        self._loop.submit(cmd.Warmup(future))
        return future.result()

    def update_weights(self, source: Any, rules: Sequence[Rule] | None = None) -> int:
        """Replaces all weights between two dispatches, all or nothing.

        Running requests are retracted: they go on under the new weights after their prompt and
        output so far were prefilled again.

        Args:
            source: A pytree of arrays, on any device. It is copied, never aliased.
            rules: Map it onto the model. None expects the engine's own names and logical shapes.
                Reuse the same rules object to reuse the compiled transformation.

        Returns:
            The new weight version.

        Raises:
            WeightSyncError: names every missing, extra or mis-shaped parameter; the old weights
                keep serving.
        """
        if rules is None:
            rules = builder.identity_rules(self._model)
        future: Future[int] = Future()
        self._loop.submit(cmd.UpdateWeights(source, tuple(rules), future))
        return future.result()

    def abort_request(self, rid: str) -> bool:
        """Ends one request with finish reason `abort`; False when it is not unfinished."""
        future: Future[int] = Future()
        self._loop.submit(cmd.AbortRequests([rid], future))
        return future.result() > 0

    def shutdown(self) -> None:
        """Fails unfinished requests, ends the threads, frees device memory. Idempotent."""
        self._loop.stop()

    def __enter__(self) -> Engine:
        """Returns the engine."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shuts the engine down."""
        self.shutdown()

    # ------------------------------------------------------------------ requests

    def _generate(
        self, prompt: Any, sampling_params: Any, input_ids: Any
    ) -> tuple[list[RequestOutput], bool]:
        requests, is_single = self._make_requests(prompt, sampling_params, input_ids)
        futures = self._submit(requests)
        try:
            return [future.result() for future in futures], is_single
        except BaseException:
            self._abandon(requests)
            raise

    def _submit(self, requests: list[Request]) -> list[Future[RequestOutput]]:
        futures: list[Future[RequestOutput]] = [Future() for _ in requests]
        self._loop.submit(cmd.AddRequests(requests, futures))
        return futures

    def _abandon(self, requests: list[Request]) -> None:
        """Aborts requests whose caller stopped waiting; does not wait for it."""
        with contextlib.suppress(EngineShutdownError):
            self._loop.submit(cmd.AbortRequests([r.rid for r in requests], Future()))

    def _make_requests(
        self, prompt: Any, sampling_params: Any, input_ids: Any
    ) -> tuple[list[Request], bool]:
        prompts, is_single = self._prompt_ids(prompt, input_ids)
        params = self._params(sampling_params, len(prompts))
        now = time.perf_counter()
        requests: list[Request] = []
        for ids, settings in zip(prompts, params, strict=True):
            stop_ids = self._check_request(ids, settings)
            seed = self._seeds.fresh() if settings.seed is None else settings.seed
            requests.extend(
                Request(
                    rid=uuid.uuid4().hex,
                    prompt_ids=ids,
                    params=settings,
                    seed=derive_seed(seed, sample),
                    stop_ids=stop_ids,
                    arrival_s=now,
                )
                for sample in range(settings.n)
            )
        return requests, is_single and params[0].n == 1

    def _prompt_ids(self, prompt: Any, input_ids: Any) -> tuple[list[list[int]], bool]:
        if (prompt is None) == (input_ids is None):
            raise InvalidRequestError("give exactly one of prompt and input_ids")
        if prompt is not None:
            is_single = isinstance(prompt, str)
            texts = [prompt] if is_single else list(prompt)
            return [self._encode(text) for text in texts], is_single
        is_single = len(input_ids) == 0 or not hasattr(input_ids[0], "__len__")
        return [
            self._check_ids(ids) for ids in ([input_ids] if is_single else input_ids)
        ], is_single

    def _encode(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise InvalidRequestError(f"prompt must be text, got {type(text).__name__}")
        if self._tokenizer is None:
            raise InvalidRequestError(
                "prompt needs a tokenizer and the engine has none; use input_ids"
            )
        return self._check_ids(self._tokenizer.encode(text))

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        if len(ids) == 0:
            raise InvalidRequestError("the prompt is empty; it needs at least one token")
        array = np.asarray(ids)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise InvalidRequestError(f"input_ids must be integers, got dtype {array.dtype}")
        bad = (array < 0) | (array >= self._model.vocab_size)
        if bad.any():
            raise InvalidRequestError(
                f"input_ids must be in [0, {self._model.vocab_size}), got {array[bad][0]} at "
                f"position {int(bad.argmax())}"
            )
        return array.tolist()

    def _params(self, given: Any, count: int) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        each = list(given) if isinstance(given, (list, tuple)) else [given] * count
        if len(each) != count:
            raise InvalidRequestError(
                f"sampling_params must be one for all or one for each of the {count} prompts, "
                f"got {len(each)}"
            )
        return [p if isinstance(p, SamplingParams) else SamplingParams.from_dict(p) for p in each]

    def _check_request(self, ids: list[int], params: SamplingParams) -> tuple[int, ...]:
        """Checks lengths and stop ids against the engine's limits; returns the stop ids."""
        total = len(ids) + params.max_new_tokens
        if len(ids) >= self._limits.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(ids)} tokens, the limit is max_model_len - 1 = "
                f"{self._limits.max_model_len - 1}"
            )
        if total > self._limits.max_model_len:
            raise InvalidRequestError(
                f"prompt ({len(ids)}) plus max_new_tokens ({params.max_new_tokens}) is {total} "
                f"tokens, the limit is max_model_len = {self._limits.max_model_len}"
            )
        if total - 1 > self._limits.max_kv_tokens:
            raise InvalidRequestError(
                f"prompt ({len(ids)}) plus max_new_tokens ({params.max_new_tokens}) needs "
                f"{total - 1} KV tokens, the pool holds {self._limits.max_kv_tokens}"
            )
        eos_ids = () if params.ignore_eos else self._eos_ids
        stop_ids = tuple(dict.fromkeys((*params.stop_token_ids, *eos_ids)))
        if len(stop_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids (end-of-sequence ids included) must be at most "
                f"{MAX_STOP_TOKEN_IDS}, got {len(stop_ids)}"
            )
        return stop_ids

    def _find_eos_ids(self) -> tuple[int, ...]:
        ids = self._model.eos_token_ids
        own = self._tokenizer.eos_token_id if self._tokenizer is not None else None
        return ids if own is None or own in ids else (*ids, own)


def _pick_dtype(config: EngineConfig, model_path: str | Path | None) -> str:
    if config.runtime.dtype is not None:
        return config.runtime.dtype
    return builder.checkpoint_dtype(model_path) if model_path is not None else "float32"


def _pick_weights(
    model: ModelConfig,
    config: EngineConfig,
    model_path: str | Path | None,
    weights: Any,
    rules: Sequence[Rule] | None,
    load_format: str,
) -> builder.WeightSource:
    if weights is not None:
        return builder.WeightSource(weights, rules or builder.identity_rules(model))
    if load_format == "dummy" or model_path is None:
        return builder.dummy_weights(model, config.runtime.random_seed or 0)
    return builder.folder_weights(model, model_path)
