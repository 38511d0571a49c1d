"""What was measured of discovery, and the tables that show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labelled import METRICS, Mode, mean

_MODES: Mapping[Mode, str] = {
    "closed": "Closed: each set among its own tools",
    "open": "Open: each set among the tools of all",
}


@dataclass(frozen=True, slots=True)
class Quality:
    """How well one finder does on one set."""

    mode: Mode
    finder: str
    dataset: str
    tools: int
    needs: int
    found: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Speed:
    """Milliseconds that a finder takes, half of the time and 99 times of 100, for short requests and for all."""

    finder: str
    tools: int
    asked: int
    short: tuple[float, float]
    every: tuple[float, float]
    memory_mb: float


@dataclass(frozen=True, slots=True)
class First:
    """The first search of a process: what of numbers and models was loaded before it, time, and memory."""

    case: str
    loaded: Sequence[str]
    first_ms: float
    next_ms: float
    before_mb: float
    after_mb: float


def quality_table(rows: Sequence[Quality], names: Mapping[str, str]) -> str:
    """Return the tables of quality; `names` are what sets are called in them."""
    lines = []
    for mode in dict.fromkeys(row.mode for row in rows):
        lines += [f"### {_MODES[mode]}", "", f"| set | tools | requests | finder | {' | '.join(METRICS)} |"]
        lines += ["|---" * (4 + len(METRICS)) + "|"]
        of_mode = [row for row in rows if row.mode == mode]
        for row in sorted(of_mode, key=lambda row: row.dataset):
            what = f"{names.get(row.dataset, row.dataset)} | {row.tools:,} | {row.needs:,} | {row.finder}"
            lines.append(f"| {what} | {_percents(row.found)} |")
        for finder in dict.fromkeys(row.finder for row in of_mode):
            found = mean([row.found for row in of_mode if row.finder == finder])
            lines.append(f"| **mean** | | | **{finder}** | {_percents(found)} |")
        lines.append("")
    return "\n".join(lines)


def speed_table(rows: Sequence[Speed]) -> str:
    """Return the table of speed."""
    lines = ["| tools | finder | asked | short: p50 ms | p99 ms | all: p50 ms | p99 ms | memory MB |", "|---" * 8 + "|"]
    for row in rows:
        figures = " | ".join(f"{number:.3g}" for number in (*row.short, *row.every))
        lines.append(f"| {row.tools:,} | {row.finder} | {row.asked:,} | {figures} | {row.memory_mb:,.0f} |")
    return "\n".join(lines) + "\n"


def first_table(rows: Sequence[First]) -> str:
    """Return the table of first searches."""
    lines = ["| case | loaded before | first ms | next ms | MB before | MB after |", "|---" * 6 + "|"]
    for row in rows:
        figures = f"{row.first_ms:.0f} | {row.next_ms:.3g} | {row.before_mb:.0f} | {row.after_mb:.0f}"
        lines.append(f"| {row.case} | {', '.join(row.loaded) or 'none of them'} | {figures} |")
    return "\n".join(lines) + "\n"


def _percents(found: Mapping[str, float]) -> str:
    return " | ".join(f"{100 * found[metric]:.1f}" for metric in METRICS)
