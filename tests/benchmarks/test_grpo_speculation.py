"""The comparison of trainings without speculation and with, end to end on tiny sizes."""

import json
import threading

import matplotlib as mpl
import pytest

from benchmarks.lib import plots
from benchmarks.lib.drafted_rollout import DraftedRollout, total
from benchmarks.lib.grpo_turns import Training, Turns
from benchmarks.training import grpo_speculation
from sgljax_engine.config import DRAFTERS


def rollout(num_accepted: int) -> DraftedRollout:
    counts = dict.fromkeys(DRAFTERS, 0) | {"history": num_accepted}
    return DraftedRollout(
        seconds=1.0,
        num_tokens=20,
        num_accepted=counts,
        num_drafts=8,
        num_verified=10,
        num_verify_rows=10 - num_accepted,
        saved_s=0.0,
    )


def training(**changes) -> Training:
    facts = {
        "rollouts": [],
        "tokens": [[[1, 2]], [[3]]],
        "rewards": [0.5, 1.0],
        "losses": [0.1, 0.2],
        "weights_digest": "a",
        "policy": None,
    }
    return Training(**facts | changes)


def test_shares_of_rollouts():
    both = total([rollout(5), rollout(0)])
    assert both.acceptance == both.accepted("history") == 5 / 40
    assert both.draft_acceptance == 5 / 16
    assert both.acceptance_length == 20 / 15


def test_the_first_difference_of_each_kind_is_found():
    assert training().first_difference(training()) == {}
    other = training(tokens=[[[1, 2]], [[4]]], losses=[0.3, 0.2], weights_digest="b")
    assert training().first_difference(other) == {"tokens": 2, "losses": 1, "weights": 2}


def test_threads_take_turns():
    turns, done = Turns(["a", "b"]), []

    def work(name: str, count: int) -> None:
        turns.wait(name)
        for step in range(count):
            turns.next(name)
            done.append((name, step))
        turns.leave(name)

    threads = [threading.Thread(target=work, args=pair) for pair in (("b", 2), ("a", 4))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert done == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("a", 3)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix
def test_trainings_are_equal(tmp_path):
    output = tmp_path / "grpo_speculation.md"
    arguments = ["--quick", "--tool-steps", "0", "--output", str(output)]
    assert grpo_speculation.main([*arguments, "--work-dir", str(tmp_path)]) == 0
    assert "equal to the bit" in output.read_text()
    data = json.loads(output.with_suffix(".json").read_text())
    off, auto = data["steps"]["off"], data["steps"]["auto"]
    assert [step["loss"] for step in off] == [step["loss"] for step in auto]
    assert not any(step["num_drafts"] for step in off)
    # How many there are in later epochs depends on measured costs.
    assert data["epochs"][0]["drafted"]["num_accepted"]["history"] == 0
    assert [each["num_differing"] for each in data["repeats"]] == [0]
    with mpl.rc_context(plots._STYLE):
        plots.draw_speculation(data, tmp_path / "plot.svg")
    assert "history" in (tmp_path / "plot.svg").read_text()
