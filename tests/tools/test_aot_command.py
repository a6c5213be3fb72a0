"""`python -m tools.aot`: what it refuses, and with libtpu what it reports."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from sgljax_engine import EngineConfig, preview_engine
from tests.aot.programs import TWO_LAYERS
from tests.aot.topologies import needs_libtpu, run_compiler
from tests.engine.remote_devices import remote_devices
from tests.engine.small_tokenizers import GOLDEN
from tools.aot import (
    CHIPS,
    AotReport,
    OpCount,
    ProgramMemory,
    ProgramReport,
    StepLaunches,
)
from tools.aot import __main__ as aot
from tools.aot import target as targets
from tools.aot.roofline import estimate
from tools.aot.words import NOT_RUN, describe

ROOT = Path(__file__).parents[2]
MODEL = GOLDEN / "qwen3_gqa_tied"
PATHWAYS = ROOT / "configs/qwen3_8b_pathways.yaml"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """The commands set variables for libtpu, which later tests must not see."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.fixture
def no_libtpu(monkeypatch):
    monkeypatch.delitem(os.environ, "TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)


def test_without_libtpu_it_says_what_to_install(no_libtpu, capsys):
    assert aot.main(["--model", str(MODEL), "--topology", "v5e:2x4"]) == 2
    error = capsys.readouterr().err
    assert "error: programs for TPU v5e are compiled by libtpu, which is not installed" in error
    assert "pip install libtpu" in error


def test_without_the_cuda_plugin_it_says_what_to_install(no_libtpu, capsys):
    assert aot.main(["--model", str(MODEL), "--topology", "h100:1"]) == 2
    error = capsys.readouterr().err
    assert "are compiled by JAX's CUDA plugin, which is not installed: pip install" in error


def test_a_library_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setitem(os.environ, "TPU_LIBRARY_PATH", "nowhere/libtpu.so")
    assert aot.main(["--model", str(MODEL), "--topology", "v5e:2x4"]) == 2
    assert "must name libtpu.so, got 'nowhere/libtpu.so'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", str(MODEL)], "arguments are required: --topology"),
        (["--topology", "v5e:2x4"], "--topology needs --model or --config, and not both"),
        (["--topology", "v7:2x4", "--model", "x"], "must be of one of v5e, v6e, v5p, h100"),
        (["--topology", "v5e", "--model", "x"], "'v5e:2x4' and 'h100:8', got 'v5e'"),
        (
            ["--topology", "v5e:2x4", "--model", "x", "actor_model_config.model_path=y"],
            "key=value arguments need --config, got 'actor_model_config.model_path=y'",
        ),
        (["--topology", "v5e:1x1", "--model", "x", "--programs", "few"], "'few'"),
    ],
)
def test_bad_arguments(capsys, argv, message):
    assert aot.main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def has_libtpu(monkeypatch):
    """Past the search for libtpu, which is not loaded."""
    monkeypatch.setitem(os.environ, "TPU_LIBRARY_PATH", str(MODEL / "config.json"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "qwen3-8b"], "'qwen3-8b' is no folder, and a model that Tunix knows by name"),
        (["--model", "qwen9", "--engine", "max_model_len=9"], "'qwen9' is no model that Tunix"),
        (["--model", str(MODEL), "--tp", "2", "--engine", "tp_size=2"], "give --tp or --engine tp"),
        (["--model", str(MODEL), "--engine", "dtyp=int8"], "dtyp"),
        (["--config", "nowhere.yaml"], "cannot read the config nowhere.yaml"),
        (
            ["--config", str(PATHWAYS), "actor_model_config.model_name=qwen9"],
            "'qwen9' is no model that Tunix",
        ),
    ],
)
def test_bad_models_and_engines(has_libtpu, capsys, argv, message):
    assert aot.main(["--topology", "v5e:2x4", *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "architecture", "head_dim"),
    [
        ("qwen3-0.6b", "Qwen3ForCausalLM", 128),
        ("llama-3.2-1b", "LlamaForCausalLM", 64),
        ("gemma-3-4b-it", "Gemma3ForCausalLM", 256),
    ],
)
def test_models_by_name(name, architecture, head_dim):
    """Also those that the engine has and `train` does not read."""
    model = targets.named_model(name, 1024)
    assert (model.architecture, model.head_dim, model.context_length) == (
        architecture,
        head_dim,
        1024,
    )


def report_of(**changes) -> AotReport:
    options = {"num_kv_tokens": 2048, "max_model_len": 1024}  # no engine
    config = EngineConfig.from_options(options)
    preview = preview_engine(TWO_LAYERS, config=config)
    memory = ProgramMemory(
        argument_bytes=30_000_000,
        output_bytes=9_000_000,
        alias_bytes=8_000_000,
        temp_bytes=500_000_000,
        code_bytes=1_000_000,
    )
    reduce = OpCount(
        name="all-reduce", array="", count=4, num_bytes=2048, num_loops=1, is_conditional=True
    )
    decode = ProgramReport(
        name="decode",
        size=8,
        memory=memory,
        flops=1e9,
        memory_bytes=1_000_000_000,
        collectives=(reduce,),
        compile_s=1.5,
    )
    estimates = estimate(CHIPS["v5e"], TWO_LAYERS, preview, decode)
    made = AotReport(chip=CHIPS["v5e"], preview=preview, programs=(decode,), estimates=estimates)
    return dataclasses.replace(made, **changes)


def test_the_table():
    table = describe(report_of(), "a model", "v5e:1x1")
    assert table.startswith("a model, ")
    assert "| decode of 8 rows | 0.03 GB | 0.50 GB | 0.53 GB | 1.0 |" in table
    assert "| 4, 0.00 MB | none | none |" in table
    assert NOT_RUN in table
    assert "an estimate" in table
    assert " It fits.\n" in table


def test_launches_of_a_gpu():
    launches = StepLaunches(
        total=451,
        products=113,
        own=28,
        fusions=309,
        copies=0,
        conditionals=1,
        others=0,
        per_layer=15.25,
        large_copies=0,
    )
    (decode,) = report_of().programs
    report = report_of(programs=(dataclasses.replace(decode, launches=launches),))
    table = describe(report, "a model", "h100:1")
    assert "- decode of 8 rows: 451, 15.2 a layer: 113 products, 28 kernels of ours, " in table
    assert "copies of KV pages or a weight: none\n" in table
    assert "Launches" not in describe(report_of(), "a model", "v5e:1x1")


def test_what_does_not_fit():
    program = ProgramReport(name="decode", size=8, problem="Ran out of memory", compile_s=1.0)
    report = report_of(programs=(program,), estimates=())
    assert report.problem == "decode of 8: Ran out of memory"
    table = describe(report, "m", "v5e:1x1")
    assert table.endswith(f"It does not fit: {report.problem}")
    assert "does not fit: Ran out of memory |" in table

    chip = dataclasses.replace(CHIPS["v5e"], usable_bytes=10**8)
    report = report_of(chip=chip)
    assert report.problem is not None
    assert report.problem.startswith("weights, KV and programs take ")
    assert report.problem.endswith(" bytes of a device; 100000000 can be used")


@pytest.mark.parametrize("tp_size", ["auto", 4])
def test_the_exit_code_is_1_whichever_size_does_not_fit(monkeypatch, capsys, tp_size):
    devices = np.array(remote_devices(4)).reshape(4, 1)
    target = targets.Target(
        model=TWO_LAYERS,
        folder=None,
        title="a model",
        config=EngineConfig.from_options({"tp_size": tp_size, "dtype": "float32"}),
        chip=dataclasses.replace(CHIPS["v5e"], usable_bytes=10**6),
        mesh=jax.sharding.Mesh(devices, ("data", "tp")),
    )
    monkeypatch.setattr(aot, "find_target", lambda args: target)
    assert aot.main(["--model", "x", "--topology", "v5e:2x2", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["problem"] == found["preview"]["problem"] is not None
    assert (found["preview"]["tp_size"], found["programs"]) == (4, [])


def run_command(*arguments) -> subprocess.CompletedProcess[str]:
    return run_compiler("-m", "tools.aot", *arguments)


@needs_libtpu
@pytest.mark.slow
def test_a_folder_compiled_for_a_chip():
    options = ["--engine", "max_running_requests=8", "--engine", "token_buckets=[128]"]
    options += ["--engine", "chunked_prefill_size=128", "--engine", "batch_buckets=[8]"]
    done = run_command("--model", MODEL, "--topology", "v6e:1x1", "--json", *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["topology"], found["problem"]) == ("v6e:1x1", None)
    assert [program["name"] for program in found["programs"]] == ["decode", "prefill", "copy_pages"]
    assert "compiling decode of 8 for v6e:1x1\n" in done.stderr


@needs_libtpu
@pytest.mark.slow
def test_whether_a_config_fits_a_topology():
    done = run_command("--config", PATHWAYS, "--topology", "v6e:2x4", "--programs", "none")
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"{PATHWAYS}, bfloat16, on v6e:2x4: 1 engine(s) of 8 device(s)" in done.stdout
    assert "It fits." in done.stdout
    named = ["--model", "qwen3-8b", "--engine", "max_model_len=4096", "--programs", "none"]
    done = run_command(*named, "--topology", "v5e:1x1", "--engine", "dtype=float32")
    assert done.returncode == 1
    assert "It does not fit: the weights take 32762941440 bytes" in done.stdout
