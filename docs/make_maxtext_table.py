"""Writes the tables of docs/maxtext.md: which models, and how near the engine is to them.

    python docs/make_maxtext_table.py

Needs MaxText: `make test-maxtext` makes an environment with it, and compares the page with
`render(page)`. How near comes from benchmarks/results/maxtext.json, which
`python -m tests.maxtext.agreement` writes.
"""

from __future__ import annotations

import collections
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sgljax_engine import UnsupportedModelError
from tunix_sgljax.maxtext.model_config import to_model_config

OUTPUT = Path(__file__).with_name("maxtext.md")
_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results" / "maxtext.json"
_TABLE = "maxtext.checkpoint_conversion.utils.hf_model_configs"
# By name: types are checked without MaxText.
MODELS: Any = importlib.import_module(_TABLE).HF_MODEL_CONFIGS
"""The models that `TunixMaxTextAdapter` takes."""
pyconfig: Any = importlib.import_module("maxtext.configs.pyconfig")
_CONFIGS = Path(importlib.import_module("maxtext.utils.globals").MAXTEXT_CONFIGS_DIR)
_WORDS = (
    "run_name=table",
    "hardware=cpu",
    "skip_jax_distributed_system=True",
    "log_config=False",
    "jax_cache_dir=",
    "attention=dot_product",
    "convert_checkpoint_if_possible=False",
)
_HEAD = (
    "| model | float32: apart | bfloat16: greedy | error | MaxText's error |",
    "|---|---:|---:|---:|---:|",
)


def render(text: str) -> str:
    """The text of the page with its tables made anew."""
    for name, lines in (("models", _models()), ("agreement", _agreement())):
        begin = f"<!-- {name}: made by docs/make_maxtext_table.py -->\n"
        end = f"<!-- end of {name} -->\n"
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = f"{head}{begin}\n{chr(10).join(lines)}\n\n{end}{tail}"
    return text


def _models() -> Iterator[str]:
    models = collections.defaultdict(list)
    for name in MODELS:
        models[_answer(name)].append(f"`{name}`")
    yield "| models | |"
    yield "|---|---|"
    for answer, names in models.items():
        yield f"| {', '.join(names)} | {answer} |"


def _answer(name: str) -> str:
    """What the converter says to the config that MaxText has for a model."""
    file = name.removesuffix("-Instruct")
    if not (_CONFIGS / "models" / f"{file}.yml").is_file():
        return "no: MaxText has no config file of that name"
    try:
        model = to_model_config(_config(name), context_length=4096)
    except UnsupportedModelError as error:
        reason = str(error).removeprefix("MaxText's ").partition(" is not supported")[0]
        field, _, value = reason.partition("=")
        return f"no: `{field}={value.strip(chr(39))}`"
    return f"yes, `{model.architecture}`"


def _config(name: str) -> Any:
    """MaxText's own config of a model, with flat layers if it refuses to scan them."""
    argv = ["", str(_CONFIGS / "base.yml"), f"model_name={name}", *_WORDS]
    try:
        return pyconfig._initialize_pydantic(argv)
    except ValueError:
        flat = ("override_model_config=True", "scan_layers=False")
        return pyconfig._initialize_pydantic([*argv, *flat])


def _agreement() -> Iterator[str]:
    content = json.loads(_RESULTS.read_text(encoding="utf-8"))
    rows = collections.defaultdict(list)
    for row in content["rows"]:
        rows[row["case"]["family"], row["dtype"]].append(row)
    yield from _HEAD
    for family in dict.fromkeys(family for family, _ in rows):
        exact, rounded = rows[family, "float32"], rows[family, "bfloat16"]
        if any(row["num_equal"] < row["num_greedy"] for row in exact):
            raise ValueError(f"{family}: the page says that float32's greedy tokens are equal")
        worst = min(rounded, key=lambda row: row["num_equal"])
        cells = (
            f"`{family}`",
            f"{max(row['difference'] for row in exact):.1e}",
            f"{worst['num_equal']}/{worst['num_greedy']}",
            *(f"{max(row[name] for row in rounded):.3f}" for name in ("error", "maxtext_error")),
        )
        yield f"| {' | '.join(cells)} |"
    versions = content["environment"]
    yield ""
    with_them = ", ".join(f"{name} {versions[name]}" for name in ("maxtext", "google-tunix", "jax"))
    yield f"Measured on {versions['date']}, {versions['device']}, with {with_them}."


if __name__ == "__main__":
    OUTPUT.write_text(render(OUTPUT.read_text(encoding="utf-8")), encoding="utf-8")
