"""An engine that follows a weight store, in process and behind HTTP."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import numpy as np
import pytest

from sgljax_engine import Engine, SamplingParams, StagedWeights, WeightStoreError
from sgljax_engine.fleet import VersionWriter
from sgljax_engine.fleet.follower import ADAPTER, WeightFollower
from sgljax_engine.server import ServerConfig
from tests import inside
from tests.engine.models import TINY, random_prompts, spread_weights
from tests.geometry import SMALL
from tests.server.served import serving
from tests.threads import LIMIT_S, start, wait_for

WEIGHTS = [spread_weights(seed=seed) for seed in range(4)]
PROMPTS = random_prompts(3, 5, 20, seed=1)
GREEDY = {"temperature": 0, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def expected():
    """What each of the weights says to the prompts."""
    with Engine(model_config=TINY, weights=WEIGHTS[0], **SMALL) as engine:
        outputs = []
        for weights in WEIGHTS:
            engine.update_weights(weights)
            outputs.append(tokens_of(engine))
    assert len({str(each) for each in outputs}) == len(WEIGHTS)
    return outputs


@pytest.fixture
def engine():
    with Engine(model_config=TINY, weights=WEIGHTS[0], **SMALL) as engine:
        yield engine


@pytest.fixture
def writer(tmp_path):
    return VersionWriter(tmp_path / "store")


@pytest.fixture
def store(tmp_path):
    return str(tmp_path / "store")


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("no adapter today")


def tokens_of(engine: Engine, lora: str | None = None) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_new_tokens=6)
    return [out.output_ids for out in engine.generate_requests(PROMPTS, params, lora)]


def body_of(**fields: Any) -> dict[str, Any]:
    return {"input_ids": PROMPTS, "sampling_params": GREEDY, **fields}


def damage(engine: Engine) -> None:
    """What a failing device may do: the weights in its memory are no numbers."""
    runner = inside.core(engine).runner
    name = "model.norm.weight"
    runner.weights = {**runner.weights, name: runner.weights[name] * np.nan}


# ------------------------------------------------------------------ in process


def test_versions_are_served_under_the_stores_numbers(engine, writer, store, expected):
    follower = WeightFollower(engine, store)
    assert follower.newest() is None
    assert follower.catch_up() == 0
    for version in (1, 2, 3):
        assert writer.write(WEIGHTS[version]).version == version
        staged = follower.stage(version)
        assert (staged.version, follower.staged_version) == (version, version)
        assert staged.num_bytes > 0
        assert tokens_of(engine) == expected[version - 1]
        assert follower.stage(version).num_bytes == 0
        assert follower.publish(version) == version == engine.weight_version
        assert follower.staged_version is None
        assert tokens_of(engine) == expected[version]


def test_one_that_missed_some_takes_the_newest(engine, writer, store, expected):
    for weights in WEIGHTS[1:]:
        writer.write(weights)
    follower = WeightFollower(engine, store)
    assert follower.catch_up() == 3
    assert tokens_of(engine) == expected[3]
    for old in (1, 2, 3):
        assert follower.publish(old) == 3
        assert follower.stage(old).num_bytes == 0
    assert engine.get_internal_state().counters.num_weight_updates == 1


def test_another_staged_version_replaces_the_one_before(engine, writer, store, expected):
    for weights in WEIGHTS[1:]:
        writer.write(weights)
    follower = WeightFollower(engine, store)
    follower.stage(2)
    assert follower._staged is not None
    first = follower._staged.weights
    assert isinstance(first, StagedWeights)
    follower.stage(3)
    assert first.state == "discarded"
    assert follower.publish(3) == 3
    follower.close()
    assert tokens_of(engine) == expected[3]


def test_a_version_that_is_missing_or_does_not_fit_changes_nothing(engine, writer, store, expected):
    follower = WeightFollower(engine, store)
    writer.write({name: x for name, x in WEIGHTS[1].items() if "layers.1" not in name})
    with pytest.raises(WeightStoreError):
        follower.publish(2)
    with pytest.raises(ValueError, match=r"model\.layers\.1"):
        follower.publish(1)
    assert (engine.weight_version, follower.staged_version) == (0, None)
    assert tokens_of(engine) == expected[0]
    writer.write(WEIGHTS[2])
    assert follower.catch_up() == 2
    assert tokens_of(engine) == expected[2]


def test_damaged_weights_are_loaded_again_under_their_number(engine, writer, store, expected):
    follower = WeightFollower(engine, store)
    writer.write(WEIGHTS[1])
    assert follower.catch_up() == 1
    damage(engine)
    assert follower.reload() == 1 == engine.weight_version
    assert tokens_of(engine) == expected[1]
    assert engine.find_differing_weights(WEIGHTS[1]) == []


def test_nothing_is_reloaded_from_an_empty_store(engine, store):
    with pytest.raises(WeightStoreError, match="has no version to reload"):
        WeightFollower(engine, store).reload()


class TestAdapters:
    CONFIG: ClassVar[dict[str, Any]] = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "o_proj"],
    }

    def pairs(self, seed: int) -> dict[str, np.ndarray]:
        """PEFT's tensors: A [rank, in] and B [out, rank]."""
        rng = np.random.default_rng(seed)
        found = {}
        for name, x in WEIGHTS[0].items():
            if name.endswith(("q_proj.weight", "o_proj.weight")):
                start = f"base_model.model.{name.removesuffix('.weight')}"
                out, num_in = x.shape
                found[f"{start}.lora_A.weight"] = rng.normal(0, 0.3, (2, num_in))
                found[f"{start}.lora_B.weight"] = rng.normal(0, 0.3, (out, 2))
        return {name: x.astype(np.float32) for name, x in found.items()}

    def merged(self, seed: int) -> dict[str, np.ndarray]:
        """The oracle: W + lora_alpha / r * B A."""
        pairs, weights = self.pairs(seed), dict(WEIGHTS[0])
        for name in [each for each in pairs if each.endswith("lora_A.weight")]:
            b = pairs[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace("lora_A.", "")
            weights[target] = weights[target] + 2 * b @ pairs[name]
        return weights

    @pytest.fixture
    def engine(self):
        options: dict[str, Any] = {"max_loras": 1, "max_lora_rank": 2}
        with Engine(model_config=TINY, weights=WEIGHTS[0], **SMALL, **options) as engine:
            yield engine

    def test_versions_of_an_adapter(self, engine, writer, store):
        wanted = []
        with Engine(model_config=TINY, weights=WEIGHTS[0], **SMALL) as merged:
            for seed in (1, 2):
                merged.update_weights(self.merged(seed))
                wanted.append(tokens_of(merged))
        base = tokens_of(engine)
        assert len({str(each) for each in (base, *wanted)}) == 3
        follower = WeightFollower(engine, store)
        assert follower.adapter is None
        for version in (1, 2):
            written = writer.write(WEIGHTS[0] | self.pairs(version), adapter=self.CONFIG)
            assert written.is_base == (version == 1)
            follower.stage(version)
            assert follower.publish(version) == version == engine.weight_version
            assert follower.adapter == ADAPTER
            assert tokens_of(engine, ADAPTER) == wanted[version - 1]
            assert tokens_of(engine) == base
        assert follower.reload() == 2
        assert tokens_of(engine, ADAPTER) == wanted[1]
        damage(engine)
        assert follower.reload() == 2
        assert tokens_of(engine, ADAPTER) == wanted[1]
        assert tokens_of(engine) == base

    def test_one_that_comes_late_gets_both(self, writer, store):
        """It reads the base and the newest of all versions with an adapter."""
        with Engine(model_config=TINY, weights=WEIGHTS[0], **SMALL) as merged:
            base = tokens_of(merged)
            merged.update_weights(self.merged(9))
            wanted = tokens_of(merged)
        sizes = [writer.write(WEIGHTS[0]).num_bytes]
        for seed in range(2, 10):
            weights = WEIGHTS[0] | self.pairs(seed)
            sizes.append(writer.write(weights, adapter=self.CONFIG).num_bytes)
        assert max(sizes[1:]) < sizes[0] / 2
        with Engine(
            model_config=TINY, weights=WEIGHTS[1], max_loras=1, max_lora_rank=2, **SMALL
        ) as engine:
            follower = WeightFollower(engine, store)
            assert follower.catch_up() == 9 == engine.weight_version
            assert tokens_of(engine, ADAPTER) == wanted
            assert tokens_of(engine) == base

    def test_half_a_version_is_never_served(self, engine, writer, store, monkeypatch):
        """The weights are published and the adapter fails: the server must not answer."""
        writer.write(WEIGHTS[1] | self.pairs(1), adapter=self.CONFIG)
        follower = WeightFollower(engine, store)
        monkeypatch.setattr(engine, "load_adapter", fail)
        with pytest.raises(RuntimeError, match="no adapter today"):
            follower.catch_up()
        monkeypatch.undo()
        assert follower.is_broken
        assert not engine.get_internal_state().is_paused
        assert follower.reload() == 1
        assert not follower.is_broken
        assert tokens_of(engine) != tokens_of(engine, ADAPTER)

    def test_it_is_the_servers_default(self, engine, writer, store):
        writer.write(WEIGHTS[0] | self.pairs(1), adapter=self.CONFIG)
        with serving(engine, weights_store=store) as served:
            outputs = served.ok("/generate", body_of())
            assert [each["output_ids"] for each in outputs] == tokens_of(engine, ADAPTER)
            assert {each["meta_info"]["weight_version"] for each in outputs} == {1}


# ------------------------------------------------------------------ behind HTTP


def test_a_server_starts_with_the_newest_version(engine, writer, store, expected):
    writer.write(WEIGHTS[1])
    with serving(engine, weights_store=store, replica_id="left") as served:
        outputs = served.ok("/generate", body_of())
        assert [each["output_ids"] for each in outputs] == expected[1]
        for each in outputs:
            meta = each["meta_info"]
            assert meta["replica_id"] == "left"
            assert set(meta["token_weight_versions"]) == {1}
        reply = served.get("/health")
        assert (reply.status_code, reply.headers["x-replica-id"]) == (200, "left")
        assert served.get("/nothing").headers["x-replica-id"] == "left"
        assert 'replica_id="left"' in served.get("/metrics").text


def test_versions_are_staged_and_published_over_http(engine, writer, store, expected):
    with serving(engine, weights_store=store, replica_id="a") as served:
        writer.write(WEIGHTS[1])
        staged = served.ok("/stage_weight_version", {"version": 1})
        assert (staged["success"], staged["version"], staged["is_delta"]) == (True, 1, False)
        assert staged["num_bytes"] > 0
        found = served.get("/get_weight_version").json()
        assert (found["weight_version"], found["staged_version"], found["store_version"]) == (
            0,
            1,
            1,
        )
        for _ in range(2):
            reply = served.ok("/publish_weight_version", {"version": 1, "mode": "in_place"})
            assert reply == {"success": True, "weight_version": 1}
        writer.write(WEIGHTS[2])
        assert served.ok("/publish_weight_version", {"version": 2})["weight_version"] == 2
        assert tokens_of(engine) == expected[2]
        missing = served.post("/publish_weight_version", {"version": 9})
        assert missing.status_code == 503
        assert missing.json()["error"]["code"] == "weight_store"
        for body in ({}, {"version": 0}, {"version": "1"}, {"version": 3, "mode": "now"}):
            assert served.post("/publish_weight_version", body).status_code == 400


def test_without_a_store_the_routes_say_so(engine):
    with serving(engine) as served:
        for path in ("/stage_weight_version", "/publish_weight_version"):
            reply = served.post(path, {"version": 1})
            assert reply.status_code == 409
            assert "without weights_store" in reply.json()["error"]["message"]
        stale = served.post("/generate", body_of(min_weight_version=1))
        assert (stale.status_code, stale.json()["error"]["code"]) == (503, "stale_weights")


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_stale_server_refuses_and_catches_up(engine, writer, store, expected, is_inside):
    least = {"min_weight_version": 1}
    body = body_of(session_params=least) if is_inside else body_of(**least)
    with serving(engine, weights_store=store) as served:
        assert served.post("/generate", body).status_code == 503  # nothing is there yet
        writer.write(WEIGHTS[1])
        stale = served.post("/generate", body)
        assert (stale.status_code, stale.headers["retry-after"]) == (503, "1")
        error = stale.json()["error"]
        assert error["code"] == "stale_weights"
        assert "serves weight version 0, and min_weight_version is 1" in error["message"]

        def is_served() -> bool:
            reply = served.post("/generate", body)
            assert reply.status_code in (200, 503)
            return reply.status_code == 200

        wait_for(is_served)
        assert [each["output_ids"] for each in served.ok("/generate", body)] == expected[1]


def test_sampling_parameters_in_session_params_are_those_of_the_body(engine):
    params = {"temperature": 1.0, "seed": 2**62 + 1, "max_new_tokens": 6, "n": 2}
    with serving(engine) as served:
        body = {"input_ids": PROMPTS[0], "rid": "a"}
        plain = served.ok("/generate", {**body, "sampling_params": params})
        inside_it = served.ok("/generate", {**body, "session_params": {"sampling_params": params}})
        assert [each["output_ids"] for each in plain] == [each["output_ids"] for each in inside_it]
        assert len(plain) == 2
        twice = {**body, "sampling_params": params, "session_params": {"sampling_params": params}}
        reply = served.post("/generate", twice)
        assert reply.status_code == 400
        assert "sampling_params or session_params.sampling_params, not both" in reply.text
        reply = served.post("/generate", {**body, "session_params": {"seed": 1}})
        assert "it is a field of session_params.sampling_params" in reply.text


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_server_with_nan_leaves_service_until_it_is_well(
    engine, writer, store, expected, monkeypatch, is_stream
):
    writer.write(WEIGHTS[1])
    go_on, real = threading.Event(), WeightFollower.reload

    def reload(self: WeightFollower) -> int:
        assert go_on.wait(LIMIT_S)
        return real(self)

    monkeypatch.setattr(WeightFollower, "reload", reload)
    with serving(engine, weights_store=store) as served:
        damage(engine)
        failed = served.post("/generate", body_of(stream=is_stream))
        assert failed.status_code == (200 if is_stream else 500)
        assert '"code":"nonfinite_logits"' in failed.text
        for reply in (served.get("/health"), served.post("/generate", body_of())):
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "quarantined"
            assert reply.headers["retry-after"] == "1"
        assert served.get("/get_weight_version").json()["is_quarantined"] is True
        go_on.set()
        wait_for(lambda: served.get("/health").status_code == 200)
        outputs = served.ok("/generate", body_of())
        assert [each["output_ids"] for each in outputs] == expected[1]
        assert {each["meta_info"]["weight_version"] for each in outputs} == {1}


def test_requests_that_ran_beside_the_nan_are_not_answered(engine, writer, store):
    """Wrong weights may have computed their tokens, though these are numbers."""
    writer.write(WEIGHTS[1])
    with serving(engine, weights_store=store) as served:
        engine.pause_generation("in_place")
        waiting = start(lambda: served.http.post("/generate", json=body_of()))
        wait_for(lambda: engine.get_internal_state().waiting_queue_size > 0)
        replica, loop = served.server._context.replica, served.server._loop
        assert loop is not None
        loop.call_soon_threadsafe(replica.found_nonfinite)
        reply = waiting.result(LIMIT_S)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "quarantined")
        engine.continue_generation()


def test_bad_names_of_replicas():
    for name in ("", " a", "\u00e9", "a\n"):
        with pytest.raises(ValueError, match="replica_id must be"):
            ServerConfig(replica_id=name)
    with pytest.raises(ValueError, match="weights_store must be"):
        ServerConfig(weights_store="")
