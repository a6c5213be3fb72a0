from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig

from sgljax_engine import (
    Engine,
    EngineShutdownError,
    HomeProcess,
    InvalidConfigError,
    InvalidRequestError,
    RequestOutput,
    SamplingParams,
    WeightRule,
    flatten_named,
)
from tunix_sgljax import padding, sampling
from tunix_sgljax.exactness.lora_effect import LoraEffect
from tunix_sgljax.exactness.trainer_match import TrainerMatch
from tunix_sgljax.idle_policy import IdlePolicy
from tunix_sgljax.in_flight.outputs import OutputRecorder, PreparedOutputs, VersionedRolloutOutput
from tunix_sgljax.lora import LoraChoice, LoraReport, check_lora_mode, check_scaling, is_lora_name
from tunix_sgljax.observability.observers import RolloutObservers
from tunix_sgljax.observability.progress import Progress
from tunix_sgljax.policy_weights import PolicyWeights
from tunix_sgljax.rollout.building import EngineBuilder
from tunix_sgljax.rollout.following import TrainerFollower, is_in_learner
from tunix_sgljax.rollout.generating import (
    SamplingReader,
    scored_sequences,
    to_rollout_output,
)
from tunix_sgljax.rollout.noise import Noise
from tunix_sgljax.rollout.prompts import PromptEncoder
from tunix_sgljax.rollout.sampler import RolloutSampler
from tunix_sgljax.rollout.truncation import TruncationAdvice
from tunix_sgljax.rollout_config import engine_options
from tunix_sgljax.rollout_config.checks import FieldChecker, check_axis_types
from tunix_sgljax.rollout_config.memory import ConfigMemory
from tunix_sgljax.rollout_config.modes import (
    check_lengths,
    configs_by_mode,
    find_cluster,
    joins_calls,
    micro_batch_advice,
)

if TYPE_CHECKING:
    from sgljax_engine.fleet import FleetConfig
    from sgljax_engine.server import Server


logger = logging.getLogger(__name__)


class SglJaxRollout(BaseRollout):
    """A rollout worker that samples on an engine inside this process.

    The first call that needs the engine builds it, with the actor's weights at that time (a
    checkpoint may be restored into the actor after construction). From then on the engine holds its
    own copy, which `update_params` replaces. All methods are thread-safe, and prompts of concurrent
    `generate` calls are batched together.

    With `ClusterConfig(offload_to_cpu=True)` the engine sleeps, weights on the host, between the
    cluster's calls of `generate` and `get_per_token_logps`; see `update_params`. If the owner puts
    the engine to sleep through `engine`, the owner must wake it: `generate` waits for that.
    """

    def __init__(
        self,
        *,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: RolloutConfig | None = None,
        model_config: Any = None,
        sampling_params: Mapping[str, Any] | None = None,
        logprobs_mode: str | None = None,
        match_batch_size: int | None = None,
        weight_update_mode: sampling.WeightUpdateMode = "retract",
        release_kv_between_steps: bool = False,
        lora: LoraChoice = "auto",
        lora_scaling: float | None = None,
        strict_config: bool = False,
        progress: Progress | None = None,
        fleet: FleetConfig | None = None,
        **engine_options: Any,
    ) -> None:
        """Checks the configuration; takes no device memory yet.

        Args:
            rollout_actor: The policy being trained (a Tunix NNX model).
            tokenizer: A Tunix TokenizerAdapter or anything it wraps.
            mesh: Devices to run on; None, or an empty mesh, takes the process's first device. If it
                spans processes, each samples its own prompts on the devices that it can address.
                Then the first use of the engine and each `update_params` are collectives; see
                `sgljax_engine.localize`.
            rollout_config: The training RolloutConfig.
            model_config: The model's shape, if the actor's `.config` does not give it.
            sampling_params: Sampling fields that RolloutConfig does not have, for every call, such
                as `{"min_p": 0.05, "stop": ["</answer>"]}`.
            logprobs_mode: What `return_logprobs` returns. "trainer_logprobs" are those that Tunix's
                trainer computes, under softmax(logits / temperature), with the engine's rounding;
                the default unless the config sets `rollout_vllm_logprobs_mode`. "trainer_match" are
                computed again by Tunix's own function on the trainer's own arrays, in the trainer's
                shapes; the arrays stay referenced. "processed_logprobs" also follow filters,
                penalties and biases; "raw_logprobs" ignore even the temperature.
            match_batch_size: Rows that "trainer_match" scores together; for equal bits this must be
                the trainer's batch size. None takes all rows of a call.
            weight_update_mode: What `update_params` does to completions that are being sampled.
                "retract" keeps their tokens, recomputes their KV under the new weights and
                continues; "in_place" continues with the KV of the old weights; "wait" lets started
                completions finish first; "abort" ends them with their tokens so far.
            release_kv_between_steps: Free the KV cache's memory, prefix cache included, after the
                last of the concurrent calls of `generate` and `get_per_token_logps`, until the next
                call. Consecutive calls (micro-batches, few concurrent episodes) free and allocate
                it each time. Nothing is freed while other users of the same engine have running
                requests.
            lora: How to apply the pairs of a LoRA actor. "merged" adds them to the frozen base at
                each sync, so that sampling costs the same as without LoRA. "adapter" keeps them
                apart: a sync moves only the pairs, and the base (for the reference's log-probs, for
                example) and other adapters can serve too; decoding takes a little longer. "auto" is
                "adapter" where the engine's weights are coarser than float32, in which merging
                rounds small updates away, and "merged" otherwise; also, with a warning, where the
                pairs cannot be kept apart. Ignored for an actor without LoRA parameters.
            lora_scaling: alpha / rank of all pairs. None takes
                `RolloutConfig.rollout_sglang_jax_lora_scaling`, else each pair's value from the
                actor's qwix provider.
            strict_config: Refuse fields of a RolloutConfig that have no meaning here, such as
                another engine's; otherwise one warning names all such fields that are not at their
                defaults.
            progress: Draws progress bars of loading, warm-up and rollouts. None writes a line to
                stderr for what takes long: each program that is compiled, slow rollouts.
                `Progress(False)` writes nothing.
            fleet: Samples on the servers of a fleet instead; see `SglJaxFleetRollout`.
            **engine_options: Flat `EngineConfig` options; they override `rollout_config`.

        Raises:
            InvalidConfigError: for an unknown option, a wrong value or fields that contradict the
                mesh; for a mesh whose tensor axis spans processes; with `strict_config` also for a
                RolloutConfig field without a meaning here.
            UnsupportedModelError: for a model that the engine does not implement.
        """
        self._home = HomeProcess("rollout")
        self._prompts = PromptEncoder(tokenizer)
        # Tunix passes an empty mesh when it runs without one.
        self._mesh = None if mesh is None or mesh.empty else check_axis_types(mesh)
        extra_params = sampling.check_extra_params(sampling_params or {})
        self._sampling = SamplingReader(extra_params, self.eos_id())
        self._noise = Noise(self._sampling)
        self._given_logprobs_mode = sampling.check_logprobs_mode(logprobs_mode)
        self._match: TrainerMatch | None = None
        match_batch_size = sampling.check_match_batch_size(match_batch_size, logprobs_mode)
        if logprobs_mode == "trainer_match":
            self._match = TrainerMatch(
                pad_id=self.pad_id(), eos_id=self.eos_id(), batch_size=match_batch_size
            )
            self._match.refuse_processes(rollout_actor)
        self._builder = EngineBuilder(
            rollout_actor,
            mesh=self._mesh,
            model_config=model_config,
            lora_mode=check_lora_mode(lora),
            lora_scaling=check_scaling("lora_scaling", lora_scaling),
            explicit_options=engine_options,
            fleet=fleet,
        )
        sampling.check_weight_update_mode(weight_update_mode)
        self._weight_update_mode: sampling.WeightUpdateMode = weight_update_mode
        is_strict = sampling.check_flag("strict_config", strict_config)
        self._field_checker = FieldChecker(is_strict=is_strict)
        self._checked: ConfigMemory[None] = ConfigMemory()
        self._batch_advice: str | None = None
        self._advice = TruncationAdvice()
        self._idle_policy = IdlePolicy(
            releases_kv=sampling.check_flag("release_kv_between_steps", release_kv_between_steps)
        )
        self._recorder = OutputRecorder()
        self._prepared = PreparedOutputs()
        self._follower = TrainerFollower()
        self._observers = RolloutObservers(progress)
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._is_closed = False
        self._temperature: float | None = None
        self._joins_calls = False
        if rollout_config is not None:
            self.bind(rollout_config)
            return
        self._bind(RolloutConfig(), {})
        self._temperature = None  # of the first call, until a training config is bound

    def bind(self, rollout_config: RolloutConfig) -> None:
        """Sets the cluster's training RolloutConfig.

        `RLCluster(rollout_worker=...)` calls it, since such a worker is created without one. Inside
        the construction of a cluster, the configs of its other modes are checked too, and the
        longest one sizes the engine.

        Raises:
            InvalidConfigError: for a field that the rollout refuses, or that asks for a different
                engine than the one already built; for a config that is longer than the context.
        """
        cluster = find_cluster()
        self._noise.follow(cluster)
        self._observers.expect_trainer(cluster is not None)
        self._follower.bind(cluster)
        self._batch_advice = micro_batch_advice(cluster)
        self._joins_calls = joins_calls(cluster)
        self._advice.is_due = cluster is not None
        self._bind(rollout_config, configs_by_mode(cluster, rollout_config))

    def _bind(self, rollout_config: RolloutConfig, configs: Mapping[str, RolloutConfig]) -> None:
        self._field_checker.check(rollout_config)
        asked_mode = engine_options.asked_logprobs_mode(rollout_config)
        self._logprobs_mode = self._given_logprobs_mode or asked_mode or "trainer_logprobs"
        self._rollout_config = rollout_config
        self._sampling.bind(rollout_config)
        self._checked.clear()
        self._temperature = rollout_config.temperature
        if self._engine is not None:
            self._check_same_engine(rollout_config)
        else:
            sampling.apply_log_level(rollout_config)
            self._builder.plan(rollout_config, configs)
            if self._match is not None:
                self._match.refuse_quantization(self._builder.engine_config.runtime)
        self._check_modes(configs)

    # ------------------------------------------------------------------ facts

    @property
    def engine(self) -> Engine:
        """The engine; builds it if no call has needed it yet."""
        self._home.check()  # before the lock, which a thread may have held at the fork
        with self._lock:
            if self._engine is None:
                if self._is_closed:
                    raise EngineShutdownError("the rollout was closed")
                if self._match is not None:
                    assert self._builder.actor is not None
                    self._match.start(self._builder.actor)
                self._engine = self._builder.build(
                    self._prompts.tokenizer, self._observers.progress
                )
                # From now on weights come through update_params; do not keep the actor alive.
                self._builder.actor = None
                self._follower.note_served()
                self._observers.built(self._engine)
            return self._engine

    @property
    def observers(self) -> RolloutObservers:
        """Observers of this rollout's calls, for metrics and timelines."""
        return self._observers

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The rollout mesh, as given; None for an empty one."""
        return self._mesh

    @property
    def rollout_config(self) -> RolloutConfig:
        """The training config, as given or bound; Tunix's defaults if there is none."""
        return self._rollout_config

    @property
    def dtype(self) -> str:
        """Dtype of the engine's weights, activations and KV cache; builds the engine.

        The default is the dtype in which Tunix computes the actor; see `engine_dtype`. Of the KV
        cache, `kv_dtype` if that differs.
        """
        self.engine  # noqa: B018
        return self._builder.dtype

    @property
    def kv_dtype(self) -> str:
        """Dtype of keys and values in the engine's pages; builds the engine."""
        return self.engine.get_internal_state().memory.kv_dtype

    @property
    def logprobs_mode(self) -> str:
        """Which log-probs `return_logprobs` returns."""
        return self._logprobs_mode

    def sampling_params_of(self, rollout_config: RolloutConfig) -> SamplingParams:
        """What a call with this config samples with, without a seed."""
        return self._sampling.params(rollout_config)

    def report_sampling_masks(self) -> None:
        """Makes `generate` return the tokens that each token was drawn from, from now on.

        They are `sampling_masks` of its outputs. Filters keep at most 512 tokens then.
        """
        self._sampling.report_masks()
        self._advice.is_due = False

    def check_comparable(self, rollout_config: RolloutConfig) -> None:
        """Refuses a config under which `generate` returns log-probs that no trainer computes.

        Raises:
            InvalidConfigError: names the mode and the setting that makes them differ.
        """
        sampling.check_comparable(self._logprobs_mode, self._sampling.params(rollout_config))

    @property
    def lora_report(self) -> LoraReport | None:
        """The actor's LoRA pairs and the holder of its base; None without LoRA parameters."""
        return self._policy.lora_report()

    @property
    def adapter(self) -> str | None:
        """Name of the policy's adapter with lora="adapter"; else None."""
        return self._policy.adapter

    @property
    def weight_version(self) -> int:
        """Version of the serving weights: 0 at first, incremented by every `update_params`."""
        return 0 if self._engine is None else self._engine.weight_version

    @property
    def weight_update_mode(self) -> sampling.WeightUpdateMode:
        """What `update_params` does to completions that are being sampled."""
        return self._weight_update_mode

    def pad_id(self) -> int:
        """The tokenizer's padding id."""
        return self._prompts.tokenizer.pad_id()

    def eos_id(self) -> int:
        """The tokenizer's end-of-sequence id."""
        return self._prompts.tokenizer.eos_id()

    def model(self) -> None:
        """None: the engine has its own weights, so Tunix syncs them after every step."""

    # ------------------------------------------------------------------ sampling

    def generate(
        self, prompts: list[str] | str, rollout_config: RolloutConfig, **kwargs: Any
    ) -> VersionedRolloutOutput:
        """Samples one completion for each prompt.

        Args:
            prompts: Texts; a bare string is one prompt. Repeated prompts get separate samples. As
                in Tunix's samplers, each prompt gets the tokenizer's BOS in front, if there is one
                (an id above 0) and the tokens do not begin with it. `Engine.generate` leaves that
                to a Hugging Face tokenizer, which may add none.
            rollout_config: Sampling settings, and the padding of prompts. With `seed` set, a run is
                reproducible: draws depend on the seed, the number of earlier calls with it, and the
                row, so no two calls repeat the same noise.
            **kwargs: No further arguments are supported.

        Returns:
            Tokens, with a sampled end token unless it is the pad id; log-probs of these tokens (see
            `logprobs_mode`) if `return_logprobs` is set, else None; the weight version that sampled
            each token. Log-probs are under the weights that sampled the token.

        Raises:
            InvalidRequestError: names the field, its value and its limit.
            InvalidConfigError: for a config field that the rollout refuses.
        """
        self._home.check()
        if kwargs:
            raise InvalidRequestError(f"SglJaxRollout.generate takes no option {sorted(kwargs)}")
        self._checked.get(rollout_config, lambda: self._check_call(rollout_config))
        self._builder.check_same_mapping(rollout_config)
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if self._batch_advice is not None and not isinstance(prompts, str):  # agents give a text
            logger.warning("%s", self._batch_advice)
            self._batch_advice = None
        prepared = self._prepared.take(len(texts))
        if prepared is not None:
            self._recorder.add(prepared)
            return prepared
        if not texts:
            raise InvalidRequestError("prompts is empty; it needs at least one prompt")
        is_joined = self._joins_calls and len(texts) > 1
        if is_in_learner():
            self.follow_trainer()
        params = self._row_params(rollout_config, len(texts))
        if self._temperature is None:
            self._temperature = rollout_config.temperature
        engine = self.engine
        watched = self._observers.generating(engine, len(texts))
        with watched, self._holding_policies(engine):
            with self._idle_policy.call(engine):
                with self._observers.span("tokenize", requests=len(texts)):
                    prompt_ids = [
                        self._encode(text, rollout_config, f"prompts[{row}]", is_joined=is_joined)
                        for row, text in enumerate(texts)
                    ]
                outputs = engine.generate_requests(prompt_ids, params, lora=self.adapter)
            output = self.to_output(prompt_ids, outputs, rollout_config)
            if self._match is not None and rollout_config.return_logprobs:
                output.logprobs = self._matched_logprobs(self._match, output, rollout_config)
        self._advice.look(params[0], outputs)
        self._recorder.add(output)
        return output

    @property
    def _sampler(self) -> RolloutSampler:
        """What Tunix's own scripts read, by this name, to evaluate the policy."""
        return RolloutSampler(self.generate, lambda: self._rollout_config)

    def to_output(
        self, prompt_ids: list[list[int]], outputs: list[RequestOutput], config: RolloutConfig
    ) -> VersionedRolloutOutput:
        """The engine's answers as `generate` returns them, under a config of that call."""
        return to_rollout_output(
            prompt_ids,
            outputs,
            config=config,
            end_ids=self._sampling.params(config).stop_token_ids,
            pad_id=self.pad_id(),
            logprobs_mode=self._logprobs_mode,
        )

    def prepared_outputs(
        self, output: VersionedRolloutOutput
    ) -> contextlib.AbstractContextManager[None]:
        """Makes this thread's `generate` calls inside the block return rows of an output, in order.

        For callers of `RLCluster.generate` who have sampled before.
        """
        return self._prepared.giving(output)

    def _holding_policies(self, engine: Engine) -> contextlib.AbstractContextManager[None]:
        """Wraps a call that may need the trainer's arrays of every version from now on."""
        if self._match is None:
            return contextlib.nullcontext()
        return self._match.call(engine.weight_version)

    def _matched_logprobs(
        self, match: TrainerMatch, output: VersionedRolloutOutput, config: RolloutConfig
    ) -> list[np.ndarray]:
        assert output.left_padded_prompt_tokens is not None
        return match.sampled_logps(
            np.asarray(output.left_padded_prompt_tokens),
            output.tokens,
            output.weight_versions,
            width=config.max_tokens_to_generate,
            temperature=config.temperature,
        )

    @contextlib.contextmanager
    def recorded_outputs(self) -> Iterator[list[VersionedRolloutOutput]]:
        """Collects the results of this thread's `generate` calls inside the block.

        For callers of `RLCluster.generate`, which passes on only Tunix's own fields.
        """
        with self._recorder.recording() as outputs:
            yield outputs

    def _row_params(self, config: RolloutConfig, count: int) -> list[SamplingParams]:
        engine = self.engine
        self._noise.go_on(engine)
        shows_special_tokens = engine.can_show_special_tokens
        return self._sampling.row_params(config, count, shows_special_tokens=shows_special_tokens)

    def get_ref_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """`get_per_token_logps` of the frozen base: the reference policy of a LoRA run.

        It needs no second model; this package's `RLCluster` uses it if there is no reference model.

        Raises:
            InvalidConfigError: unless lora="adapter", with which the engine holds the base
                separately.
        """
        if self.adapter is None:
            raise InvalidConfigError(
                "log-probs of the base need a LoRA actor and lora='adapter'; the engine's weights "
                "are the policy's"
            )
        return self._score(prompt_tokens, completion_tokens, None)

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Log-probs of given completions under the engine's own weights.

        The logits are divided by the training temperature, as in Tunix's loss, unless it is 0. With
        "trainer_match" Tunix's function scores these very arrays on the trainer's weights. Padding
        is everything before a prompt's first and after a completion's last token that is not the
        pad id. Pad ids in between are scored and seen like other tokens.

        Raises:
            InvalidRequestError: for a prompt of padding alone.

        Shape:
            prompt_tokens: [B, P] int32, left-padded; completion_tokens: [B, C] int32,
            right-padded; returns [B, C] float32, 0 at padding.
        """
        self._home.check()
        if self._match is None:
            return self._score(prompt_tokens, completion_tokens, self.adapter)
        scored_sequences(
            prompt_tokens, completion_tokens, self.pad_id()
        )  # refuses inputs that cannot be scored
        prompts_BP, completions_BC = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        watched = self._observers.span("get_per_token_logps", rows=len(prompts_BP))
        with watched, self._holding_policies(self.engine):
            temperature = self._temperature or 1.0
            return jnp.asarray(
                self._match.given_logps(prompts_BP, completions_BC, temperature=temperature)
            )

    def _score(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array, adapter: str | None
    ) -> jax.Array:
        sequences, start_lens, mask_BC = scored_sequences(
            prompt_tokens, completion_tokens, self.pad_id()
        )
        engine = self.engine
        watched = self._observers.span("get_per_token_logps", rows=len(sequences))
        with watched, self._idle_policy.call(engine):
            logps = engine.score(
                sequences,
                temperature=self._temperature or 1.0,
                start_lens=start_lens,
                lora=adapter,
            )
        return jnp.asarray(padding.spread(logps, mask_BC))

    # ------------------------------------------------------------------ for an event loop

    def encode(self, prompt: Any, config: RolloutConfig, *, name: str = "prompt") -> list[int]:
        """Token ids of a prompt, as `generate` makes them, for a call with a config.

        Pad ids in front are left out, as Tunix's masks hide them. A text and a conversation get
        BOS, as in Tunix's samplers.

        Args:
            prompt: A text, token ids, a message or a conversation (a list of messages).
            config: Whose maximum of new tokens must fit behind it.
            name: What errors call it.

        Raises:
            InvalidRequestError: names the prompt, its length and the limit; also for a
                conversation without a chat template.
        """
        return self._encode(prompt, config, name)

    def _encode(
        self, prompt: Any, config: RolloutConfig, name: str, *, is_joined: bool = False
    ) -> list[int]:
        built = self._builder
        return self._prompts.encode(
            prompt,
            config,
            name=name,
            max_model_len=built.engine_config.max_model_len or built.model_config.context_length,
            render=lambda messages: self.engine.apply_chat_template(messages),
            is_joined=is_joined,
        )

    def request_params(self, config: RolloutConfig) -> SamplingParams:
        """Sampling parameters of one prompt; a `seed` gives the next draw of that seed."""
        return self._row_params(config, 1)[0]

    async def async_generate_ids(
        self,
        prompt_ids: list[list[int]],
        params: list[SamplingParams],
        *,
        rid: list[str] | None = None,
        on_piece: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Samples prompts given as token ids; cancelling the task aborts them.

        `rid` and `on_piece` are those of `Engine.async_generate_requests`.
        """
        engine = self.engine
        with self._observers.generating(engine, len(prompt_ids)), self._idle_policy.call(engine):
            return await engine.async_generate_requests(
                prompt_ids, params, lora=self.adapter, rid=rid, on_piece=on_piece
            )

    @property
    def weight_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Names, shapes and dtypes that Tunix passes to `update_params`; builds the engine.

        All of the actor's parameters, or only the LoRA leaves if it has any.
        """
        self.engine  # noqa: B018
        return dict(self._builder.weight_specs)

    def weight_source(self, params: Any) -> tuple[dict[str, Any], tuple[WeightRule, ...]]:
        """Parameters by name and the rules that map them, as `Engine` takes them.

        If there are only LoRA leaves, the actor's frozen base completes them.

        Raises:
            WeightSyncError: for LoRA parameters of another actor.
        """
        return self._policy.source(params)

    def accept_source(self, params: Any) -> None:
        """Records that an engine serves the result of `weight_source` for these parameters.

        Their base completes LoRA leaves that come alone later.
        """
        self._policy.accept(params)

    # ------------------------------------------------------------------ weights

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Replaces the engine's weights with the trainer's, all or none.

        `weight_update_mode` decides what happens to completions that other threads are sampling.

        An empty state is Tunix's signal that it offloads models: Tunix passes one before and after
        each of its calls of `generate` and `get_per_token_logps`. From the first one on, the engine
        sleeps after a signal with no such call active, until the next call. An update while it
        sleeps replaces the sleeping weights.

        Args:
            params: The actor's `nnx.State` (or any pytree with its names), or an empty one.
            filter_types: The variable types in `params`. Ignored: names distinguish LoRA leaves,
                which may come alone, from weights.

        Raises:
            InvalidConfigError: for an empty state with "trainer_match", whose references would keep
                the device memory that Tunix wants to free.
            WeightSyncError: names each missing, extra or mis-shaped parameter; the old weights
                keep serving.
            OffloadError: when the engine could not be put to sleep; it serves the right weights.
        """
        self._home.check()
        if not jax.tree.leaves(params):
            if self._match is not None:
                self._match.refuse_offload()
            self._idle_policy.offload(self._engine)
            return
        with self._observers.updating():
            self._update(params)

    def _update(self, params: Any) -> None:
        if self._policy.has_lora:
            self.engine  # noqa: B018  built from the actor, which holds the frozen base
            # With offloading, Tunix passes only the base when it moves the reference model.
            if self._idle_policy.is_offloading and not any(
                map(is_lora_name, flatten_named(params))
            ):
                return
        engine, mode = self.engine, self._weight_update_mode
        if self._match is None:
            self._policy.update(engine, params, mode)
        else:
            with self._match.update(params) as versions:
                versions.append(self._policy.update(engine, params, mode))
        self._follower.note_served()
        self._idle_policy.updated(engine)

    def follow_trainer(self) -> None:
        """Updates the weights if the cluster's trainer has made a step since they were its own.

        `generate` calls it where Tunix's GRPO and PPO learners sample, which sync once a global
        step: with `mini_batch_size` below the batch their optimizer steps more often. Not while the
        trainer works.
        """
        self.engine  # noqa: B018  if it is built only now, it has the newest
        newer = self._follower.newer_params()
        if newer is not None:
            self.update_params(*newer)

    def find_differing_weights(self, params: Any) -> list[str]:
        """Names of engine weights whose bits differ from the mapped trainer weights; see `Engine`.

        Args:
            params: The actor's `nnx.State`, as `update_params` takes it.

        Raises:
            WeightSyncError: names each missing, extra or mis-shaped parameter.
        """
        return self._policy.differing(self.engine, params)

    def lora_effect(self, params: Any) -> LoraEffect | None:
        """How much of a LoRA actor's pairs is left in the weights that `generate` samples with.

        None without pairs, as long as they change nothing, and for a quantised engine that merges.

        Args:
            params: All of the actor's parameters.
        """
        self.engine  # noqa: B018  only now it is certain how the pairs are applied
        is_quantized = self._builder.engine_config.runtime.quantization is not None
        if is_quantized and self.adapter is None:
            return None
        return self._policy.lora_effect(params, self._builder.dtype)

    def serve(self, **options: Any) -> Server:
        """Serves the policy over HTTP while it is trained; see `Engine.serve`.

        Requests get the weights of the last `update_params`, which never waits for them: their
        tokens say which version sampled them. With `lora="adapter"` they use the policy's
        adapter unless they name another. `close` stops the server.

        Args:
            **options: Fields of `sgljax_engine.server.ServerConfig`, for example `port=30000`.

        Raises:
            InvalidConfigError: as `Engine.serve`.
        """
        engine = self.engine
        return engine.serve(**{"lora": self.adapter, **options})

    def close(self) -> None:
        """Shuts the engine down and frees its memory. Idempotent; nothing in a forked child."""
        if not self._home.is_here:
            return
        with self._lock:
            self._is_closed = True
            engine, self._builder.actor = self._engine, None
        if engine is not None:
            engine.shutdown()
        if self._match is not None:
            self._match.release()

    # ------------------------------------------------------------------ checks

    @property
    def _policy(self) -> PolicyWeights:
        return self._builder.weights

    def _check_call(self, config: RolloutConfig) -> None:
        self._field_checker.check(config)
        self._check_same_engine(config)

    def _check_same_engine(self, config: RolloutConfig) -> None:
        self._builder.check_same(config)
        asked_mode = engine_options.asked_logprobs_mode(config)
        if self._given_logprobs_mode is None and asked_mode not in (None, self._logprobs_mode):
            raise InvalidConfigError(
                f"RolloutConfig asks for logprobs_mode={asked_mode!r}, but the rollout was made "
                f"with {self._logprobs_mode!r}; it cannot change after construction"
            )
        self._builder.check_same_mapping(config)

    def _check_modes(self, configs: Mapping[str, RolloutConfig]) -> None:
        """Refuses now what the first call with each config would, hours into a run."""
        built = self._builder
        check_lengths(
            configs, built.engine_config.max_model_len or built.model_config.context_length
        )
        for mode, config in configs.items():
            try:
                self._check_call(config)
                self._sampling.params(config)
                sampling.seed_to_int(config.seed)
            except (InvalidConfigError, InvalidRequestError) as error:
                if config is self._rollout_config:
                    raise
                raise InvalidConfigError(f"the RolloutConfig of {mode}: {error}") from error
