"""`tunix-sgljax maxtext`: what it refuses, and that nothing stays replaced. Needs no MaxText.

The modules here stand for MaxText's own, in which only names and imports matter; tests/maxtext runs
the real trainer.
"""

from __future__ import annotations

import importlib
import sys

import pytest

from sgljax_engine import InvalidConfigError
from tests.devices import ROOT
from tunix_sgljax.cli import main as cli
from tunix_sgljax.cli import maxtext as command
from tunix_sgljax.maxtext import requirements, trainer
from tunix_sgljax.maxtext.known_faults import padding_fault

RL = "maxtext.trainers.post_train.rl"

TRAIN_RL = """
import maxtext.integration.vllm.maxtext_vllm_adapter as adapter
adapter.register()
from maxtext.integration.vllm.maxtext_vllm_rollout import MaxTextVllmRollout
ran = []
def main(argv):
    ran.append((argv, MaxTextVllmRollout))
    if "fail=True" in argv:
        raise RuntimeError("as asked")
"""
NEEDS_VLLM = "import tpu_inference\nclass MaxTextVllmRollout: ...\ndef register(): ...\n"
CONFIGS = """
from types import SimpleNamespace
class RLConfig: ...
def initialize_pydantic(argv, config_class):
    if "unknown=1" in argv:
        raise ValueError("'unknown' not in 'a', 'b'")
    return SimpleNamespace(rl=SimpleNamespace(use_agentic_rollout=False))
"""

TYPES = """
class RLConfig: ...
class LoRA:
    def __init__(self, enable_lora=False, lora_rank=0, **others):
        if others:
            raise ValueError(f"no field {next(iter(others))!r}")
        self.lora_rank = lora_rank
"""


class Rollout:
    """Stands for ours."""


@pytest.fixture
def maxtext(tmp_path, monkeypatch):
    """A package with MaxText's modules, importable; returns the folder it is in."""
    configs = tmp_path / "maxtext" / "configs"
    files = {
        "integration/vllm/maxtext_vllm_adapter": NEEDS_VLLM,
        "integration/vllm/maxtext_vllm_rollout": NEEDS_VLLM,
        "trainers/post_train/rl/train_rl": TRAIN_RL,
        "configs/pyconfig": CONFIGS,
        "configs/types": TYPES,
        "utils/model_creation_utils": "def create_models_and_meshes(*args): ...\n",
        "utils/globals": f"MAXTEXT_CONFIGS_DIR = {str(configs)!r}\n",
    }
    for name, text in files.items():
        path = tmp_path / "maxtext" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in [path for path in (tmp_path / "maxtext").rglob("*") if path.is_dir()]:
        (folder / "__init__.py").touch()
    (tmp_path / "maxtext" / "__init__.py").touch()
    (configs / "post_train").mkdir()
    (configs / "post_train" / "rl.yml").write_text("vllm_hf_overrides: {}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("maxtext", "tpu_inference", "vllm"):
            del sys.modules[name]


def run(config, *overrides):
    """Runs the trainer; returns the lines that a user reads."""
    lines = []
    options = {"page_size": 8}  # no engine
    trainer.run_rl(config, overrides, Rollout, options, lines.append)
    return lines


def names_of(package):
    return dict(vars(importlib.import_module(package)))


# ---------------------------------------------------------------------- requirements


def test_an_old_python_is_refused_with_the_way_out():
    with pytest.raises(InvalidConfigError, match=r"3\.12 or newer, and this is 3\.11\.9") as error:
        requirements.check_requirements((3, 11, 9), {})
    assert requirements.install_line(requirements.WHEELS) in str(error.value)


def test_what_is_missing_is_named_with_its_line():
    installed = {wheel.name: "1" for wheel in requirements.WHEELS}
    requirements.check_requirements((3, 12, 1), installed)
    del installed["aqtp"], installed["pathwaysutils"]
    with pytest.raises(InvalidConfigError, match="not installed: pathwaysutils, aqtp") as error:
        requirements.check_requirements((3, 13, 0), installed)
    line = 'pip install "pathwaysutils>=0.1.13" && pip install --no-deps "aqtp"'
    assert str(error.value).endswith(line)


def test_the_page_has_the_line():
    page = ROOT / "docs" / "maxtext.md"
    assert requirements.install_line(requirements.WHEELS) in page.read_text(encoding="utf-8")


def test_the_command_says_how_to_install_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(requirements, "installed_wheels", dict)
    assert cli.main(["maxtext", "rl", "rl.yml"]) == cli.EXIT_BAD_INPUT
    assert "pip install" in capsys.readouterr().err


# ---------------------------------------------------------------------- arguments


def test_options_of_ours_are_taken_out():
    words = ["rl.yml", "run_name=x", "sgljax_config.page_size=32", "sgljax_config.a.b=c"]
    options = {"page_size": 32, "a": {"b": "c"}}  # no engine
    assert command.split_words(words) == ("rl.yml", ["run_name=x"], options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a YAML file first.* got 'nothing'"),
        (["run_name=x"], "needs a YAML file first.* got 'run_name=x'"),
        (["rl.yml", "other.yml"], "key=value after the YAML file, got 'other.yml'"),
    ],
)
def test_bad_arguments_are_refused(words, message):
    with pytest.raises(InvalidConfigError, match=message):
        command.split_words(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lora.lora_rank=4"], r"lora\.lora_rank=4 has no effect without lora\.enable_lora=True"),
        (["lora.enable_lora=True"], "lora_rank must be at least 1, got 0"),
        (["lora.enable_lora=True", "lora.rank=4"], "lora: no field 'rank'"),
        (
            ["lora.enable_lora=True", "lora.lora_weight_qtype=nf4"],
            r"lora\.lora_weight_qtype is not supported in RL, got 'nf4'",
        ),
    ],
)
def test_bad_lora_is_refused(maxtext, words, message):
    with pytest.raises(InvalidConfigError, match=message):
        run("rl.yml", *words)


def test_lora_in_a_file_is_refused_with_another_way(maxtext, tmp_path):
    own = tmp_path / "own.yml"
    own.write_text("lora:\n  enable_lora: true\n")
    with pytest.raises(InvalidConfigError, match="give its keys as words"):
        run(str(own))


def test_lora_is_told_and_taken_away(maxtext):
    module = importlib.import_module("maxtext.utils.model_creation_utils")
    own = module.create_models_and_meshes
    lines = run("rl.yml", "lora.enable_lora=True", "lora.lora_rank=4")
    assert any("gives the actor LoRA pairs of rank 4 until" in line for line in lines)
    assert module.create_models_and_meshes is own


def test_maxtexts_own_refusal_is_one_of_input(maxtext):
    with pytest.raises(InvalidConfigError, match="MaxText's config: 'unknown' not in"):
        run("rl.yml", "unknown=1")


def test_a_config_that_is_nowhere(maxtext):
    with pytest.raises(InvalidConfigError, match=r"no config file 'none\.yml'.*post_train"):
        run("none.yml")


def test_keys_of_vllm_that_a_user_sets_are_named(maxtext, tmp_path):
    own = tmp_path / "own.yml"
    own.write_text("vllm_load_format: auto\nrl:\n  reshard_chunk_size: 4\nbatch_size: 2\n")
    lines = run(str(own), "async_scheduling=False")
    wanted = "nothing here: async_scheduling, rl.reshard_chunk_size, vllm_load_format"
    assert any(line.endswith(wanted) for line in lines)
    assert not any("mean nothing" in line for line in run("rl.yml", "batch_size=2"))


# ---------------------------------------------------------------------- what is put where


@pytest.mark.parametrize("fails", [False, True], ids=["runs", "fails"])
def test_without_vllm_stand_ins_are_told_and_taken_away(maxtext, fails):
    packages = ("maxtext.integration.vllm", RL)
    before = {package: names_of(package) for package in packages}
    lines, used = [], []

    def use():
        with trainer.trainer(Rollout, lines.append) as module:
            used.append(module.MaxTextVllmRollout)
            module.main(["fail=True"] if fails else [])

    if fails:
        with pytest.raises(RuntimeError, match="as asked"):
            use()
    else:
        use()
    assert used == [Rollout]
    assert "tpu_inference and vllm" in lines[0]
    assert lines[1] == f"{RL}.train_rl.MaxTextVllmRollout is Rollout until the command ends"
    assert {package: names_of(package) for package in packages} == before
    assert not any("train_rl" in name or "maxtext_vllm" in name for name in sys.modules)


@pytest.mark.parametrize("fails", [False, True], ids=["runs", "fails"])
def test_with_vllm_one_name_is_replaced_and_set_back(maxtext, fails):
    for name in ("tpu_inference", "vllm"):
        (maxtext / f"{name}.py").touch()
    importlib.invalidate_caches()
    module = importlib.import_module(f"{RL}.train_rl")
    own = module.MaxTextVllmRollout
    if fails:
        with pytest.raises(RuntimeError, match="as asked"):
            run("rl.yml", "fail=True")
    else:
        assert len(run("rl.yml", "run_name=x")) == 1
    ((argv, used),) = module.ran
    assert argv[:1] + argv[2:] == ["", "fail=True" if fails else "run_name=x"]
    assert used.func is Rollout
    assert used.keywords == {"page_size": 8}  # no engine
    assert module.MaxTextVllmRollout is own
    assert sys.modules[f"{RL}.train_rl"] is module


def test_models_whose_padding_leaks_are_known():
    class Config:
        __module__ = "maxtext.configs.types"
        decoder_block = "qwen3_next"

    fault = padding_fault(Config())
    assert fault is not None
    assert "convolution" in fault
    Config.decoder_block = "qwen3"
    assert padding_fault(Config()) is None
    assert padding_fault(None) is None
