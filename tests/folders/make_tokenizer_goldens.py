"""Writes what transformers alone makes of the generated tokenizer folders, as digests.

Run by hand, once with each of the two releases, never by the test suite; no torch is needed:

    python -m venv goldvenv
    goldvenv/bin/pip install "transformers==5.24.0"   # then "transformers==4.51.3"
    goldvenv/bin/python -m tests.folders.make_tokenizer_goldens

tokenizer_goldens.json has for each release and folder two digests, of the ids with BOS and EOS
and of ids and texts without; one is "raises" where loading or encoding failed.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import transformers
from transformers import AutoTokenizer

from tests.folders.tokenizer_answers import INNER, digest, of_transformers
from tests.folders.tokenizer_cases import TokenizerCase, all_cases

GOLDENS = Path(__file__).with_name("tokenizer_goldens.json")


def golden(case: TokenizerCase, parent: Path) -> list[str]:
    """Digests of the ids with BOS and EOS, and of what is inside."""
    folder = case.write(parent)
    try:
        answers = of_transformers(AutoTokenizer.from_pretrained(str(folder)))
    except Exception:  # each class raises what it likes
        return ["raises", "raises"]
    return [digest(answers, ("whole",)), digest(answers, INNER)]


def main() -> None:
    """Adds the installed release's digests to the file, or replaces them."""
    transformers.logging.set_verbosity_error()
    goldens = json.loads(GOLDENS.read_text()) if GOLDENS.exists() else {}
    with tempfile.TemporaryDirectory() as parent:
        goldens[transformers.__version__] = {
            case.name: golden(case, Path(parent)) for case in all_cases()
        }
    releases = (
        f' "{release}": {{\n'
        + ",\n".join(f'  "{name}": {json.dumps(pair)}' for name, pair in cases.items())
        + "\n }"
        for release, cases in sorted(goldens.items())
    )
    GOLDENS.write_text("{\n" + ",\n".join(releases) + "\n}\n")


if __name__ == "__main__":
    main()
