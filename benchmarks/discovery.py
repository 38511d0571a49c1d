"""How well and how quickly search finds tools, beside FastMCP's search and SQLite's own.

Usage: discovery.py [--quality] [--speed] [--first] [--words] [--data FOLDER] [--dataset NAME] [--limit N] [--sizes N,N]

The data is that of `--data`, of `KIWI_DISCOVERY_DATA`, or of `../shared/discovery/dev`; where there is none, the small
corpus that ships with these benchmarks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

from msgspec.structs import replace

from discovery_tables import First, Quality, Speed, first_table, quality_table, speed_table
from finders import ADAPTER, DEFAULT, FASTMCP, FIELDS, PLAIN, WORDS, Finder, has_fastmcp, started
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from labelled import (
    OWN,
    ROOT,
    Labelled,
    Listed,
    Mode,
    Need,
    mean,
    padded,
    read_sets,
    scores,
    union,
    where,
    write_tools,
)

SIZES = (10_000, 100_000)
KEEP = ROOT / ".cache" / "discovery.db"
"""What was made of the texts of tools, kept so that a second run encodes nothing."""
HOMES = ROOT / ".cache" / "homes"
"""LocationSummary with many tools, kept for the same reason."""
_FIRST = Path(__file__).with_name("first_search.py")
_TURNS, _WARM, _BLOCK = 600, 5, 25
_SPELL = 60_000.0
"""For how many milliseconds each is asked at the most; whoever is slower answers fewer requests."""
_ENCODED = 2_000
"""How many of many tools are really encoded: where the others lie makes no difference to time."""
_PATIENCE = 3_600.0
_HEAD = """\
## Discovery

Which tools the verb `search` finds for a request, through a kernel that knows them as MCP servers offer them. Made by
`benchmarks/discovery.py` (`--quality`, `--speed` or `--first` for a part, `--words` without what compares meanings,
`--dataset NAME` and `--limit N` for fewer requests). The labelled data is that of `--data FOLDER`, of
`KIWI_DISCOVERY_DATA`, or of `../shared/discovery/dev`. Any scorer can ask the same way:
`benchmarks/discovery_adapter.py TOOLS.jsonl` answers a line of JSON with a line of JSON.

The encoder was taught with three fourths of the requests of that data (`scripts/teach_encoder.py`), so quality is
judged by the other fourth; `--every` takes all of them. Per cent, means over requests; the mean is that of the sets.
nDCG@10 is what the order of the first ten is worth, R@k the share of wanted tools among the first k, C@10 the share of
requests that have all of theirs among the first ten.
"""
_OWN = """
The labelled data is not here: these figures are of the small corpus in `benchmarks/corpus`.
"""
_SPEED = """\
### How quickly

`benchmarks/discovery.py --speed`: the round trip of one request through pipes, encoding of the request included. All
finders run at once, and are asked in turns of {block} requests, each turn beginning with another one, so that a finder
answers with its own caches and what slows the machine slows all. Short requests have up to 14 words. Tools beyond those
of the data are put together from their parts. Whoever takes more than a minute in all is asked no further. Budget, p50
/ p99 of short requests: words only 1 / 5 ms among 10,000 tools and 3 / 15 among 100,000; by default 5 / 30 and 15 / 60.

"""
_STARTING = """\
### The first search of a process

`benchmarks/discovery.py --first`: a new kernel, with {size:,} tools that the store knows, asked for what it offers and
then for one search; medians of {turns} processes. Budget: 300 ms, and neither numpy nor onnxruntime loaded before it.

"""
_ABSENT = "FastMCP is not installed here (`scripts/setup.sh --bench`), and is left out.\n"


def measure_quality(sets: Sequence[Labelled], modes: Sequence[Mode], names: Sequence[str]) -> Iterator[Quality]:
    """Give the quality of each finder on each set, in each mode."""
    asked = [one for one in sets if one.needs]
    for mode in modes:
        groups = [(union(sets), asked)] if mode == "open" else [(one.tools, [one]) for one in asked]
        for tools, group in groups:
            with _written(tools) as path:
                for name in names:
                    with started([name], path, keep=KEEP) as (finder,):
                        yield from (_quality(mode, finder, one, len(tools)) for one in group)


def measure_speed(sets: Sequence[Labelled], size: int, names: Sequence[str]) -> list[Speed]:
    """Return the speed of each finder among so many tools, all asked in turns."""
    # One request of each set after the other, so that none has the first word.
    needs = [need for some in zip_longest(*(one.needs for one in sets)) for need in some if need][:_TURNS]
    with (
        _written(padded(union(sets), size)) as path,
        started(names, path, encode=_ENCODED, homes=HOMES) as finders,
        _undisturbed(),
    ):
        _take_turns(finders, [*needs[:_WARM], *needs])
        return [_speed(finder, size, needs) for finder in finders]


def measure_first(sets: Sequence[Labelled], size: int, turns: int) -> Iterator[First]:
    """Give the first search of a process that knows so many tools, with all that there is and with words only."""
    need = next(need.text for one in sets for need in one.needs if need.is_short)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tools.jsonl")
        write_tools(path, padded(union(sets), size))
        cases = {DEFAULT: (("--encode", str(_ENCODED)), ()), WORDS: (("--words",), ("--words",))}
        for before, _ in cases.values():  # so that the store knows what either will look for
            _run(ADAPTER, *before, "--home", folder, str(path))
        rows = [(case, _run(_FIRST, *how, folder, need)) for _ in range(turns) for case, (_, how) in cases.items()]
    yield from (_first(case, [row for name, row in rows if name == case]) for case in cases)


def _take_turns(finders: Sequence[Finder], needs: Sequence[Need]) -> None:
    for turn, start in enumerate(range(0, len(needs), _BLOCK)):
        first = turn % len(finders)
        for finder in (*finders[first:], *finders[:first]):
            if sum(finder.took) < _SPELL:
                for need in needs[start : start + _BLOCK]:
                    finder.ask(need.text)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let nothing of our own be cleaned up while others are timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _quality(mode: Mode, finder: Finder, one: Labelled, tools: int) -> Quality:
    rows = [scores(finder.ask(need.text), need.gold) for need in one.needs]
    return Quality(mode, finder.name, one.name, tools, len(rows), mean(rows))


def _speed(finder: Finder, size: int, needs: Sequence[Need]) -> Speed:
    took = finder.took[_WARM:] or finder.took
    short = [ms for ms, need in zip(took, needs, strict=False) if need.is_short] or took
    return Speed(finder.name, size, len(took), _spread(short), _spread(took), finder.resident_mb)


def _spread(took: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(took)
    return statistics.median(ordered), ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]


def _first(case: str, rows: Sequence[JsonObject]) -> First:
    loaded = sorted({as_text(name) for row in rows for name in as_list(row["loaded"])})
    figures = ("first_ms", "next_ms", "before_mb", "after_mb")
    return First(case, loaded, *(statistics.median(float(str(row[word])) for row in rows) for word in figures))


def _run(*words: str | Path) -> JsonObject:
    """Run a program to its end, and return the object that it prints."""
    done = subprocess.run(
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # As where Kiwi is installed, modules are compiled once and not in each process.
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        check=True,
        timeout=_PATIENCE,
    )
    response: Json = json.loads(done.stdout.splitlines()[-1]) if done.stdout.startswith(b"{") else {}
    return as_object(response)


@contextmanager
def _written(tools: Sequence[Listed]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tools.jsonl")
        write_tools(path, tools)
        yield path


def report(asked: argparse.Namespace, *, is_page: bool = False) -> Iterator[str]:
    """Give the sections that were asked for, or all; a page does not name the sets."""
    folder = where(asked.data)
    sets = read_sets(folder, only=asked.dataset, limit=asked.limit)
    wants_all = not (asked.quality or asked.speed or asked.first)
    yield _HEAD + (_OWN if folder == OWN else "")
    if asked.quality or wants_all:
        names = [WORDS, FIELDS, PLAIN] if asked.words else [DEFAULT, WORDS, FIELDS, PLAIN]
        modes: tuple[Mode, ...] = (asked.mode,) if asked.mode else ("closed", "open") if len(sets) > 1 else ("closed",)
        # The encoder has seen no request of our own corpus.
        judged = sets if asked.every or folder == OWN else [*map(_left_out, sets)]
        numbers = {one.name: f"set {number}" for number, one in enumerate(sets, 1)} if is_page else {}
        yield quality_table([*measure_quality(judged, modes, names)], numbers)
    if asked.speed or wants_all:
        finders = [*([] if asked.words else [DEFAULT]), WORDS, PLAIN, *([FASTMCP] if has_fastmcp() else [])]
        rows = [row for size in asked.sizes for row in measure_speed(sets, size, finders)]
        yield _SPEED.format(block=_BLOCK) + speed_table(rows) + ("" if has_fastmcp() else f"\n{_ABSENT}")
    if asked.first or wants_all:
        size = min(asked.sizes)
        rows_first = [*measure_first(sets, size, asked.turns)]
        yield _STARTING.format(size=size, turns=asked.turns) + first_table(rows_first)


def _left_out(one: Labelled) -> Labelled:
    return replace(one, needs=[need for need in one.needs if need.is_left_out])


def options() -> argparse.ArgumentParser:
    """Return what can be asked for."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--quality", action="store_true", help="how well tools are found")
    found.add_argument("--speed", action="store_true", help="how quickly")
    found.add_argument("--first", action="store_true", help="the first search of a process")
    found.add_argument("--every", action="store_true", help="judge by what the encoder was taught with, too")
    found.add_argument("--words", action="store_true", help="leave out what compares meanings")
    found.add_argument("--data", help="the folder of the labelled data")
    found.add_argument("--dataset", action="append", default=[], help="only the requests of this set (repeatable)")
    found.add_argument("--mode", choices=("closed", "open"))
    found.add_argument("--limit", type=int, help="at most so many requests of each set")
    found.add_argument("--sizes", type=_sizes, default=SIZES, help="among how many tools speed is measured: N,N")
    found.add_argument("--turns", type=int, default=5, help="how many processes search for the first time")
    return found


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(word.replace("_", "")) for word in text.split(","))


def main() -> None:
    """Print what was asked for as it is measured."""
    for section in report(options().parse_args()):
        print(section, flush=True)


if __name__ == "__main__":
    main()
