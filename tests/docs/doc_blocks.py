"""Reads the code blocks of a documentation page, and runs its Python."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(
    r"^(?P<note><!-- not run: [^\n]+ -->\n\n)?```(?P<kind>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def load_script(name: str) -> Any:
    """The module of a script of docs/, which is no package; as `import` has it."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Block(NamedTuple):
    """A fenced block, with what the page says it prints; None if it says nothing."""

    line: int
    kind: str
    code: str
    is_run: bool
    prints: str | None


def blocks(page: str) -> list[Block]:
    """The blocks of a page in order; a text block right behind another is what that one prints."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found: list[Block] = []
    end = -1
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("kind")) + 2
        if match["kind"] == "text" and found and text[end : match.start()] == "\n\n":
            found[-1] = found[-1]._replace(prints=match["code"])
        else:
            found.append(Block(line, match["kind"], match["code"], match["note"] is None, None))
        end = match.end()
    return found


def line_of(page: str, heading: str) -> int:
    """The line of a heading of a page, from 1."""
    return (DOCS / page).read_text(encoding="utf-8").splitlines().index(heading) + 1


def run(page: str, names: dict[str, Any], lines: range = range(sys.maxsize)) -> int:
    """Runs a page's Python blocks one after another; returns how many.

    Args:
        page: Its path in docs/.
        names: What the blocks may use beside one another's names.
        lines: Where the blocks that are run begin, from 1.

    Raises:
        AssertionError: a block did not print what is below it.
    """
    count = 0
    for block in blocks(page):
        if block.kind != "python" or block.line not in lines:
            continue
        # Line numbers of the page in tracebacks.
        code = compile("\n" * (block.line - 1) + block.code, f"docs/{page}", "exec")
        if not block.is_run:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        count += 1
        if block.prints is not None:
            where = f"docs/{page}:{block.line}"
            assert printed.getvalue() == block.prints, f"{where} printed\n{printed.getvalue()}"
    return count
