"""samples.jsonl: whole lines whatever happens, and the steps of a run that resumes."""

import json
import resource
import threading

import pytest

from tunix_sgljax.training import report, samples
from tunix_sgljax.training.report import StepLines, StepRecord


class Run:
    """A file whose batches come from another thread, as those of Tunix's learners do."""

    def __init__(self, path, num_done=0):
        self.step = num_done + 1
        self.file = samples.SampleFile(path, lambda: self.step, num_done)

    def add(self, *completions):
        prompts = ["2+2="] * len(completions)
        rewards = [float(text == "4") for text in completions]
        call = {"prompts": prompts, "completions": completions, "rewards": rewards, "answer": 4}
        thread = threading.Thread(target=self.file.add, kwargs=call)
        thread.start()
        thread.join()
        self.step += 1


@pytest.fixture
def start():
    runs = []

    def make(path, num_done=0):
        runs.append(Run(path, num_done))
        return runs[-1]

    yield make
    for run in runs:
        run.file.close()


def read(path):
    text = path.read_text(encoding="utf-8")
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_each_completion_is_a_line(tmp_path, start):
    path = tmp_path / "out/samples.jsonl"
    run = start(path)
    run.add("4", "f\u00fcnf\n5")
    assert read(path) == [
        {"step": 1, "prompt": "2+2=", "completion": "4", "reward": 1.0},
        {"step": 1, "prompt": "2+2=", "completion": "f\u00fcnf\n5", "reward": 0.0},
    ]
    assert run.file.first == samples.Sample(1, "2+2=", "4", 1.0)
    run.add("\ud83d")  # half a character
    assert read(path)[-1]["completion"] == "\ud83d"
    assert run.file.first == samples.Sample(2, "2+2=", "\ud83d", 0.0)


def test_evaluation_is_left_out(tmp_path, start):
    run = start(tmp_path / "samples.jsonl")
    assert run.file.add(prompts=["a"], completions=["b"], rewards=[1.0]) == {}
    assert read(tmp_path / "samples.jsonl") == []


@pytest.mark.parametrize(
    ("num_done", "kept"), [(0, []), (1, [1, 1]), (2, [1, 1, 2]), (9, [1, 1, 2])]
)
@pytest.mark.parametrize("tail", [b"", b'{"step": 2, "prompt": "cut', b"[]\n", b"\xff\n"])
def test_a_resumed_run_keeps_the_lines_of_its_checkpoint(tmp_path, start, num_done, kept, tail):
    path = tmp_path / "samples.jsonl"
    before = start(path)
    before.add("4", "5")
    before.add("6")
    before.file.close()
    before.file.close()
    with path.open("ab") as file:
        file.write(tail)
    after = start(path, num_done)
    after.add("7")
    steps = [row["step"] for row in read(path)]
    assert steps == [*kept, num_done + 1]


def test_a_full_disk_ends_the_file_and_not_the_run(tmp_path, start, caplog):
    path = tmp_path / "samples.jsonl"
    run = start(path)
    run.add("4")
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size + 10, hard))
    try:
        run.add("4", "4", "4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(read(path)) == 2
    run.add("4")
    assert len(read(path)) == 2
    assert caplog.text.count("ends here, and the run goes on") == 1
    assert run.file.first == samples.Sample(3, "2+2=", "4", 1.0), "still there to look at"


def test_a_sample_is_described_in_a_few_lines():
    sample = samples.Sample(10, "Q:\n2+2=", "\x1b[2J" + "4" * 2000, 0.5)
    first, *lines = samples.describe_sample(sample).splitlines()
    assert first == "sample of step 10, reward 0.500"
    assert lines[:2] == ["  prompt      Q:", "              2+2="]
    assert lines[2].startswith("  completion  \\x1b[2J444")
    assert " [1404 characters] 444" in lines[2]
    assert len(lines[2]) < samples.MAX_SHOWN + 50


def record(step, step_s):
    return StepRecord(step, 0.25, 0.5, 100, step_s, step - 1)


def test_lines_of_steps_have_the_steps_seconds_and_the_time_left(capsys):
    lines = StepLines(50)
    for step, step_s in ((1, 60.0), (2, 5.0), (3, 5.0), (4, 9.0), (50, 5.0)):
        lines(record(step, step_s))
    first, second, _, fourth, last = capsys.readouterr().out.splitlines()
    assert first == (
        "step  1/50  reward 0.250  60.00 s, rollout 0.50 s at 200 tokens/s  weights 0"
    ), "a step that compiles says nothing about the others"
    assert second.endswith("5.00 s, rollout 0.50 s at 200 tokens/s  weights 1  4 min left")
    assert fourth.endswith("weights 3  4 min left"), "a median"
    assert last.endswith("weights 49")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5399, "90 min"), (9e3, "2.5 h")],
)
def test_times(seconds, text):
    assert report.describe_time(seconds) == text
