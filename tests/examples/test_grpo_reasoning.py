"""GRPO on a real model: its task, its model's other form, and two steps of the example."""

import json
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import get_smollm2
import plain_task
import reasoning_plot
from benchmarks.throughput.step_time import read_slices, step_times
from lines import Lines
from sgljax_engine import Engine
from smollm2_as_qwen2 import as_qwen2, zero_biases
from tests.engine.exactness_checks import check_golden
from tests.engine.small_tokenizers import GOLDEN
from tests.geometry import SMALL
from tests.threads import LIMIT_S

EASY = "The cat sat on the mat. It had a red hat. We all ran to see it go up the hill."


@pytest.mark.parametrize(
    ("text", "ease"),  # words, sentences and syllables, counted by hand
    [
        ("The cat sat.", (3, 1, 3)),
        ("The cat sat. It ran\nHome we go!", (8, 3, 8)),
        ("Reading is a little difficult for many people.", (8, 1, 14)),
        ("Here it is: go.", (4, 2, 4)),
        ("1. Don't panic", (2, 1, 3)),
    ],
)
def test_reading_ease_is_flesch_s(text, ease):
    words, sentences, syllables = ease
    expected = 206.835 - 1.015 * words / sentences - 84.6 * syllables / words
    assert plain_task.reading_ease(text) == pytest.approx(expected)


def test_the_reward_is_ease_length_and_variety():
    hard = "Organizational considerations necessitate comprehensive administrative evaluation."
    numbered = " ".join(f"We go to {chr(97 + i % 26)}{chr(97 + i // 26)}." for i in range(60))
    texts = ["", "1 2 3", hard, EASY, EASY * 10, numbered]
    nothing, digits, difficult, short, repeated, long = plain_task.is_plain(texts, texts)
    assert nothing == digits == difficult == 0
    assert short == pytest.approx(21 / plain_task.MIN_WORDS)  # as easy as may be
    assert 0 < repeated < 0.5 < long <= 1


def test_held_out_topics_are_none_that_training_sees():
    rows, held_out = (plain_task.plain_rows(500, 0, each) for each in (False, True))
    assert rows == plain_task.plain_rows(500, 0)
    assert rows != plain_task.plain_rows(500, 1)
    seen, kept = ({row["prompts"] for row in each} for each in (rows, held_out))
    assert not seen & kept
    assert len(seen | kept) == len(set(plain_task.TOPICS)) == len(plain_task.TOPICS)
    assert len(kept) == plain_task.NUM_HELD_OUT_TOPICS


def test_a_llama_as_a_qwen2_is_the_same_function(tmp_path):
    llama = tmp_path / "llama"
    shutil.copytree(GOLDEN / "llama_tied", llama)
    folder = as_qwen2(llama)
    assert as_qwen2(llama) == folder
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert len(zero_biases(config)) == 3 * config["num_hidden_layers"]
    with Engine(folder, dtype="float32", **SMALL) as engine:
        check_golden(engine, np.load(GOLDEN / "llama_tied/golden.npz"))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_plot_of_two_engines(tmp_path):
    steps = [SimpleNamespace(reward=i / 10, end_s=60.0 * i) for i in range(1, 9)]
    held_out = [SimpleNamespace(num_steps=i, reward=i / 10) for i in (0, 4, 8)]
    path = tmp_path / "plot.svg"
    reasoning_plot.write_plot(path, [(name, steps, held_out) for name in ("sgljax", "vanilla")])
    assert path.stat().st_size > 1_000


def test_a_silence_has_lines_too(monkeypatch):

    lines, has_three = [], threading.Event()

    def take(line: str, **_: object) -> None:
        lines.append(line)
        if "loaded" in lines and sum(each.startswith("  ... ") for each in lines) > 3:
            has_three.set()

    monkeypatch.setattr("builtins.print", take)
    with Lines(quiet_s=0.01) as say:
        say("loaded")
        assert has_three.wait(LIMIT_S)
    assert "loaded" in lines


@pytest.mark.real
@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix
def test_two_steps(tmp_path, capsys):
    import grpo_reasoning

    try:
        get_smollm2.get_smollm2()
    except get_smollm2.UnreachableError as error:
        pytest.skip(str(error))
    small = ["batch_size=2", "grpo_config.num_generations=2", "task.dataset_args.num=8"]
    small += ["rollout_config.total_generation_steps=8"]
    timeline = tmp_path / "second_step.pftrace"
    args = ["--steps", "2", "--held-out", "4", "--timeline", str(timeline)]
    args += ["--output-dir", str(tmp_path), "--set", *small]
    assert grpo_reasoning.main(args) == 0
    content = json.loads((tmp_path / "records.json").read_text())
    assert [step["step"] for step in content["steps"]] == [1, 2]
    for step in content["steps"]:
        assert min(step["rollout_s"], step["sync_s"], step["trainer_s"]) > 0
    (timed,) = step_times(read_slices(timeline))
    assert 0 < timed.parts["trainer"] < content["steps"][1]["trainer_s"]
    assert timed.parts["decode"] < content["steps"][1]["rollout_s"]
    assert content["steps"][0]["end_s"] < content["steps"][1]["end_s"]
    assert [each["num_steps"] for each in content["held_out"]] == [0, 2]
    assert (tmp_path / "training.png").stat().st_size > 1_000
    assert "step 2/2" in capsys.readouterr().out
