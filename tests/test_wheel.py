"""The built wheel: what is in it, what it asks for, and that it is built offline."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import install_matrix

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = {
    "tunix_sgljax": ROOT,
    "sgljax_engine": ROOT / "engine",
    "sgljax_cpu": ROOT / "engine",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, opened."""
    path = install_matrix.build_wheel(tmp_path_factory.mktemp("dist"))
    with zipfile.ZipFile(path) as file:
        yield file


def read_metadata(wheel, name):
    (member,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return wheel.read(member).decode()


@pytest.mark.soak
def test_the_two_packages_and_nothing_else(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to(source).as_posix()
        for package, source in SOURCES.items()
        for path in (source / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == expected
    assert {"tunix_sgljax/py.typed", "sgljax_engine/py.typed"} <= names
    assert {name.split("/")[0] for name in names} == set(SOURCES)
    folders = {name.split("/")[0] for name in wheel.namelist()} - set(SOURCES)
    assert folders == {f"tunix_sgljax-{PROJECT['version']}.dist-info"}


@pytest.mark.soak
def test_metadata_says_what_pyproject_says(wheel):
    metadata = email.message_from_string(read_metadata(wheel, "METADATA"))
    assert metadata["Name"] == PROJECT["name"]
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["Requires-Python"] == PROJECT["requires-python"] == ">=3.11"
    required = {
        _spread(line) for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line
    }
    assert required == {_spread(line) for line in PROJECT["dependencies"]}
    entry_points = read_metadata(wheel, "entry_points.txt").splitlines()
    assert entry_points == ["[console_scripts]", "tunix-sgljax = tunix_sgljax.cli.main:main"]
    assert read_metadata(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()


def _spread(requirement):
    """A requirement's name and its bounds, in any order."""
    name = re.split(r"[<>=!]", requirement, maxsplit=1)[0]
    return name, frozenset(requirement.removeprefix(name).split(","))


def test_every_dependency_has_a_lower_bound():
    pins = install_matrix.lowest_versions()
    assert len(pins) == len(PROJECT["dependencies"]) - len(install_matrix.UNREACHABLE)
    assert all(re.fullmatch(r"[a-z]+==\d+(\.\d+)*", pin) for pin in pins), pins


def test_a_dependency_without_a_bound_is_told(tmp_path):
    path = tmp_path / "pyproject.toml"
    path.write_text('[project]\ndependencies = ["jax"]\n')
    with pytest.raises(ValueError, match=r"'jax' has no lower bound"):
        install_matrix.lowest_versions(path)


@pytest.mark.soak
def test_an_installed_wheel_shows_its_version_and_needs_no_checkout(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = (
        "import importlib.metadata as m, sgljax_engine, tunix_sgljax; "
        "print(m.version('tunix-sgljax'), sgljax_engine.__file__, tunix_sgljax.__file__)"
    )
    # -I leaves the working folder and PYTHONPATH out; the wheel's folder goes first.
    command = [
        sys.executable,
        "-I",
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}",
    ]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    version, *files = shown.stdout.split()
    assert version == PROJECT["version"]
    assert all(Path(file).is_relative_to(tmp_path) for file in files)


# ------------------------------------------------------------------ the matrix' own parts


def test_this_python_is_found():
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = install_matrix.find_python(version)
    assert python is not None
    shown = subprocess.run([python, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith(f"Python {version}.")
    assert install_matrix.find_python("3.0") is None


@pytest.mark.soak
def test_steps_of_an_environment_are_noted(tmp_path, capsys):
    environment = install_matrix.Environment(sys.executable, tmp_path)
    python = environment.bin / "python"
    assert environment.run("good", python, "-c", "print('out')") == "out\n"
    environment.run("bad", python, "-c", "raise SystemExit('no such thing')")
    assert environment.steps == {"good": "ok", "bad": "no such thing"}
    assert environment.seconds.keys() == {"good", "bad"}
    assert "bad: no such thing" in capsys.readouterr().out


def make_result(name, outcome, python):
    steps = dict.fromkeys(install_matrix.STEPS, "ok") | {"rollout": outcome}
    return install_matrix.Result(
        case=install_matrix.Case(name=name, python="3.12", constraints=("jax==0.8.0",)),
        python=python,
        versions={"jax": "0.8.0"} if python else {},
        steps=steps if python else {},
        seconds=dict.fromkeys(install_matrix.STEPS, 1.5) if python else {},
    )


def test_the_report_tells_what_failed_and_is_read_back(tmp_path):
    results = [
        make_result("one", "ok", "3.12.1"),
        make_result("two", "ValueError: 3", "3.12.1"),
        make_result("none", "", ""),
    ]
    assert [result.is_ok for result in results] == [True, False, False]
    path = tmp_path / "report.md"
    install_matrix.write_report(results, path)
    assert install_matrix.read_results(path.with_suffix(".json")) == results
    lines = path.read_text().splitlines()
    (one,) = (line for line in lines if line.startswith("| one |"))
    (two,) = (line for line in lines if line.startswith("| two |"))
    assert "0.8.0" in one
    assert "fails" not in one
    assert two.endswith("| fails |")
    assert "- two, rollout: `ValueError: 3`" in lines
    assert any("not on this machine" in line for line in lines)
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_the_report_is_that_of_the_last_run():
    report = install_matrix.REPORT.read_text()
    table = "\n".join(line for line in report.splitlines() if line.startswith("|"))
    results = install_matrix.read_results(install_matrix.REPORT.with_suffix(".json"))
    assert {result.case.name for result in results} == {c.name for c in install_matrix.make_cases()}
    assert table in "\n".join(install_matrix.format_table(results))
