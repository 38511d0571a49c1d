"""Measures Kiwi against its budgets and prints docs/benchmarks.md; `--write` also writes it.

Usage: run.py [--turns N] [--tools N] [--only PART] [--write]
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import agent_turns
import before
import bookkeeping
import chains
import code_mode
import code_tasks
import composites
import context
import discovery
import gateways
import isolation
import journey
import learning
import listing
import memory_calls
import receipts
import registry
import script_tools
import starts
import syncs
import tools
from measure import Measured
from releases import fill, opened

_PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
_SOAK = "## Workers on one PostgreSQL\n"
_HEAD = """# Benchmarks

`make bench` writes this page (`benchmarks/run.py --write`). Every case runs once per turn, so that other load on the
machine affects all cases alike. Figures are medians in milliseconds. Compare ratios within one table, not figures of
different tables. CPU includes the process and its children that have ended.

Measured at commit {commit} on {machine}, Python {python}, {turns} turns.
"""
_BEFORE = f"""\
This Kiwi against the one of commit {before.COMMIT}, in turns in one run. CPU is that of the process where it ends, and
of the server alone where it serves. Budget: no case more than a tenth slower."""
_RESOLVE = (
    "`resolve` among {count:,} tools, by the id of a version. Budget: under 0.1 ms on SQLite and 0.5 ms on PostgreSQL,"
    " and 2.0 of a bare driver that asks the same."
)
_IMPORT = (
    "`publish` against the driver's own bulk insert (`executemany`, `COPY`) of exactly the rows that come of it."
    " Budget: 2.0. Within it every path, name, pin, statement and hash is checked, and the log's entries are sealed."
)
_BOOKKEEPING = """\
A call from the request to the answer, with the file and the row that it leaves, and a driver that does nothing.
Budget: 100 µs, flat. In memory (`/dev/shm`) where there is one, since what making a file costs is up to the disk."""
_PARTS = "The parts of the same call, measured where they are: each is several times quicker when repeated by itself."
_AGENT = """\
CPU of the process that runs the loop, against one model on loopback that answers at once and calls one tool per turn.
Kiwi streams the reply, writes journal, budget and receipts, and runs a recorded call of an item; the other loops do
not stream, store nothing and call a function of their own. Budget without the connection to the model: 1 ms, flat."""
_COMPOSITES = """\
A composite of ten steps against ten calls of the same sandboxed bash tool, in one kernel. In memory the steps are
`pure`; as a thread each call and its result are stored before and after."""
_MEMORY = """\
Calls of the memory's items by its owner, with a rule that permits them, among 200 files: each write is a commit in the
memory's own history."""
_CODE = """\
Ten pages of fifty rows, of which a model wants one number: it calls a tool ten times, or sends one program. The tokens
are those of all requests together. The milliseconds are those of Kiwi and of the tools, with the start of the program's
sandbox; what a model takes for nine more requests comes on top of the first row. Budget: a third of the tokens."""
_CODE_TASKS = """\
Twenty tasks of ten calls over five MCP servers (filesystem, memory, git, time, calculator), through `kiwi serve` and
through FastMCP over stdio. The model is scripted: it looks the tools up, makes the calls or sends one program, and
ends. Tokens are those of everything that it reads at each request, and that it writes. Budget: with a program, a third
of the tokens of ten calls. FastMCP's code mode reads less than Kiwi's: Kiwi sends more definitions and instructions,
and its answers to `search` and `load` carry more fields."""
_SYNC = "Through the verb `registry`, manifests parsed and all checked. Budget: the second time, no contents are read."
_LISTING = "Spawn to an answered `tools/list`. Budget: with 10,000 known tools as with ten, and the same bytes."
_GATEWAYS = """\
An echo of 100 bytes through one gateway at a time, with 1, 16 and 64 calls on their way at once, by a client that
speaks raw JSON-RPC and is the same for all. CPU is that of the gateway alone, without the client and the server behind
it.
Budget: ahead of FastMCP's proxy and mcp-proxy, where they have the same front."""
_SCRIPTS = """\
A script that echoes 100 bytes, with 1, 16 and 64 calls at once. By hand: a new process per call. Through `kiwi serve`:
`execute` over stdio, with record and receipt; CPU is that of the server and the processes that it started.
Budget: sandboxed, 1.1 of bwrap and bash by hand, and at least 150 calls per second at 64."""
_LAUNCHES = """\
The launch of one bash script through each level's backend, in one kernel's process. Budget: 4.0 of bash alone for
`sandboxed`, on a quiet machine. Restricted tools are held by control groups besides."""
_LEVELS = "A whole call of a bash tool at each level, with its record and its receipt."
_RIGHTS = "Whether the rights of an owner, a directive and a thread cover a plan. Budget: 20 µs."
_RECEIPT = "The same call with its receipt and without, in turns. Budget: 1.05."
_COMMANDS = "A new process each. The first run makes the schema and publishes what ships with Kiwi."
_FORBIDDEN = (
    "starlette",
    "uvicorn",
    "sqlite3",
    "pysqlite3",
    "psycopg",
    "sqlalchemy",
    "mcp",
    "httpx2",
    "anthropic",
    "openai",
)


def table(title: str, rows: list[Measured], budget: str) -> str:
    """Return a section of the page."""
    lines = [f"## {title}", "", budget, "", "| case | wall ms | CPU ms | ratio |", "|---|---|---|---|"]
    lines += [f"| {row.name} | {_figure(row.wall_ms)} | {_figure(row.cpu_ms)} | {row.ratio:.2f} |" for row in rows]
    return "\n".join(lines) + "\n"


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 1_000 else f"{number:.3g}"


def published(count: int, turns: int) -> list[str]:
    """Return the sections about the registry, with so many tools in it, on both databases."""
    resolves: list[Measured] = []
    imported: list[Measured] = []
    rates: list[str] = []
    with tempfile.TemporaryDirectory() as folder, registry.running_postgres() as url:
        places = (registry.sqlite_in(Path(folder)), registry.postgres_at(url))
        urls = [place.new_url() for place in places]
        for place, home in zip(places, urls, strict=True):
            started = time.perf_counter()
            with opened(home) as filled:
                fill(filled, count)
            rates.append(f"{place.name} took {count / (time.perf_counter() - started):,.0f} a second")
            resolves += registry.measure_resolve(place, home, count, turns)
            imported += registry.measure_import(place, 5)
        whole, parts = bookkeeping.measure(Path(urls[0].removeprefix("sqlite://")), count, turns * 4)
    return [
        table("A chain of three links out of the registry", resolves, _RESOLVE.format(count=count)),
        table("10,000 new tools in one transaction", imported, _IMPORT),
        f"Publishing {count:,} tools, 10,000 at a time, made and checked one by one: {', '.join(rates)}.\n",
        spreads("The bookkeeping of one execute", whole, _BOOKKEEPING),
        spreads("Where it goes", parts, _PARTS),
        synced(syncs.measure_syncs(10_000)),
        table("Commands that ask the registry", syncs.measure_commands(max(turns // 2, 3)), _COMMANDS),
    ]


def spreads(title: str, rows: Sequence[bookkeeping.Spread], about: str) -> str:
    """Return a section with microseconds of CPU."""
    lines = [f"## {title}", "", about, "", "| case | best CPU µs | median CPU µs |", "|---|---|---|"]
    lines += [f"| {row.name} | {row.best:.0f} | {row.median:.0f} |" for row in rows]
    return "\n".join(lines) + "\n"


def synced(rows: Sequence[syncs.Sync]) -> str:
    """Return the section about syncs."""
    lines = ["## A sync with a folder", "", _SYNC, "", "| sync | new versions | s | file contents read |"]
    lines += ["|---|---|---|---|"]
    lines += [f"| {row.name} | {row.versions:,} | {row.seconds:.2g} | {row.contents_read:,} |" for row in rows]
    return "\n".join(lines) + "\n"


def listed(rows: Sequence[listing.Listing]) -> str:
    """Return the section about connecting."""
    lines = ["## Connecting, by how many MCP tools are known", "", _LISTING, ""]
    lines += ["| case | wall ms | CPU ms | ratio | bytes |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.measured.name} | {_figure(row.measured.wall_ms)} | {_figure(row.measured.cpu_ms)} "
        f"| {row.measured.ratio:.2f} | {row.size:,} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def under_load(title: str, about: str, rows: Sequence[gateways.Row]) -> str:
    """Return a section about calls under load."""
    loads = [str(many) for many in gateways.AT_ONCE]
    heads = [*(f"p50 ms, {many}" for many in loads), *(f"CPU ms, {many}" for many in loads), f"calls/s, {loads[-1]}"]
    lines = [f"## {title}", "", about, "", f"| way | {' | '.join(heads)} |"]
    lines += ["|---" * (len(heads) + 1) + "|"]
    for row in rows:
        figures = [*(_figure(number) for number in (*row.middle_ms, *row.cpu_ms)), f"{row.rate[-1]:,.0f}"]
        lines.append(f"| {row.name} | {' | '.join('no answer' if one == 'nan' else one for one in figures)} |")
    return "\n".join(lines) + "\n"


def imports() -> str:
    """Return which of the modules that the kernel must not load it loads."""
    code = f"import sys, kiwi_mcp.kernel; print(*[m for m in {_FORBIDDEN!r} if m in sys.modules], len(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    *loaded, count = done.stdout.split()
    response = ", ".join(loaded) or "none"
    return (
        "## What importing the kernel loads\n\nBudget: no HTTP server, no database driver, no model code.\n\n"
        f"Of {', '.join(_FORBIDDEN)}: {response}. Modules in all: {count}.\n"
    )


def _commit() -> str:
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    done = subprocess.run(command, cwd=_PAGE.parent, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() or "unknown"


def _soaked() -> str:
    """Return the figures of `make soak`, which are written by hand at the end of the page."""
    _, mark, rest = _PAGE.read_text(encoding="utf-8").partition(_SOAK)
    return mark + rest


def parts(turns: int, tools_in_registry: int) -> Mapping[str, Callable[[], Iterable[str]]]:
    """Return what is measured, by name, in the order of the page: each gives its sections."""
    few = max(turns // 5, 2)

    def start() -> Sequence[str]:
        servers, commands = starts.measure_servers(turns), starts.measure_commands(turns)
        return [
            table("Server start: spawn to an answered `tools/list`", servers, "Budget: 1.0 of the SDK or better."),
            table("Commands: spawn to exit", commands, "Budget: `--help` 4.4 of `python -c pass`, `run` 13.9."),
        ]

    def plans() -> Sequence[str]:
        rows, second = chains.measure(max(turns, 5))
        about = "Resolve, verify, bind, authorize. Budget: under 1 ms, flat."
        first = f"The first call of a new process among 10,000 known tools takes {second:.0f} ms.\n"
        return [table("From a call to a permitted plan", rows, about), first]

    def scripts() -> Sequence[str]:
        bash, python = tools.measure(turns * 2)
        launches, levels = isolation.measure(turns * 2)
        by_hand = "Budget: 1.5 of spawning bash by hand; the record of the run is written within it."
        return [
            table("A bash tool", bash, by_hand),
            table("A process in a sandbox", launches, _LAUNCHES),
            table("A bash tool at each isolation level", levels, _LEVELS),
            spreads("A decision of rights", isolation.measure_rights(), _RIGHTS),
            table("The receipt of a call", receipts.measure(turns * 4), _RECEIPT),
            table("A Python tool without dependencies", python, "Budget: 1.5 of `python main.py`."),
        ]

    return {
        "journey": lambda: [journey.table(journey.measure())],
        "before": lambda: [f"## Before and now\n\n{_BEFORE}\n\n{before.table(before.measure(turns))}"],
        "plans": plans,
        "starts": start,
        "scripts": scripts,
        "registry": lambda: published(tools_in_registry, turns),
        "listing": lambda: [listed(listing.measure(max(turns // 3, 3)))],
        "context": lambda: [context.table(context.measure())],
        "serve": lambda: [
            under_load(f"A {language} tool as a client gets it", _SCRIPTS, rows)
            for language, rows in script_tools.measure(few).items()
        ],
        "gateways": lambda: [
            under_load(f"A call to a server over {upstream}", _GATEWAYS, rows)
            for upstream, rows in gateways.measure(few).items()
        ],
        "discovery": lambda: discovery.report(discovery.options().parse_args([]), is_page=True),
        "learning": lambda: [learning.report(learning.options().parse_args([]), is_page=True)],
        "agents": lambda: [f"## A turn of an agent, without the model\n\n{_AGENT}\n\n{agent_turns.table()}"],
        "composites": lambda: [table("A composite of ten steps", composites.measure(max(turns // 2, 3)), _COMPOSITES)],
        "memory": lambda: [table("The memory", memory_calls.measure(max(turns // 2, 3)), _MEMORY)],
        "code": lambda: [
            f"## Code mode\n\n{_CODE}\n\n{code_mode.table()}",
            f"## Code mode over five servers\n\n{_CODE_TASKS}\n\n{code_tasks.table(code_tasks.measure())}",
        ],
        "imports": lambda: [imports()],
    }


def main() -> None:
    """Measure everything, or some parts, and print it; where a part fails, nothing is written."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=15)
    options.add_argument("--tools", type=int, default=100_000, help="how many tools the registry holds")
    options.add_argument("--only", action="append", help="measure this part; may be repeated, and nothing is written")
    options.add_argument("--write", action="store_true")
    asked = options.parse_args()
    every = parts(asked.turns, asked.tools)
    if unknown := {*(asked.only or ())} - every.keys():
        options.error(f"no part is named {', '.join(sorted(unknown))}; there are: {', '.join(every)}")
    machine = f"{platform.system()} {platform.machine()}"
    sections = [_HEAD.format(commit=_commit(), machine=machine, python=platform.python_version(), turns=asked.turns)]
    failed = []
    for name in asked.only or every:
        began = time.monotonic()
        try:
            sections += every[name]()
        except Exception:  # noqa: BLE001 - the others are measured all the same
            traceback.print_exc()
            failed.append(name)
        print(f"{name}: {time.monotonic() - began:,.0f} s", file=sys.stderr, flush=True)
    page = "\n".join([*sections, _soaked()])
    print(page)
    if failed:
        raise SystemExit(f"These parts failed: {', '.join(failed)}")
    if asked.write and not asked.only:
        _PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
