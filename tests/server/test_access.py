"""Which key opens which route, however its path is written."""

from __future__ import annotations

import asyncio
import http.client
import itertools

import httpx
import pytest
from fastapi import FastAPI

from sgljax_engine.server import ServerConfig, create_app
from tests.server.served import serving
from tests.threads import LIMIT_S

ADMIN = (
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/abort_request"),
    ("GET", "/flush_cache"),
    ("POST", "/flush_cache"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/release_memory_occupation"),
    ("POST", "/resume_memory_occupation"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
)
DATA = (("GET", "/get_server_info"), ("POST", "/generate"), ("POST", "/v1/completions"))
ENDS = ("", "%0A", "%0a?x=1", "/", "%2F", "%00", ";a=b", "%0D", "%0A%0A", "%C2%85", "%E2%80%A8")
STARTS = ("", "/", "/.", "/x/..", "%2F", "/%0A", "http://x")


def status_of(served, method, target, headers):
    """Status of a target that a client would refuse to send."""
    connection = http.client.HTTPConnection("127.0.0.1", served.server.port, timeout=LIMIT_S)
    try:
        connection.putrequest(method, target)
        for name, value in {"content-length": "0", **headers}.items():
            connection.putheader(name, value)
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


def statuses(served, routes, headers):
    """Statuses of every spelling of every route."""
    for (method, path), start, end in itertools.product(routes, STARTS, ENDS):
        target = f"{start}{path}{end}"
        yield f"{method} {target}", status_of(served, method, target, headers)


@pytest.mark.parametrize(
    ("keys", "routes", "given"),
    [
        ({"api_key": "data", "admin_key": "admin"}, ADMIN, "data"),
        ({"api_key": "data", "admin_key": "admin"}, DATA, "admin"),
        ({"admin_key": "admin"}, ADMIN[:2], None),
    ],
)
def test_no_spelling_of_a_path_opens_a_route(engine, keys, routes, given):
    headers = {} if given is None else {"authorization": f"Bearer {given}"}
    with serving(engine, **keys) as served:
        found: dict[str, int] = dict(statuses(served, routes, headers))
    assert set(found.values()) <= {401, 403, 404}
    assert not engine.get_internal_state().is_paused
    assert found[" ".join(routes[0])] == 401


def test_an_unread_body_of_a_stranger_ends_the_connection(engine):
    with serving(engine, api_key="data", admin_key="admin") as served:
        response = served.http.post("/generate", content=b"x" * 100_000)
        assert response.status_code == 401
        assert response.headers["connection"] == "close"


def test_a_mounted_app_has_its_keys_and_words(engine):
    parent = FastAPI()
    parent.mount("/policy", create_app(engine, ServerConfig(admin_key="admin")))

    async def ask():
        transport = httpx.ASGITransport(parent)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            body = {"prompt": [5], "max_tokens": 10**6}
            named = await client.post("/policy/v1/completions", json=body)
            # The client's Host is no part of the path that errors are told by.
            forged = await client.post(
                "/policy/generate",
                json={"input_ids": [5], "sampling_params": {"max_new_tokens": 10**6}},
                headers={"host": "x/v1/?"},
            )
            refused = await client.post("/policy/pause_generation%0A")
        return named, forged, refused

    named, forged, refused = asyncio.run(ask())
    assert "max_tokens" in named.json()["error"]["message"]
    assert "max_new_tokens" not in named.json()["error"]["message"]
    assert "max_new_tokens" in forged.json()["error"]["message"]
    assert refused.status_code in (401, 404)
