"""Several controllers: what is refused, and what happens when a process ends."""

from __future__ import annotations

import pytest

from tests.adapter.two_processes import processes

QUICK_COMPILE = "that processes end, and why, not what they compute"

END_LIMIT_S = 60
"""For a process whose peer has died. Shorter than JAX's own 100 s, so that its settings matter."""

pytestmark = pytest.mark.soak


def test_a_tensor_axis_across_processes_is_refused():
    with processes("refuse") as both:
        for each in both:
            message = each.read("refused")
            assert "mesh axis 'tp' (size 8) must lie within one process" in message
            assert "processes [0, 1]" in message
            each.read("accepted")
        for each in both:
            assert each.end() == 0, each.log()


@pytest.mark.parametrize(("case", "killed"), [("sample", 0), ("update", 1)])
def test_a_killed_process_ends_the_other(case, killed):
    """Outside a collective and in one; the coordinator is process 0."""
    with processes(case) as both:
        for each in both:
            each.read("ready")
        other = both[1 - killed]
        other.go()
        other.read("busy")
        both[killed].popen.kill()
        assert other.end(END_LIMIT_S) != 0
        assert "This most likely indicates that another task died" in other.log()


def test_a_process_that_raises_ends_the_other():
    with processes("fail") as both:
        for each in both:
            each.read("ready")
        both[1].go()
        assert both[1].end(END_LIMIT_S) != 0
        assert "ValueError: a reward function failed" in both[1].log()
        assert both[0].end(END_LIMIT_S) != 0
        assert "This most likely indicates that another task died" in both[0].log()
