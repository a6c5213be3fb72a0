"""Hooks of mkdocs: links from the documentation to files of the repository stay inside the site.

Pages link to benchmarks, examples and tests by relative paths (`../examples/two_models.py`), which
is right on a Git host. In the site those files are pages below `repository/`: Markdown as it is,
images as they are, all else as a listing. A link to a file that does not exist is a warning, which
`--strict` makes an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.plugins.repository_links")

ROOT = Path(__file__).parents[1]
AREA = "repository"
_LINK = re.compile(r"(?<!\\)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^ *```.*?^ *```[^\n]*$", re.MULTILINE | re.DOTALL)
_IMAGES = {".png", ".svg"}
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sh": "bash"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for every file of the repository that a page links to, and so on from there."""
    sources = {file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()}
    waiting = list(sources.values())
    seen: set[str] = set()
    while waiting:
        source = waiting.pop()
        for target in sorted(_outside(source)):
            if target in seen:
                continue
            seen.add(target)
            if not (ROOT / target).exists():
                log.warning("%s links to %s, which is not in the repository", source, target)
                continue
            files.append(_as_file(target, config))
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links that leave docs/ to where `on_files` put their targets."""
    del config, files
    here = page.file.src_uri
    source = here.removeprefix(f"{AREA}/") if here.startswith(f"{AREA}/") else f"docs/{here}"

    def rewrite(match: re.Match[str]) -> str:
        target = _target(source, match[1])
        if target is None:
            return match[0]
        place = target.removeprefix("docs/") if _is_page(target) else site_path(target)
        relative = posixpath.relpath(place, posixpath.dirname(here) or ".")
        return f"]({relative}{match[2] or ''})"

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(rewrite, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(rewrite, markdown[end:])])


def site_path(target: str) -> str:
    """Where a file of the repository is in the site's sources."""
    if (ROOT / target).is_dir():
        return f"{AREA}/{target}/index.md"
    is_kept = target.endswith(".md") or Path(target).suffix in _IMAGES
    return f"{AREA}/{target}" if is_kept else f"{AREA}/{target}.md"


def _is_page(target: str) -> bool:
    """Whether a file of the repository is in the site's own sources."""
    return target.startswith("docs/") and not target.endswith(".py")


def _as_file(target: str, config: MkDocsConfig) -> File:
    path = ROOT / target
    if path.suffix in _IMAGES:
        return File.generated(config, site_path(target), abs_src_path=str(path))
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if each.is_file())
        listing = "\n".join(f"- `{name}`" for name in names)
        return File.generated(config, site_path(target), content=f"# {target}\n\n{listing}\n")
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        fence = "`" * 5
        text = f"# {target}\n\n{fence}{_LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}\n"
    return File.generated(config, site_path(target), content=text)


def _outside(source: str) -> set[str]:
    """Files outside docs/ that a Markdown file of the repository links to."""
    text = _FENCE.sub("", (ROOT / source).read_text(encoding="utf-8"))
    targets = (_target(source, match[1]) for match in _LINK.finditer(text))
    return {target for target in targets if target and not _is_page(target)}


def _target(source: str, link: str) -> str | None:
    """The file that a link of `source` means, if one of the two is outside docs/; else None."""
    if re.match(r"[a-z]+:", link) or link.startswith("/"):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if _is_page(target) and source.startswith("docs/"):
        return None
    has_readme = (ROOT / target / "README.md").is_file()
    return f"{target}/README.md" if has_readme else target
