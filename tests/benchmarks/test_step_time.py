"""The parts of a step, from a timeline whose times are known; and the picture of them."""

import json
import runpy

import pytest

from benchmarks.lib.reporting import ROOT
from benchmarks.throughput import step_time
from tunix_sgljax.observability.perfetto_file import Slice, Track, write_trace

TRAINER = (
    ("tokenize", 10.0, 10.5),
    ("rollout", 9.0, 16.0),  # of Tunix's tracer, which also has what is inside
    ("generate", 10.5, 15.5),
    ("old_actor_inference", 16.0, 17.0),
    ("get_per_token_logps", 16.25, 16.75),
    ("train", 17.0, 25.0),
    ("weight_sync", 25.0, 26.0),
    ("update_params", 25.0, 26.0),
    ("generate", 27.0, 29.0),
    ("train", 29.0, 33.0),
    ("update_params", 33.0, 34.0),
    ("train", 34.0, 50.0),  # of a step that is not over
)
ENGINE = (
    ("AddRequests", 10.5, 10.75),
    ("prefill", 10.75, 11.75),
    ("decode", 11.75, 13.75),
    ("decode", 14.0, 15.0),
    ("decode", 27.5, 29.0),
)
EXPECTED = (
    (17.0, (0.5, 1.0, 3.0, 1.0, 1.0, 8.0, 1.0, 1.5)),
    (8.0, (0.0, 0.0, 1.5, 0.5, 0.0, 4.0, 1.0, 1.0)),
)


@pytest.fixture
def timeline(tmp_path):
    slices = {
        "trainer: MainThread": TRAINER,
        "engine": ENGINE,
        "detokenizer": (("detokenize", 15.0, 15.25),),
    }
    tracks = [
        Track(name, True, [Slice(what, begin_s, end_s, {}) for what, begin_s, end_s in given])
        for name, given in slices.items()
    ]
    tracks.append(Track("trainer on cpu:0", False, [Slice("train", 9.0, 34.0, {})]))
    return write_trace(tmp_path / "step.pftrace", tracks, [])


def test_parts_add_up(timeline):
    steps = step_time.step_times(step_time.read_slices(timeline))
    assert [step.total_s for step in steps] == [total for total, _ in EXPECTED]
    for step, (total, parts) in zip(steps, EXPECTED, strict=True):
        assert list(step.parts) == list(step_time.PARTS)
        assert tuple(step.parts.values()) == pytest.approx(parts)
        assert sum(step.parts.values()) == pytest.approx(total)
    assert [step.detokenizer_s for step in steps] == [0.25, 0.0]


def test_report_and_picture(timeline, tmp_path):
    step_time.main([str(timeline), "--about", "a run", "--output-dir", str(tmp_path)])
    report = (tmp_path / "step_time.md").read_text()
    assert "| trainer | 8.000 | 4.000 | 6.000 | 48.0% |" in report
    assert "- a run" in report
    result = tmp_path / "step_time.json"
    assert [step["total_s"] for step in json.loads(result.read_text())["steps"]] == [17.0, 8.0]
    picture = tmp_path / "step.svg"
    script = runpy.run_path(str(ROOT / "docs/make_step_plot.py"))
    assert script["main"](["--result", str(result), "--output", str(picture)]) == 0
    assert "<svg" in picture.read_text()


def test_a_timeline_without_a_step_is_refused(tmp_path, capsys):
    path = write_trace(tmp_path / "none.pftrace", [], [])
    with pytest.raises(SystemExit, match="2"):
        step_time.main([str(path), "--output-dir", str(tmp_path)])
    assert "holds no step" in capsys.readouterr().err
