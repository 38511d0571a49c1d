"""Labelled data: tools that servers list, requests, and which of the tools each is for; and how well an answer fits.

A folder holds one folder for each set, with `tools.jsonl` and `queries.jsonl`, plain or ending in `.gz`. A set without
requests adds its tools to the union of all that every set is searched in, in the open mode.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from math import log2
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import asdict

from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text

Mode: TypeAlias = Literal["closed", "open"]
"""Whether a set is searched among its own tools, or among those of all sets."""

ROOT = Path(__file__).parents[1]
OWN = Path(__file__).parent
"""The folder with the corpus that ships with these benchmarks."""
TOP = 10
METRICS = ("nDCG@10", "R@1", "R@5", "R@10", "C@10")
_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SIGNS = re.compile(r"[^\w]+|_+")
_ENDINGS = (".jsonl", ".jsonl.gz")
_LEFT_OUT = 4
"""One of so many requests is left out of all that is taught."""
_NEARBY = ROOT.parent / "shared" / "discovery" / "dev"


class Listed(Struct, frozen=True):
    """A tool as the server lists it that is its `source`."""

    id: str
    source: str
    name: str
    description: str
    parameters: Mapping[str, str] = field(default_factory=dict)


class Need(Struct, frozen=True):
    """A request, and the tools that it is for."""

    text: str
    gold: frozenset[str]

    @property
    def is_left_out(self) -> bool:
        """Whether nothing is taught with it, so that results can be judged by it."""
        return sha256(self.text.encode()).digest()[0] % _LEFT_OUT == 0

    @property
    def is_short(self) -> bool:
        """Whether it is as long as what people type, or models ask."""
        return len(self.text.split()) <= 14


class Labelled(Struct, frozen=True):
    """One set."""

    name: str
    tools: Sequence[Listed]
    needs: Sequence[Need]


def where(named: str | None = None) -> Path:
    """Return the folder of the data: as named, as `KIWI_DISCOVERY_DATA` says, beside the repository, else our own."""
    found = named or os.environ.get("KIWI_DISCOVERY_DATA")
    if found:
        return Path(found)
    return _NEARBY if _NEARBY.is_dir() else OWN


def read_sets(folder: Path, *, only: Sequence[str] = (), limit: int | None = None) -> list[Labelled]:
    """Return the sets below a folder; those that are not among `only`, if any are, give their tools alone."""
    found = []
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        tools = read_tools(path) if (path := _file(place, "tools")) else []
        if tools:
            wanted = not only or place.name in only
            path = _file(place, "queries") if wanted else None
            needs = [*map(_need, _lines(path))] if path else []
            found.append(Labelled(place.name, tools, needs[:limit]))
    if not any(one.needs for one in found):
        raise SystemExit(f"No set with requests is in {folder}")
    return found


def union(sets: Iterable[Labelled]) -> list[Listed]:
    """Return the tools of all sets, each once."""
    return [*{tool.id: tool for one in sets for tool in one.tools}.values()]


def read_tools(path: Path) -> list[Listed]:
    """Return the tools of a file."""
    return [*map(_tool, _lines(path))]


def write_tools(path: Path, tools: Iterable[Listed]) -> None:
    """Write tools into a file, as programs that are asked for them read it."""
    lines = (json.dumps(asdict(tool), ensure_ascii=False) for tool in tools)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _tool(line: JsonObject) -> Listed:
    parameters = {name: as_text(text) for name, text in as_object(line.get("parameters")).items()}
    response = {word: as_text(line.get(word)) for word in ("id", "source", "name", "description")}
    return Listed(**response, parameters=parameters)


def padded(tools: Sequence[Listed], count: int) -> list[Listed]:
    """Return so many tools: the given ones, then others whose parts are theirs, put together anew.

    A part keeps its words, so that words are as common and texts as long as they are among real tools.
    """
    chance = random.Random(count)
    made = [*tools[:count]]
    for number in range(count - len(made)):
        first, second, third = (chance.choice(tools) for _ in range(3))
        name = f"{_halves(words_of(first.name))[0]} {_halves(words_of(second.name))[1]}".strip()
        text = f"{_halves(first.description)[0]} {_halves(second.description)[1]}".strip()
        made.append(Listed(f"+{number}", third.source, "_".join(name.split()), text, second.parameters))
    return made


def scores(found: Sequence[str], gold: frozenset[str]) -> Mapping[str, float]:
    """Return how well the first ten of an answer fit, by each metric."""
    hits = [name in gold for name in found[:TOP]]
    gained = sum(1 / log2(place + 2) for place, hit in enumerate(hits) if hit)
    best = sum(1 / log2(place + 2) for place in range(min(TOP, len(gold))))
    recalls = {f"R@{top}": sum(hits[:top]) / len(gold) for top in (1, 5, 10)}
    return {"nDCG@10": gained / best, **recalls, "C@10": float(sum(hits) == len(gold))}


def mean(rows: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Return the mean of each metric."""
    return {metric: sum(row[metric] for row in rows) / len(rows) for metric in METRICS}


def words_of(name: str) -> str:
    """Return the words that an identifier is made of."""
    return _SIGNS.sub(" ", _CASE.sub(" ", name))


def _halves(text: str) -> tuple[str, str]:
    words = text.split()
    return " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])


def _need(line: JsonObject) -> Need:
    gold = line.get("gold")
    assert isinstance(gold, list)
    return Need(as_text(line.get("query")), frozenset(map(as_text, gold)))


def _file(folder: Path, stem: str) -> Path | None:
    return next((path for ending in _ENDINGS if (path := folder / f"{stem}{ending}").exists()), None)


def _lines(path: Path) -> Iterator[JsonObject]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for line in filter(bytes.strip, data.splitlines()):
        read: Json = json.loads(line)
        yield as_object(read)
