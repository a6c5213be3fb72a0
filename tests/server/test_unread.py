"""What a client sends has an effect or is refused by name: queries, bodies and fields."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute

from sgljax_engine import NonFiniteLogitsError
from sgljax_engine.server import create_app
from sgljax_engine.server.routes import AdminRoute, DataRoute, OpenRoute
from sgljax_engine.server.sglang import SGLangSampling
from tests.engine.interrupts import make_engine
from tests.engine.test_nonfinite import TRAP, trapped
from tests.server.served import Served, events_of, served_golden, serving

VERSION = importlib.metadata.version("tunix-sgljax")

QUICK_COMPILE = "which requests are refused, and whether fields have an effect"


@pytest.fixture(scope="module")
def served():
    with served_golden() as served:
        yield served


@pytest.fixture(scope="module")
def trap():
    """Serves a model that one token makes overflow."""
    with make_engine(weights=trapped()) as engine, serving(engine) as served:
        yield served


def routes(served: Served) -> list[tuple[str, APIRoute]]:
    """Every method and route, with something in place of its parameters."""

    def flat(given: Any) -> Iterator[APIRoute]:
        for each in given:
            if isinstance(each, APIRoute):
                yield each
            elif hasattr(each, "original_router"):  # how newer versions of FastAPI include one
                yield from flat(each.original_router.routes)

    app = create_app(served.engine)
    found = [(method, each) for each in flat(app.routes) for method in each.methods or ()]
    assert len(found) > 35
    return found


def path_of(route: APIRoute) -> str:
    return route.path.replace("{model:path}", "policy")


def needs_one(route: APIRoute) -> bool:
    """Whether the route cannot do without a body."""
    return route.body_field is not None and route.body_field.field_info.is_required()


def error_of(response: Any) -> str:
    assert response.status_code == 400, (response.url, response.text)
    return response.json()["error"]["message"]


def facts(served: Served) -> Any:
    """What no refused request may change."""
    state = served.engine.get_internal_state()
    return (
        state.pause_mode, state.asleep, state.weight_version, state.counters.num_requests,
        state.counters.num_aborted, state.counters.num_pauses, state.cached_kv_tokens,
    )  # fmt: skip


class TestRouter:
    """Over all routes, so that a new one is tried too."""

    def test_unknown_query_parameters(self, served):
        before = facts(served)
        for method, route in routes(served):
            own = {field.alias for field in route.dependant.query_params}
            for name in {"x", "mode", "tags", "level", "stream", "name[]", "x" * 500} - own:
                reply = served.http.request(method, path_of(route), params={name: "1"})
                if isinstance(route, (DataRoute, AdminRoute)):
                    message = error_of(reply)
                    assert message.startswith(f"unknown query parameter {name[:64]!r}")
                else:
                    assert reply.status_code == 200, reply.text
        assert facts(served) == before

    def test_fields_as_query_parameters_and_the_reverse(self, served):
        """The hint says where they belong."""
        for path, name in [
            ("/pause_generation", "mode"), ("/release_memory_occupation", "tags"),
            ("/abort_request", "abort_all"), ("/generate", "stream"), ("/tokenize", "prompt"),
        ]:  # fmt: skip
            message = error_of(served.http.post(path, params={name: "retract"}))
            assert message.endswith(f"{name!r}; it is a field of the JSON body")
        for path, name in [("/sleep", "tags"), ("/wake_up", "tags"), ("/pause", "mode")]:
            message = error_of(served.http.post(path, json={name: ["kv_cache"]}))
            assert message.endswith("the route reads no body; it is a query parameter")
        assert "did you mean 'tags'?" in error_of(served.http.post("/wake_up?tag=weights"))

    def test_a_parameter_given_twice(self, served):
        before = facts(served)
        message = error_of(served.http.post("/sleep?level=1&level=2"))
        assert message == "level must be given once, got 2"
        assert error_of(served.http.get("/v1/loads?dp_rank=0&dp_rank=0"))
        assert facts(served) == before
        assert served.http.post("/sleep?tags=weights&tags=kv_cache").status_code == 200
        assert served.http.post("/wake_up?tags=weights&tags=kv_cache").status_code == 200

    def test_bodies_that_no_route_reads(self, served):
        before = facts(served)
        for method, route in routes(served):
            if route.body_field is not None:
                continue
            for body, told in [
                (b'{"x": 1}', "unknown field 'x': the route reads no body"),
                (b'{"mode": "retract"}', "unknown field 'mode': the route reads no body"),
                (b"a=1", "the route reads no body, got 3 bytes"),
                (b"[1]", "the route reads no body, got 3 bytes"),
                (b'{"x":' + b"[" * 5000, "the route reads no body, got 5005 bytes"),
            ]:
                reply = served.http.request(method, path_of(route), content=body)
                if type(route) is OpenRoute:
                    assert reply.status_code == 200
                else:
                    assert error_of(reply).startswith(told)
        assert facts(served) == before

    @pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded", ""])
    def test_empty_bodies_are_none(self, served, kind):
        """As `curl -X POST`, `requests.post(json={})` and other clients send them."""
        headers = {"content-type": kind} if kind else {}
        for method, route in routes(served):
            if route.path in ("/v1/chat/completions", "/health_generate"):
                continue
            for body in [b""] if route.body_field is not None else [b"", b"{}", b" {}\n", b"null"]:
                reply = served.http.request(method, path_of(route), content=body, headers=headers)
                needs_body = needs_one(route)
                assert (reply.status_code == 400) == needs_body, (route.path, reply.text)
                if needs_body:
                    assert "a JSON object as body is missing" in error_of(reply)
        for path in ("/resume_memory_occupation", "/wake_up", "/continue_generation", "/resume"):
            assert served.http.post(path).status_code == 200
        assert facts(served)[:2] == (None, ())

    def test_unknown_fields(self, served):
        for method, route in routes(served):
            if route.body_field is not None:
                reply = served.http.request(method, path_of(route), json={"nonsense": 1})
                assert "unknown field 'nonsense'" in error_of(reply)


class TestControl:
    def test_the_kv_cache_sleeps_alone(self, served):
        engine = served.engine
        sizes = engine.get_internal_state().memory
        before = served.generate([[5, 6, 7]], max_new_tokens=4)
        body = {"tags": ["kv_cache"]}
        assert served.ok("/release_memory_occupation", body)["num_bytes"] == sizes.kv_bytes
        assert engine.get_internal_state().asleep == ("kv_cache",)
        assert served.ok("/release_memory_occupation", {"tags": ["weights"]})["num_bytes"] > 0
        assert engine.get_internal_state().asleep == ("weights", "kv_cache")
        served.ok("/resume_memory_occupation", body)
        served.ok("/resume_memory_occupation")
        assert served.post("/sleep?tags=weights&preserve_state=true").status_code == 200
        assert engine.get_internal_state().asleep == ("weights",)
        assert served.post("/wake_up").status_code == 200
        after = served.generate([[5, 6, 7]], max_new_tokens=4)
        assert [each["text"] for each in before] == [each["text"] for each in after]
        message = error_of(served.post("/sleep?level=2&tags=kv_cache"))
        assert message.startswith("level must be 1 with tags=['kv_cache'], got 2")

    def test_vllms_pause(self, served):
        for query, mode in [
            ("", "abort"), ("?mode=keep", "in_place"), ("?wait_for_inflight_requests=true", "wait"),
            ("?mode=wait&clear_cache=false", "wait"),
        ]:  # fmt: skip
            served.generate([[5] * 9], max_new_tokens=1)
            assert served.ok(f"/pause{query}") == {"status": "paused"}
            state = served.engine.get_internal_state()
            assert state.pause_mode == mode
            keeps = "keep" in query or "false" in query
            assert (state.cached_kv_tokens > 0) == keeps
            assert served.get("/is_paused").json() == {"is_paused": True}
            assert served.ok("/resume") == {"status": "resumed"}
        message = error_of(served.post("/pause?mode=keep&wait_for_inflight_requests=true"))
        assert "means mode=wait, got mode=keep" in message
        assert error_of(served.post("/pause?mode=retract")).startswith("mode: ")
        assert served.get("/is_paused").json() == {"is_paused": False}

    def test_newer_names_answer_the_same(self, served):
        for name in ("model_info", "server_info", "weight_version"):
            older, newer = served.get(f"/get_{name}"), served.get(f"/{name}")
            assert (newer.status_code, newer.json()) == (200, older.json())
        assert served.get("/version").json()["version"] == VERSION
        assert served.get("/ping").status_code == served.post("/ping").status_code == 200
        loads = served.get("/v1/loads?include=core&format=json&dp_rank=0").json()
        (load,), (older,) = loads["loads"], served.get("/get_load").json()
        assert loads["version"] == VERSION
        total = served.engine.get_internal_state().total_kv_tokens
        assert load["max_total_num_tokens"] == total
        assert load["token_usage"] == load["num_used_tokens"] / total
        assert load["num_total_reqs"] == older["num_reqs"] == 0
        for query in ("dp_rank=1", "include=disagg", "format=prometheus"):
            name = query.partition("=")[0]
            assert name in error_of(served.get(f"/v1/loads?{query}"))


class TestNonFiniteLogits:
    """The error of a request whose logits are NaN, in each dialect, whole and as a stream."""

    @pytest.mark.parametrize("is_stream", [False, True])
    @pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
    def test_one_of_two_prompts(self, trap, path, is_stream):
        own = {"temperature": 0, "allowed_token_ids": [TRAP]}
        body: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 3, **own}
        if path == "/generate":
            body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, **own}}
        before = trap.engine.get_internal_state().counters.num_nonfinite_requests
        reply = trap.post(path, {**body, "stream": is_stream})
        if is_stream:
            *pieces, last = events_of(reply)
            assert len(pieces) == 1  # the token that was sound
        else:
            last = reply.json()
        assert reply.status_code == (200 if is_stream else 500)
        error = last["error"]
        assert (error["type"], error["code"]) == ("server_error", NONFINITE)
        assert error["message"].startswith(f"{NonFiniteLogitsError.__name__}: request ")
        assert "at output token 1: its logits are NaN or infinite" in error["message"]
        lines = trap.get("/metrics").text.splitlines()
        (line,) = [each for each in lines if each.startswith("sgljax:nonfinite_requests_total")]
        assert 'model_name="policy"' in line
        assert line.endswith(f" {before + 1}.0")

    def test_log_probs_of_a_prompt(self, trap):
        options = {"return_logprob": True, "logprob_start_len": 0}
        body = {"input_ids": [5, TRAP, 6], "sampling_params": {"max_new_tokens": 0}, **options}
        reply = trap.post("/generate", body)
        assert reply.status_code == 500
        assert "of its prompt are NaN or infinite" in reply.json()["error"]["message"]
        meta = trap.ok("/generate", {**body, "input_ids": [5, 6]})["meta_info"]
        assert meta["input_token_logprobs"][1][0] < 0


# ---------------------------------------------------------------------- fields

EOS, START, D, E = 1, 3, 72, 73
"""Tokens of the golden model; the last two are letters."""

SAMPLING: dict[str, tuple[Any, dict[str, Any]]] = {
    "n": (2, {}),
    "temperature": (0, {}),
    "top_k": (1, {}),
    "top_p": (0.01, {}),
    "min_p": (1.0, {}),
    "presence_penalty": (2.0, {"temperature": 0, "logit_bias": {"73": 9, "72": 8.5}}),
    "frequency_penalty": (2.0, {"temperature": 0, "logit_bias": {"73": 9, "72": 8.5}}),
    "repetition_penalty": (99.0, {"temperature": 0}),
    "logit_bias": ({"73": 100}, {}),
    "allowed_token_ids": ([E], {}),
    "bad_token_ids": ([E], {"allowed_token_ids": [D, E], "logit_bias": {"73": 100}}),
    "seed": (4, {}),
    "stop": ("ee", {"allowed_token_ids": [E]}),
    "stop_token_ids": ([E], {"allowed_token_ids": [E]}),
    "ignore_eos": (True, {"allowed_token_ids": [EOS]}),
    "include_stop_str_in_output": (True, {"allowed_token_ids": [E], "stop": "ee"}),
    "skip_special_tokens": (False, {"allowed_token_ids": [START], "ignore_eos": True}),
    "structured_outputs": ({"choice": ["a", "b"]}, {}),
    "return_sampling_mask": (True, {}),
}
"""A value of each field, and the other fields that make its effect visible."""

OWN_SAMPLING = SAMPLING | {
    "sampling_seed": (4, {"seed": None}),
    "no_stop_trim": (True, {"allowed_token_ids": [E], "stop": "ee"}),
    "max_new_tokens": (2, {}),
    "min_new_tokens": (3, {"allowed_token_ids": [EOS, E], "logit_bias": {"1": 100}}),
    "detokenize": (False, {}),
    "reasoning_tags": (["", "x"], {"allowed_token_ids": [E], "stop": "ee"}),
    "max_thinking_tokens": (2, {"reasoning_tags": ["", "x"]}),
    "json_schema": ({"enum": ["a", "b"]}, {}),
    "regex": ("[ab]", {}),
    "ebnf": ('root ::= "a" | "b"', {}),
}
OPENAI = SAMPLING | {
    "model": ("other", {}),
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "max_tokens": (2, {}),
    "min_tokens": (3, {"allowed_token_ids": [EOS, E], "logit_bias": {"1": 100}}),
    "return_token_ids": (True, {}),
    "return_weight_versions": (True, {}),
    "response_format": ({"type": "json_object"}, {}),
}
CASES: dict[str, tuple[dict[str, Any], dict[str, tuple[Any, dict[str, Any]]]]] = {
    "/generate": (
        {"text": "the fox", "sampling_params": {"temperature": 1, "max_new_tokens": 9, "seed": 3}},
        {
            "text": ("a dog", {}),
            "input_ids": ([5, 6], {"text": None}),
            "sampling_params": ({"max_new_tokens": 2}, {}),
            "rid": ("mine", {}),
            "return_logprob": (True, {}),
            "logprob_start_len": (0, {"return_logprob": True}),
            "top_logprobs_num": (2, {"return_logprob": True}),
            "token_ids_logprob": ([5], {"return_logprob": True}),
            "return_text_in_logprobs": (True, {"return_logprob": True}),
            "return_routed_experts": (True, {}),
            "return_sampling_mask": (True, {}),
            "stream": (True, {}),
            "stream_output": (True, {"stream": True}),
            "lora_path": ("other", {}),
            "model": ("other", {}),
            "min_weight_version": (10**6, {}),
            "session_params": (
                {"sampling_params": {"max_new_tokens": 2}}, {"sampling_params": None}
            ),
        },
    ),
    "/score_tokens": (
        {"input_ids": [[5, 6, 7]]},
        {
            "input_ids": ([[5, 6, 8]], {}),
            "start_lens": ([2], {}),
            "temperature": (0.5, {}),
            "lora_path": ("other", {}),
            "min_weight_version": (10**6, {}),
        },
    ),
    "/v1/completions": (
        {"prompt": "the fox", "temperature": 1, "max_tokens": 9, "seed": 3},
        OPENAI
        | {
            "prompt": ("a dog", {}),
            "echo": (True, {}),
            "logprobs": (1, {}),
            "return_tokens_as_token_ids": (True, {"logprobs": 1}),
        },
    ),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "seed": 3},
        OPENAI
        | {
            "messages": ([{"role": "user", "content": "ho"}], {}),
            "max_completion_tokens": (2, {"max_tokens": None}),
            "logprobs": (True, {}),
            "top_logprobs": (1, {"logprobs": True}),
            "return_tokens_as_token_ids": (True, {"logprobs": True}),
            "tools": ([{"type": "function", "function": {"name": "f"}}], {}),
            "tool_choice": ("required", {}),
            "max_thinking_tokens": (2, {}),
            "thinking_token_budget": (2, {}),
            "add_generation_prompt": (False, {}),
            "continue_final_message": (True, {"messages": [{"role": "assistant", "content": "a"}]}),
            "chat_template_kwargs": ({"add_generation_prompt": False}, {}),
        },
    ),
    "/tokenize": (
        {"prompt": "the fox"},
        {
            "model": ("other", {}),
            "prompt": ("a dog", {}),
            "messages": ([{"role": "user", "content": "hi"}], {"prompt": None}),
            "add_generation_prompt": (False, {"prompt": None, "messages": [
                {"role": "user", "content": "hi"}]}),
            "continue_final_message": (True, {"prompt": None, "messages": [
                {"role": "assistant", "content": "hi"}]}),
            "chat_template_kwargs": ({"add_generation_prompt": False}, {"prompt": None,
                "messages": [{"role": "user", "content": "hi"}]}),
        },
    ),
    "/detokenize": ({"tokens": [D, E]}, {"model": ("other", {}), "tokens": ([D], {})}),
}  # fmt: skip
NONFINITE = "nonfinite_logits"

UNSEEN = {
    "add_special_tokens": "the golden tokenizer adds none",
    "spaces_between_special_tokens": "slow tokenizers alone have any",
    "decode_behind_prompt": "the golden tokenizer decodes all tokens alike",
    "tools": "the golden template shows none, outside of chat",
    "parallel_tool_calls": "the golden template writes no calls",
    "separate_reasoning": "the golden template has no thoughts",
}
"""Fields without an effect on the golden model; tests with other models have them."""


def seen(response: Any) -> Any:
    """What a client sees of a reply, without what differs between two equal calls."""
    text = response.text
    for name in ("id", "e2e_latency", "time_to_first_token", "cached_tokens", "cache_miss_count"):
        own = "mine" if name == "id" and '"mine"' in text else ""
        text = re.sub(rf'"{name}":("[^"]*"|[\d.e-]+|null)', f'"{name}":"{own}"', text)
    return response.status_code, re.sub(r'"created":\d+', "", text)


def body_models(served: Served) -> dict[str, Any]:
    """The class of the body of each route that generates or reads, by path."""
    return {
        route.path: route.body_field.field_info.annotation
        for _, route in routes(served)
        if route.body_field is not None and route.path in CASES
    }


def tried(served: Served, path: str, name: str, base: Any, case: Any, wrap: Any) -> None:
    value, others = case
    without = {k: v for k, v in {**base, **others}.items() if v is not None}
    without.pop(name, None) if name not in base else None
    plain = served.post(path, wrap(without))
    reply = served.post(path, wrap({**without, name: value}))
    if reply.status_code in (400, 404, 503):
        error = reply.json()["error"]
        told = "lora" if name == "lora_path" else name
        assert told in f"{error['param']} {error['message']}", error
        return
    assert reply.status_code == 200, reply.text
    assert seen(reply) != seen(plain), f"{name}={value!r} of {path} has no effect"


class TestFields:
    """Each field of each body has an effect, is refused by name, or is said to have none."""

    @pytest.mark.slow
    @pytest.mark.parametrize("path", CASES)
    def test_each_has_an_effect_or_is_refused(self, served, path):
        base, cases = CASES[path]
        for name, case in cases.items():
            tried(served, path, name, base, case, lambda body: body)

    @pytest.mark.slow
    def test_of_sampling_params(self, served):
        base, _ = CASES["/generate"]
        for name, case in OWN_SAMPLING.items():
            tried(
                served, "/generate", name, base["sampling_params"], case,
                lambda params: {**base, "sampling_params": params},
            )  # fmt: skip

    def test_all_are_tried(self, served):
        bodies = body_models(served)
        assert bodies.keys() == CASES.keys()
        for path, body in bodies.items():
            for name, field in body.model_fields.items():
                is_unused = field.description == "accepted and not used"
                assert (name in CASES[path][1]) + is_unused + (name in UNSEEN) >= 1, (path, name)
        assert OWN_SAMPLING.keys() | UNSEEN.keys() >= SGLangSampling.model_fields.keys()

    def test_what_is_not_there_is_refused_in_words_that_name_it(self, served):
        base, _ = CASES["/v1/chat/completions"]
        text_only = "the model takes text only"
        for fields, told in [
            *(
                ({"messages": [{"role": "user", "content": [part]}]}, text_only)
                for part in (
                    {"type": "image_url", "image_url": {"url": "data:,x"}},
                    {"image_url": {"url": "data:,x"}, "type": "image_url"},
                    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
                    {"type": "file", "file": {"file_id": "x"}},
                )
            ),
        ]:
            message = error_of(served.post("/v1/chat/completions", {**base, **fields}))
            assert "is not supported" in message
            assert told in message

    def test_a_prompt_of_the_whole_context_is_scored(self, served):
        longest = served.engine.max_model_len
        ids = [5 + i % 60 for i in range(longest)]
        body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
        (choice,) = served.ok("/v1/completions", body)["choices"]
        first, *others = choice["logprobs"]["token_logprobs"]
        assert first is None
        assert len(others) == longest - 1
        assert None not in others
        for prompt, tokens, told in [
            ([*ids, 5], 0, f"the prompt has {longest + 1} tokens, the limit is {longest}"),
            (ids, 1, f"the prompt has {longest} tokens, the limit is {longest - 1}"),
        ]:
            given = {**body, "prompt": prompt, "max_tokens": tokens}
            assert error_of(served.post("/v1/completions", given)) == told
        generate = {"input_ids": [*ids, 5], "sampling_params": {"max_new_tokens": 0}}
        assert "the limit is max_model_len = 512" in error_of(served.post("/generate", generate))

    def test_model_names_an_adapter_of_generate(self, served):
        base, _ = CASES["/generate"]
        assert served.ok("/generate", {**base, "model": "policy"})["output_ids"]
        assert served.ok("/generate", {**base, "model": ""})["output_ids"]
        reply = served.post("/generate", {**base, "model": "other"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (404, "model")
