"""Weight sync through safetensors files, and what later releases of Tunix call."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from tunix.generate.tokenizer_adapter import TokenizerAdapter

from sgljax_engine import InvalidRequestError, WeightLoadError, flatten_named
from tests import lora_models
from tests import tunix_reference as ref
from tests.adapter.agentic_parts import LineParser
from tests.adapter.helpers import params_of
from tests.experimental.parts import (
    TEXTS,
    greedy_tokens,
    new_sampler,
    request,
    run,
    sync,
    sync_request,
    tokens_of,
)
from tunix_sgljax.experimental import SglJaxRolloutWorker, WeightFolder, WeightFolderSource


async def greedy(sampler):
    return tokens_of(await sampler.sample([request(text) for text in TEXTS]))


def with_sources(units, version=0, key=1):
    wanted = sync_request(None, version, key)
    return dataclasses.replace(wanted, source_metadata=units)


@pytest.mark.parametrize("as_dict", [False, True])
def test_a_round_through_a_folder(model, other_model, tmp_path, as_dict):
    """As a coordinator drives it; dicts are what some transports make of metadata."""
    source = WeightFolderSource(tmp_path / "weights", lambda: params_of(other_model))
    folder = WeightFolder()

    async def scenario(sampler):
        assert await greedy(sampler) == greedy_tokens(model)
        (theirs,) = await source.prepare_weight_sync()
        (ours,) = await sampler.get_weight_sync_metadata()
        assert theirs.variables == ours.variables
        for unit in (theirs, ours):
            folder.register_work_unit(unit)
        assert folder.transfer([theirs.unit], [ours.unit], req_id="r1").success
        units = [dataclasses.asdict(theirs) if as_dict else theirs]
        await sync(sampler, with_sources(units, version=7))
        await source.release_weight_sync()
        assert sampler.policy_version == 7
        assert await greedy(sampler) == greedy_tokens(other_model)
        assert sampler._rollout.find_differing_weights(params_of(other_model)) == []

    with new_sampler(model) as sampler:
        run(scenario(sampler))
    assert list((tmp_path / "weights").iterdir()) == []


def test_lora_pairs_come_alone(tmp_path):
    model = lora_models.make("gqa2_tied")
    lora_models.draw(model, seed=1)
    source = WeightFolderSource(tmp_path, lambda: lora_models.leaves(model))

    async def scenario(sampler):
        lora_models.draw(model, seed=2)
        units = await source.prepare_weight_sync()
        await sync(sampler, with_sources(units))
        assert sampler._rollout.find_differing_weights(lora_models.leaves(model)) == []

    with new_sampler(model) as sampler:
        sampler.initialize()
        run(scenario(sampler))


def test_what_is_no_file_of_weights_is_refused(model, tmp_path):
    source = WeightFolderSource(tmp_path, lambda: params_of(model))

    async def refused(sampler, units, key, match):
        wanted = with_sources(units, key=key)
        await sampler.pre_weight_sync(wanted)
        with pytest.raises(WeightLoadError, match=match):
            await sampler.weight_sync(wanted)
        await sampler.abort_weight_sync(wanted)

    async def scenario(sampler):
        units = await source.prepare_weight_sync()
        (file,) = tmp_path.iterdir()
        file.write_bytes(file.read_bytes()[:-100])
        await refused(sampler, units, 1, file.name)
        orbax = {"unit": "trainer", "artifact_uri": str(tmp_path)}
        await refused(sampler, [orbax], 2, "neither a safetensors file nor a folder with")
        assert await greedy(sampler) == greedy_tokens(model)

    with new_sampler(model) as sampler:
        run(scenario(sampler))
    with pytest.raises(InvalidRequestError, match="holds no parameters"):
        run(WeightFolderSource(tmp_path, dict).prepare_weight_sync())


def test_a_transfer_needs_one_source_with_a_file(model, tmp_path):
    folder, source = WeightFolder(), WeightFolderSource(tmp_path, lambda: params_of(model))
    (theirs,) = run(source.prepare_weight_sync())
    unknown = folder.transfer([theirs.unit], [])
    assert (unknown.success, "names no file" in unknown.message) == (False, True)
    assert "one file holds all weights" in folder.transfer([theirs.unit] * 2, []).message


def test_a_worker_of_either_layout(model, other_model):
    """Tells a trainer what to send, binds for a round, and names the policy that serves."""

    async def scenario(sampler, worker):
        worker.initialize()
        wanted = sync_request(other_model, version=4, key=1)
        await sampler.bind_weight_sync(wanted)
        await worker.bind_weight_sync()
        expected = jax.eval_shape(lambda: params_of(other_model))
        target = sampler.get_target_state()
        assert isinstance(target["layers"]["0"], dict)
        assert [(name, x.shape, x.dtype) for name, x in flatten_named(target).items()] == [
            (name, x.shape, x.dtype) for name, x in flatten_named(expected).items()
        ]
        for phase in (worker.pre_weight_sync, worker.weight_sync):
            await phase(wanted)
        assert worker.info().resources["policy_version"] == 0
        await worker.abort_weight_sync(wanted)
        assert await greedy(sampler) == greedy_tokens(model)
        wanted = sync_request(other_model, version=5, key=2)
        for phase in (worker.pre_weight_sync, worker.weight_sync, worker.post_weight_sync):
            await phase(wanted)
        assert worker.info().resources["policy_version"] == 5
        assert await greedy(sampler) == greedy_tokens(other_model)

    with new_sampler(model) as sampler:
        tokenizer = TokenizerAdapter(ref.IntegerTokenizer())
        worker = SglJaxRolloutWorker("w", sampler, tokenizer=tokenizer, chat_parser=LineParser())
        run(scenario(sampler, worker))
