"""Installs the wheel in fresh environments, beside other versions of what it needs, and tries it.

    python .ci/install_matrix.py                   # every case: about three minutes each
    python .ci/install_matrix.py --case oldest --case newest-3.13

Each case makes a virtual environment, installs the built wheel with pip (or uv) under the case's
constraints, and runs, outside the checkout: `pip check`, `tunix-sgljax --help`, and
`install_smoke.py`. The report is benchmarks/results/install_matrix.md. A case whose Python is not
on this machine is reported so.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.environment import cpu_model

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "benchmarks/results/install_matrix.md"
SMOKE = ROOT / ".ci/install_smoke.py"
STEPS = ("install", "pip check", "--help", "imports", "engine", "rollout")
SHOWN = ("google-tunix", "jax", "flax", "qwix", "transformers", "numpy")
STEP_LIMIT_S = 1800
TIMED = ("install", "engine", "rollout")
UNREACHABLE = ("google-tunix", "llvmlite", "numpy")
"""Left out of `oldest`: Tunix has one release that is supported, and what Tunix needs needs a
newer NumPy, which the numba of that llvmlite does not take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An environment: a Python, and what its packages are held to.

    Attributes:
        name: For the command line and the report.
        python: Such as "3.11".
        constraints: Lines of a constraints file; what they leave open is the newest.
    """

    name: str
    python: str
    constraints: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a case showed.

    Attributes:
        case: Which.
        python: The full version; "" if there is no such Python here.
        versions: Of the packages.
        steps: "ok" or what went wrong, of the steps that ran.
        seconds: Of the steps that ran.
    """

    case: Case
    python: str
    versions: dict[str, str]
    steps: dict[str, str]
    seconds: dict[str, float]

    @property
    def is_ok(self) -> bool:
        """Whether every step ran and was well."""
        return all(self.steps.get(step) == "ok" for step in STEPS)


def lowest_versions(pyproject: Path = ROOT / "pyproject.toml") -> tuple[str, ...]:
    """Pins to the lower bounds that pyproject.toml declares."""
    dependencies = tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    pins = []
    for dependency in dependencies:
        match = re.match(r"([A-Za-z0-9-]+)>=([0-9.]+)", dependency)
        if match is None:
            raise ValueError(f"{pyproject}: {dependency!r} has no lower bound")
        if match[1] not in UNREACHABLE:
            pins.append(f"{match[1]}=={match[2]}")
    return tuple(pins)


def make_cases() -> list[Case]:
    """All cases."""
    return [
        *(Case(name=f"newest-{python}", python=python) for python in ("3.11", "3.12", "3.13")),
        Case(name="oldest", python="3.11", constraints=lowest_versions()),
        Case(name="jax-0.8", python="3.12", constraints=("jax==0.8.0",)),
        Case(name="jax-0.9", python="3.12", constraints=("jax==0.9.0",)),
    ]


def find_python(version: str) -> str | None:
    """An interpreter of this version: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [
        shutil.which(f"python{version}"),
        *map(str, sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)),
    ]
    for candidate in filter(None, candidates):
        # pyenv's shims are on the path whether or not their version is chosen.
        command = [candidate, "-c", "import sys, venv; print(sys.version)"]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        if shown.returncode == 0 and shown.stdout.startswith(f"{version}."):
            return candidate
    return None


def build_wheel(folder: Path) -> Path:
    """Builds the wheel with the build tools of this environment."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    return wheel


class Environment:
    """A fresh virtual environment in a folder of its own, outside the checkout.

    Attributes:
        steps: "ok" or the last line of what went wrong, of the steps that ran.
        seconds: Of the steps that ran.
    """

    def __init__(self, python: str, folder: Path, uv: str | None = None) -> None:
        self.folder = folder
        self.bin = folder / "venv/bin"
        self.steps: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self._uv = uv
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JAX_"))}
        self._variables = {
            **kept,
            "JAX_PLATFORMS": "cpu",
            # The compilation cache is the case's own; pip's is the user's.
            "XDG_CACHE_HOME": str(folder / "cache"),
            "PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache/pip")),
        }
        command = [python, "-m", "venv", str(folder / "venv")]
        subprocess.run(command, check=True, env=self._variables)

    def pip(self, step: str, command: str, *options: str | Path) -> None:
        """Runs a command of pip, or of `uv pip`."""
        python = self.bin / "python"
        if self._uv is not None:
            self.run(step, self._uv, "pip", command, "--python", python, *options)
        else:
            # What is imported is compiled then; the rest would take most of the time.
            no_compile = ["--no-compile"] if command == "install" else []
            self.run(step, python, "-m", "pip", command, *no_compile, *options)

    def run(self, step: str, *command: str | Path) -> str:
        """Runs a command, notes how it went, and returns its output."""
        start = time.perf_counter()
        done = subprocess.run(
            [str(part) for part in command],
            cwd=self.folder,
            env=self._variables,
            capture_output=True,
            text=True,
            timeout=STEP_LIMIT_S,
            check=False,
        )
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        self.note(step, "ok" if done.returncode == 0 else lines[-1], time.perf_counter() - start)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
        return done.stdout

    def note(self, step: str, outcome: str, seconds: float) -> None:
        """Keeps and prints how a step went."""
        self.steps[step], self.seconds[step] = outcome, round(seconds, 1)
        print(f"  {step}: {outcome}, {seconds:.0f} s", flush=True)


def run_case(case: Case, wheel: Path, folder: Path, uv: str | None) -> Result:
    """Makes the environment in `folder`, which must be empty, and tries the wheel in it."""
    python = find_python(case.python)
    if python is None:
        return Result(case=case, python="", versions={}, steps={}, seconds={})
    environment = Environment(python, folder, uv)
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in case.constraints))
    environment.pip("install", "install", "--quiet", "-c", constraints, wheel)
    report = {"python": case.python, "versions": {}}
    if environment.steps["install"] == "ok":
        environment.pip("pip check", "check")
        environment.run("--help", environment.bin / "tunix-sgljax", "--help")
        output = environment.run("smoke", environment.bin / "python", shutil.copy(SMOKE, folder))
        report = json.loads(output.splitlines()[-1])
        for step, outcome in report["steps"].items():
            environment.note(step, outcome, report["seconds"][step])
    return Result(
        case=case,
        python=report["python"],
        versions=report["versions"],
        steps=environment.steps,
        seconds=environment.seconds,
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def format_table(results: Sequence[Result]) -> list[str]:
    """A row for each case, and under the table what went wrong."""
    header = ["case", "Python", *SHOWN, *STEPS]
    lines = [_row(header), "|" + "---|" * len(header)]
    failures = []
    for result in results:
        if not result.python:
            cells = [result.case.name, result.case.python, "not on this machine"]
            lines.append(_row([*cells, *[""] * (len(header) - len(cells))]))
            continue
        marks = []
        for step in STEPS:
            outcome = result.steps.get(step, "not run")
            if outcome == "ok":
                marks.append(f"{result.seconds[step]:.0f} s" if step in TIMED else "ok")
            elif outcome == "not run":
                marks.append(outcome)
            else:
                marks.append("fails")
                failures.append(f"- {result.case.name}, {step}: `{outcome}`")
        shown = [result.versions.get(name, "") for name in SHOWN]
        lines.append(_row([result.case.name, result.python, *shown, *marks]))
    return [*lines, *([""] if failures else []), *failures]


def write_report(results: Sequence[Result], output: Path) -> None:
    """Writes the table as Markdown and everything as JSON beside it."""
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    lines = [
        "# The wheel beside other versions",
        "",
        f"Made on {date} by `.ci/install_matrix.py`, which describes the steps, on "
        f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores.",
        "",
        "Seconds where a step has them; they depend on the network, pip's cache and what else ran.",
        "",
        *format_table(results),
        "",
        "What each case is held to; the rest is the newest that pip resolves:",
        "",
        *(
            f"- {result.case.name}: {', '.join(result.case.constraints) or 'nothing'}"
            for result in results
        ),
    ]
    output.write_text("\n".join(lines) + "\n")
    content = {"date": date, "results": [dataclasses.asdict(result) for result in results]}
    output.with_suffix(".json").write_text(json.dumps(content, indent=2) + "\n")


def read_results(path: Path) -> list[Result]:
    """The results of an earlier run; none if there is no file."""
    if not path.exists():
        return []
    rows = json.loads(path.read_text())["results"]
    for row in rows:
        row["case"]["constraints"] = tuple(row["case"]["constraints"])
    return [Result(**(row | {"case": Case(**row["case"])})) for row in rows]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Returns the command line's options."""
    names = [case.name for case in make_cases()]
    parser = argparse.ArgumentParser(description="Try the wheel in fresh environments.")
    parser.add_argument("--case", action="append", choices=names, help="only this one; repeatable")
    parser.add_argument("--output", type=Path, default=REPORT)
    parser.add_argument("--wheel", type=Path, help="instead of building it")
    parser.add_argument("--uv", help="path of uv, which installs faster than pip")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the cases; cases that are not asked for keep their rows of the last report."""
    args = parse_args(argv)
    cases = make_cases()
    results: list[Result] = []
    kept = {result.case.name: result for result in read_results(args.output.with_suffix(".json"))}
    with tempfile.TemporaryDirectory(prefix="install-matrix-") as folder:
        wheel = args.wheel or build_wheel(Path(folder))
        for case in cases:
            if args.case is not None and case.name not in args.case:
                continue
            print(f"{case.name}: Python {case.python}, {', '.join(case.constraints)}", flush=True)
            place = Path(folder, case.name)
            place.mkdir()
            kept[case.name] = run_case(case, wheel.resolve(), place, args.uv)
            shutil.rmtree(place)
            results = [kept[case.name] for case in cases if case.name in kept]
            write_report(results, args.output)
    print("\n".join(format_table(results)))
    return 0 if all(result.is_ok for result in results if result.python) else 1


if __name__ == "__main__":
    sys.exit(main())
