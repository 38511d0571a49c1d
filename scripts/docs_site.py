"""Hooks of mkdocs: the README is the first page, and links to files that are no page become plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(`{3,4})(\w+) (\S+)$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are outside of docs/."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page with links as the site has them, and the file name of a code block as its title."""
    names = {name: source for source, name in PAGES.items()}
    path = page.file.src_uri
    here = ROOT if path in names else (ROOT / "docs" / path).parent

    def link(found: re.Match[str]) -> str:
        mark, text, target, anchor = found[1], found[2], found[3], found[4] or ""
        file = (here / target).resolve()
        if not file.is_relative_to(ROOT) or not file.exists():
            return found[0]  # mkdocs reports it
        inside = file.relative_to(ROOT).as_posix()
        place = PAGES.get(inside) or (inside.removeprefix("docs/") if inside.startswith("docs/") else "")
        if not place:
            return f"`{text.strip('`')}`"
        return f"{mark}[{text}]({'../' * path.count('/')}{place}{anchor})"

    return _FENCE.sub(r'\1\2 title="\3"', _LINK.sub(link, markdown))
