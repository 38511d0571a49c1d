"""The pictures of the README show what was measured."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_picture_of_tokens_shows_the_figures_of_the_benchmarks_page() -> None:
    pictures = runpy.run_path(str(ROOT / "scripts" / "pictures.py"))

    svg = pictures["tokens_svg"]()

    assert [tools for tools, _, _ in pictures["figures"]()] == ["10", "1,000", "10,000"]
    assert (ROOT / "docs" / "pictures" / "tokens.svg").read_text(encoding="utf-8") == svg, "run: make docs"
