"""The errors of docs/troubleshooting.md and plain_messages.txt, one row each.

A row has a name, the call that makes the error, and its class. Calls are of the functions that
check, where these can be reached without an engine: only what comes from a running engine asks
`Parts` for one, and only what comes from one that has ended makes its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tunix.models.qwen3.model import ModelConfig as Qwen3Config
from tunix.models.qwen3.model import Qwen3

from sgljax_engine import (
    CheckpointError,
    CompileForbiddenError,
    Engine,
    EngineConfig,
    EngineError,
    EngineShutdownError,
    EngineStateError,
    EngineStepError,
    InvalidConfigError,
    InvalidRequestError,
    NonFiniteLogitsError,
    OffloadError,
    SamplingParams,
    StructuredOutputError,
    UnsupportedModelError,
    WeightLoadError,
    WeightsLostError,
    WeightSyncError,
    find_weight_files,
    hf_rules,
    load_model_config,
    model_config_from_hf,
    preview_engine,
)
from sgljax_engine.builder.group import build_shapes
from sgljax_engine.builder.sources import check_sources, folder_weights, same_model_weights
from sgljax_engine.checkpoint.manager import REQUESTS_NAME, CheckpointManager
from sgljax_engine.core.commands.checkpoint import load_checkpoint
from sgljax_engine.io_struct import PauseGenerationReqInput
from sgljax_engine.models.registry import get_model
from sgljax_engine.placement.submeshes import check_divides, place
from sgljax_engine.processing.any_tokenizer import wrap_tokenizer
from sgljax_engine.processing.conversation import conversation_ids
from sgljax_engine.processing.input_processor import Limits, LogprobArgs, RequestFactory
from sgljax_engine.sampling_params import SeedSource
from sgljax_engine.weights.apply import apply
from sgljax_engine.weights.plan import WeightPlanner
from sgljax_engine.weights.rules import check_rules
from tests import inside
from tests import tunix_reference as ref
from tests.adapter.helpers import MODEL, EndingTokenizer, new_rollout, rollout_config
from tests.engine.checkpoint_cases import make_checkpoint
from tests.engine.models import TINY, TINY_MOE, ForeignTensor, spread_weights
from tests.engine.small_tokenizers import GOLDEN, CharTokenizer
from tests.geometry import SMALL
from tunix_sgljax import RLCluster, sampling
from tunix_sgljax.checkpoints.lora_settings import LoraSettings
from tunix_sgljax.cli.tunix_model import BaseTensors, TunixModel
from tunix_sgljax.exactness.trainer_match import TrainerMatch
from tunix_sgljax.lora import find_lora
from tunix_sgljax.mappings import WeightMapper
from tunix_sgljax.model_config import to_model_config
from tunix_sgljax.rollout.prompts import PromptEncoder
from tunix_sgljax.rollout_config.checks import FieldChecker, check_fields
from tunix_sgljax.rollout_config.engine_options import (
    ask_options,
    check_same_engine,
    make_engine_config,
)
from tunix_sgljax.rollout_config.modes import check_lengths
from tunix_sgljax.training.lora import abstract_actor
from tunix_sgljax.training.models import ModelSpec

FOLDER = GOLDEN / "qwen3_gqa_tied"
QWEN3 = Qwen3Config(**ref.CONFIGS[MODEL])
REQUESTS = RequestFactory(TINY, Limits(max_model_len=256, max_kv_tokens=160), None, SeedSource(0))
ASK: list[Any] = [{"role": "user", "content": "Count to ten."}]


def run_out_of_tokens(_: Any) -> None:
    """The grammar goes on with a token that may not be generated."""
    with Engine(FOLDER, **SMALL) as engine:
        allowed = engine.tokenize("a", add_special_tokens=False)
        params = {"structured_outputs": {"regex": "aab"}, "allowed_token_ids": allowed}
        engine.generate("x", params)


class Parts:
    """A folder for files, and an engine, made on first use, which every row leaves as it was."""

    def __init__(self, tmp_path: Path, stack: contextlib.ExitStack) -> None:
        self.tmp_path = tmp_path
        self._stack = stack
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """Serves TINY, without a tokenizer; warm, and compiles no more."""
        if self._engine is None:
            made = Engine(model_config=TINY, weights=spread_weights(), forbid_compile=True, **SMALL)
            self._engine = self._stack.enter_context(made)
            made.warmup()
        return self._engine

    def empty(self) -> Path:
        """A new folder with nothing in it."""
        count = sum(1 for _ in self.tmp_path.iterdir())
        (self.tmp_path / str(count)).mkdir()
        return self.tmp_path / str(count)


# ------------------------------------------------------------------ checks without an engine


def options(**given: Any) -> None:
    EngineConfig.from_options(given)


def plan(model: Any = TINY, devices: int = 1, **given: Any) -> None:
    """Runs an engine's checks without arrays or programs.

    They read only a mesh's shape, so one device may be repeated.
    """
    mesh = Mesh(np.array(jax.devices()[:1] * devices), ("tp",))
    build_shapes(model, EngineConfig.from_options(given), "float32", mesh)


def hf(**changes: Any) -> None:
    """Reads a config.json with other settings."""
    model_config_from_hf(json.loads((FOLDER / "config.json").read_text()) | changes)


def sources(path: Any = None, model: Any = None, weights: Any = None) -> None:
    check_sources(path, model, weights, None, "auto")


def weight_files(folder: Path, *, is_cut: bool = False, has_index: bool = False) -> Path:
    """Puts weights into a folder, once more with an index, or half of them."""
    shutil.copyfile(FOLDER / "model.safetensors", folder / "model.safetensors")
    if is_cut:
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    if has_index:
        shard = "model-00001-of-00001.safetensors"
        shutil.copyfile(FOLDER / "model.safetensors", folder / shard)
        index = {"weight_map": {"model.norm.weight": shard}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def request(
    prompt: Any = None, ids: Any = None, logprobs: LogprobArgs | None = None, **params: Any
) -> None:
    REQUESTS.make(prompt, params, ids, logprobs or LogprobArgs(), is_streaming=False)


def update(change: Callable[[dict[str, Any]], Any]) -> None:
    """Makes new weights of a source in which something is wrong."""
    weights: dict[str, Any] = spread_weights()
    change(weights)
    apply(*planner().plan(weights, hf_rules(TINY)))


def planner() -> WeightPlanner:
    specs = get_model(TINY.architecture).param_specs(TINY)
    return WeightPlanner(place(TINY, None, "float32").whole.weight_targets(specs))


def lose_weights() -> None:
    """A hook that gives other values each time, as one that reads something outside might."""
    calls = itertools.count()
    rules = [
        rule._replace(hook=lambda w: w + next(calls)) if "norm" in rule.source else rule
        for rule in hf_rules(TINY)
    ]
    planned, arrays = planner().plan(spread_weights(), rules)
    old: Any = {name: jnp.zeros(1) for name in planned.targets}
    apply(planned, arrays, [old], verify=True)


def forget_head(weights: dict[str, Any]) -> None:
    weights["model.norm.weight"] = np.ones(16, np.float32)
    del weights["lm_head.weight"]


def delete_norm(weights: dict[str, Any]) -> None:
    weights["model.norm.weight"] = jnp.asarray(weights["model.norm.weight"])
    weights["model.norm.weight"].delete()


def fields(**given: Any) -> None:
    check_fields(rollout_config(**given))


def devices(**given: Any) -> None:
    """What a rollout does with sizes of a config before it makes an engine."""
    config = make_engine_config(ask_options(rollout_config(**given)), {}, 64)
    preview_engine(TINY, config=config)


def explicit_axes() -> None:
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    device = jax.devices()[:1]
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=kinds, devices=device)
    new_rollout(actor(), mesh=mesh)


@ref.deprecations_ignored()
def actor() -> Any:
    """A Tunix model of shapes alone."""
    return nnx.eval_shape(lambda: Qwen3(QWEN3, rngs=nnx.Rngs(0)))


def lora_without_scale() -> None:
    model = actor()
    projection = model.layers[0].attn.q_proj
    projection.w_lora_a = nnx.LoRAParam(np.ones((64, 2), np.float32))
    projection.w_lora_b = nnx.LoRAParam(np.ones((2, 4, 16), np.float32))
    find_lora(model, None)


def lora_of_another_actor() -> None:
    pair = nnx.LoRAParam(np.ones((64, 2), np.float32))
    WeightMapper(None, TINY).named_source(nnx.State({"layers": {0: {"w_lora_a": pair}}}))


def pairs_without_scale() -> None:
    TunixModel(
        folder=Path("checkpoints/actor/200/model_params"),
        model=TINY,
        base=BaseTensors(of_text={}, names={}, beside={}),
        tensors=None,
        pairs={"layers.0.attn.q_proj.w_lora_a": np.ones((64, 2), np.float32)},
        scale=None,
    ).hf_pairs(None)


@ref.deprecations_ignored()  # of qwix
def lora_path() -> None:
    section = LoraSettings(rank=8, alpha=16.0, module_path="q_proj")
    abstract_actor(ModelSpec("qwen3", Qwen3, QWEN3), section)


def closed_rollout() -> None:
    rollout = new_rollout(actor())
    rollout.close()
    rollout.generate(["2 3"], rollout_config())


def experts() -> None:
    assert TINY_MOE.moe is not None
    moe = dataclasses.replace(TINY_MOE.moe, num_experts=6, intermediate_size=66)
    check_divides(dataclasses.replace(TINY_MOE, moe=moe), 4)


def restore(folder: Path, model: Any = TINY, **forged: Any) -> None:
    """Reads a checkpoint of no requests, with other values in `requests.json`."""
    metadata = {"model": dataclasses.asdict(TINY), "weight_version": 0}
    CheckpointManager(folder).save(make_checkpoint([], metadata=metadata))
    if forged:
        requests = json.loads((folder / REQUESTS_NAME).read_text())
        (folder / REQUESTS_NAME).write_text(json.dumps(requests | forged))
    load_checkpoint(folder, model)


# ------------------------------------------------------------------ a running engine


@contextlib.contextmanager
def held_request(engine: Engine, rid: str | None = None) -> Iterator[Engine]:
    """A request that has started and holds its pages while generation is paused in place."""
    params = {"max_new_tokens": 120}
    stream = engine.generate(input_ids=[1, 2, 3], sampling_params=params, stream=True, rid=rid)
    try:
        next(stream)
        engine.pause_generation("in_place")
        yield engine
    finally:
        stream.close()
        engine.continue_generation()


def while_held(call: Callable[[Engine], Any]) -> Callable[[Parts], None]:
    def make(parts: Parts) -> None:
        with held_request(parts.engine, "sample-7") as engine:
            call(engine)

    return make


def asleep(parts: Parts) -> None:
    parts.engine.sleep()
    try:
        parts.engine.score([[1, 2, 3]])
    finally:
        parts.engine.wake_up()


def without_weights(call: Callable[[Engine], Any], give_up: Callable[[Engine], Any]) -> Any:
    def make(parts: Parts) -> None:
        give_up(parts.engine)
        try:
            call(parts.engine)
        finally:
            parts.engine.update_weights(spread_weights())

    return make


def delete_one(engine: Engine) -> None:
    """What a device that lost an array does: the program cannot run."""
    next(iter(inside.runner(engine).weights.values())).delete()


def overflow(engine: Engine) -> None:
    """Gives the engine finite weights that no activation is finite with."""
    weights = spread_weights()
    for name in ("gate_proj", "up_proj"):
        weights[f"model.layers.0.mlp.{name}.weight"] *= 1e20
    engine.update_weights(weights)


def sleep_deeply(engine: Engine) -> None:
    engine.sleep(level=2)
    engine.wake_up()


def ended(_: Parts) -> None:
    engine = Engine(model_config=TINY, load_format="dummy", **SMALL)
    engine.shutdown()
    engine.generate(input_ids=[1])


# ------------------------------------------------------------------ the table


class Row(NamedTuple):
    """A name, the call that makes the error, and its class."""

    name: str
    make: Callable[[Parts], Any]
    error: type[EngineError]


ONE: Any = {"input_ids": [1]}
EVAL = {"EVAL": rollout_config(max_tokens_to_generate=128)}
CONFIG: Any = EngineConfig()
DICT: Any = {"page_size": 16}  # no engine
NONE: Any = None
PAIR: Any = ("embed", "model.embed_tokens.weight")
STOP: Any = "stop"
FIXED = rollout_config(rollout_sglang_jax_chunked_prefill_size=512)
MANY_HEADS = dataclasses.replace(TINY, num_heads=12, num_kv_heads=4, intermediate_size=96,
                                 vocab_size=96)  # fmt: skip

TABLE = [Row(*row) for row in (
    # ---- an engine's options
    ("unknown_option", lambda _: options(max_running_request=64), InvalidConfigError),
    ("foreign_option", lambda _: options(max_num_seqs=64), InvalidConfigError),
    ("config_and_options",
     lambda _: Engine(model_config=TINY, config=CONFIG, page_size=16),  # no engine
     InvalidConfigError),
    ("config_type", lambda _: Engine(model_config=TINY, config=DICT), InvalidConfigError),
    ("not_a_folder", lambda _: sources("Qwen/Qwen3-0.6B"), InvalidConfigError),
    ("model_config_type", lambda _: sources(model={"vocab_size": 128}), InvalidConfigError),
    ("weights_are_a_path", lambda _: sources(model=TINY, weights="path/to/checkpoint"),
     InvalidConfigError),
    ("batch_buckets", lambda _: options(max_running_requests=64, batch_buckets=(1, 4)),
     InvalidConfigError),
    ("token_buckets", lambda _: options(token_buckets=(100,)), InvalidConfigError),
    ("dtype", lambda _: options(dtype="fp16"), InvalidConfigError),
    ("deterministic_backend",
     lambda _: options(enable_deterministic_sampling=True, attention_backend="xla"),
     InvalidConfigError),
    ("deterministic_devices",
     lambda _: plan(devices=2, enable_deterministic_sampling=True),
     InvalidConfigError),
    ("context_length", lambda _: plan(max_model_len=1024), InvalidConfigError),
    ("num_kv_tokens", lambda _: plan(num_kv_tokens=10**12), InvalidConfigError),
    ("mem_fraction", lambda _: plan(mem_fraction_static=1e-12), InvalidConfigError),
    ("pallas", lambda _: plan(attention_backend="pallas"), InvalidConfigError),
    ("native", lambda _: plan(devices=2, linear_backend="native"), InvalidConfigError),
    ("mesh_heads", lambda _: plan(devices=3), InvalidConfigError),
    ("mesh_kv_heads", lambda _: plan(MANY_HEADS, devices=6), InvalidConfigError),
    ("experts_do_not_divide", lambda _: experts(), InvalidConfigError),
    ("tokenizer_type", lambda _: wrap_tokenizer(SimpleNamespace(encode=list)), InvalidConfigError),
    # ---- a model's folder
    ("no_config_json", lambda p: load_model_config(p.empty()), InvalidConfigError),
    ("architecture", lambda _: hf(architectures=["Phi3ForCausalLM"]), UnsupportedModelError),
    ("model_setting", lambda _: hf(quantization_config={"quant_method": "awq"}),
     UnsupportedModelError),
    ("rope_type", lambda _: hf(
        rope_parameters={"rope_type": "su", "rope_theta": 1e6, "factor": 4.0}),
     UnsupportedModelError),
    ("shards_missing", lambda p: folder_weights(TINY, p.empty()), WeightLoadError),
    ("two_sets_of_weights", lambda p: find_weight_files(weight_files(p.empty(), has_index=True)),
     WeightLoadError),
    ("truncated_weights", lambda p: folder_weights(TINY, weight_files(p.empty(), is_cut=True)),
     WeightLoadError),
    # ---- a rollout
    ("no_pad_token", lambda _: PromptEncoder(EndingTokenizer(eos=None, pad=None)),
     InvalidConfigError),
    ("meaningless_field",
     lambda _: FieldChecker(is_strict=True).check(rollout_config(rollout_vllm_server_mode=True)),
     InvalidConfigError),
    ("decided_sampling", lambda _: fields(rollout_vllm_sampling_kwargs={"temperature": 0.5}),
     InvalidConfigError),
    ("lora_parameters", lambda _: lora_of_another_actor(), WeightSyncError),
    ("lora_scale", lambda _: lora_without_scale(), InvalidConfigError),
    ("convert_scale", lambda _: pairs_without_scale(), InvalidConfigError),
    ("lora_module_path", lambda _: lora_path(), InvalidConfigError),
    ("tensor_parallel_size", lambda _: devices(tensor_parallel_size=4), InvalidConfigError),
    ("data_parallel_size", lambda _: devices(data_parallel_size=2), InvalidConfigError),
    ("engine_options_fixed", lambda _: check_same_engine(ask_options(FIXED), CONFIG, {}),
     InvalidConfigError),
    ("log_level",
     lambda _: sampling.apply_log_level(rollout_config(rollout_sglang_jax_log_level="loud")),
     InvalidConfigError),
    ("sampling_params_of_a_rollout", lambda _: sampling.check_extra_params({"temperature": 0.7}),
     InvalidConfigError),
    ("logprobs_mode", lambda _: sampling.check_logprobs_mode("processed"), InvalidConfigError),
    ("incomparable_logprobs",
     lambda _: sampling.check_comparable("processed_logprobs", SamplingParams(top_p=0.9)),
     InvalidConfigError),
    ("trainer_match_offload",
     lambda _: TrainerMatch(pad_id=0, eos_id=1, batch_size=None).refuse_offload(),
     InvalidConfigError),
    ("unknown_model", lambda _: to_model_config(SimpleNamespace(num_layers=2), context_length=64),
     UnsupportedModelError),
    ("rollout_worker", lambda _: RLCluster(
        actor=NONE, tokenizer=NONE, cluster_config=NONE, rollout_worker=CONFIG),
     InvalidConfigError),
    ("explicit_axes", lambda _: explicit_axes(), InvalidConfigError),
    ("evaluation_too_long", lambda _: check_lengths(EVAL, 64), InvalidConfigError),
    ("rollout_closed", lambda _: closed_rollout(), EngineShutdownError),
    # ---- requests
    ("unknown_sampling_field", lambda _: SamplingParams.from_dict({"temprature": 0.5}),
     InvalidRequestError),
    ("renamed_sampling_field", lambda _: SamplingParams.from_dict({"max_tokens": 64}),
     InvalidRequestError),
    ("refused_sampling_field", lambda _: SamplingParams.from_dict({"stop_regex": "[0-9]+"}),
     InvalidRequestError),
    ("out_of_range", lambda _: SamplingParams.from_dict({"top_p": 0}), InvalidRequestError),
    ("prompt_too_long", lambda _: request(ids=[1] * 300), InvalidRequestError),
    ("request_too_long", lambda _: request(ids=[1] * 200, max_new_tokens=128), InvalidRequestError),
    ("pool_too_small", lambda _: request(ids=[1] * 100, max_new_tokens=100), InvalidRequestError),
    ("no_tokenizer", lambda _: request("The capital of France is"), InvalidRequestError),
    ("ids_as_prompt", lambda _: request([5, 6]), InvalidRequestError),
    ("messages_as_prompt", lambda _: request(ASK), InvalidRequestError),
    ("text_as_ids", lambda _: request(ids="The capital of France is"), InvalidRequestError),
    ("one_sequence_to_score", lambda _: REQUESTS.check_scored([1, 2, 3], 1.0, None),
     InvalidRequestError),
    ("empty_prompt", lambda _: request(ids=[]), InvalidRequestError),
    ("token_out_of_vocabulary", lambda _: request(ids=[5, 128]), InvalidRequestError),
    ("stop_needs_tokenizer", lambda _: request(ids=[1], stop=["</answer>"]), InvalidRequestError),
    ("no_chat_template", lambda _: conversation_ids(wrap_tokenizer(CharTokenizer()), ASK),
     InvalidRequestError),
    ("logprobs_not_asked_for", lambda _: request(ids=[1], logprobs=LogprobArgs(top_logprobs_num=5)),
     InvalidRequestError),
    ("pause_mode", lambda _: PauseGenerationReqInput(mode=STOP), InvalidRequestError),
    ("rid_in_use", while_held(lambda e: e.generate(rid="sample-7", **ONE)), InvalidRequestError),
    ("not_warm", lambda p: p.engine.generate(**ONE, sampling_params={"repetition_penalty": 1.1}),
     CompileForbiddenError),
    ("failed_step", without_weights(lambda e: e.generate(**ONE), delete_one), EngineStepError),
    ("nonfinite_logits", without_weights(lambda e: e.generate(**ONE), overflow),
     NonFiniteLogitsError),
    ("no_token_allowed", run_out_of_tokens, StructuredOutputError),
    ("shut_down", ended, EngineShutdownError),
    # ---- pauses and sleep
    ("kv_in_use", while_held(lambda e: e.release_kv_cache()), EngineStateError),
    ("in_place_flush",
     while_held(lambda e: e.update_weights(spread_weights(), mode="in_place", flush_cache=True)),
     EngineStateError),
    ("wait_in_pause", while_held(lambda e: e.update_weights(spread_weights(), mode="wait")),
     EngineStateError),
    ("asleep", asleep, EngineStateError),
    ("no_weights", without_weights(lambda e: e.generate(**ONE), sleep_deeply), EngineStateError),
    ("failed_offload", without_weights(lambda e: e.sleep(), delete_one), OffloadError),
    # ---- weights
    ("weights_of_another_model", lambda _: same_model_weights(TINY, FOLDER, None), WeightLoadError),
    ("folder_without_config", lambda p: same_model_weights(TINY, p.empty(), None), WeightLoadError),
    ("weights_file", lambda _: same_model_weights(TINY, FOLDER / "model.safetensors", None),
     WeightLoadError),
    ("weights_do_not_fit", lambda _: update(forget_head), WeightSyncError),
    ("not_finite", lambda _: update(lambda w: w["model.norm.weight"].fill(np.nan)),
     WeightSyncError),
    ("rules_type", lambda _: check_rules([PAIR]), WeightSyncError),
    ("foreign_array", lambda _: update(lambda w: w.update({"model.norm.weight": ForeignTensor()})),
     WeightSyncError),
    ("deleted_source", lambda _: update(delete_norm), WeightSyncError),
    ("weights_lost", lambda _: lose_weights(), WeightsLostError),
    # ---- checkpoints of requests
    ("no_checkpoint", lambda p: load_checkpoint(p.tmp_path / "none.ckpt", TINY), CheckpointError),
    ("folder_without_checkpoint", lambda p: load_checkpoint(p.empty(), TINY), CheckpointError),
    ("damaged_checkpoint", lambda p: restore(p.empty(), timestamp=1.0), CheckpointError),
    ("newer_checkpoint", lambda p: restore(p.empty(), version=3), CheckpointError),
    ("checkpoint_of_another_model",
     lambda p: restore(p.empty(), dataclasses.replace(TINY, rms_norm_eps=1e-5)), CheckpointError),
)]  # fmt: skip
"""All of them, by what they are about."""
