"""A rollout on a fleet of servers, beside one in process."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from benchmarks.lib.slow_network import SlowNetwork
from sgljax_engine import (
    EngineStateError,
    InvalidConfigError,
    InvalidRequestError,
    SamplingParams,
)
from sgljax_engine.fleet import FleetError, VersionWriter, client
from tests import tunix_reference as ref
from tests.adapter.helpers import (
    VOCAB_SIZE,
    new_rollout,
    params_of,
    rollout_config,
    scores,
    text_of,
)
from tests.fleet.parts import fleet_rollout, workers
from tests.threads import LIMIT_S, start, wait_for
from tunix_sgljax import SglJaxFleetRollout

PROMPTS = ref.make_prompts(VOCAB_SIZE, (3, 7, 12, 12))
TEXTS = [text_of(PROMPTS[row]) for row in (0, 1, 1, 2, 3, 1)]
CONFIGS = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 5, "return_logprobs": True},
    "filtered": {"temperature": 0.7, "top_k": 8, "top_p": 0.9, "return_logprobs": True, "seed": 1},
    "ending": {"temperature": 1.3, "eos_tokens": list(range(16)), "seed": -7},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def fleet(model, store):
    with workers(model, store, 2) as made:
        yield made


@pytest.fixture(scope="module")
def remote(model, store, fleet):
    rollout = fleet_rollout(model, store, fleet)
    yield rollout
    rollout.close()


@pytest.fixture(scope="module")
def local(model):
    rollout = new_rollout(model)
    yield rollout
    rollout.close()


def check_equal(one, other):
    """Outputs of the same seeds, but for the versions and names of who sampled them."""
    assert one.text == other.text
    for name in ("tokens", "logprobs", "left_padded_prompt_tokens"):
        first, second = getattr(one, name), getattr(other, name)
        assert (first is None) == (second is None), name
        if first is not None:
            for a, b in zip(first, second, strict=True):
                np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("kind", CONFIGS)
def test_samples_are_those_in_process(local, remote, kind):
    config = rollout_config(**CONFIGS[kind])
    for _ in range(2):  # the second call with a seed draws others
        one, other = (each.generate(TEXTS, config) for each in (local, remote))
        check_equal(one, other)
        assert {row.min() for row in other.weight_versions} == {remote.weight_version}
        assert set(other.replica_ids) <= {"worker-0", "worker-1"}
        assert one.replica_ids is None


def test_scores_are_those_in_process(local, remote):
    completions = ref.make_prompts(VOCAB_SIZE, (5, 2, 6, 1), seed=9)
    one, other = (scores(each, PROMPTS, completions) for each in (local, remote))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_bad_requests_are_refused_here(remote):
    config = rollout_config(max_tokens_to_generate=1000)
    with pytest.raises(InvalidRequestError, match="max_model_len"):
        remote.generate(TEXTS[:1], config)


def test_what_an_engine_alone_can_do_is_refused(remote):
    with pytest.raises(EngineStateError, match="timeline"):
        remote.engine.start_recording()
    with pytest.raises(EngineStateError, match="serve the policy already"):
        remote.serve()


def test_states_and_progress(remote, fleet):
    before, first = remote.engine.get_internal_state(), remote.engine.get_progress()
    remote.generate(TEXTS, rollout_config())
    after, now = remote.engine.get_internal_state(), remote.engine.get_progress()
    assert after.counters.num_requests - before.counters.num_requests == len(TEXTS)
    assert after.total_kv_tokens == sum(
        worker.engine.get_internal_state().total_kv_tokens for worker in fleet
    )
    assert now.num_finished - first.num_finished == len(TEXTS)
    assert now.num_output_tokens - first.num_output_tokens == 16 * len(TEXTS)
    assert (now.num_running, now.weight_version) == (0, remote.weight_version)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule_policy": "fcfs"}, "schedule_policy=.fcfs. is an option of the workers"),
        ({"fleet": "http://127.0.0.1:1"}, "must be a FleetConfig or a mapping"),
        ({"fleet": {"urls": ["http://127.0.0.1:1"]}}, "needs weights_store"),
        ({"fleet": {"urls": [], "weights_store": "x"}}, "at least one address"),
        ({"fleet": {"urls": "127.0.0.1:1", "weights_store": "x"}}, "http:// or https://"),
        ({"fleet": {"urls": "http://a", "weights_store": "x", "base_evry": 1}}, "no field"),
        ({"fleet": {"urls": "http://a", "weights_store": "x", "min_workers": 0}}, ">= 1"),
    ],
)
def test_bad_configurations_are_refused(model, changes, message):
    settings = {"fleet": {"urls": "http://127.0.0.1:1", "weights_store": "x"}} | changes
    with pytest.raises(InvalidConfigError, match=message):
        SglJaxFleetRollout(rollout_actor=model, tokenizer=ref.IntegerTokenizer(), **settings)


class TestUpdates:
    """Each on a fleet of its own, since they change its weights."""

    @pytest.fixture
    def made(self, model, tmp_path):
        with workers(model, tmp_path, 2) as fleet:
            rollout = fleet_rollout(model, tmp_path, fleet)
            yield rollout, fleet
            rollout.close()

    def test_new_weights_sample(self, made, make_rollout, other_model):
        rollout, fleet = made
        config = rollout_config(temperature=1.0, seed=3, return_logprobs=True)
        rollout.generate(TEXTS, config)
        first = rollout.weight_version
        rollout.update_params(params_of(other_model))
        assert rollout.weight_version > first
        assert rollout.find_differing_weights(params_of(other_model)) == []
        assert {worker.engine.weight_version for worker in fleet} == {rollout.weight_version}
        wanted = make_rollout(other_model)
        wanted.generate(TEXTS, config)  # the second call with the seed follows
        check_equal(wanted.generate(TEXTS, config), rollout.generate(TEXTS, config))

    def test_a_worker_that_is_gone_is_left_out(self, made, make_rollout, other_model):
        rollout, fleet = made
        config = rollout_config(temperature=1.0, seed=3, return_logprobs=True)
        rollout.generate(TEXTS, config)
        fleet[0].close()
        wanted = make_rollout(other_model)
        wanted.generate(TEXTS, config)
        rollout.update_params(params_of(other_model))
        output = rollout.generate(TEXTS, config)
        check_equal(wanted.generate(TEXTS, config), output)
        assert set(output.replica_ids) == {"worker-1"}

    def test_nobody_is_left(self, model, tmp_path):
        with workers(model, tmp_path, 1) as fleet:
            settings = {"outage_timeout_s": 0.5}
            rollout = fleet_rollout(model, tmp_path, fleet, changes=settings)
            rollout.generate(TEXTS, rollout_config())
            version = rollout.weight_version
            fleet[0].close()
            with pytest.raises(FleetError, match=r"outage_timeout_s=0\.5"):
                rollout.generate(TEXTS, rollout_config())
            with pytest.raises(FleetError, match="served by 0 of 1 workers"):
                rollout.update_params(params_of(model))
            assert rollout.weight_version == version
            rollout.close()

    def test_a_version_that_is_damaged_is_written_anew(
        self, made, other_model, tmp_path, monkeypatch
    ):
        """A bit of a file changes, once, between the trainer and the workers."""
        rollout, fleet = made
        write, damaged = VersionWriter.write, []

        def write_and_damage(writer, *args, **options):
            written = write(writer, *args, **options)
            if not damaged:
                path = min(tmp_path.glob(f"versions/*{written.version}/*.safetensors"))
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
                damaged.append(written.version)
            return written

        rollout.generate(TEXTS, rollout_config())
        before = rollout.weight_version
        monkeypatch.setattr(VersionWriter, "write", write_and_damage)
        rollout.update_params(params_of(other_model))
        assert damaged == [before + 1]
        assert rollout.weight_version == before + 2
        assert {worker.engine.weight_version for worker in fleet} == {before + 2}
        assert rollout.find_differing_weights(params_of(other_model)) == []

    def test_requests_leave_a_worker_that_hangs(self, model, tmp_path, monkeypatch):
        """Its connections are open, and nothing comes: only probes find that."""
        with workers(model, tmp_path, 2) as fleet, SlowNetwork(fleet[0].url, delay_s=0) as network:
            urls = [network.url, fleet[1].url]
            rollout = fleet_rollout(model, tmp_path, fleet, changes={"urls": urls})
            config = rollout_config(temperature=1.0, seed=2)
            texts = [text_of(ids) for ids in ref.make_prompts(VOCAB_SIZE, (4,) * 16, seed=4)]
            first = rollout.generate(texts, config)
            assert set(first.replica_ids or ()) == {"worker-0", "worker-1"}
            monkeypatch.setattr(client, "_PROBE_S", 0.05)
            network.freeze()
            output = rollout.generate(texts, config)
            assert set(output.replica_ids or ()) == {"worker-1"}
            rollout.close()

    def test_an_id_that_an_earlier_attempt_still_has_is_tried_again(self, model, tmp_path):
        """A worker may still end what a client gave up, under the same id."""
        with workers(model, tmp_path, 1) as fleet:
            rollout = fleet_rollout(model, tmp_path, fleet)
            rollout.generate(TEXTS, rollout_config())
            engine = fleet[0].engine
            remote: Any = rollout.engine
            params = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)
            engine.pause_generation()
            earlier = engine.generate(
                input_ids=[3, 4, 5], sampling_params=params, rid="mine", stream=True
            )
            again = remote.async_generate_requests([[3, 4, 5]], params, rid=["mine"])
            answer = start(lambda: asyncio.run(again))
            wait_for(lambda: remote._client.num_retries > 0)
            engine.continue_generation()
            ids = [token for piece in earlier for token in piece["output_ids"]]
            (output,) = answer.result(LIMIT_S)
            assert output.output_ids == ids
            rollout.close()
