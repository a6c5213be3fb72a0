"""The engine's public API: thread-safe, blocking and asyncio calls over the engine threads.

The file is long because the facade has a method for every call. Each method only checks its
arguments and sends a command to the engine threads.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from sgljax_engine.aio import Asks, Callers, asks, for_asyncio
from sgljax_engine.builder import group, sources
from sgljax_engine.builder.adapters import adapter_source, check_adapters, first_sources
from sgljax_engine.builder.endable_progress import EndableProgress
from sgljax_engine.checkpoint.manager import CheckpointManager, SaveReport
from sgljax_engine.checks import check_text
from sgljax_engine.config import EngineConfig
from sgljax_engine.core import commands as cmd
from sgljax_engine.core.command import SHUT_DOWN
from sgljax_engine.core.commands.checkpoint import SaveJob, load_checkpoint
from sgljax_engine.core.weights_worker import job
from sgljax_engine.errors import EngineShutdownError, InvalidConfigError, InvalidRequestError
from sgljax_engine.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    NewVersion,
    PauseGenerationReqInput,
    PauseMode,
    SleepTag,
    check_flags,
    check_level,
    check_mode,
    check_tags,
    flushes,
)
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.registry import load_model_config
from sgljax_engine.observability.metrics import EngineState
from sgljax_engine.observability.progress import EngineProgress, ProgressListener
from sgljax_engine.observability.trace import MAX_EVENTS, Recording
from sgljax_engine.outputs import RequestOutput
from sgljax_engine.processing.any_tokenizer import take_tokenizer
from sgljax_engine.processing.bounded_text import check_length
from sgljax_engine.processing.conversation import conversation_ids, split_conversations
from sgljax_engine.processing.futures import Answer
from sgljax_engine.processing.generation_defaults import read_generation_defaults
from sgljax_engine.processing.home import HomeFuture
from sgljax_engine.processing.input_processor import LogprobArgs, RequestFactory, takes_long
from sgljax_engine.processing.tokenizer import (
    DecodeOptions,
    Tokenizer,
    can_show_special_tokens,
)
from sgljax_engine.processing.tokenizer_folder import load_tokenizer
from sgljax_engine.runner.warmup import Extra
from sgljax_engine.sampling_params import SamplingParams, SeedSource, refuse_keywords
from sgljax_engine.types import Request
from sgljax_engine.weights.rules import WeightRule
from sgljax_engine.weights.staged import StagedWeights, check_staged

if TYPE_CHECKING:
    from sgljax_engine.server import Server, ServerConfig

logger = logging.getLogger(__name__)


class Engine:
    """An inference engine inside this process.

    Any thread may call any method, also concurrently; the engine batches the requests of all
    callers together. On a mesh with data axes it is a group: one engine for each submesh, with
    threads, KV pool and prefix cache of its own. Requests are routed to the engine that holds their
    prefix, or to the one with the fewest; every other call concerns all engines, together.

    Creating an engine takes device memory and starts two threads for each submesh, and one more for
    a group; the first weight update starts one, and the first checkpoint another. `shutdown`,
    leaving the `with` block, or dropping the last reference releases all of it.
    """

    def __init__(
        self,
        model_path: str | Path | None = None,
        *,
        model_config: ModelConfig | None = None,
        weights: Any = None,
        weight_rules: Sequence[WeightRule] | None = None,
        tokenizer: Any = None,
        load_format: str = "auto",
        adapters: Mapping[str, str | Path | tuple[Any, Sequence[WeightRule]]] | None = None,
        mesh: jax.sharding.Mesh | None = None,
        config: EngineConfig | None = None,
        progress: ProgressListener | None = None,
        **options: Any,
    ) -> None:
        """Loads the model and starts the engine.

        Args:
            model_path: A Hugging Face folder: config.json, safetensors and an optional tokenizer.
            model_config: The model's shape, instead of `model_path`.
            weights: A pytree of arrays to start with, instead of a checkpoint.
            weight_rules: Map `weights` onto the model, as in `update_weights`.
            tokenizer: A Hugging Face tokenizer, a SentencePieceProcessor, or an object with encode,
                decode, bos_id, eos_id and pad_id; None loads the folder's.
            load_format: "auto" or "safetensors" reads the folder, "dummy" creates random weights.
            adapters: Adapters to start with, by name: a PEFT folder, or a pytree with the LoRA
                pairs and its rules; see `load_adapter`. At most `max_loras`; they take the first
                slots.
            mesh: Devices to run on. Its tensor axis ("tp", "model" or "tensor") shards the weights;
                each index of the other axes has an engine of its own. `tp_size` and
                `data_parallel_size` divide the devices differently. None, or an empty mesh, takes
                JAX's first device, or as many as these two options ask for.
            config: All options as one object.
            progress: Called with the progress of loading and warm-up, on the threads that do the
                work.
            **options: Instead of `config`: flat names of `EngineConfig`, for example
                `page_size=16, max_running_requests=64, dtype="bfloat16"`.

        Raises:
            InvalidConfigError: names the option, its value and its limit.
            UnsupportedModelError: for an architecture that is not implemented.
            WeightLoadError: for a missing or broken checkpoint.
            WeightSyncError: when the weights do not cover or fit the model, or are not finite.
        """
        if config is not None and options:
            raise InvalidConfigError(f"give config or options, not both; got {sorted(options)}")
        if config is not None and not isinstance(config, EngineConfig):
            raise InvalidConfigError(
                f"config must be an EngineConfig, got {type(config).__name__}; give options flat"
            )
        config = config or EngineConfig.from_options(options)
        sources.check_sources(model_path, model_config, weights, weight_rules, load_format)
        if model_config is None:
            assert model_path is not None
            model_config = load_model_config(model_path)
        check_adapters(adapters or {}, config.lora)
        self._progress = EndableProgress(progress)
        self._model = model_config
        self._checks_finite = config.runtime.check_finite
        self._returns_routed = config.cache.enable_return_routed_experts
        if tokenizer is not None:
            tokenizer = take_tokenizer(tokenizer)
        elif model_path is not None:
            tokenizer = load_tokenizer(model_path)
        self._defaults = SamplingParams()
        if model_path is not None:
            self._defaults = read_generation_defaults(
                model_path, model_config, has_tokenizer=tokenizer is not None
            )
        build = functools.partial(
            group.build_group,
            model=model_config,
            config=config,
            dtype=sources.pick_dtype(config, model_path),
            weights=sources.pick_weights(
                model_config,
                config,
                model_path,
                weights,
                weight_rules,
                load_format,
                self._progress,
            ),
            adapters=first_sources(model_config, adapters or {}),
            tokenizer=tokenizer,
            mesh=mesh,
            progress=self._progress,
        )
        self._tokenizer = tokenizer
        self._servers: list[Server] = []
        self._has_warned_of_sleep = False
        self._group, limits = group.start_on_clean_thread(build, self._progress)
        try:
            self._calls = Callers(self._group)
            self._requests = RequestFactory(
                model_config,
                limits,
                tokenizer,
                SeedSource(config.runtime.random_seed),
                config.speculation.max_drafts,
            )
        except BaseException:  # a user's tokenizer, or an interrupt
            self._group.request_stop()
            raise

    # ------------------------------------------------------------------ facts

    @property
    def model_config(self) -> ModelConfig:
        """The model's shape."""
        return self._model

    @property
    def returns_routed_experts(self) -> bool:
        """Whether outputs have `routed_experts`, as `enable_return_routed_experts` asks."""
        return self._returns_routed

    @property
    def max_model_len(self) -> int:
        """Maximum number of prompt plus output tokens of one request."""
        return self._requests.limits.max_model_len

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """Tokens that may follow a prompt of this length; below 1 if the prompt is too long."""
        limits = self._requests.limits
        return min(limits.max_model_len, limits.max_kv_tokens + 1) - num_prompt_tokens

    @property
    def weight_version(self) -> int:
        """Version of the serving weights: 0 at first, incremented by every update."""
        return self._group.weight_version

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters from the model's generation_config.json, read at the start.

        Missing fields, or a missing file, get vLLM's defaults.
        """
        return self._defaults

    @property
    def num_seeds_drawn(self) -> int:
        """Seeds that requests without one have drawn from `random_seed`; any thread."""
        return self._requests.seeds.num_drawn

    def skip_seeds_to(self, num_drawn: int) -> None:
        """Skips seeds until so many are drawn, as an earlier process left `random_seed`.

        Does nothing if they are already drawn. Takes about 1 us a seed. Any thread.

        Args:
            num_drawn: What `num_seeds_drawn` was.
        """
        self._requests.seeds.skip_to(num_drawn)

    @asks
    def get_internal_state(self) -> Asks[EngineState]:
        """Queue sizes, free KV tokens and counters, read between two dispatches."""
        return cmd.GetState

    @property
    def is_running(self) -> bool:
        """Whether the engine takes calls; False after `shutdown`, or when its thread has failed."""
        return self._group.is_running

    def get_progress(self) -> EngineProgress:
        """Queue sizes and totals; does not wait for the engine or slow it down."""
        return self._group.progress

    def start_recording(self, max_events: int = MAX_EVENTS) -> None:
        """Starts recording what the engine's threads do and when; see `stop_recording`.

        While recording, the engine waits for each prefill to end before it dispatches the decode,
        so that the two are timed separately.

        Args:
            max_events: Events, and samples, to keep; older ones are dropped.

        Raises:
            InvalidRequestError: unless `max_events` is a positive int.
        """
        self._group.start_recording(max_events)

    def stop_recording(self) -> Recording:
        """Stops recording and returns the recording, which is empty if none was started.

        Times are readings of `time.perf_counter`. Unfinished events are left out, except for a
        pause or a sleep, which ends with the recording.
        """
        return self._group.stop_recording()

    def check_integrity(self) -> None:
        """Raises EngineError if queues, pages and prefix cache contradict one another (a bug)."""
        self._calls.ask(cmd.CheckIntegrity)

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
        rid: str | Sequence[str] | None = None,
        lora: str | Sequence[str | None] | None = None,
        **unknown: Any,
    ) -> Any:
        """Generates and waits for the output, also across a pause of generation.

        Args:
            prompt: One text or several.
            sampling_params: For all prompts, or a list with one for each; None takes
                `get_default_sampling_params()`, with fewer new tokens where no more fit.
            input_ids: Token ids instead of `prompt`: one prompt's, or a list of prompts'.
            return_logprob: Put log-probs into `meta_info`, see `RequestOutput.to_dict`. This and
                the next three arguments apply to all prompts, or are lists with one value per
                prompt.
            logprob_start_len: Report the prompt's log-probs from this position on; -1 or None
                reports none.
            top_logprobs_num: Most likely tokens to report at each position.
            token_ids_logprob: Tokens to report at each position.
            stream: Return an iterator at once; see `TokenStream`.
            rid: The caller's id of each prompt, for `abort_request` and checkpoints; it must not be
                in use by an unanswered call. With several samples, sample i is `<rid>-<i>`.
            lora: Name of the adapter for all prompts, or a list with one per prompt; None is the
                base model alone.
            **unknown: Must be empty. The error for a sampling field says where it goes.

        Returns:
            One dict (see `RequestOutput.to_dict`) for one prompt and n = 1; else a list of them,
            with the n samples of a prompt next to one another. With `stream`, a `TokenStream`.

        Raises:
            InvalidRequestError: names the field, its value and its limit.
            EngineStepError: when a device step of one of the requests failed.
            EngineStateError: after an update with donate=True failed.
            EngineShutdownError: after, or because of, `shutdown`.
        """
        refuse_keywords(unknown)
        logprobs = LogprobArgs(
            return_logprob, logprob_start_len, top_logprobs_num, token_ids_logprob
        )
        made = self._make_requests(prompt, sampling_params, input_ids, logprobs, stream, rid, lora)
        return self._run(*made, stream)

    def _run(self, requests: list[Request], is_single: bool, stream: bool) -> Any:
        if stream:
            return self._calls.stream(requests)
        return _dicts(self._calls.generate(requests), is_single)

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
        rid: str | Sequence[str] | None = None,
        lora: str | Sequence[str | None] | None = None,
        **unknown: Any,
    ) -> Any:
        """`generate` for asyncio; cancelling the task aborts its requests.

        With `stream` it returns an `AsyncTokenStream`: `async for piece in await ...`.
        """
        refuse_keywords(unknown)
        logprobs = LogprobArgs(
            return_logprob, logprob_start_len, top_logprobs_num, token_ids_logprob
        )
        make = functools.partial(
            self._make_requests, prompt, sampling_params, input_ids, logprobs, stream, rid, lora
        )
        # Other tasks of the event loop would have to wait for it.
        is_slow = takes_long(input_ids if prompt is None else prompt, sampling_params)
        requests, is_single = await asyncio.to_thread(make) if is_slow else make()
        if stream:
            return self._calls.async_stream(requests)
        outputs = await self._calls.async_generate(requests)
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
        lora: str | Sequence[str | None] | None = None,
    ) -> Any:
        """`generate` for conversations, rendered with the tokenizer's chat template.

        An answer's text is the content of a message, so it is decoded without the prompt.

        Args:
            messages: One conversation, a list of `{"role": ..., "content": ...}`, or several.
            sampling_params: As in `generate`.
            add_generation_prompt: End the prompt with the start of the assistant's answer.
            template_options: More variables for the template, for example `{"enable_thinking":
                False}`.
            return_logprob: As in `generate`.
            stream: As in `generate`.
            lora: As in `generate`.

        Returns:
            As `generate`: for one conversation and n = 1 a dict, else a list, or a stream.

        Raises:
            InvalidRequestError: as `apply_chat_template` and `generate`.
        """
        conversations, is_single = split_conversations(messages)
        ids = [
            self.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                template_options=template_options,
            )
            for conversation in conversations
        ]
        made = self._make_requests(
            None,
            sampling_params,
            ids[0] if is_single else ids,
            LogprobArgs(return_logprob),
            stream,
            lora=lora,
            stands_alone=True,
        )
        return self._run(*made, stream)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_options: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of one conversation; see `chat`.

        Args:
            messages: A list of `{"role": ..., "content": ...}`. An assistant message may have
                `token_ids`, the `output_ids` of its text: these ids and those of its prompt are
                then kept. `prompt_token_ids`, the ids of that prompt, are checked.
            add_generation_prompt: End the prompt with the start of the assistant's answer.
            continue_final_message: End the prompt with the content of the last message, so that the
                model continues it. It must be an assistant's; needs add_generation_prompt=False.
            template_options: More variables for the template.
            max_tokens: Refuse a text that certainly has more tokens, without tokenizing all of it;
                None accepts any.

        Raises:
            InvalidRequestError: when the engine has no tokenizer, the tokenizer has no chat
                template, or a message lacks its role or content; for `prompt_token_ids` that are
                not those of the messages before; for a text that is too long.
        """
        return conversation_ids(
            self._need_tokenizer("messages need"),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_options=template_options or {},
            max_tokens=max_tokens,
        )

    def get_chat_template(self, *, has_tools: bool = False) -> str | None:
        """The Jinja source of the tokenizer's chat template; None without one.

        Args:
            has_tools: Whether it is to render tools.
        """
        tokenizer = self._tokenizer
        return None if tokenizer is None else tokenizer.get_chat_template(has_tools=has_tools)

    @property
    def response_template(self) -> Any:
        """The response template of the tokenizer's folder; None without one."""
        return None if self._tokenizer is None else self._tokenizer.response_template

    @property
    def special_tokens(self) -> Sequence[str]:
        """Names of the tokenizer's special tokens, as far as they are known."""
        return () if self._tokenizer is None else self._tokenizer.special_tokens

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that a token stands for, a part of a character too; None if not known."""
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token)

    @property
    def can_show_special_tokens(self) -> bool:
        """Whether the tokenizer supports `skip_special_tokens=False`."""
        return can_show_special_tokens(self._tokenizer)

    def tokenize(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of a text.

        Args:
            text: Any text.
            add_special_tokens: Add what the tokenizer adds to a prompt, such as BOS.
            max_tokens: Refuse a text that certainly has more tokens, without tokenizing all of it;
                None accepts any.

        Raises:
            InvalidRequestError: when the engine has no tokenizer, and for a text that is too long.
        """
        tokenizer = self._need_tokenizer("tokenize needs")
        if max_tokens is None:
            check_text(text)
        else:
            check_length(tokenizer, text, max_tokens)
        return tokenizer.encode(text) if add_special_tokens else tokenizer.encode_rendered(text)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool | None = True) -> str:
        """Text of token ids.

        Args:
            ids: Token ids of the vocabulary.
            skip_special_tokens: Leave special tokens out; None keeps them if the tokenizer has
                that option.

        Raises:
            InvalidRequestError: when the engine has no tokenizer, for an id outside the vocabulary,
                and for an option that the tokenizer lacks.
        """
        tokenizer = self._need_tokenizer("detokenize needs")
        if skip_special_tokens is None:
            skip_special_tokens = not self.can_show_special_tokens
        options = DecodeOptions(skip_special_tokens=skip_special_tokens)
        tokenizer.check_decode_options(options)
        checked = self._requests.check_ids(ids) if len(ids) else []
        return tokenizer.decode(checked, options)

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError(f"{what} a tokenizer and the engine has none")
        return self._tokenizer

    def generate_requests(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        lora: str | None = None,
    ) -> list[RequestOutput]:
        """`generate` for token ids with typed outputs.

        Args:
            input_ids: Token ids of each prompt.
            sampling_params: For all prompts, or one for each.
            lora: The adapter of all prompts; None is the base model alone.

        Returns:
            All samples of all prompts in order, with the n samples of a prompt next to one another.

        Raises:
            InvalidRequestError: names the field, its value and its limit.
        """
        made = self._make_requests(
            None, sampling_params, input_ids, LogprobArgs(), False, lora=lora
        )
        return self._calls.generate(made[0])

    async def async_generate_requests(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        lora: str | None = None,
        *,
        rid: Sequence[str] | None = None,
        on_piece: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """`generate_requests` for asyncio; cancelling the task aborts its requests.

        Args:
            input_ids: As in `generate_requests`, also for the arguments below.
            sampling_params: For all prompts, or one for each.
            lora: The adapter of all prompts.
            rid: An id for each prompt, for `abort_request`.
            on_piece: Called with an output's index and new tokens as these come, but for the last
                ones; on a thread of the engine, which it must not keep.
        """
        made, _ = self._make_requests(
            None, sampling_params, input_ids, LogprobArgs(), on_piece is not None, rid, lora
        )
        if on_piece is None:
            return await self._calls.async_generate(made)
        return await self._calls.async_watch(made, on_piece)

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float = 1.0,
        start_lens: Sequence[int] | None = None,
        lora: str | None = None,
    ) -> list[np.ndarray]:
        """Log-probs of given tokens under the current weights.

        Sequences of one batch share the computation of a common prefix, in blocks of 16 tokens; so
        put the samples of a prompt next to one another.

        Args:
            sequences: Token ids, each of at least one token.
            temperature: Divides the logits; > 0.
            start_lens: Number of leading tokens of each sequence that need no log-prob, such as the
                prompt's; at least 1. None means 1.
            lora: The adapter of all sequences; None is the base model alone.

        Returns:
            For each sequence a float32 array of its length - start: entry t is
            log softmax(logits_{start + t - 1} / temperature)[token start + t].

        Raises:
            InvalidRequestError: names the argument, its value and its limit.
            EngineStateError: while the engine sleeps or has no weights.
            NonFiniteLogitsError: names the first token whose logits are NaN or infinite.
        """
        checked, starts = self._requests.check_scored(sequences, temperature, start_lens)
        if not checked:
            return []
        command = functools.partial(cmd.Score, checked, starts, float(temperature), lora)
        return self._calls.ask(command)

    # ------------------------------------------------------------------ control

    def warmup(
        self,
        *,
        include_score: bool = False,
        include_table: bool = False,
        include_masks: bool = False,
        include_grammars: bool = False,
    ) -> int:
        """Compiles and runs all prefill, copy and decode programs; returns the number of new ones.

        Programs for `top_logprobs_num` and `token_ids_logprob` are compiled at their first use.
        Other requests wait during warm-up, for seconds to minutes.

        Args:
            include_score: Also compile programs for `score` and `logprob_start_len`: one for each
                prefill bucket, and for each larger power of two up to the longest sequence.
            include_table: Also compile programs for penalties, biases, allowed and bad tokens and
                min_new_tokens: three or more for each batch bucket.
            include_masks: Also compile programs for `return_sampling_mask`: two for each batch
                bucket.
            include_grammars: Also compile programs for `structured_outputs`: one or two for each
                batch bucket.

        Raises:
            EngineStateError: while the engine sleeps or has no weights.
        """
        asked: dict[Extra, bool] = {
            "score": include_score,
            "table": include_table,
            "masks": include_masks,
            "grammars": include_grammars,
        }
        include: frozenset[Extra] = frozenset(
            extra for extra, is_asked in asked.items() if is_asked
        )
        return self._calls.ask(functools.partial(cmd.Warmup, include, self._progress))

    @asks
    def pause_generation(self, mode: PauseMode = "retract") -> Asks[None]:
        """Pauses generation. Returns once this engine runs nothing on the device.

        New requests wait for `continue_generation`, so the pausing thread must not wait for an
        output before it continues. A second call changes the mode.

        Args:
            mode: What happens to the requests; see `io_struct.PauseMode`. "wait" returns once all
                started requests have finished.

        Raises:
            InvalidRequestError: for an unknown mode.
            EngineStateError: when `continue_generation`, or a pause that keeps requests from
                finishing, interrupted a "wait".
        """
        return functools.partial(cmd.Pause, PauseGenerationReqInput(mode=mode))

    @asks
    def continue_generation(self) -> Asks[None]:
        """Continues generation; does nothing if generation is not paused."""
        return functools.partial(cmd.Continue, ContinueGenerationReqInput())

    @asks
    def abort_request(
        self, rid: str | None = None, abort_all: bool = False, *, message: str | None = None
    ) -> Asks[int]:
        """Ends requests with finish reason `abort`; their callers get the output so far.

        Args:
            rid: Id of a request, or of a prompt with several samples. An unknown or finished id is
                not an error.
            abort_all: End all requests, including waiting ones.
            message: Put into their finish reason; None says that the caller aborted them.

        Returns:
            The number of ended requests.

        Raises:
            InvalidRequestError: unless exactly one of `rid` and `abort_all` is given.
        """
        request = AbortReq(rid=rid, abort_all=abort_all, aborted_message=message)
        return functools.partial(cmd.Abort, request)

    @asks
    def flush_cache(self) -> Asks[FlushCacheReqOutput]:
        """Empties the prefix cache and resets `new_token_ratio` and `forward_ct_decode`.

        The engine refuses while requests that run, or are paused in place, hold KV pages; the
        answer says why. Retracted requests hold none.

        Returns:
            Whether the cache was flushed, and how many KV tokens it held.
        """
        return functools.partial(cmd.FlushCache, FlushCacheReqInput())

    def release_kv_cache(self) -> int:
        """Frees the memory of the KV cache; the next dispatch allocates it again.

        Returns:
            Bytes freed; 0 if it was released already.

        Raises:
            EngineStateError: while requests hold KV pages; see `flush_cache`.
        """
        return self._calls.ask(cmd.ReleaseKV)

    # ------------------------------------------------------------------ sleep

    @asks
    def sleep(
        self,
        level: int = 1,
        preserve_state: bool = False,
        *,
        tags: Sequence[SleepTag] | None = None,
        refuse_requests: bool = False,
    ) -> Asks[int]:
        """Frees the device memory of weights and KV cache until `wake_up`.

        No request is lost: started requests keep their tokens and continue after `wake_up`, and new
        requests wait for it. So a thread that put the engine to sleep must not wait for an output
        before it wakes the engine. A pause stays in force. If weights or KV cache sleep already,
        they stay as they were put to sleep; if both do, the call only logs a warning.

        Args:
            level: 1 keeps the weights on the host. 2 drops them: after `wake_up`, generation waits
                for `update_weights`, and the engine refuses new requests until then.
            preserve_state: Keep weights, KV pages in use and the prefix cache on the host, whatever
                the level; requests then continue without a prefill. Otherwise the KV cache is
                dropped and started requests are retracted.
            tags: "weights", "kv_cache" or both; None means both. Started requests keep the pages of
                a KV cache that stays awake.
            refuse_requests: Refuse new requests while the engine sleeps.

        Returns:
            Bytes of device memory freed.

        Raises:
            InvalidRequestError: for an unknown level or tag, a level of 2 that leaves the weights
                awake, or a flag that is not a bool.
            OffloadError: when copying to the host failed; nothing has changed.
        """
        check_level(level)
        checked = check_tags(tags)
        if level == 2 and "weights" not in checked:
            raise InvalidRequestError(
                f"level must be 1 with tags={tags!r}, got 2: it drops weights"
            )
        check_flags(preserve_state=preserve_state, refuse_requests=refuse_requests)
        return functools.partial(cmd.Sleep, level, preserve_state, checked, refuse_requests)

    @asks
    def wake_up(self, tags: Sequence[SleepTag] | None = None) -> Asks[int]:
        """Allocates the memory that `sleep` freed, and restores what was kept.

        Requests continue once nothing sleeps. Logs a warning if nothing named by the tags sleeps.

        Args:
            tags: "weights", "kv_cache" or both, to wake them one by one; None wakes all.

        Returns:
            Bytes of device memory allocated.

        Raises:
            InvalidRequestError: for an unknown tag.
            OffloadError: when waking failed, for example for lack of memory. The engine stays
                asleep and keeps its state, so the call can be repeated.
        """
        return functools.partial(cmd.WakeUp, check_tags(tags))

    def is_sleeping(self) -> bool:
        """Whether weights or KV cache sleep. Does not wait for the engine."""
        return self._group.is_sleeping

    async def async_is_sleeping(self) -> bool:
        """`is_sleeping` for asyncio."""
        return self._group.is_sleeping

    # ------------------------------------------------------------------ weights

    @asks
    def update_weights(
        self,
        source: Any,
        rules: Sequence[WeightRule] | None = None,
        *,
        mode: PauseMode = "retract",
        flush_cache: bool | None = None,
        donate: bool = False,
        verify: bool = False,
        check_finite: bool | None = None,
        version: int | None = None,
        reload: bool = False,
    ) -> Asks[int]:
        """Replaces all weights between two dispatches, while other callers generate.

        If the weights live on one device, the engine keeps decoding while the new weights are made.
        Updates run in the order of their calls. An update also runs during a pause, and does not
        end it. It wakes sleeping weights. The prefix cache never serves keys and values that other
        weights computed.

        Args:
            source: A pytree of arrays, or a list of (name, array) pairs, on any devices; the engine
                copies it and never aliases it. Or the path of a Hugging Face folder of the same
                model.
            rules: Map `source` onto the model. None expects Hugging Face's names and projections
                [out, in], see `hf_rules`. `logical_rules` expects the same names with projections
                [in, out]. Reuse a rules object to reuse the compiled transformation.
            mode: What happens to started requests; see `io_struct.PauseMode`. With "in_place" they
                keep the keys and values of the old weights, which no other request ever uses. With
                "retract" they are prefilled again under the new weights.
            flush_cache: True forbids reuse of the old weights' keys and values, so "in_place" is
                refused while requests run. None means False for "in_place" and True for the other
                modes.
            donate: Free each old weight before its replacement is made, which takes the memory of
                one model, not two. Generation stops during the update. A failure before the first
                weight is freed changes nothing. A later failure leaves no weights: all requests
                fail, and the engine refuses new ones until an update succeeds.
            verify: Compare checksums of the new weights and of the mapped source. Hooks must only
                move and cast, since repeated arithmetic may round differently.
            check_finite: Refuse new weights that hold NaN or infinity. None follows the engine
                option of that name, True by default. With `donate` this reads the source a second
                time, before the first old weight is freed.
            version: Serve as this version, which must be above the serving one: servers of one
                policy then give their tokens the same versions. None takes the next one.
            reload: The source holds the serving version's weights once more, after they were found
                damaged: then `version` may be the serving one too.

        Returns:
            The new weight version.

        Raises:
            InvalidRequestError: for a version that is not above the serving one.
            WeightSyncError: names every missing, extra or mis-shaped parameter, or those that are
                not finite. As after all other errors, the old weights keep serving.
            WeightsLostError: the one exception; see `donate`.
            WeightLoadError: for a folder that is missing, broken or of another model.
            EngineStateError: for mode "wait" in a pause that keeps requests from finishing, and
                where `flush_cache` forbids it.
        """
        check_mode(mode)
        checks_finite = self._checks_finite if check_finite is None else check_finite
        check_flags(donate=donate, verify=verify, check_finite=checks_finite)
        new_version = NewVersion(number=version, is_reload=reload)
        new_version.after(self.weight_version)  # before its source is read, and at the swap again
        flush = flushes(mode, flush_cache)
        load = sources.update_source(self._model, source, rules)
        update = self._group.weights.update
        return job(
            update,
            load,
            mode,
            flush,
            donate=donate,
            verify=verify,
            check_finite=checks_finite,
            version=new_version,
        )

    @asks
    def stage_weights(
        self,
        source: Any,
        rules: Sequence[WeightRule] | None = None,
        *,
        verify: bool = False,
        check_finite: bool | None = None,
    ) -> Asks[StagedWeights]:
        """Makes new weights beside the serving weights, which keep serving unchanged.

        This is the first half of an update: `publish_weights` is the second, and `discard_weights`
        cancels it. Staged weights take the device memory of one more model, also while the engine
        sleeps; several may be staged at once. All calls about weights run one by one, in order.

        Args:
            source: As in `update_weights`.
            rules: As in `update_weights`.
            verify: As in `update_weights`.
            check_finite: As in `update_weights`.

        Raises:
            WeightSyncError: names every missing, extra or mis-shaped parameter, or those that are
                not finite.
            WeightLoadError: for a folder that is missing, broken or of another model.
        """
        checks_finite = self._checks_finite if check_finite is None else check_finite
        check_flags(verify=verify, check_finite=checks_finite)
        load = sources.update_source(self._model, source, rules)
        return job(self._group.weights.stage, load, verify=verify, check_finite=checks_finite)

    @asks
    def publish_weights(
        self,
        staged: StagedWeights,
        *,
        mode: PauseMode = "retract",
        flush_cache: bool | None = None,
        version: int | None = None,
    ) -> Asks[int]:
        """Serves staged weights from the next dispatch on, atomically.

        Staged weights are complete, so it does not matter which weights served when they were made:
        they also replace those of a later update. Publishing wakes sleeping weights. A second call
        changes nothing and returns the same version, even if other weights serve by then.

        Args:
            staged: From `stage_weights` of this engine.
            mode: As in `update_weights`.
            flush_cache: As in `update_weights`.
            version: As in `update_weights`.

        Returns:
            The weight version of the published weights.

        Raises:
            InvalidRequestError: for weights that another engine staged; for a version that is not
                above the serving one, or not the one that the weights were published as.
            EngineStateError: for discarded weights; also as in `update_weights`, and then the
                weights stay staged.
        """
        check_staged(staged)
        check_mode(mode)
        flush, new_version = flushes(mode, flush_cache), NewVersion(number=version)
        return job(self._group.weights.publish, staged, mode, flush, new_version)

    def discard_weights(self, staged: StagedWeights) -> bool:
        """Frees staged weights; does not touch the serving weights.

        Returns:
            Whether there was something to free. Weights that were published or discarded, or freed
            by a shutdown, need no freeing.

        Raises:
            InvalidRequestError: for weights that another engine staged.
        """
        check_staged(staged)
        try:
            return self._calls.ask(job(self._group.weights.discard, staged))
        except EngineShutdownError:
            return False

    async def async_discard_weights(self, staged: StagedWeights) -> bool:
        """`discard_weights` for asyncio; cancelling the task does not undo it."""
        check_staged(staged)
        try:
            return await self._calls.async_ask(job(self._group.weights.discard, staged))
        except EngineShutdownError:
            return False

    @asks
    def load_adapter(
        self,
        name: str,
        source: Any,
        rules: Sequence[WeightRule] | None = None,
        *,
        mode: PauseMode = "retract",
        flush_cache: bool | None = None,
        version: int | None = None,
        reload: bool = False,
    ) -> Asks[int]:
        """Loads a LoRA adapter beside the weights, or replaces the adapter of the same name.

        Requests select it with `lora=`. Requests of other adapters and of the base model continue
        undisturbed in the same batches. An engine has room for `max_loras` adapters of rank
        `max_lora_rank`. Loading moves only the LoRA pairs, and compiles nothing new for pairs of
        the same shapes. It wakes sleeping weights.

        Args:
            name: Name of the adapter.
            source: The path of a PEFT folder; or a pytree that holds A and B of each `LoraRule`,
                and nothing else but what a rule ignores, which the engine copies.
            rules: Rules for a pytree: LoRA rules, and those that map the weights they change; reuse
                the objects.
            mode: What happens to started requests of this adapter; see `update_weights`.
            flush_cache: As in `update_weights`.
            version: As in `update_weights`.
            reload: As in `update_weights`.

        Returns:
            The new weight version.

        Raises:
            WeightSyncError: names each pair that is incomplete, does not fit, has too large a rank,
                or changes a projection without room for adapters, and each leaf of no pair, such as
                a magnitude of DoRA. The old adapter keeps serving.
            WeightLoadError: for a folder that is broken, or no plain LoRA.
            EngineStateError: when there is no free slot, or the engine has no weights.
            InvalidRequestError: for an invalid name, for a pytree without rules, and for a version
                that is not above the serving one.
        """
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(f"name must be a string of an adapter, got {name!r}")
        check_mode(mode)
        flush = flushes(mode, flush_cache)
        load = functools.partial(adapter_source, self._model, source, rules)
        load_adapter = self._group.weights.load_adapter
        new_version = NewVersion(number=version, is_reload=reload)
        new_version.after(self.weight_version)
        return job(
            load_adapter,
            name,
            load,
            mode,
            flush,
            check_finite=self._checks_finite,
            version=new_version,
        )

    def find_differing_adapter(
        self, name: str, source: Any, rules: Sequence[WeightRule] | None = None
    ) -> list[str]:
        """Names of projections whose adapter differs in bits from one made from a source.

        Args:
            name: Name of a loaded adapter.
            source: As in `load_adapter`.
            rules: As in `load_adapter`.

        Raises:
            WeightSyncError: as `load_adapter`.
            InvalidRequestError: for an adapter that is not loaded.
            EngineStateError: while the engine sleeps or has no weights.
        """
        load = functools.partial(adapter_source, self._model, source, rules)
        compare = job(self._group.weights.find_differing_adapter, name, load)
        return self._calls.ask(compare)

    @asks
    def unload_adapter(self, name: str) -> Asks[None]:
        """Frees an adapter's slot.

        Raises:
            InvalidRequestError: for an adapter that is not loaded.
            EngineStateError: while unfinished requests use it.
        """
        return functools.partial(cmd.UnloadAdapter, name)

    def get_weights_checksum(self) -> dict[str, str]:
        """Checksums of the bits of each serving weight in its logical shape: 16 hexadecimal digits.

        Equal weights have equal checksums, whatever the devices, sharding and physical layout.

        Raises:
            EngineStateError: while the engine sleeps or has no weights.
        """
        return self._calls.ask(cmd.ChecksumWeights)

    def find_differing_weights(
        self, source: Any, rules: Sequence[WeightRule] | None = None
    ) -> list[str]:
        """Names of serving weights whose bits differ from a source; empty if none do.

        Compares the checksum of each weight with that of the mapped source. Hooks of rules must
        only move and cast, since arithmetic may round differently in another program.

        Args:
            source: As in `update_weights`.
            rules: As in `update_weights`.

        Raises:
            WeightSyncError: when the source does not map onto the weights.
            WeightLoadError: for a folder that is missing, broken or of another model.
        """
        found = sources.update_source(self._model, source, rules)()
        return self._calls.ask(functools.partial(cmd.CompareWeights, found.arrays, found.rules))

    # ------------------------------------------------------------------ checkpoints

    @asks
    def save_checkpoint(self, path: str | Path) -> Asks[SaveReport]:
        """Writes all unfinished requests to a folder, for `restore_checkpoint`.

        Works also while the engine sleeps or is paused. Other callers continue: the engine takes a
        snapshot between two dispatches, and another thread writes it. Finished requests are saved
        until their whole `generate` call has finished. The folder holds one checkpoint, the last
        one saved, and is valid whenever the process dies.

        Args:
            path: A folder for this alone; created if missing.

        Raises:
            CheckpointError: it could not be written; the previous checkpoint is still there.
        """
        return functools.partial(SaveJob, Path(path).absolute())

    def restore_checkpoint(
        self, path: str | Path, *, missing_ok: bool = False
    ) -> dict[str, Future[RequestOutput]]:
        """Continues the requests of a checkpoint, queued behind those that the engine has.

        They are prefilled as retracted requests are. With the weights that served at the save,
        greedy and seeded outputs equal those of an uninterrupted engine. The exception is a request
        that kept keys of older weights after an update with mode="in_place": its keys are computed
        anew. With other weights, requests continue under those and a warning is logged; token
        versions stay ascending. A stream is answered as a whole.

        Args:
            path: The folder of the checkpoint.
            missing_ok: Log a warning, and raise no error, for a folder without a checkpoint.

        Returns:
            For each request id, the future of the whole output, with the tokens from before the
            save. If this engine refuses a request (it is too long, for example), its future holds
            the InvalidRequestError. Callbacks of the futures run on an engine's thread: they must
            not wait, and calls of the engine raise EngineStateError there.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, of another version or of another
                model, or has a request id that is in use. Nothing is restored then.
            EngineStateError: as for `generate`, when requests are refused.
        """
        folder = Path(path)
        if missing_ok and not CheckpointManager(folder).has_checkpoint():
            logger.warning("restore_checkpoint: there is no checkpoint in %s", folder)
            return {}
        checkpoint = load_checkpoint(folder, self._model)
        answers = {rid: Answer(HomeFuture()) for rid in checkpoint.scheduler_state.requests}
        self._calls.restore(checkpoint, self._requests, answers)
        return {rid: answer.future for rid, answer in answers.items()}

    async def async_restore_checkpoint(
        self, path: str | Path, *, missing_ok: bool = False
    ) -> dict[str, asyncio.Future[RequestOutput]]:
        """`restore_checkpoint` for asyncio; its futures belong to the running event loop."""
        restore = functools.partial(self.restore_checkpoint, path, missing_ok=missing_ok)
        futures = await asyncio.to_thread(restore)
        return {rid: asyncio.wrap_future(future) for rid, future in futures.items()}

    # ------------------------------------------------------------------ HTTP

    def serve(self, config: ServerConfig | None = None, **options: Any) -> Server:
        """Serves this engine over HTTP, on a thread of its own; needs the extra [server].

        The engine can be used in process at the same time. `shutdown` stops the server; until then,
        or until `Server.stop`, the server keeps the engine alive.

        Args:
            config: Address, keys and limits; see `sgljax_engine.server.ServerConfig`.
            **options: Instead of `config`: its fields, for example `port=30000`.

        Returns:
            The running server, with `url`, `port` and `stop`.

        Raises:
            InvalidConfigError: names the option, its value and its limit; also when the extra is
                not installed, or the address cannot be used.
        """
        self._group.home.check()
        if config is not None and options:
            raise InvalidConfigError(f"give config or options, not both; got {sorted(options)}")
        try:
            # Late, since the server uses this package's public names.
            module = importlib.import_module("sgljax_engine.server")
        except ImportError as error:
            raise InvalidConfigError(
                f"serve needs the extra [server], pip install '.[server]' in a checkout ({error})"
            ) from error
        server = module.Server(self, config or module.ServerConfig.from_options(options))
        self._servers.append(server)
        return server

    # ------------------------------------------------------------------ the end

    def shutdown(self) -> None:
        """Fails unfinished requests, ends the threads, frees device memory. Idempotent.

        It does not wait for a source of weights that is being read: that thread ends afterwards. A
        warm-up ends with the program that is being compiled.
        Servers of this engine stop first; their unfinished requests are aborted. In a forked child
        it does nothing: the engine is the parent's.
        """
        self._progress.end(SHUT_DOWN)
        while self._servers:
            self._servers.pop().stop(drain_timeout_s=0.0)
        self._group.stop()

    def __reduce__(self) -> NoReturn:
        """Refuses to be pickled, as an argument of a spawned process would be."""
        self._group.home.refuse_pickle()

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

    # ------------------------------------------------------------------ asyncio

    # Cancelling a task does not undo its call.
    async_get_internal_state = for_asyncio(get_internal_state)
    """`get_internal_state` for asyncio."""
    async_pause_generation = for_asyncio(pause_generation)
    """`pause_generation` for asyncio."""
    async_continue_generation = for_asyncio(continue_generation)
    """`continue_generation` for asyncio."""
    async_abort_request = for_asyncio(abort_request)
    """`abort_request` for asyncio."""
    async_flush_cache = for_asyncio(flush_cache)
    """`flush_cache` for asyncio."""
    async_sleep = for_asyncio(sleep)
    """`sleep` for asyncio."""
    async_wake_up = for_asyncio(wake_up)
    """`wake_up` for asyncio."""
    async_update_weights = for_asyncio(update_weights)
    """`update_weights` for asyncio.

    A cancelled update goes on, and keeps reading its source: do not change that until it is done.
    """
    async_stage_weights = for_asyncio(stage_weights)
    """`stage_weights` for asyncio; cancelling the task frees what it staged."""
    async_publish_weights = for_asyncio(publish_weights)
    """`publish_weights` for asyncio."""
    async_load_adapter = for_asyncio(load_adapter)
    """`load_adapter` for asyncio."""
    async_unload_adapter = for_asyncio(unload_adapter)
    """`unload_adapter` for asyncio."""
    async_save_checkpoint = for_asyncio(save_checkpoint)
    """`save_checkpoint` for asyncio."""

    # ------------------------------------------------------------------ requests

    def _warn_of_sleep(self) -> None:
        """Says once in a sleep that a call waits, which looks like a hang otherwise."""
        is_sleeping = self._group.is_sleeping
        if is_sleeping and not self._has_warned_of_sleep:
            logger.warning(
                "the engine sleeps: what is asked of it now waits for wake_up, or for new weights, "
                "from another thread"
            )
        self._has_warned_of_sleep = is_sleeping

    def _make_requests(
        self,
        prompt: Any,
        sampling_params: Any,
        input_ids: Any,
        logprobs: LogprobArgs,
        stream: bool,
        rid: Any = None,
        lora: Any = None,
        stands_alone: bool = False,
    ) -> tuple[list[Request], bool]:
        self._group.home.check()
        self._warn_of_sleep()
        is_default = sampling_params is None
        if is_default:
            sampling_params = self.get_default_sampling_params()
        return self._requests.make(
            prompt,
            sampling_params,
            input_ids,
            logprobs,
            rid,
            lora,
            is_streaming=stream,
            is_default=is_default,
            stands_alone=stands_alone,
        )


def _dicts(outputs: Sequence[RequestOutput], is_single: bool) -> Any:
    dicts = [output.to_dict() for output in outputs]
    return dicts[0] if is_single else dicts
