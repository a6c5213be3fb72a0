"""kill -9 in the middle of a rollout; another process restores the checkpoint and finishes it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgljax_engine import CheckpointManager, Engine
from tests.engine.interrupts import settle
from tests.engine.models import TINY, spread_weights
from tests.engine.rollout_to_kill import NUM_LONG, NUM_REQUESTS, PARAMS, PROMPTS, RIDS
from tests.geometry import SMALL
from tests.threads import LIMIT_S

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_config=TINY, weights=spread_weights(), **SMALL) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine) -> dict[str, list[int]]:
    outs = engine.generate(input_ids=PROMPTS, sampling_params=PARAMS)
    engine.flush_cache()
    return {rid: out["output_ids"] for rid, out in zip(RIDS, outs, strict=True)}


class Rollouts:
    """Runs rollouts one after another and kills them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.killed_rollouts"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
            bufsize=1,
        )

    def kill_one(self, folder: Path, num_finished: int, wait_s: float) -> None:
        """Kills a rollout a while after so many of its requests were finished and it saved."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{folder}\n")
        pid = int(self._read("started"))
        while int(self._read("saved")) < num_finished:
            pass
        time.sleep(wait_s)  # not to wait for anything: the moment is to be any
        os.kill(pid, signal.SIGKILL)
        self._read("dead", skip="saved")

    def _read(self, word: str, skip: str = "") -> str:
        assert self._process.stdout is not None
        while True:
            line = self._process.stdout.readline().split()
            assert line, "the rollouts have ended"
            if line[0] == word:
                return line[-1]
            assert line[0] == skip, line

    def close(self) -> None:
        self._process.communicate(timeout=LIMIT_S)


@pytest.mark.parametrize(
    "num_kills",
    [pytest.param(2, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.soak)],
)
def test_rollouts_survive_kill_9(engine, expected, tmp_path, num_kills):
    rollouts, chance = Rollouts(), random.Random(num_kills)
    for number in range(num_kills):
        folder = tmp_path / str(number)
        # The long requests begin last, so there is always something left to do.
        num_finished = chance.randrange(NUM_REQUESTS - NUM_LONG)
        rollouts.kill_one(folder, num_finished, chance.uniform(0, 0.02))
        state = CheckpointManager(folder).load().scheduler_state
        assert len(state.finished_req_ids) < NUM_REQUESTS
        assert any(request.output_ids for request in state.requests.values())
        futures = engine.restore_checkpoint(folder)
        assert sorted(futures) == sorted(RIDS)
        for rid, future in futures.items():
            assert future.result(LIMIT_S).output_ids == expected[rid], (number, rid)
        settle(engine)
        engine.flush_cache()
    rollouts.close()
