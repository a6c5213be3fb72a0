"""`python -m tools.simulation`."""

from __future__ import annotations

import json

import pytest

from tools.simulation.__main__ import main

SMALL = ["--rows", "4", "--requests", "16", "--samples", "4", "--steps", "3", "--median", "20"]


def test_writes_a_table_and_all_numbers(tmp_path, capsys):
    path = tmp_path / "found.json"
    lengths = tmp_path / "lengths.json"
    lengths.write_text('{"lengths": [[4, 9], [30, 60]]}')
    arguments = [*SMALL, "--lengths", str(lengths), "--prompts", "8"]
    assert main([*arguments, "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "first come" in out
    assert "step times: Qwen3-0.6B on one H200" in err
    found = json.loads(path.read_text())
    assert len(found["outcomes"]) == len(out.splitlines()) - 2
    assert found["outcomes"][0]["speed"] == 1
    assert found["plan"]["num_groups"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "10"], "--requests must be a multiple of --samples (4), got 10"),
        (["--hardware", "v5"], "unknown hardware 'v5'"),
        (["--steps", "0"], "num_steps"),
        (["--lengths", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_input_is_refused(capsys, arguments, message):
    assert main([*SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err
