"""Measures Kiwi against its budgets and writes the table of docs/benchmarks.md.

Usage: run.py [--turns N] [--write]
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from pathlib import Path

import chains
import starts
import tools
from measure import Measured

_PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
_HEAD = """# Benchmarks

Made by `make bench` (`benchmarks/run.py --write`). Every case runs once a turn, so that a busy machine is busy for all
of them; figures are medians in milliseconds, and the ratios within one table are what to read. CPU counts the process
and its children where they have ended.

Measured on {machine}, Python {python}, {turns} turns.
"""
_FORBIDDEN = ("starlette", "uvicorn", "sqlite3", "psycopg", "sqlalchemy", "mcp", "httpx2", "anthropic", "openai")


def table(title: str, rows: list[Measured], budget: str) -> str:
    """Return a section of the page."""
    lines = [f"## {title}", "", budget, "", "| case | wall ms | CPU ms | ratio |", "|---|---|---|---|"]
    lines += [f"| {row.name} | {row.wall_ms:.3g} | {row.cpu_ms:.3g} | {row.ratio:.2f} |" for row in rows]
    return "\n".join(lines) + "\n"


def imports() -> str:
    """Return which of the modules that the kernel must not load it loads."""
    code = f"import sys, kiwi_mcp.kernel; print(*[m for m in {_FORBIDDEN!r} if m in sys.modules], len(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    *loaded, count = done.stdout.split()
    told = ", ".join(loaded) or "none"
    return (
        "## What importing the kernel loads\n\nBudget: no HTTP server, no database driver, no model code.\n\n"
        f"Of {', '.join(_FORBIDDEN)}: {told}. Modules in all: {count}.\n"
    )


def main() -> None:
    """Measure everything and print the page."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=15)
    options.add_argument("--write", action="store_true")
    asked = options.parse_args()
    plans, second = chains.measure(max(asked.turns, 5))
    bash, python = tools.measure(asked.turns * 2)
    machine = f"{platform.system()} {platform.machine()}"
    servers, commands = starts.measure_servers(asked.turns), starts.measure_commands(asked.turns)
    sections = [
        _HEAD.format(machine=machine, python=platform.python_version(), turns=asked.turns),
        table("From a call to a permitted plan", plans, "Resolve, verify, bind, authorize. Budget: under 1 ms, flat."),
        f"The first call of a new process among 10,000 known tools takes {second:.0f} ms.\n",
        table("Server start: spawn to an answered `tools/list`", servers, "Budget: 1.0 of the SDK or better."),
        table("Command start: spawn to first output", commands, "Budget: 1.0 of the SDK server's start or better."),
        table("A bash tool", bash, "Budget: 1.5 of spawning bash by hand; the record of the run is written within it."),
        table("A Python tool without dependencies", python, "Budget: 1.5 of `python main.py`."),
        imports(),
    ]
    page = "\n".join(sections)
    print(page)
    if asked.write:
        _PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
