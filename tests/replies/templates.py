"""Our response templates as JSON, for tests/golden/make_response_goldens.py."""

from __future__ import annotations

import json
import sys

from sgljax_engine.replies.formats import known_template
from tests.replies.forms import FORMS


def templates() -> dict[str, object]:
    return {name: known_template(form.template) for name, form in FORMS.items()}


if __name__ == "__main__":
    json.dump(templates(), sys.stdout)
