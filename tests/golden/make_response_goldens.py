"""Writes what transformers' ResponseParser makes of the replies of tests/replies/forms.py.

    python -m tests.replies.templates | \
        OTHER_PYTHON -m tests.golden.make_response_goldens tests/golden/response_parser.json

`OTHER_PYTHON` has transformers >= 5.13, which cannot be installed beside Tunix. It gets our
response templates. An answer is kept as two bytes of its digest; 0 for one that it refuses.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import base64
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import transformers
from transformers.utils.chat_parsing import parse_response

from tests.replies.forms import NUM_REPLIES, TOOLS, digest, make_reply, normal_form


def answer(reply: Any, template: Any) -> int:
    tools = TOOLS if "tool_calls" in template["fields"] else None
    try:
        found = parse_response(reply.text, template, prefix=reply.prompt, tools=tools)
        functions = [each["function"] for each in found.get("tool_calls") or []]
        calls = [
            (each["name"], each.get("arguments", each.get("parameters"))) for each in functions
        ]
    except Exception:  # whatever it raises for a text that it cannot read
        return 0
    thoughts, content = found.get("reasoning_content") or "", found.get("content") or ""
    return digest(normal_form(thoughts, content, calls))


def main() -> None:
    warnings.simplefilter("ignore")
    templates = json.load(sys.stdin)
    answers = {}
    for name, template in templates.items():
        codes = [answer(make_reply(name, seed), template) for seed in range(NUM_REPLIES)]
        packed = b"".join(code.to_bytes(2, "big") for code in codes)
        answers[name] = base64.b85encode(packed).decode()
    known = {"transformers": transformers.__version__, "templates": templates, "answers": answers}
    Path(sys.argv[1]).write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
