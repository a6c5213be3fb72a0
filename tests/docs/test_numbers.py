"""Numbers, versions, options, paths and names in README and the pages: each has a source."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import re
import shlex
import statistics
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tunix

import hf_folder
from tests.docs import doc_blocks
from tunix_sgljax.cli.main import COMMANDS, main, make_parser

ROOT = doc_blocks.DOCS.parent
RESULTS = ROOT / "benchmarks/results"
PAGES = (ROOT / "README.md", *sorted(doc_blocks.DOCS.rglob("*.md")))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TUNIX = Path(tunix.__path__[0])


def read(page: str) -> str:
    """A page as one line of words, without the line breaks that move."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def numbers(page: str, pattern: str) -> list[float]:
    """The numbers that the groups of a sentence match, which must be there once."""
    (found,) = re.findall(pattern, read(page))
    return [float(each.replace(",", "")) for each in ([found] if isinstance(found, str) else found)]


@pytest.fixture(scope="module")
def plot():
    spec = importlib.util.spec_from_file_location("plot", ROOT / "docs/make_engines_plot.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_how_much_of_a_step_is_sampling(plot):
    steps = plot.steps()
    vanilla, ours = numbers("README.md", r"it is (\d+) % with vanilla and (\d+) % with this engine")
    assert round(100 * steps["vanilla"].share) == vanilla
    assert round(100 * steps["sgljax"].share) == ours


def test_how_much_faster_the_training_of_the_picture_is(plot):
    (times,) = numbers("README.md", r"the whole training ([\d.]+) times as fast")
    assert round(plot.times_faster(), 1) == times


def test_the_real_models_page_has_the_pictures_seconds(plot):
    text = (ROOT / "docs/first_steps.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (this one|vanilla) \| (.+) \|$", text, re.MULTILINE))
    for name, engine in (("this one", "sgljax"), ("vanilla", "vanilla")):
        runs = [run["steps"] for run in result("real_training")["runs"] if run["engine"] == engine]
        first, last, minutes = (
            ", ".join(found)
            for found in zip(
                *(
                    (
                        f"{statistics.fmean(step['reward'] for step in steps[:3]):.2f}",
                        f"{statistics.fmean(step['reward'] for step in steps[-3:]):.2f}",
                        f"{steps[-1]['end_s'] / 60:.1f}",
                    )
                    for steps in runs
                ),
                strict=True,
            )
        )
        step = plot.steps()[engine]
        seconds = f"{step.sampling_s:.1f} | {step.trainer_s:.1f}"
        assert rows[name] == f"{first} | {last} | {seconds} | {minutes}"


def test_the_real_models_page_says_where_three_times_would_be(plot):
    found = numbers(
        "docs/first_steps.md",
        r"([\d.]+) times as long with vanilla, and the whole training ([\d.]+) times, since the "
        r"trainer takes (\d+) s with either. Three times would need a step of (\d+) s in place of "
        r"(\d+)\.",
    )
    ours, theirs = (plot.steps()[engine] for engine in ("sgljax", "vanilla"))
    assert found == [
        round(theirs.sampling_s / ours.sampling_s, 1),
        round(plot.times_faster(), 1),
        round(ours.trainer_s),
        round(theirs.total_s / 3),
        round(ours.total_s),
    ]


def test_speeds_of_gpus():
    found = numbers(
        "README.md", r"at ([\d.]+) times Tunix's sampler on an H100 and ([\d.]+) times on an H200"
    )
    for name, times in zip(("gpu", "gpu_h200"), found, strict=True):
        rate = {each["contestant"]: each["useful tokens/s"] for each in result(name)["rollouts"]}
        assert round(rate["engine, pallas"] / rate["vanilla"], 1) == times, name


def test_speed_of_a_cpu():
    (times,) = numbers("README.md", r"(\d+) times Tunix's sampler on long-tailed outputs")
    (workload,) = (
        each for each in result("bench_small")["workloads"] if each["workload"] == "rl_longtail"
    )
    ratios = [
        statistics.median(
            theirs / ours for theirs, ours in zip(peer["runs_s"], peer["our_runs_s"], strict=True)
        )
        for peer in workload["peers"]
        if peer["name"].startswith("vanilla")
    ]
    assert round(min(ratios)) == times


def test_the_demos_answers_and_seconds():
    """That it takes as long with either engine."""
    (tokens,) = numbers("README.md", r"whose answers have (\d+) tokens, takes as long with either")
    runs = result("grpo_addition")["runs"]
    seconds = {
        name: statistics.fmean(run["run_s"] for run in runs if run["rollout"] == name)
        for name in ("sgljax", "vanilla")
    }
    assert seconds["sgljax"] == pytest.approx(seconds["vanilla"], rel=0.02)
    per_step = statistics.fmean(run["tokens_per_s"] * run["rollout_s"] for run in runs)
    assert per_step / 128 == pytest.approx(tokens, abs=2)


def test_log_probs():
    (bound,) = numbers("README.md", r"Log-probs within ([\d.e-]+) of the trainer's in float32")
    found = [
        report["overall"]["max_abs"]
        for name, report in result("mismatch")["reports"].items()
        if "float32" in name and "trainer_logprobs" in name
    ]
    assert 0.8 * bound < max(found) <= bound


def test_random_pauses():
    (cycles,) = numbers("README.md", r"([\d,]+) random pauses and weight updates")
    assert result("interruptions")["effort"]["num_cycles"] == cycles


def test_what_doctor_says_of_the_first_model(tmp_path, capsys):
    assert hf_folder.main([str(tmp_path / "addition_hf")]) == 0
    main(["doctor", "--model", str(tmp_path / "addition_hf")])
    printed = capsys.readouterr().out
    page = (ROOT / "docs/first_steps.md").read_text(encoding="utf-8")
    for line in ("weights", "KV cache", "max_model_len"):
        (found,) = re.findall(rf"^  {line}: .*$", page, re.MULTILINE)
        assert found in printed


def test_rewards_of_the_first_steps():
    rewards = result("over_sampling")["trainings"]["plain"]["0"]["rewards"][:10]
    steps = re.findall(r"step +(\d+)/10 +reward ([\d.]+)", read("docs/first_steps.md"))
    assert len(steps) == 3
    for step, reward in steps:
        assert f"{rewards[int(step) - 1]:.3f}" == reward
    (mean,) = numbers("docs/first_steps.md", r"mean reward ([\d.]+) in 10 steps")
    assert f"{statistics.fmean(rewards):.3f}" == f"{mean:.3f}"


def test_versions():
    (bounds,) = (line for line in PROJECT["dependencies"] if line.startswith("google-tunix"))
    stated = bounds.replace(">=", " >= ").replace(",<", ", < ")
    assert stated in read("README.md")
    python = PROJECT["requires-python"].removeprefix(">=")
    for page in ("README.md", "docs/installation.md"):
        assert f"Python {python} or newer" in read(page), page


def test_the_range_of_jax_is_that_of_the_install_matrix():
    cases = result("install_matrix")["results"]
    lowest, highest, first, last = re.findall(
        r"JAX ([\d.]+) to ([\d.]+), Python ([\d.]+) to ([\d.]+)", read("docs/installation.md")
    )[0]

    def key(version: str) -> list[int]:
        return [int(part) for part in version.split(".")]

    jax = sorted({case["versions"]["jax"] for case in cases}, key=key)
    assert (lowest, highest) == (jax[0], jax[-1])
    pythons = sorted({".".join(case["python"].split(".")[:2]) for case in cases}, key=key)
    assert (first, last) == (pythons[0], pythons[-1])


def test_the_table_of_engines_says_what_tunixs_own_sources_do():
    generate, rollout = TUNIX / "generate", TUNIX / "rl/rollout"
    vllm = (generate / "vllm_sampler.py").read_text(encoding="utf-8")
    sglang = (generate / "sglang_jax_sampler.py").read_text(encoding="utf-8")
    assert "from vllm import" in vllm
    assert "TPU_BACKEND_TYPE" in vllm
    assert "from sgl_jax" in sglang
    four = ("enable_static_lora", "lora_target_modules", "max_lora_rank", "lora_scaling")
    assert all(f"config.{name}" in sglang for name in four)
    for text in (vllm, sglang, (rollout / "vanilla_rollout.py").read_text(encoding="utf-8")):
        assert not re.search(r"def (pause|sleep|wake)", text)
    extras = importlib.metadata.metadata("google-tunix").get_all("Provides-Extra") or []
    assert not {"vllm", "sglang", "sglang-jax"} & set(extras)


def commands(text: str) -> list[list[str]]:
    """The words behind `tunix-sgljax` in code blocks and in backticks, comments left out."""
    joined = text.replace("\\\n", " ")
    lines = re.findall(r"^\s*tunix-sgljax (.+)$", joined, re.MULTILINE)
    lines += re.findall(r"`tunix-sgljax ([^`]+)`", joined)
    return [shlex.split(line, comments=True) for line in lines]


def options(name: str) -> set[str]:
    """All options of a command."""
    (actions,) = (
        action
        for action in make_parser([name])._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return set(actions.choices[name]._option_string_actions)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_the_options_that_pages_give_them(page):
    for words in commands(page.read_text(encoding="utf-8")):
        name = words[0]
        if not name.isalpha() or not name.islower():
            continue  # COMMAND, or an option of all
        assert name in COMMANDS, f"{page.name}: {words}"
        given = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
        if name not in ("tunix", "maxtext"):  # theirs are others'
            assert given <= options(name), f"{page.name}: {words}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_pages_exist(page):
    text = page.read_text(encoding="utf-8")
    folders = "benchmarks|configs|docs|engine|examples|notebooks|tests|tools|tunix_sgljax"
    for path in set(re.findall(rf"`((?:{folders})/[\w./-]+)`", text)):
        if path != "tests/soak.txt":  # `make soak` writes it
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_make_targets_in_pages_exist():
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    for page in PAGES:
        named = re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(named) <= targets, f"{page.name}: {set(named) - targets}"


def test_two_lines_are_called_two():
    """The switch of a script is an import and an argument."""
    for page in PAGES:
        text = read(page.relative_to(ROOT).as_posix())
        found = re.findall(r"[^.]*\b[Oo]ne line\b[^.]*(?:script|ClusterConfig|engine)[^.]*\.", text)
        assert found == [], page.name
