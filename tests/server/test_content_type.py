"""A body that is JSON but does not say so, as plain `curl -d` sends it."""

from __future__ import annotations

import pytest

from tests.engine.interrupts import make_engine
from tests.server.served import serving


@pytest.fixture(scope="module")
def served():
    with make_engine() as engine, serving(engine) as served:
        yield served


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_another_content_type_is_named(served, path):
    for headers, given in (
        ({}, "none was sent"),
        ({"content-type": "application/x-www-form-urlencoded"}, "got 'application/x-www-form-ur"),
    ):
        reply = served.http.post(path, content=b'{"text": "a"}', headers=headers)
        assert reply.status_code == 400
        message = reply.json()["error"]["message"]
        assert message.startswith("the header Content-Type must be application/json, ")
        assert given in message
    text = served.http.post(path, content=b'"a"', headers={"content-type": "application/json"})
    assert text.json()["error"]["message"] == "the body must be a JSON object, got a string"
