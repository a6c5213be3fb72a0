"""Producers of errors that come when an engine or a rollout is made."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tunix.rl.rl_cluster import Mode

from sgljax_engine import Engine, EngineConfig
from sgljax_engine.placement.submeshes import check_divides
from tests import tunix_reference as ref
from tests.adapter.grpo_parts import make_parts
from tests.adapter.helpers import EndingTokenizer, new_rollout, params_of, rollout_config
from tests.docs.error_cases import Parts, Producers, new_engine
from tests.engine.models import TINY, ForeignTensor, spread_weights
from tunix_sgljax import RLCluster, SglJaxRollout
from tunix_sgljax.cli.tunix_model import BaseTensors, TunixModel
from tunix_sgljax.model_config import to_model_config
from tunix_sgljax.training.lora import abstract_actor
from tunix_sgljax.training.models import ModelSpec
from tunix_sgljax.training.schema import LoraConfig

PRODUCERS = Producers()
produces = PRODUCERS.named


@produces("unknown_option")
def _(_: Parts):
    new_engine(max_running_request=64)


@produces("foreign_option")
def _(_: Parts):
    new_engine(max_num_seqs=64)


@produces("config_and_options")
def _(_: Parts):
    Engine(model_config=TINY, config=EngineConfig(), page_size=16)


@produces("not_a_folder")
def _(_: Parts):
    Engine("Qwen/Qwen3-0.6B")


@produces("model_config_type")
def _(_: Parts):
    contents: Any = {"vocab_size": 128}
    Engine(model_config=contents)


@produces("config_type")
def _(_: Parts):
    options: Any = {"page_size": 16}
    Engine(model_config=TINY, config=options)


@produces("weights_are_a_path")
def _(_: Parts):
    Engine(model_config=TINY, weights="path/to/checkpoint")


@produces("no_config_json")
def _(parts: Parts):
    folder = parts.folder("no_config")
    (folder / "config.json").unlink()
    Engine(folder)


@produces("architecture")
def _(parts: Parts):
    Engine(parts.folder("mixtral", architectures=["MixtralForCausalLM"]))


@produces("model_setting")
def _(parts: Parts):
    Engine(parts.folder("quantized", quantization_config={"quant_method": "awq"}))


@produces("rope_type")
def _(parts: Parts):
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    Engine(parts.folder("yarn", rope_parameters=rope))


@produces("context_length")
def _(_: Parts):
    new_engine(max_model_len=1024)


@produces("batch_buckets")
def _(_: Parts):
    new_engine(max_running_requests=64, batch_buckets=(1, 4))


@produces("token_buckets")
def _(_: Parts):
    new_engine(token_buckets=(100,))


@produces("dtype")
def _(_: Parts):
    new_engine(dtype="fp16")


@produces("num_kv_tokens")
def _(_: Parts):
    new_engine(num_kv_tokens=10**12)


@produces("mem_fraction")
def _(_: Parts):
    new_engine(num_kv_tokens=None, mem_fraction_static=1e-12)


@produces("pallas")
def _(_: Parts):
    new_engine(attention_backend="pallas")


@produces("native")
def _(_: Parts):
    mesh = Mesh(np.array(jax.devices()[:1] * 2), ("tp",))
    new_engine(linear_backend="native", mesh=mesh)


@produces("deterministic_backend")
def _(_: Parts):
    new_engine(enable_deterministic_sampling=True, attention_backend="xla")


@produces("mesh_heads")
def _(_: Parts):
    # The check reads the mesh's shape alone, so one device may stand there three times.
    devices = np.array(jax.devices()[:1] * 3)
    Engine(model_config=TINY, load_format="dummy", mesh=Mesh(devices, ("tp",)))


@produces("mesh_kv_heads")
def _(_: Parts):
    sizes = {"num_heads": 12, "num_kv_heads": 4, "intermediate_size": 96, "vocab_size": 96}
    model = dataclasses.replace(TINY, **sizes)
    devices = np.array(jax.devices()[:1] * 6)
    Engine(model_config=model, load_format="dummy", mesh=Mesh(devices, ("tp",)))


@produces("tokenizer_type")
def _(_: Parts):
    new_engine(tokenizer=SimpleNamespace(encode=list))


@produces("no_pad_token")
def _(parts: Parts):
    new_rollout(parts.model, tokenizer=EndingTokenizer(eos=None, pad=None))


@produces("meaningless_field")
def _(parts: Parts):
    config = rollout_config(rollout_vllm_server_mode=True)
    new_rollout(parts.model, rollout_config=config, strict_config=True)


@produces("decided_sampling")
def _(parts: Parts):
    config = rollout_config(rollout_vllm_sampling_kwargs={"temperature": 0.5})
    new_rollout(parts.model, rollout_config=config)


@produces("lora_parameters")
def _(parts: Parts):
    parts.rollout.update_params(
        nnx.merge_state(
            params_of(parts.model),
            nnx.State({"layers": {0: {"w_lora_a": nnx.LoRAParam(np.ones((64, 2), np.float32))}}}),
        )
    )


@produces("lora_scale")
def _(parts: Parts):
    actor = nnx.clone(parts.model)
    projection = actor.layers[0].attn.q_proj
    projection.w_lora_a = nnx.LoRAParam(np.ones((64, 2), np.float32))
    projection.w_lora_b = nnx.LoRAParam(np.ones((2, 4, 16), np.float32))
    new_rollout(actor)


@produces("convert_scale")
def _(_: Parts):
    TunixModel(
        folder=Path("checkpoints/actor/200/model_params"),
        model=TINY,
        base=BaseTensors(of_text={}, names={}, beside={}),
        tensors=None,
        pairs={"layers.0.attn.q_proj.w_lora_a": np.ones((64, 2), np.float32)},
        scale=None,
    ).hf_pairs(None)


@produces("lora_module_path")
def _(parts: Parts):
    spec = ModelSpec("qwen3", type(parts.model), parts.model.config)
    with ref.deprecations_ignored():  # of qwix
        abstract_actor(spec, LoraConfig(rank=8, alpha=16.0, module_path="q_proj"))


@produces("tensor_parallel_size")
def _(parts: Parts):
    new_rollout(parts.model, rollout_config=rollout_config(tensor_parallel_size=4))


@produces("data_parallel_size")
def _(parts: Parts):
    new_rollout(parts.model, rollout_config=rollout_config(data_parallel_size=2))


@produces("engine_options_fixed")
def _(parts: Parts):
    config = rollout_config(rollout_sglang_jax_chunked_prefill_size=512)
    SglJaxRollout(
        rollout_actor=parts.model, tokenizer=EndingTokenizer(eos=1), rollout_config=rollout_config()
    ).generate(["2 3"], config)


@produces("log_level")
def _(parts: Parts):
    new_rollout(parts.model, rollout_config=rollout_config(rollout_sglang_jax_log_level="loud"))


@produces("sampling_params_of_a_rollout")
def _(parts: Parts):
    new_rollout(parts.model, sampling_params={"temperature": 0.7})


@produces("logprobs_mode")
def _(parts: Parts):
    new_rollout(parts.model, logprobs_mode="processed")


@produces("incomparable_logprobs")
def _(parts: Parts):
    rollout = new_rollout(parts.model, logprobs_mode="processed_logprobs")
    rollout.check_comparable(rollout_config(temperature=1.0, top_p=0.9))


@produces("trainer_match_offload")
def _(parts: Parts):
    new_rollout(parts.model, logprobs_mode="trainer_match").update_params(nnx.State({}))


@produces("unknown_model")
def _(_: Parts):
    to_model_config(SimpleNamespace(num_layers=2), context_length=64)


@produces("experts_do_not_divide")
def _(parts: Parts):
    config = dataclasses.replace(
        parts.model.config, num_experts=6, num_experts_per_tok=2, hidden_dim=66
    )
    check_divides(to_model_config(config, context_length=64), 4)


@produces("rollout_worker")
def _(parts: Parts):
    worker: object = parts.rollout.engine
    RLCluster(actor=parts.model, tokenizer=None, cluster_config=None, rollout_worker=worker)  # type: ignore[arg-type]


@produces("weights_of_another_model")
def _(parts: Parts):
    parts.engine.update_weights(parts.folder("other_model"))


@produces("shards_missing")
def _(parts: Parts):
    folder = parts.folder("no_weights")
    (folder / "model.safetensors").unlink()
    Engine(folder)


@produces("two_sets_of_weights")
def _(parts: Parts):
    folder = parts.folder("two_sets")
    shard = "model-00001-of-00001.safetensors"
    shutil.copyfile(folder / "model.safetensors", folder / shard)
    index = {"weight_map": {"model.norm.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    Engine(folder)


@produces("truncated_weights")
def _(parts: Parts):
    folder = parts.folder("truncated")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    Engine(folder)


@produces("weights_do_not_fit")
def _(parts: Parts):
    weights = spread_weights()
    weights["model.norm.weight"] = np.ones(16, np.float32)
    del weights["lm_head.weight"]
    parts.engine.update_weights(weights)


@produces("other_orientation")
def _(parts: Parts):
    weights, name = spread_weights(), "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].T
    parts.engine.update_weights(weights)


@produces("not_finite")
def _(parts: Parts):
    weights = spread_weights()
    weights["model.norm.weight"][3] = np.nan
    parts.engine.update_weights(weights)


@produces("rules_type")
def _(parts: Parts):
    rules: Any = [("embed", "model.embed_tokens.weight")]
    parts.engine.update_weights(spread_weights(), rules)


@produces("foreign_array")
def _(parts: Parts):
    parts.engine.update_weights(spread_weights() | {"model.norm.weight": ForeignTensor()})


@produces("folder_without_config")
def _(parts: Parts):
    folder = parts.folder("no_config_to_update")
    (folder / "config.json").unlink()
    parts.engine.update_weights(folder)


@produces("weights_file")
def _(parts: Parts):
    parts.engine.update_weights(parts.folder("a_file") / "model.safetensors")


@produces("deleted_source")
def _(parts: Parts):
    weights = {name: jnp.asarray(array) for name, array in spread_weights().items()}
    weights["model.norm.weight"].delete()
    parts.engine.update_weights(weights)


@produces("explicit_axes")
def _(parts: Parts):
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=kinds, devices=jax.devices()[:1])
    new_rollout(parts.model, mesh=mesh)


@produces("evaluation_too_long")
def _(parts: Parts):
    training = rollout_config(rollout_sglang_jax_context_length=64)
    evaluation = rollout_config(max_tokens_to_generate=128)
    configs = {Mode.TRAIN: training, Mode.EVAL: evaluation}
    RLCluster(**make_parts(rollout_engine=SglJaxRollout, rollout_config=configs).arguments)
