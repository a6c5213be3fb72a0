"""SGLang's routes give what the engine gives in process."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sgljax_engine import Engine
from sgljax_engine.server import ServerConfig
from tests.engine.models import TINY_MOE, spread_weights
from tests.geometry import SMALL
from tests.server.served import GREEDY, events_of, serving

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
SHORT = {**GREEDY, "max_new_tokens": 12}


def without_times(output):
    """What two runs of a request have in common."""
    changing = (
        "replica_id",
        "id",
        "e2e_latency",
        "time_to_first_token",
        "cached_tokens",
        "cache_miss_count",
    )
    meta = {name: each for name, each in output["meta_info"].items() if name not in changing}
    return {**output, "meta_info": meta}


def as_json(value):
    """Tuples as lists."""
    if isinstance(value, dict):
        return {name: as_json(each) for name, each in value.items()}
    return [as_json(each) for each in value] if isinstance(value, (list, tuple)) else value


def same(reply, output):
    assert without_times(reply) == as_json(without_times(output))


class TestGenerate:
    def test_one_prompt(self, served):
        body = {"input_ids": PROMPTS[0], "sampling_params": SHORT}
        same(served.ok("/generate", body), served.engine.generate(**body))

    def test_a_batch_with_parameters_of_its_own(self, served):
        params = [{**SHORT, "max_new_tokens": count} for count in (3, 5, 7)]
        body = {"input_ids": PROMPTS, "sampling_params": params}
        for reply, output in zip(
            served.ok("/generate", body), served.engine.generate(**body), strict=True
        ):
            same(reply, output)

    def test_sampling_masks(self, served):
        body = {"input_ids": PROMPTS[0], "sampling_params": {"top_k": 4, "seed": 3}}
        own = {**body["sampling_params"], "return_sampling_mask": True}
        output = served.engine.generate(**body | {"sampling_params": own})
        same(served.ok("/generate", body | {"sampling_params": own}), output)
        reply = served.ok("/generate", body | {"return_sampling_mask": True})
        same(reply, output)
        assert max(map(len, reply["meta_info"]["output_token_sampling_mask"])) == 4
        wide = {"sampling_params": {"top_k": 513}, "return_sampling_mask": True}
        refused = served.post("/generate", body | wide)
        assert refused.status_code == 400
        assert "top_k must be at most 512" in refused.text

    def test_text_and_default_parameters(self, served):
        params = {"max_new_tokens": 5, "seed": 3}
        reply = served.ok("/generate", {"text": "the fox", "sampling_params": params})
        same(reply, served.engine.generate("the fox", params))
        reply = served.ok("/generate", {"text": "the fox"})
        assert reply["meta_info"]["completion_tokens"] <= 128

    def test_sglangs_own_names(self, served):
        params = {"max_new_tokens": 8, "sampling_seed": 3, "stop": ["e"], "no_stop_trim": True}
        own = {"max_new_tokens": 8, "seed": 3, "stop": ["e"], "include_stop_str_in_output": True}
        body = {"input_ids": PROMPTS, "sampling_params": params}
        outputs = served.engine.generate(input_ids=PROMPTS, sampling_params=own)
        for reply, output in zip(served.ok("/generate", body), outputs, strict=True):
            same(reply, output)

    def test_log_probs(self, served):
        options = {
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "token_ids_logprob": [5, 6],
        }
        body = {"input_ids": PROMPTS[0], "sampling_params": SHORT, **options}
        output = served.engine.generate(**body)
        same(served.ok("/generate", body), output)
        reply = served.ok("/generate", {**body, "return_text_in_logprobs": True})
        meta = reply["meta_info"]
        texts = [text for _, _, text in meta["output_token_logprobs"]]
        ids = reply["output_ids"]
        assert texts == [served.engine.detokenize([token]) for token in ids]
        assert [len(top) for top in meta["output_top_logprobs"]] == [2] * len(ids)
        assert all(text is not None for top in meta["output_top_logprobs"] for *_, text in top)

    def test_the_version_is_in_a_header(self, served):
        before = served.engine.weight_version
        response = served.post("/generate", {"input_ids": [5], "sampling_params": SHORT})
        assert response.headers["x-weight-version"] == str(before)

    def test_no_new_tokens(self, served):
        """The log-probs of prompts, as distillation and reward servers ask for them."""
        body = {
            "input_ids": PROMPTS,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        for reply, ids in zip(served.ok("/generate", body), PROMPTS, strict=True):
            meta = reply["meta_info"]
            assert (reply["output_ids"], meta["finish_reason"]["type"]) == ([], "length")
            logprobs = [entry[0] for entry in meta["input_token_logprobs"]]
            own = served.engine.score([ids])[0].tolist()
            assert (logprobs[0], logprobs[1:]) == (None, pytest.approx(own, abs=1e-4))

    @pytest.mark.parametrize("is_cumulative", [True, False])
    def test_streams_add_up(self, served, is_cumulative):
        body = {"input_ids": PROMPTS, "sampling_params": SHORT}
        whole = served.engine.generate(**body)
        options = {"stream": True, "stream_output": None if is_cumulative else True}
        response = served.post("/generate", {**body, **options})
        assert response.headers["content-type"].startswith("text/event-stream")
        pieces = events_of(response)
        assert len(pieces) > len(PROMPTS)
        for index, output in enumerate(whole):
            own = [piece for piece in pieces if piece["index"] == index]
            assert [p["meta_info"]["finish_reason"] is None for p in own[:-1]] == [True] * (
                len(own) - 1
            )
            if is_cumulative:
                same({name: each for name, each in own[-1].items() if name != "index"}, output)
            else:
                assert "".join(piece["text"] for piece in own) == output["text"]
                ids = [token for piece in own for token in piece["output_ids"]]
                assert ids == output["output_ids"]

    @pytest.mark.parametrize("stream_output", [None, True])
    def test_streams_with_log_probs_send_what_is_new(self, served, stream_output):
        """SGLang's incremental form: lists that grow would be sent again with each event."""
        body = {
            "input_ids": PROMPTS,
            "sampling_params": SHORT,
            "return_logprob": [True, False, True],
            "top_logprobs_num": [3, 0, 3],
            "logprob_start_len": [0, -1, 0],
        }
        whole = served.engine.generate(**body)
        options = {"stream": True, "stream_output": stream_output}
        pieces = events_of(served.post("/generate", {**body, **options}))
        for index, output in enumerate(whole):
            own = [piece for piece in pieces if piece["index"] == index]
            assert len(own) > 1
            assert "".join(piece["text"] for piece in own) == output["text"]
            joined: dict = {}
            for piece in own:
                for name, value in piece["meta_info"].items():
                    if isinstance(value, list):
                        joined[name] = joined.get(name, []) + value
            expected = {n: v for n, v in output["meta_info"].items() if isinstance(v, list)}
            assert joined == json.loads(json.dumps(expected))

    def test_repeated_log_probs_are_refused(self, served):
        body = {"input_ids": [5], "return_logprob": True, "stream": True, "stream_output": False}
        response = served.post("/generate", body)
        assert response.status_code == 400
        assert "stream_output=false would repeat" in response.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({}, "give exactly one of text and input_ids"),
            ({"text": "a", "input_ids": [1]}, "give exactly one of text and input_ids"),
            ({"input_ids": []}, "the prompt is empty"),
            ({"text": []}, "at least one prompt"),
            ({"input_ids": [999]}, r"input_ids must be in \[0, 320\), got 999"),
            ({"input_ids": ["5"]}, "input_ids"),
            ({"text": "a", "sampling_params": {"top_p": 2}}, "sampling_params.*top_p.*got 2"),
            ({"text": "a", "sampling_params": {"max_new_tokens": 9999}}, "9999.* is 10.*limit"),
            (
                {"text": "a", "sampling_params": {"seed": 1, "sampling_seed": 2}},
                "sampling_seed=2 contradicts seed=1",
            ),
            ({"text": ["a", "b"], "sampling_params": [{}]}, "one for each of the 2 prompts, got 1"),
            ({"text": "a", "rid": ["a", "b"]}, "one id for each of the 1 prompts, got 2"),
            ({"text": "a", "top_logprobs_num": 2}, "need return_logprob=True"),
        ],
    )
    def test_refused(self, served, body, message):
        response = served.post("/generate", body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert re.search(message, error["message"]), error["message"]


class TestInformation:
    def test_facts(self, served):
        info = served.get("/get_model_info").json()
        assert info["vocab_size"] == served.engine.model_config.vocab_size
        assert served.get("/health").status_code == 200
        assert served.get("/health_generate").status_code == 200
        assert served.get("/get_weight_version").json() == {
            "weight_version": 0,
            "label": None,
            "replica_id": ServerConfig().replica_name(served.server.port),
            "is_quarantined": False,
            "staged_version": None,
            "store_version": None,
        }
        (load,) = served.get("/get_load").json()
        assert (load["num_reqs"], load["num_waiting_reqs"], load["num_tokens"]) == (0, 0, 0)

    def test_state_is_the_engines(self, served):
        (state,) = served.get("/get_server_info").json()["internal_states"]
        own = served.engine.get_internal_state()
        assert state["tree_cache_size"] == own.tree_cache_size == own.cached_kv_tokens
        assert state["memory"]["kv_tokens"] == own.memory.kv_tokens
        assert state["counters"]["num_finished"] == own.counters.num_finished

    def test_metrics_are_what_prometheus_reads(self, served):
        served.ok("/generate", {"input_ids": [5], "sampling_params": SHORT})
        families = {f.name: f for f in text_string_to_metric_families(served.get("/metrics").text)}
        counters = served.engine.get_internal_state().counters
        tokens = families["sgljax:generation_tokens"].samples[0]
        assert tokens.value == counters.num_output_tokens > 0
        replica_id = ServerConfig().replica_name(served.server.port)
        assert tokens.labels == {"model_name": "policy", "replica_id": replica_id}
        assert families["sgljax:e2e_request_latency_seconds"].type == "summary"


class TestRoutedExperts:
    def test_as_sglang_encodes_them(self):
        options = {**SMALL, "enable_return_routed_experts": True}
        weights = spread_weights(TINY_MOE)
        with (
            Engine(model_config=TINY_MOE, weights=weights, **options) as engine,
            serving(engine) as served,
        ):
            body = {"input_ids": PROMPTS[0], "sampling_params": SHORT}
            wanted = engine.generate(**body)["meta_info"]["routed_experts"]
            assert "routed_experts" not in served.ok("/generate", body)["meta_info"]
            body |= {"return_routed_experts": True}
            replies = [served.ok("/generate", body)]
            replies.append(events_of(served.post("/generate", {**body, "stream": True}))[-1])
        for reply in replies:
            data = base64.b64decode(reply["meta_info"]["routed_experts"])
            found = np.frombuffer(data, np.int32).reshape(wanted.shape)
            np.testing.assert_array_equal(found, wanted)

    def test_refused_without_the_option(self, served):
        body = {"input_ids": PROMPTS[0], "return_routed_experts": True}
        response = served.post("/generate", body)
        assert response.status_code == 400
        assert "enable_return_routed_experts" in response.text


class TestVLLM:
    def test_tokenizer(self, served):
        reply = served.ok("/tokenize", {"prompt": "the fox"})
        assert reply["tokens"] == served.engine.tokenize("the fox")
        assert reply["count"] == len(reply["tokens"])
        assert reply["max_model_len"] == served.engine.max_model_len
        assert served.ok("/detokenize", {"tokens": reply["tokens"]}) == {"prompt": "the fox"}
        messages = [{"role": "user", "content": "hi"}]
        chat = served.ok("/tokenize", {"messages": messages, "add_generation_prompt": False})
        own = served.engine.apply_chat_template(messages, add_generation_prompt=False)
        assert chat["tokens"] == own
