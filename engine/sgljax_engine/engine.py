"""The engine's public face: thread-safe, blocking and asyncio calls over one engine thread."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from sgljax_engine import builder
from sgljax_engine import commands as cmd
from sgljax_engine.client import EngineClient
from sgljax_engine.config import EngineConfig
from sgljax_engine.errors import InvalidConfigError, InvalidRequestError
from sgljax_engine.files import read_generation_config
from sgljax_engine.metrics import EngineState
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.registry import load_model_config
from sgljax_engine.outputs import RequestOutput
from sgljax_engine.requests import LogprobArgs, RequestFactory
from sgljax_engine.sampling_params import SamplingParams
from sgljax_engine.seeds import SeedSource
from sgljax_engine.tokenizer import load_tokenizer, wrap_tokenizer
from sgljax_engine.types import Request
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
        builder.check_sources(model_path, model_config, weights, weight_rules, load_format)
        if model_config is None:
            assert model_path is not None
            model_config = load_model_config(model_path)
        self._model = model_config
        self._generation = read_generation_config(model_path) if model_path is not None else {}
        if tokenizer is not None:
            tokenizer = wrap_tokenizer(tokenizer)
        elif model_path is not None:
            tokenizer = load_tokenizer(model_path)
        build = functools.partial(
            builder.build_loop,
            model=model_config,
            config=config,
            dtype=builder.pick_dtype(config, model_path),
            weights=builder.pick_weights(
                model_config, config, model_path, weights, weight_rules, load_format
            ),
            tokenizer=tokenizer,
            mesh=mesh,
        )
        self._tokenizer = tokenizer
        self._loop, limits = builder.run_on_clean_thread(build)
        try:
            self._client = EngineClient(self._loop)
            self._requests = RequestFactory(
                model_config, limits, tokenizer, SeedSource(config.runtime.random_seed)
            )
        except BaseException:  # a user's tokenizer, or an interrupt
            self._loop.request_stop()
            raise

    # ------------------------------------------------------------------ facts

    @property
    def model_config(self) -> ModelConfig:
        """The model's shape."""
        return self._model

    @property
    def max_model_len(self) -> int:
        """Prompt plus output tokens of one request at most."""
        return self._requests.limits.max_model_len

    @property
    def weight_version(self) -> int:
        """0 for the first weights, one more with every update."""
        return self._loop.weight_version

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters as the model's generation_config.json has them.

        Fields that it leaves out, and a model without the file, get vLLM's defaults.
        """
        known = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"}
        fields = {k: v for k, v in self._generation.items() if k in known and v is not None}
        if self._generation.get("do_sample") is False:
            fields["temperature"] = 0.0
        if fields.get("top_k") == 0:  # HF's spelling of "all"
            fields["top_k"] = -1
        return SamplingParams.from_dict(fields)

    def get_internal_state(self) -> EngineState:
        """Queue sizes, free KV tokens and counters, taken between two dispatches."""
        return self._client.ask(cmd.GetState)

    def check_integrity(self) -> None:
        """Raises EngineError if queues, pages and prefix cache contradict one another (a bug)."""
        self._client.ask(cmd.CheckIntegrity)

    # ------------------------------------------------------------------ generation

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool | Sequence[bool] = False,
        logprob_start_len: int | Sequence[int] | None = None,
        top_logprobs_num: int | Sequence[int] | None = None,
        token_ids_logprob: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
    ) -> Any:
        """Generates and waits.

        Args:
            prompt: One text or several.
            sampling_params: For all prompts, or a list with one for each; None takes
                `get_default_sampling_params()`.
            input_ids: Token ids instead of `prompt`: one prompt's, or a list of prompts'.
            return_logprob: Put log-probs into `meta_info`, see `RequestOutput.to_dict`. This and
                the next three are for all prompts, or lists with one for each.
            logprob_start_len: Report the prompt's log-probs from this position on; -1 or None
                reports none.
            top_logprobs_num: Most likely tokens to report at each position.
            token_ids_logprob: Tokens to report at each position.
            stream: Return an iterator at once; see `TokenStream`.

        Returns:
            One dict (see `RequestOutput.to_dict`) for one prompt and n = 1; else a list of them,
            the n samples of a prompt in a row. With `stream`, a `TokenStream`.

        Raises:
            InvalidRequestError: names the field, its value and its limit.
            EngineStepError: when the device step of one of the requests failed.
            EngineShutdownError: after, or because of, `shutdown`.
        """
        logprobs = LogprobArgs(
            return_logprob, logprob_start_len, top_logprobs_num, token_ids_logprob
        )
        made = self._make_requests(prompt, sampling_params, input_ids, logprobs, stream)
        if stream:
            return self._client.stream(made[0])
        return _dicts(self._client.generate(made[0]), made[1])

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool | Sequence[bool] = False,
        logprob_start_len: int | Sequence[int] | None = None,
        top_logprobs_num: int | Sequence[int] | None = None,
        token_ids_logprob: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
    ) -> Any:
        """`generate` for asyncio; cancelling the task aborts its requests.

        With `stream` it returns an `AsyncTokenStream`: `async for piece in await ...`.
        """
        logprobs = LogprobArgs(
            return_logprob, logprob_start_len, top_logprobs_num, token_ids_logprob
        )
        requests, is_single = self._make_requests(
            prompt, sampling_params, input_ids, logprobs, stream
        )
        if stream:
            return self._client.async_stream(requests)
        outputs = await self._client.async_generate(requests)
        return _dicts(outputs, is_single)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
        return_logprob: bool = False,
        stream: bool = False,
    ) -> Any:
        """`generate` for conversations, written out by the tokenizer's chat template.

        Args:
            messages: One conversation, a list of `{"role": ..., "content": ...}`, or several.
            sampling_params: As in `generate`.
            add_generation_prompt: End with the beginning of the assistant's answer.
            template_options: More variables of the template, `{"enable_thinking": False}` say.
            return_logprob: As in `generate`.
            stream: As in `generate`.
        """
        conversations, is_single = _conversations(messages)
        ids = [
            self.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                template_options=template_options,
            )
            for conversation in conversations
        ]
        return self.generate(
            input_ids=ids[0] if is_single else ids,
            sampling_params=sampling_params,
            return_logprob=return_logprob,
            stream=stream,
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of one conversation; see `chat`.

        Raises:
            InvalidRequestError: when the engine has no tokenizer, the tokenizer no template, or a
                message no role or content.
        """
        if self._tokenizer is None:
            raise InvalidRequestError("messages need a tokenizer and the engine has none")
        return self._tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            template_options=template_options or {},
        )

    def generate_requests(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
    ) -> list[RequestOutput]:
        """`generate` for token ids with typed outputs, all samples of all prompts in order."""
        made = self._make_requests(None, sampling_params, input_ids, LogprobArgs(), False)
        return self._client.generate(made[0])

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
        checked = self._requests.check_scored(sequences, temperature)
        if not checked:
            return []
        return self._client.ask(functools.partial(cmd.Score, checked, float(temperature)))

    # ------------------------------------------------------------------ control

    def warmup(self, *, include_score: bool = False, include_table: bool = False) -> int:
        """Compiles and runs all prefill, copy and decode programs; returns how many were new.

        Programs for `top_logprobs_num` and `token_ids_logprob` are left to their first use.

        Args:
            include_score: Those of `score` and `logprob_start_len` too, one or two for each power
                of two of tokens.
            include_table: Those for penalties, biases, allowed and bad tokens and min_new_tokens
                too, three or more for each batch bucket.
        """
        return self._client.ask(functools.partial(cmd.Warmup, include_score, include_table))

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
        return self._client.ask(functools.partial(cmd.UpdateWeights, source, tuple(rules)))

    def flush_cache(self) -> int:
        """Empties the prefix cache; returns the KV tokens that this freed.

        Running requests go on; pages that they share are freed when they end.
        """
        return self._client.ask(cmd.FlushCache)

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

    def _make_requests(
        self,
        prompt: Any,
        sampling_params: Any,
        input_ids: Any,
        logprobs: LogprobArgs,
        stream: bool,
    ) -> tuple[list[Request], bool]:
        if not isinstance(stream, bool):
            raise InvalidRequestError(f"stream must be True or False, got {stream!r}")
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        return self._requests.make(
            prompt, sampling_params, input_ids, logprobs, is_streaming=stream
        )


def _dicts(outputs: Sequence[RequestOutput], is_single: bool) -> Any:
    dicts = [output.to_dict() for output in outputs]
    return dicts[0] if is_single else dicts


def _conversations(messages: Any) -> tuple[Sequence[Any], bool]:
    """The conversations of a `chat` call, and whether it was given one, not a list of them."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not messages:
        raise InvalidRequestError(
            "messages must be a list of at least one dict with 'role' and 'content', or a list of "
            f"such lists, got {messages!r}"
        )
    is_single = isinstance(messages[0], Mapping)
    return [messages] if is_single else messages, is_single
