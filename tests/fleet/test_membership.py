"""A server's place among the workers of a router."""

from __future__ import annotations

import pytest

from sgljax_engine import InvalidConfigError
from tests.fleet.routers import REAL, ScriptedRouter, is_installed, real_router
from tests.server.served import served_golden
from tests.threads import wait_for
from tunix_sgljax.cli import membership as module
from tunix_sgljax.cli.membership import Membership

URL = "http://worker-1:30000"


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(module, "_LOOK_S", 0.01)


@pytest.fixture(params=[True, False], ids=["ids", "urls"])
def router(request):
    router = ScriptedRouter(has_ids=request.param)
    yield router
    router.close()


def test_from_joining_to_leaving(router):
    membership = Membership(f"{router.url}/", f"{URL}/", api_key="key")
    wait_for(lambda: membership.is_registered)
    assert list(router.workers.values()) == [URL]
    assert membership.leave()
    assert membership.leave()
    assert router.workers == {}
    assert [method for method, _ in router.asked] == ["POST", "DELETE"]
    assert {each["authorization"] for each in router.headers} == {"Bearer key"}


def test_a_router_that_forgot_the_server_is_told_again(router):
    membership = Membership(router.url, URL)
    for count in (1, 2, 3):
        wait_for(lambda: URL in router.workers.values())
        assert router.asked.count(("POST", "/workers")) == count
        router.workers.clear()
    wait_for(lambda: URL in router.workers.values())
    assert membership.leave()


def test_a_router_that_refuses_is_asked_again(router, caplog):
    router.refuses = 500
    membership = Membership(router.url, URL)
    wait_for(lambda: len(router.headers) > 3)
    assert not membership.is_registered
    assert [each.message for each in caplog.records if "cannot join" in each.message] == [
        next(each.message for each in caplog.records if "cannot join" in each.message)
    ]
    assert not membership.leave(timeout_s=1.0)
    router.refuses = None
    assert membership.leave()
    assert router.workers == {}


def test_other_workers_stay(router):
    router.answer("POST", "/workers", {"url": "http://other:1"})
    membership = Membership(router.url, URL)
    wait_for(lambda: membership.is_registered)
    assert membership.leave()
    assert list(router.workers.values()) == ["http://other:1"]


def test_there_may_be_no_router_yet():
    membership = Membership("http://127.0.0.1:9", URL)
    wait_for(lambda: membership._problem not in ("", None))
    assert not membership.leave(timeout_s=1.0)


@pytest.mark.parametrize("url", ["", "worker:1", "ftp://a", "http://", "http://a/b"])
def test_what_is_no_url_of_a_server(url):
    for arguments in ((url, URL), (URL, url)):
        with pytest.raises(InvalidConfigError, match=r"must be http://HOST:PORT, got"):
            Membership(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_behind_a_real_router(name, tmp_path):
    """It passes on what the fleet needs: ids, seeds, the least version, and who replied."""
    import httpx

    if not is_installed(name):
        pytest.skip(f"{name} is not installed")
    body = {
        "input_ids": [1, 2, 3],
        "rid": "a",
        "return_logprob": True,
        "session_params": {
            "sampling_params": {"max_new_tokens": 5, "seed": 2**62 + 1, "n": 2},
            "min_weight_version": 0,
        },
    }
    with (
        real_router(name, tmp_path, "--disable-retries") as url,
        served_golden(replica_id="left") as served,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        membership = Membership(url, served.url)
        wait_for(lambda: http.post("/generate", json=body).status_code == 200)
        reply = http.post("/generate", json=body)
        assert reply.headers["x-replica-id"] == "left"
        direct = served.ok("/generate", body)
        assert [each["output_ids"] for each in reply.json()] == [
            each["output_ids"] for each in direct
        ]
        session = {**body["session_params"], "min_weight_version": 7}
        stale = http.post("/generate", json={**body, "session_params": session})
        assert stale.status_code == 503
        assert stale.json()["error"]["code"] == "stale_weights"
        assert membership.leave()
        assert http.post("/generate", json=body).status_code == 503
