"""Two models on one device: never both at once, and no output changes."""

import gc

import pytest

import two_models


@pytest.mark.soak
def test_two_models_take_turns(capsys, monkeypatch):
    reports = []
    run = two_models.run

    def keep(*arguments):
        reports.append(run(*arguments))
        return reports[-1]

    monkeypatch.setattr(two_models, "run", keep)
    gc.collect()  # what earlier tests left on the device
    assert two_models.main([]) == 0
    (report,) = reports

    assert report.outputs == report.uninterrupted
    assert {len(ids) for outputs in report.outputs.values() for ids in outputs} == {200}
    # Every turn but a model's last one ended in the middle of its requests, and models alternate.
    by_name = {name: [t for t in report.turns if t.name == name] for name in ("large", "small")}
    for turns in by_name.values():
        assert len(turns) >= 2
        assert all(turn.num_unfinished for turn in turns[:-1])
        assert not turns[-1].num_unfinished
        assert sum(turn.num_tokens for turn in turns) == 6 * 200
    names = [turn.name for turn in report.turns]
    assert names[:4] == ["large", "small", "large", "small"]

    # One model at a time: all that is held is its own, and nothing is left when it sleeps.
    in_flight = 50_000  # inputs and outputs of dispatches
    for turn in report.turns:
        assert turn.held_bytes <= report.base_bytes + turn.own_bytes + in_flight
        assert turn.left_bytes == report.base_bytes
    assert by_name["large"][0].own_bytes > by_name["small"][0].own_bytes > in_flight
    assert two_models.device_bytes() == report.base_bytes

    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 2 + len(report.turns)
    assert printed.endswith("outputs of 12 requests equal those of uninterrupted runs\n")


def test_an_output_that_differs_is_told(capsys, monkeypatch):
    report = two_models.Report([], 0, {"large": [[1]]}, {"large": [[2]]})
    monkeypatch.setattr(two_models, "run", lambda *_: report)
    assert two_models.main(["--requests", "1"]) == 1
    assert "DIFFER" in capsys.readouterr().out
