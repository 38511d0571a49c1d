"""Lets a scorer ask Kiwi's own `search` about the tools of a file.

Usage: discovery_adapter.py [--words] [--keep FILE] [--encode N] [--home FOLDER] TOOLS.jsonl

Each line of the file is a tool: `{"id", "source", "name", "description", "parameters"?: {name: text}}`. They are put
into the store of a new home, as though MCP servers had been added that offer them: `source` is the server. `READY` is
printed once all of them can be found. Then each line on stdin, `{"id", "query", "k"}`, is answered by the verb `search`
of a kernel in that home, and the ids of what it found are printed as a JSON array, best first.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from labelled import read_tools
from stocked import Place, opened, stock
from warming import warm_up


@contextmanager
def _home(named: Path | None) -> Iterator[Place]:
    if named is not None:
        yield Place(named)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Place(Path(folder))


def main() -> None:
    """Answer what arrives on stdin."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("tools", type=Path, metavar="TOOLS.jsonl")
    options.add_argument("--words", action="store_true", help="compare words only, as where onnxruntime is missing")
    options.add_argument("--keep", type=Path, metavar="FILE", help="keeps what is made of texts for the next run")
    options.add_argument("--encode", type=int, metavar="N", help="encode so many texts, and mix the other vectors")
    options.add_argument("--home", type=Path, metavar="FOLDER", help="use this home, and leave it")
    asked = options.parse_args()
    if asked.words:
        sys.modules["onnxruntime"] = None  # type: ignore[assignment] # which is how Python says that it is not there
    with _home(asked.home) as place:
        named = stock(place, read_tools(asked.tools))
        warm_up(place, keep=asked.keep, encode=asked.encode)
        with opened(place, named) as desk:
            desk.settle()
            print("READY", flush=True)
            for line in sys.stdin:
                need = json.loads(line)
                print(json.dumps(desk.ask(need["query"], need["k"])), flush=True)


if __name__ == "__main__":
    main()
