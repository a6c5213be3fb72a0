"""A fleet of servers behind the calls that a trainer makes of an engine in its own process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from sgljax_engine.builder.sources import pick_dtype
from sgljax_engine.config import EngineConfig
from sgljax_engine.errors import EngineStateError, InvalidConfigError, InvalidRequestError
from sgljax_engine.fleet.client import FleetClient, problems
from sgljax_engine.fleet.config import ADAPTER, FleetConfig, FleetError
from sgljax_engine.fleet.loop_thread import LoopThread
from sgljax_engine.fleet.publishing import WeightsPublisher
from sgljax_engine.fleet.sampling import FleetSampler
from sgljax_engine.fleet.states import FleetCounts, FleetState
from sgljax_engine.fleet.writer import WrittenVersion
from sgljax_engine.io_struct import PauseMode
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.models.hf_export import to_hf_tensors, to_peft_tensors
from sgljax_engine.observability.metrics import EngineState
from sgljax_engine.observability.progress import EngineProgress, ProgressListener, reporting
from sgljax_engine.outputs import RequestOutput
from sgljax_engine.processing.any_tokenizer import take_tokenizer
from sgljax_engine.processing.conversation import conversation_ids
from sgljax_engine.processing.input_processor import Limits, LogprobArgs, RequestFactory
from sgljax_engine.processing.tokenizer import can_show_special_tokens
from sgljax_engine.sampling_params import SamplingParams, SeedSource
from sgljax_engine.types import Request
from sgljax_engine.weights.rules import WeightRule

_T = TypeVar("_T")

_POLL_S = 0.5
_CONTROL_TIMEOUT_S = 60.0


class RemoteEngine:
    """Samples on the servers of a fleet and gives them the trainer's weights.

    It has the methods of `Engine` that a Tunix rollout calls, with the same arguments and results:
    requests are checked and get their seeds here, so that they are sampled as in process. It takes
    no device memory; an update takes host memory for two copies of the weights. Any thread.
    """

    def __init__(
        self,
        fleet: FleetConfig,
        *,
        model_config: ModelConfig,
        weights: Any,
        weight_rules: Sequence[WeightRule],
        tokenizer: Any,
        config: EngineConfig,
        adapters: Mapping[str, tuple[Any, Sequence[WeightRule]]] | None = None,
        progress: ProgressListener | None = None,
    ) -> None:
        """Waits for the fleet's workers, and gives them the first weights.

        Args:
            fleet: Where the workers and the weight store are.
            model_config: The model's shape; the workers must serve the same.
            weights: Arrays of the trainer to start with.
            weight_rules: Map `weights` onto the model, as in `Engine`.
            tokenizer: As in `Engine`; texts are made with it, not with the workers'.
            config: `max_model_len`, dtype, seed and adapters; the workers have options of their
                own for all else.
            adapters: At most one adapter to start with, as in `Engine`.
            progress: Called with the progress of waiting for workers.

        Raises:
            FleetError: when too few workers came within `sync_timeout_s`, or serve the weights.
            InvalidConfigError: when a worker's context is shorter than `max_model_len`.
            WeightSyncError: when the weights do not cover or fit the model.
        """
        self._model = model_config
        self._dtype = np.dtype(pick_dtype(config, None))
        self._max_rank = config.lora.max_lora_rank
        self._tokenizer = take_tokenizer(tokenizer)
        max_len = config.max_model_len or model_config.context_length
        self._requests = RequestFactory(
            model_config,
            Limits(max_len, max_len),
            self._tokenizer,
            SeedSource(config.runtime.random_seed),
        )
        self._fleet = fleet
        self._counts = FleetCounts()
        self._loop = LoopThread("sgljax-fleet")
        self._client = FleetClient(fleet)
        self._state = FleetState(self._client)
        self._sampler = FleetSampler(
            self._client,
            self._counts,
            self._tokenizer,
            model_config.moe,
            lambda: self.weight_version,
        )
        try:
            self._publisher = WeightsPublisher(fleet, self._client, self._loop)
            self._await_workers(max_len, progress)
            self._base = self._tensors(weights, weight_rules)
            if adapters:
                ((name, (pairs, rules)),) = adapters.items()
                self.load_adapter(name, pairs, rules)
            else:
                self._publisher.publish(self._base, None, "retract")
        except BaseException:
            self.shutdown()
            raise

    def _await_workers(self, max_len: int, progress: ProgressListener | None) -> None:
        needed = self._fleet.min_workers
        with reporting(progress, "find workers", needed, "worker") as advance:
            found = self._loop.run(self._find_workers(needed, advance))
        for url, info in found.items():
            context = info["max_model_len"]
            if context < max_len:
                raise InvalidConfigError(
                    f"max_model_len={max_len} is more than the {context} tokens of {url}"
                )

    async def _find_workers(
        self, needed: int, advance: Callable[[int], None]
    ) -> dict[str, Mapping[str, Any]]:
        """Model infos of the workers, once enough of them answer."""
        ends_s, num_found = time.monotonic() + self._fleet.sync_timeout_s, 0
        while True:
            urls = await self._client.worker_urls()
            replies = await self._client.tell(urls, "/v1/models", None, _CONTROL_TIMEOUT_S)
            found = {r.url: r.content["data"][0] for r in replies if r.problem is None}
            advance(max(0, min(len(found), needed) - num_found))
            num_found = max(num_found, min(len(found), needed))
            if len(found) >= needed:
                return found
            if time.monotonic() > ends_s:
                raise FleetError(
                    f"{len(found)} of min_workers={needed} workers answered within "
                    f"sync_timeout_s={self._fleet.sync_timeout_s}: "
                    f"{problems(replies) or 'none is known'}"
                )
            await asyncio.sleep(_POLL_S)

    # ------------------------------------------------------------------ facts

    @property
    def model_config(self) -> ModelConfig:
        """The model's shape."""
        return self._model

    @property
    def weight_version(self) -> int:
        """Newest version of the weights that the fleet was given; all new requests have it."""
        return self._publisher.version

    @property
    def last_written(self) -> WrittenVersion | None:
        """Sizes of what the last update wrote into the store."""
        return self._publisher.written

    @property
    def returns_routed_experts(self) -> bool:
        """False: the workers' replies leave them out."""
        return False

    @property
    def num_seeds_drawn(self) -> int:
        """As `Engine.num_seeds_drawn`."""
        return self._requests.seeds.num_drawn

    def skip_seeds_to(self, num_drawn: int) -> None:
        """As `Engine.skip_seeds_to`."""
        self._requests.seeds.skip_to(num_drawn)

    @property
    def can_show_special_tokens(self) -> bool:
        """Whether the tokenizer supports `skip_special_tokens=False`."""
        return can_show_special_tokens(self._tokenizer)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """As `Engine.apply_chat_template`, with the trainer's tokenizer."""
        return conversation_ids(
            self._tokenizer,
            messages,
            add_generation_prompt=True,
            continue_final_message=False,
            template_options={},
            max_tokens=None,
        )

    def get_internal_state(self) -> EngineState:
        """The states of all workers that answer, as one; see `Engine.get_internal_state`.

        Raises:
            FleetError: when none answers.
        """
        return self._loop.run(self._state.read())

    def get_progress(self) -> EngineProgress:
        """Requests and tokens of this trainer; does not ask the workers."""
        return self._counts.progress(self.weight_version)

    def start_recording(self, max_events: int = 0) -> None:
        """Refuses: what a worker's threads do is seen on its own page."""
        raise EngineStateError(
            "a timeline needs an engine in this process; each worker of a fleet draws its own at /"
        )

    # ------------------------------------------------------------------ generation

    def generate_requests(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        lora: str | None = None,
    ) -> list[RequestOutput]:
        """As `Engine.generate_requests`.

        Raises:
            InvalidRequestError: names the field, its value and its limit.
            NonFiniteLogitsError: when several workers had NaN or infinity.
            FleetError: when no worker answered for `outage_timeout_s`.
        """
        requests = self._make(input_ids, sampling_params, lora, None)
        return self._loop.run(self._sampler.generate(requests, has_rids=False))

    async def async_generate_requests(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        lora: str | None = None,
        *,
        rid: Sequence[str] | None = None,
        on_piece: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """As `Engine.async_generate_requests`; outputs come whole, so `on_piece` is not called."""
        del on_piece
        requests = self._make(input_ids, sampling_params, lora, rid)
        return await self._await(self._sampler.generate(requests, has_rids=rid is not None))

    def _make(
        self,
        input_ids: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        lora: str | None,
        rid: Sequence[str] | None,
    ) -> list[Request]:
        made, _ = self._requests.make(
            None, params, input_ids, LogprobArgs(), rid, lora, is_streaming=False
        )
        return made

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float = 1.0,
        start_lens: Sequence[int] | None = None,
        lora: str | None = None,
    ) -> list[np.ndarray]:
        """As `Engine.score`."""
        checked, starts = self._requests.check_scored(sequences, temperature, start_lens)
        return self._loop.run(self._sampler.score(checked, starts, float(temperature), lora))

    # ------------------------------------------------------------------ weights

    def update_weights(
        self,
        source: Any,
        rules: Sequence[WeightRule],
        *,
        mode: PauseMode = "retract",
    ) -> int:
        """Has the workers serve the trainer's weights; returns their version.

        Args:
            source: Arrays by the trainer's names, as for `Engine.update_weights`.
            rules: Map them onto the model.
            mode: What happens to started requests; see `io_struct.PauseMode`.

        Raises:
            WeightSyncError: names every missing, extra or mis-shaped parameter.
            FleetError: when too few workers serve them; the others go on with the old ones.
        """
        self._base = self._tensors(source, rules)
        return self._publisher.publish(self._base, None, mode)

    def _tensors(self, source: Any, rules: Sequence[WeightRule]) -> dict[str, np.ndarray]:
        """The weights in Hugging Face's names and form, in the dtype that the workers serve."""
        with jax.transfer_guard("allow"):  # Tunix forbids transfers around a sync
            tensors = to_hf_tensors(self._model, jax.device_get(dict(source)), rules)
            return {
                name: np.ascontiguousarray(tensor.load().astype(self._dtype, copy=False))
                for name, tensor in tensors.items()
            }

    def _pairs(
        self, source: Any, rules: Sequence[WeightRule]
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """An adapter's tensors in PEFT's names, and its config."""
        with jax.transfer_guard("allow"):
            pairs = jax.device_get(dict(source))
            return to_peft_tensors(self._model, pairs, rules, self._max_rank)

    def load_adapter(
        self, name: str, source: Any, rules: Sequence[WeightRule], *, mode: PauseMode = "retract"
    ) -> int:
        """Has the workers serve an adapter beside the base; returns the version with it.

        The version holds both, so that a worker that knows neither gets them. What is written is
        the adapter's pairs, but for each `base_every`th version.

        Raises as `update_weights`.
        """
        if name != ADAPTER:
            raise InvalidRequestError(f"a fleet's adapter is {ADAPTER!r}, got {name!r}")
        tensors, config = self._pairs(source, rules)
        return self._publisher.publish(self._base | tensors, config, mode)

    def find_differing_weights(self, source: Any, rules: Sequence[WeightRule]) -> list[str]:
        """Names of tensors in the store's newest version whose bits differ from mapped ones."""
        return self._publisher.differing(self._tensors(source, rules))

    def find_differing_adapter(
        self, name: str, source: Any, rules: Sequence[WeightRule]
    ) -> list[str]:
        """Names of an adapter's tensors whose bits differ from mapped ones."""
        if name != ADAPTER:
            raise InvalidRequestError(f"a fleet's adapter is {ADAPTER!r}, got {name!r}")
        tensors, _ = self._pairs(source, rules)
        return self._publisher.differing(tensors)

    # ------------------------------------------------------------------ control

    def pause_generation(self, mode: PauseMode = "retract") -> None:
        """Pauses all workers that answer; see `Engine.pause_generation`."""
        self._loop.run(self._tell_all("/pause_generation", {"mode": mode}))

    async def async_pause_generation(self, mode: PauseMode = "retract") -> None:
        """`pause_generation` for asyncio."""
        await self._await(self._tell_all("/pause_generation", {"mode": mode}))

    def continue_generation(self) -> None:
        """Continues generation of all workers."""
        self._loop.run(self._tell_all("/continue_generation", {}))

    async def async_continue_generation(self) -> None:
        """`continue_generation` for asyncio."""
        await self._await(self._tell_all("/continue_generation", {}))

    def flush_cache(self) -> None:
        """Empties the prefix caches of all workers; see `Engine.flush_cache`."""
        self._loop.run(self._tell_all("/flush_cache", {}))

    async def async_abort_request(self, rid: str | None = None, abort_all: bool = False) -> int:
        """As `Engine.async_abort_request`, of requests that were given an id."""
        body = {"rid": rid, "abort_all": abort_all}
        replies = await self._await(self._tell_all("/abort_request", body))
        return sum(reply["num_aborted"] for reply in replies)

    def sleep(self) -> None:
        """Does nothing: a fleet takes no memory of the trainer's devices."""

    def wake_up(self) -> None:
        """Does nothing; see `sleep`."""

    def release_kv_cache(self) -> None:
        """Does nothing; see `sleep`."""

    def shutdown(self) -> None:
        """Cancels what is under way and disconnects; the workers serve on. Idempotent."""
        self._loop.close(self._client.close())

    async def _tell_all(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """Calls a route of all workers; FleetError if none could do it."""
        replies = await self._client.tell_all(path, body, _CONTROL_TIMEOUT_S)
        return [reply.content for reply in replies]

    async def _await(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return await asyncio.wrap_future(self._loop.start(coroutine))
