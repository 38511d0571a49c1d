"""Draw the pictures of the README from the figures in docs/benchmarks.md; run by `make docs` and `make reference`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "tokens.svg"
SECTION = "## Token cost of a conversation"
WIDTH, LEFT, BAR, STEP = 720, 150, 18, 26
COLORS = {"every definition sent": "#b3542d", "through Kiwi": "#4c8c2b"}


def figures() -> list[tuple[str, int, int]]:
    """Return for each number of tools the tokens of a conversation: with every definition sent, and through Kiwi."""
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    lines = text.partition(SECTION)[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| [\d,]+ \|", line)]
    return [(row[0], _tokens(row[6]), _tokens(row[7])) for row in rows]


def _tokens(cell: str) -> int:
    return int(cell.partition(" ")[0].replace(",", ""))


def tokens_svg() -> str:
    """Return the picture: two bars for each number of tools, in proportion to the longer one."""
    parts, top = [], 46
    for tools, direct, found in figures():
        longest = max(direct, found)
        parts.append(f'<text x="12" y="{top + STEP}" class="head">{tools} tools</text>')
        for (label, color), value in zip(COLORS.items(), (direct, found), strict=True):
            width = max(round((WIDTH - LEFT - 260) * value / longest), 2)
            parts.append(f'<rect x="{LEFT}" y="{top}" width="{width}" height="{BAR}" rx="3" fill="{color}"/>')
            parts.append(f'<text x="{LEFT + width + 8}" y="{top + 14}">{value:,} {label}</text>')
            top += STEP
        top += 14
    title = "Tokens of a conversation that finds and calls one tool"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img" aria-label="{title}">
<style>text {{ font: 13px sans-serif; fill: #333 }} .head {{ font-weight: bold }}</style>
<rect width="{WIDTH}" height="{top}" rx="8" fill="#fafaf7"/>
<text x="12" y="28" class="head">{title}</text>
{chr(10).join(parts)}
</svg>
"""


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(tokens_svg(), encoding="utf-8")
