"""SQLite's own full text search over the tools of a file, by the protocol of `discovery_adapter.py`.

Usage: fts5_search.py [--fields] TOOLS.jsonl

Plain, it ranks names and descriptions as they are written. With `--fields`, identifiers are split, parameters and
sources are searched too, and each part has a weight.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from labelled import Listed, read_tools, words_of

_COMMON = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "by", "can", "could", "do", "for", "from", "i", "in", "is", "it", "me",
    "my", "of", "on", "or", "please", "that", "the", "this", "to", "was", "we", "what", "with", "would", "you", "your",
})  # fmt: skip
_PLAIN = "select rowid from tools where tools match ? order by bm25(tools) limit ?"
_WEIGHED = "select rowid from tools where tools match ? order by bm25(tools, 5, 1, 1.5, 0.5) limit ?"


class Fts5:
    """A table of tools, and its own ranking."""

    def __init__(self, tools: Sequence[Listed], *, with_fields: bool) -> None:
        self._ids = [tool.id for tool in tools]
        self._statement = _WEIGHED if with_fields else _PLAIN
        self._database = sqlite3.connect(":memory:")
        columns = "name, source, description, parameters" if with_fields else "name, description"
        self._database.execute(f"create virtual table tools using fts5({columns}, tokenize = 'porter unicode61')")
        texts = map(_fields, tools) if with_fields else ((tool.name, tool.description) for tool in tools)
        rows = ((number, *text) for number, text in enumerate(texts))
        marks = ", ".join("?" * (1 + len(columns.split(", "))))
        self._database.executemany(f"insert into tools (rowid, {columns}) values ({marks})", rows)

    def ask(self, need: str, limit: int) -> list[str]:
        """Return the tools that hold any word of a need, best first."""
        words = dict.fromkeys(words_of(need).lower().split())
        wanted = [word for word in words if word not in _COMMON] or [*words]
        match = " OR ".join(f'"{word}"' for word in wanted)
        return [self._ids[row] for (row,) in self._database.execute(self._statement, (match, limit))] if match else []

    def close(self) -> None:
        """Let go of the table."""
        self._database.close()


def _fields(tool: Listed) -> tuple[str, ...]:
    asked = " ".join([*tool.parameters, *tool.parameters.values()])
    return tuple(map(words_of, (tool.name, tool.source, tool.description, asked)))


def main() -> None:
    """Answer what arrives on stdin."""
    *options, path = sys.argv[1:]
    with closing(Fts5(read_tools(Path(path)), with_fields="--fields" in options)) as table:
        print("READY", flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(table.ask(asked["query"], asked["k"])), flush=True)


if __name__ == "__main__":
    main()
