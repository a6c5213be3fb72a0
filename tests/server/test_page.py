"""The page at `/`, in a headless browser."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from pathlib import Path

import pytest

from sgljax_engine import Engine
from tests.geometry import SMALL
from tests.server.browser import Browser

pytestmark = pytest.mark.slow

MODEL = Path(__file__).parents[1] / "golden" / "qwen3_gqa_tied"
PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def engine():
    with Engine(MODEL, **SMALL) as engine:
        yield engine


@pytest.fixture
def server(engine):
    with engine.serve(port=0) as server:
        yield server
    engine.wake_up()
    engine.continue_generation()


@contextlib.contextmanager
def requests_running(url):
    """Requests of more samples than run at once, one after another, until the block ends."""
    body = {
        "input_ids": [[5, 6, 7, row] for row in range(10, 26)],
        "sampling_params": {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0.0},
    }
    is_over = threading.Event()

    def send():
        while not is_over.is_set():
            post(f"{url}/generate", body)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        post(f"{url}/continue_generation", {})
        thread.join()


def post(url, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def number(name):
    """An expression: the number that the page shows."""
    return f"parseFloat(document.getElementById('{name}').textContent)"


def says(name, text):
    """An expression: whether an element's text begins so."""
    return f"document.getElementById('{name}').textContent.startsWith({json.dumps(text)})"


def test_numbers_move_and_buttons_work(browser, engine, server):
    browser.open(server.url)
    browser.wait_for(says("state", "Idle"))
    assert browser.text("#model") == "policy"
    assert browser.text("#weights") == str(engine.weight_version)
    with requests_running(server.url):
        for name in ("running", "waiting", "kv", "rate", "open"):
            browser.wait_for(f"{number(name)} > 0")
        browser.wait_for(says("state", "Running"))

        browser.click("#pause")  # retract is the first in the list
        browser.wait_for(says("result", "Paused."))
        assert engine.get_internal_state().pause_mode == "retract"
        browser.wait_for(says("state", "Paused (retract)"))
        browser.wait_for(f"{number('running')} === 0 && {number('waiting')} > 0")
        browser.wait_for(f"{number('rate')} === 0")
        browser.wait_for("document.querySelector('rect.paused').getAttribute('width') > 5")

        browser.click("#continue")
        browser.wait_for(says("result", "Continued."))
        assert not engine.get_internal_state().is_paused
        browser.wait_for(f"{says('state', 'Running')} && {number('rate')} > 0")

        browser.select("#mode", "in_place")
        browser.click("#pause")
        browser.wait_for(says("state", "Paused (in_place)"))
        assert engine.get_internal_state().pause_mode == "in_place"
        browser.click("#continue")
        browser.wait_for(says("state", "Running"))
    browser.wait_for(says("state", "Idle"))
    # Running and waiting, KV cache, tokens/s.
    browser.wait_for("document.querySelectorAll('path.curve').length === 4")
    assert browser.problems() == []


def test_weight_versions_and_sleep_are_drawn(browser, engine, server):
    browser.open(server.url)
    browser.wait_for(says("state", "Idle"))
    version = engine.update_weights(MODEL)
    browser.wait_for(f"{number('weights')} === {version}")
    browser.wait_for("document.querySelectorAll('path.version').length === 1")
    engine.sleep()
    browser.wait_for(says("state", "Asleep (weights, kv_cache)"))
    engine.wake_up()
    browser.wait_for(says("state", "Idle"))
    browser.wait_for("document.querySelectorAll('rect.asleep').length === 1")
    assert browser.problems() == []


def test_keys(browser, engine):
    with engine.serve(port=0, api_key="let me read", admin_key="let me write") as server:
        browser.open(server.url)
        browser.wait_for(says("state", "This server asks for the API key."))
        browser.fill("#api-key", "wrong")
        browser.press("Enter")
        browser.wait_for(says("state", "The API key is wrong."))
        browser.fill("#api-key", "let me read")
        browser.press("Enter")
        browser.wait_for(says("state", "Idle"))

        browser.click("#pause")
        browser.wait_for(says("result", "This server asks for the admin key."))
        for key in ("wrong", "let me read"):
            for button in ("pause", "continue"):
                assert browser.evaluate(f"document.getElementById('{button}').disabled")
            assert browser.evaluate("document.activeElement.id") == "admin-key"
            browser.fill("#admin-key", key)
            browser.press("Enter")
            browser.click("#pause")
            browser.wait_for(says("result", "The admin key is wrong."))
        assert not engine.get_internal_state().is_paused
        browser.fill("#admin-key", "let me write")
        browser.press("Enter")
        browser.click("#pause")
        browser.wait_for(says("state", "Paused"))
        assert engine.get_internal_state().is_paused
        browser.click("#continue")
        browser.wait_for(says("state", "Idle"))

        # A browser notes replies of status 401; there is nothing else.
        assert all("401 (Unauthorized)" in problem for problem in browser.problems())
        assert browser.evaluate("localStorage.length + document.cookie.length") == 0
        assert "let me" not in browser.evaluate("document.documentElement.outerHTML")
        browser.open(server.url)  # what another visitor sees
        browser.wait_for(says("state", "This server asks for the API key."))


def test_a_server_that_is_gone_and_comes_back(browser, engine):
    with engine.serve(port=0) as server:
        browser.open(server.url)
        browser.wait_for(says("state", "Idle"))
    browser.wait_for(says("state", "The server does not answer; trying again every"))
    with engine.serve(port=server.port):
        browser.wait_for(says("state", "Idle"))


def test_a_hidden_page_asks_for_nothing(browser, server):
    browser.open(server.url)
    browser.evaluate(
        "window.numCalls = 0, window.send = fetch, "
        "window.fetch = (...args) => (numCalls += 1, send(...args)), null"
    )
    browser.wait_for("numCalls > 1")
    browser.evaluate("Object.defineProperty(document, 'hidden', {value: true, writable: true})")
    browser.wait_for("!isPolling")  # a call under way would time out
    browser.skip(60)
    browser.wait_for(says("state", "Idle"))
    count = browser.evaluate("numCalls")
    browser.skip(60)
    assert browser.evaluate("numCalls") == count
    browser.evaluate("document.hidden = false")
    browser.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    assert browser.evaluate("numCalls") == count + 1
    browser.wait_for(f"numCalls > {count} + 1")  # and goes on


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_small_screens_and_keyboards(browser, server, scheme):
    browser.open(server.url, viewport=PHONE, colorScheme=scheme)
    browser.wait_for(says("state", "Idle"))
    assert browser.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    reached = []
    browser.evaluate("document.getElementById('keys').open = true")
    for _ in range(7):
        browser.press("Tab")
        reached.append(browser.evaluate("document.activeElement.id"))
    # The fifth is the line that opens the keys; the last has no id.
    assert reached == ["mode", "pause", "continue", "", "api-key", "admin-key", ""]
    assert browser.problems() == []


def test_the_policy_refuses_what_is_not_in_the_file(browser, server):
    browser.open(server.url)
    browser.evaluate("document.body.setAttribute('style', 'color: red')")
    browser.evaluate("window.added = document.createElement('script'), null")
    browser.evaluate("added.textContent = 'document.title = 1'")
    browser.evaluate("document.body.append(added)")
    style, script = browser.problems()
    assert "style" in style
    assert "Content Security Policy" in style
    assert "script" in script
    assert browser.evaluate("document.title") != "1"
