"""`doctor`: each check on facts made for it, and the whole command on this machine."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgljax_engine import Engine, EngineConfig, model_config_from_hf, preview_engine
from sgljax_engine.models.registry import get_model
from tests.engine.small_tokenizers import GOLDEN
from tests.folders.tokenizer_cases import PUBLISHED
from tunix_sgljax.cli import doctor_checks as checks
from tunix_sgljax.cli import doctor_facts
from tunix_sgljax.cli.doctor import describe
from tunix_sgljax.cli.doctor_checks import Finding
from tunix_sgljax.cli.doctor_facts import Cache, Device, Facts, Model, TokenizerFolder
from tunix_sgljax.cli.main import main
from tunix_sgljax.maxtext.requirements import WHEELS

MODEL = GOLDEN / "qwen3_gqa_tied"
CPU = Device(platform="cpu", kind="cpu")
SOUND = Facts(
    python="3.11.9",
    system="Linux x86_64",
    versions={"jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.1.0"},
    requirements=("jax>=0.7.1,!=0.7.2", "numpy>=2", 'torch; extra == "other"'),
    devices=(CPU,),
    available_bytes=8 * 10**9,
    cache=Cache(path="cache", num_files=0, num_bytes=0, is_writable=True),
    model=Model(
        path="model",
        has_tokenizer=True,
        has_chat_template=True,
        pad_id=0,
        eos_ids=(1,),
        vocab_size=8,
        tokenizer_size=8,
    ),
    is_example=False,
)
GPU = dataclasses.replace(SOUND, accelerators=frozenset({"gpu"}))


def with_model(**changes):
    assert SOUND.model is not None
    return dataclasses.replace(SOUND, model=dataclasses.replace(SOUND.model, **changes))


def with_tokenizer(**facts):
    return dataclasses.replace(SOUND, tokenizers=(TokenizerFolder("folder", **facts),))


def with_versions(**changes):
    versions = {**SOUND.versions, **changes}
    present = {name: version for name, version in versions.items() if version is not None}
    return dataclasses.replace(SOUND, versions=present)


WITH_MAXTEXT = with_versions(**{wheel.name: "1" for wheel in WHEELS})


PROXY = {"JAX_PLATFORMS": "proxy"}
BEHIND_PROXY = dataclasses.replace(
    with_versions(pathwaysutils="0.1.13"),
    devices=(Device(platform="tpu", kind="TPU v5", runtime="proxy/pathways"),),
    variables=PROXY,
)


@pytest.fixture(scope="module")
def preview():
    config = json.loads((MODEL / "config.json").read_text())
    return preview_engine(model_config_from_hf(config), folder=MODEL)


@pytest.mark.parametrize("check", checks.CHECKS)
def test_a_sound_machine_has_no_findings(check):
    assert list(check(SOUND)) == []


CASES: list[tuple[Callable[[Facts], Iterator[Finding]], Facts, str, str, str]] = [
    (
        checks.check_requirements,
        with_versions(numpy="1.26.4"),
        "problem",
        "numpy 1.26.4 is not >=2",
        'pip install "numpy>=2"',
    ),
    (
        checks.check_jax_starts,
        dataclasses.replace(SOUND, jax_problem="x", variables={"JAX_PLATFORMS": "tpu"}),
        "problem",
        "JAX does not start",
        "unset JAX_PLATFORMS (it is 'tpu')",
    ),
    (
        checks.check_pathways,
        dataclasses.replace(SOUND, jax_problem="ValueError: x", variables=PROXY),
        "problem",
        "pathwaysutils, which makes its proxy known to JAX, is not installed",
        "must call pathwaysutils.initialize() before anything touches JAX",
    ),
    (
        checks.check_pathways,
        dataclasses.replace(BEHIND_PROXY, jax_problem="RuntimeError: no answer", devices=()),
        "problem",
        "Pathways' proxy gives no devices: RuntimeError: no answer",
        "JAX_BACKEND_TARGET is not set",
    ),
    (
        checks.check_pathways,
        BEHIND_PROXY,
        "note",
        "the devices do not say how much memory is free",
        "set num_kv_tokens",
    ),
    (
        checks.check_accelerator_is_used,
        GPU,
        "problem",
        "the machine has an NVIDIA GPU, but JAX uses ['cpu']",
        'pip install --upgrade "jax[cuda13]"',
    ),
    (
        checks.check_accelerator_is_used,
        dataclasses.replace(GPU, variables={"JAX_PLATFORMS": "cpu"}),
        "problem",
        "NVIDIA GPU",
        "unset JAX_PLATFORMS (it is 'cpu')",
    ),
    (
        checks.check_accelerator_is_used,
        dataclasses.replace(SOUND, accelerators=frozenset({"tpu"})),
        "problem",
        "the machine has a TPU",
        'pip install --upgrade "jax[tpu]"',
    ),
    (
        checks.check_variables,
        dataclasses.replace(
            SOUND, variables={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
        ),
        "note",
        "XLA_FLAGS splits the host's cores",
        "take --xla_force_host_platform_device_count out",
    ),
    (
        checks.check_variables,
        dataclasses.replace(SOUND, variables={"JAX_ENABLE_X64": "True"}),
        "note",
        "JAX_ENABLE_X64 is set: 64-bit",
        "unset JAX_ENABLE_X64",
    ),
    (
        checks.check_cache,
        dataclasses.replace(
            SOUND, cache=Cache(path="c", num_files=0, num_bytes=0, is_writable=False)
        ),
        "problem",
        "the compilation cache c cannot be written",
        "JAX_COMPILATION_CACHE_DIR",
    ),
    (
        checks.check_host,
        dataclasses.replace(SOUND, available_bytes=10**9),
        "note",
        "only 1.0 GB of the host's memory",
        "end other programs",
    ),
    (
        checks.check_host,
        dataclasses.replace(
            SOUND,
            devices=(
                Device(platform="gpu", kind="X", bytes_limit=80 * 10**9, bytes_in_use=79 * 10**9),
            ),
        ),
        "note",
        "device 0 (X) has 1.0 of 80.0 GB free",
        "nvidia-smi",
    ),
    (
        checks.check_maxtext,
        WITH_MAXTEXT,
        "problem",
        "needs Python 3.12 or newer, and this is 3.11.9",
        "docs/maxtext.md",
    ),
    (
        checks.check_maxtext,
        dataclasses.replace(
            WITH_MAXTEXT,
            python="3.12.1",
            versions={n: v for n, v in WITH_MAXTEXT.versions.items() if n != "aqtp"},
        ),
        "problem",
        "needs what is not: aqtp",
        'pip install --no-deps "aqtp"',
    ),
    (
        checks.check_model,
        with_model(
            problem="architecture 'X' is not supported", problem_kind="UnsupportedModelError"
        ),
        "problem",
        "model: architecture 'X' is not supported",
        "docs/add_a_model.md",
    ),
    (
        checks.check_model,
        dataclasses.replace(SOUND, preview_problem="max_model_len must be at most 512"),
        "problem",
        "max_model_len must be at most 512",
        "--engine",
    ),
    (
        checks.check_tokenizer,
        with_model(has_tokenizer=False),
        "problem",
        "has no tokenizer",
        "copy tokenizer.json",
    ),
    (
        checks.check_tokenizer,
        with_model(tokenizer_problem="ValueError: x"),
        "problem",
        "the tokenizer cannot be loaded: ValueError: x",
        "again",
    ),
    (
        checks.check_tokenizer,
        with_model(tokenizer_size=9),
        "problem",
        "the tokenizer has 9 tokens, the model 8",
        "trained with",
    ),
    (
        checks.check_tokenizer,
        with_model(pad_id=1),
        "note",
        "the pad token is 1, an end token",
        "a pad token of its own",
    ),
    (
        checks.check_tokenizer,
        with_model(eos_ids=()),
        "note",
        "no end token is known",
        "generation_config.json",
    ),
    (
        checks.check_tokenizer,
        with_model(has_chat_template=False),
        "note",
        "there is no chat template",
        "chat_template.jinja",
    ),
    (
        checks.check_tokenizer_files,
        with_tokenizer(problem="cannot read tokenizer.json"),
        "problem",
        "the tokenizer cannot be loaded: cannot read tokenizer.json",
        "again",
    ),
    (
        checks.check_tokenizer_files,
        with_tokenizer(difference="it reads 'a' as [1], X as [2]"),
        "note",
        "wrongly, and the engine as it should: it reads 'a' as [1], X as [2]",
        "load_hf_tokenizer",
    ),
]


@pytest.mark.parametrize(("check", "facts", "level", "message", "fix"), CASES)
def test_each_problem_is_found_with_its_fix(check, facts, level, message, fix):
    (finding,) = check(facts)
    assert finding.level == level
    assert message in finding.message
    assert fix in finding.fix


def test_every_check_has_a_case():
    found = {check for check, *_ in CASES} | {checks.check_dtype}
    assert found == set(checks.CHECKS)


def test_checks_of_what_an_engine_would_use(preview):
    facts = dataclasses.replace(SOUND, preview=preview)
    assert list(checks.check_dtype(facts)) == []
    slow = dataclasses.replace(facts, preview=dataclasses.replace(preview, dtype="bfloat16"))
    (finding,) = checks.check_dtype(slow)
    assert "bfloat16 is slow on CPUs" in finding.message
    small = dataclasses.replace(preview, memory=None, problem="the weights take 9 bytes")
    (finding,) = checks.check_model(dataclasses.replace(facts, preview=small))
    assert finding.message == "the model does not fit: the weights take 9 bytes"
    assert (
        list(checks.check_model(dataclasses.replace(facts, preview=small, is_example=True))) == []
    )


def test_pathways_is_known_by_its_runtime_or_by_what_is_asked_for():
    assert not SOUND.is_pathways
    assert dataclasses.replace(BEHIND_PROXY, variables={}).is_pathways
    assert dataclasses.replace(SOUND, variables={"JAX_PLATFORMS": "proxy,cpu"}).is_pathways
    limit = Device(platform="tpu", kind="TPU v5", runtime="pathways", bytes_limit=1)
    assert list(checks.check_pathways(dataclasses.replace(BEHIND_PROXY, devices=(limit,)))) == []
    not_started = dataclasses.replace(BEHIND_PROXY, jax_problem="x", devices=())
    assert list(checks.check_jax_starts(not_started)) == []  # `check_pathways` says it


def test_maxtexts_trainer_is_told_where_it_can_run():
    facts = dataclasses.replace(WITH_MAXTEXT, python="3.12.1")
    assert list(checks.check_maxtext(facts)) == []
    assert "  vLLM for TPUs: not installed" in describe(facts)
    assert not any("MaxText" in line for line in describe(SOUND))


def test_findings_put_problems_first():
    facts = dataclasses.replace(
        with_versions(numpy="1.26.4"), available_bytes=1, variables={"JAX_DEBUG_NANS": "1"}
    )
    levels = [finding.level for finding in checks.find_all(facts)]
    assert levels == ["problem", "note", "note"]


def test_accelerators_are_found_by_their_files(tmp_path):
    assert doctor_facts.find_accelerators(tmp_path) == frozenset()
    pci = tmp_path / "sys" / "bus" / "pci" / "devices"
    for name, device in (("0", "0x0042"), ("1", "0x0063")):  # a network card, a TPU v5e
        (pci / name).mkdir(parents=True)
        (pci / name / "vendor").write_text("0x1ae0\n")
        (pci / name / "device").write_text(f"{device}\n")
        kinds = {"tpu"} if name == "1" else set()
        assert doctor_facts.find_accelerators(tmp_path) == kinds
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert doctor_facts.find_accelerators(tmp_path) == {"gpu", "tpu"}


def test_cache_folder(tmp_path):
    (tmp_path / "a").write_bytes(b"123")
    cache = doctor_facts.look_at_cache(tmp_path)
    assert (cache.num_files, cache.num_bytes, cache.is_writable) == (1, 3, True)
    missing = doctor_facts.look_at_cache(tmp_path / "not" / "there")
    assert (missing.num_files, missing.is_writable) == (0, True)
    blocked = doctor_facts.look_at_cache(tmp_path / "a" / "b")  # below a file
    assert not blocked.is_writable


def doctor(*argv: Any) -> int:
    return main(["doctor", *map(str, argv)])


@pytest.fixture
def facts_here(monkeypatch):
    """What this machine's own state may add, set aside: the command runs on the rest."""
    gather = doctor_facts.gather

    def gathered(folder, config, **options):
        facts = gather(folder, config, **options)
        return dataclasses.replace(facts, available_bytes=8 * 10**9, variables={})

    monkeypatch.setattr(doctor_facts, "gather", gathered)


def test_report(facts_here, capsys):
    assert doctor("--model", MODEL) == 0
    text = capsys.readouterr().out
    for line in (
        "  google-tunix ",
        "  cpu device: cpu",
        "  compilation cache: ",
        "  weights: 0.1 m",
    ):
        assert f"\n{line}" in text
    native = "  attention: native; projections: native\n" in text
    assert native != ("\n  not native, since " in text)
    assert "  cpu (cpu), float32\n" in text
    assert text.endswith("No problems found.\n")


@pytest.mark.usefixtures("facts_here")
def test_recurrent_states_are_reported(capsys):
    doctor("--model", MODEL.parent / "qwen3_5_ratio_two")
    # Of 256 requests, as many prefixes, and 256 rows: 9,600 bytes each.
    assert "\n  recurrent states, with copies of rows for decode: 7.37 MB, 512 of them\n" in (
        capsys.readouterr().out
    )


def test_report_is_what_the_engine_then_does(preview):
    with Engine(MODEL) as engine:
        memory = engine.get_internal_state().memory
    assert preview.memory.weights_bytes == preview.weights_bytes == memory.weights_bytes
    assert preview.memory.kv_bytes == memory.kv_bytes
    is_native = preview.attention == preview.linear == "native"
    assert is_native == (preview.why_not_native is None)
    assert preview.max_model_len == 512
    config = EngineConfig.from_options({"attention_backend": "xla", "dtype": "bfloat16"})
    other_model = model_config_from_hf(json.loads((MODEL / "config.json").read_text()))
    other = preview_engine(other_model, folder=MODEL, config=config)
    assert (other.attention, other.dtype) == ("xla", "bfloat16")
    assert other.linear == preview.linear
    specs = get_model(other_model.architecture).param_specs(other_model)
    norms = sum(math.prod(spec.shape) for name, spec in specs.items() if "norm" in name)
    assert (other.weights_bytes - 4 * norms) * 2 == preview.weights_bytes - 4 * norms


def broken(tmp_path: Path, **changes: Any) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_problems_of_a_folder_end_with_1(facts_here, tmp_path, capsys):
    folder = broken(tmp_path, architectures=["Phi3ForCausalLM"])
    assert doctor("--model", folder) == 1
    text = capsys.readouterr().out
    assert "problem: " in text
    assert "architecture 'Phi3ForCausalLM' is not supported" in text


def test_missing_files_of_a_folder(facts_here, tmp_path, capsys):
    folder = broken(tmp_path)
    os.remove(folder / "tokenizer.json")
    os.remove(folder / "tokenizer_config.json")
    assert doctor("--model", folder) == 1
    assert "has no tokenizer: only token ids can be completed" in capsys.readouterr().out
    os.remove(folder / "model.safetensors")
    assert doctor("--model", folder) == 1
    text = capsys.readouterr().out
    assert "fix: download the folder again" in text
    assert f"An engine for {folder} would use" in text, "config.json is enough to plan"
    assert doctor("--model", folder, "--engine", "page_size=0") == 2


def test_a_tokenizer_that_transformers_reads_wrongly(facts_here, tmp_path, capsys):
    folder = PUBLISHED["llama2"].build("llama2").write(tmp_path)
    assert doctor("--tokenizer", folder) == 0
    assert f"it should: {folder}/tokenizer.json has another normalizer" in capsys.readouterr().out
    (folder / "tokenizer.json").write_text("{}")
    assert doctor("--tokenizer", folder) == 1
    assert f"the tokenizer cannot be loaded: cannot read the tokenizer of {folder}" in (
        capsys.readouterr().out
    )
    assert doctor("--tokenizer", folder / "none") == 2


def test_a_model_that_does_not_fit(facts_here, capsys):
    assert doctor("--model", MODEL, "--engine", "num_kv_tokens=100000000000") == 1
    assert "problem: the model does not fit: num_kv_tokens 100000000000 takes" in (
        capsys.readouterr().out
    )
