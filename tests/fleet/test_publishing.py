"""An update while workers are away: it waits for them, and fails at once where they refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest

from sgljax_engine.fleet import FleetConfig, FleetError
from sgljax_engine.fleet import publishing as publishing_module
from sgljax_engine.fleet.client import FleetClient, Reply
from sgljax_engine.fleet.loop_thread import LoopThread
from sgljax_engine.fleet.publishing import WeightsPublisher

QUICK_COMPILE = "who is asked what, no numbers"
URL = "http://worker"
AWAY, ENDING = "ConnectError all attempts failed", "status 503: the server ends"
REFUSES = "status 400: shapes do not fit"


class ScriptedClient:
    """A fleet of one worker whose problems with control calls are a list; None is success."""

    def __init__(self, problems: Sequence[str | None]) -> None:
        self._problems = list(problems)
        self.calls: list[tuple[str, int]] = []

    async def worker_urls(self) -> list[str]:
        return [URL]

    async def tell(
        self, urls: Sequence[str], path: str, body: Mapping[str, Any], timeout_s: float
    ) -> list[Reply]:
        assert timeout_s > 0
        replies = []
        for url in urls:
            self.calls.append((path, body["version"]))
            problem = self._problems.pop(0) if len(self._problems) > 1 else self._problems[0]
            replies.append(Reply(url, {}, problem))
        return replies


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """Publishes a tensor with such problems; returns the version and the calls."""
    monkeypatch.setattr(publishing_module, "_RETRY_S", 0.0)
    loop = LoopThread("test-publishing")

    def run(problems: Sequence[str | None], outage_timeout_s: float = 60.0):
        client = ScriptedClient(problems)
        config = FleetConfig(
            urls=URL, weights_store=str(tmp_path), outage_timeout_s=outage_timeout_s
        )
        publisher = WeightsPublisher(config, cast(FleetClient, client), loop)
        version = publisher.publish({"w": np.ones(3, np.float32)}, None, "retract")
        return version, client.calls

    yield run

    async def nothing() -> None:
        pass

    loop.close(nothing())


STAGE, PUBLISH = "/stage_weight_version", "/publish_weight_version"


@pytest.mark.parametrize(
    ("problems", "calls"),
    [
        ([None], [STAGE, PUBLISH]),
        ([AWAY, ENDING, AWAY, None], [STAGE, STAGE, STAGE, STAGE, PUBLISH]),
        ([None, AWAY, None], [STAGE, PUBLISH, STAGE, PUBLISH]),  # killed between the two
    ],
)
def test_an_update_waits_for_workers_that_are_away(publish, problems, calls):
    assert publish(problems) == (1, [(path, 1) for path in calls])


@pytest.mark.parametrize(
    ("problems", "outage_timeout_s", "num_calls"),
    [([REFUSES], 60.0, 1), ([AWAY, REFUSES], 60.0, 2), ([AWAY], 1e-9, 1)],
)
def test_an_update_that_no_worker_serves(publish, problems, outage_timeout_s, num_calls, caplog):
    with pytest.raises(FleetError, match=rf"by 0 of 1 workers.*{problems[-1].split()[0]}"):
        publish(problems, outage_timeout_s)
    assert len([r for r in caplog.records if "waits for workers" in r.message]) == num_calls - 1
