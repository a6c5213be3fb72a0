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
@pytest.mark.parametrize("given", ["", "application/x-www-form-urlencoded"])
def test_another_content_type_is_named(served, path, given):
    headers = {"content-type": given} if given else {}
    reply = served.http.post(path, content=b'{"text": "a"}', headers=headers)
    assert reply.status_code == 400
    told = f"got {given!r}" if given else "none was sent"
    message = f"the header Content-Type must be application/json, {told}"
    assert reply.json()["error"]["message"] == message
