"""Lets a scorer ask Kiwi's own `search` about the tools of a file.

Usage: discovery_adapter.py [--words] [--keep FILE] [--encode N] [--home FOLDER | --homes FOLDER] TOOLS.jsonl

Each line of the file is a tool: `{"id", "source", "name", "description", "parameters"?: {name: text}}`. They are put
into the store of a new home, as though MCP servers had been added that offer them: `source` is the server. `READY` is
printed once all of them can be found. Then each line on stdin, `{"id", "query", "k"}`, is answered by the verb `search`
of a kernel in that home, and the ids of what it found are printed as a JSON array, best first. `{"used": id, "query"}`
lets it remember that a tool was used after a request, as a run after a search does, and `{"forget": true}` lets it
forget all of that; both are answered with `[]`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from homes import complete, discard, home_of, names_in
from kiwi_mcp.domain.json import JsonObject
from labelled import read_tools
from stocked import Desk, Place, holds, opened, stock
from warming import warm_up


@contextmanager
def _home(asked: argparse.Namespace) -> Iterator[tuple[Place, Mapping[str, str]]]:
    """Give a home that knows the tools, and what each of them is called by whoever asks."""
    if asked.homes is not None:
        yield _kept(asked)
    elif asked.home is not None:
        yield _stocked(Place(asked.home), asked)
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield _stocked(Place(Path(folder)), asked)


def _kept(asked: argparse.Namespace) -> tuple[Place, Mapping[str, str]]:
    """Return a home of an earlier run, or one that is made now, where there is none or it is damaged."""
    home = home_of(asked.homes, asked.tools, encode=asked.encode, is_worded=asked.words)
    place, named = Place(home), names_in(home)
    if named is not None and holds(place, len(named)):
        return place, named
    discard(home)
    place, named = _stocked(place, asked)
    complete(home, named)
    return place, named


def _stocked(place: Place, asked: argparse.Namespace) -> tuple[Place, Mapping[str, str]]:
    named = stock(place, read_tools(asked.tools))
    warm_up(place, keep=asked.keep, encode=asked.encode)
    return place, named


def main() -> None:
    """Answer what arrives on stdin."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("tools", type=Path, metavar="TOOLS.jsonl")
    options.add_argument("--words", action="store_true", help="compare words only, as where onnxruntime is missing")
    options.add_argument("--keep", type=Path, metavar="FILE", help="keeps what is made of texts for the next run")
    options.add_argument("--encode", type=int, metavar="N", help="encode so many texts, and mix the other vectors")
    options.add_argument("--homes", type=Path, metavar="FOLDER", help="keep the home there for the next run")
    options.add_argument("--home", type=Path, metavar="FOLDER", help="use this home, and leave it")
    asked = options.parse_args()
    if asked.words:
        sys.modules["onnxruntime"] = None  # type: ignore[assignment] # which is how Python says that it is not there
    with _home(asked) as (place, named), opened(place, named) as desk:
        desk.settle()
        print("READY", flush=True)
        for line in sys.stdin:
            print(json.dumps(_answer(desk, json.loads(line))), flush=True)


def _answer(desk: Desk, line: JsonObject) -> list[str]:
    match line:
        case {"used": str(tool), "query": str(request)}:
            desk.use(tool, request)
        case {"forget": True}:
            desk.forget()
        case {"query": str(request), "k": int(limit)}:
            return desk.ask(request, limit)
        case _:
            raise SystemExit(f"Nobody knows what {line} means")
    return []


if __name__ == "__main__":
    main()
