"""Levels, floors and backends, as the data that ships with Kiwi says them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

import kiwi_mcp.data
from kiwi_mcp.domain.isolation import Level, strictest
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text

FOLDER = Path(kiwi_mcp.data.__file__).parent / "isolation"
"""Where the data on isolation are."""
_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Demands:
    """What a level asks of a backend."""

    requires: frozenset[str]
    prefers: frozenset[str] = frozenset()
    denies: frozenset[str] = frozenset()

    @property
    def denied_calls(self) -> tuple[str, ...]:
        """The system calls that are refused at this level besides those that always are."""
        return ("memfd_create",) if "memfd" in self.denies else ()


@dataclass(frozen=True, slots=True)
class Offer:
    """What a backend does: some of it always, the rest where a self-test has shown it."""

    provides: frozenset[str]
    proves: frozenset[str] = frozenset()
    is_last_resort: bool = False
    """Whether it is taken only where nothing else has all that a level requires."""

    @property
    def whole(self) -> frozenset[str]:
        """All that it does where nothing hinders it."""
        return self.provides | self.proves

    @property
    def usual(self) -> frozenset[str]:
        """All that a machine should have it for."""
        return frozenset() if self.is_last_resort else self.whole


@cache
def read_data(name: str) -> JsonObject:
    """Return one of the files of data on isolation."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    return as_object(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))  # noqa: S506 - both are safe loaders, and the file is Kiwi's own


def words(value: Json) -> frozenset[str]:
    """Return a list of words as a set."""
    return frozenset(as_text(word) for word in as_list(value))


@cache
def demands(level: Level) -> Demands:
    """Return what a level asks for."""
    row = as_object(as_object(read_data("levels")["levels"])[level])
    return Demands(words(row.get("requires")), words(row.get("prefers")), words(row.get("denies")))


@cache
def offers() -> Mapping[str, Offer]:
    """Return what each backend does, by its name."""
    rows = {name: as_object(row) for name, row in read_data("backends").items()}
    return {
        name: Offer(words(row.get("provides")), words(row.get("proves")), row.get("last_resort") is True)
        for name, row in rows.items()
    }


def floor(origin: str) -> Level:
    """Return the least strict level that code of an origin may have."""
    floors = as_object(read_data("levels")["floors"])
    return strictest([as_text(floors.get(origin, floors[_UNKNOWN]))])


def needed_level(origins: Iterable[str], asked: Iterable[str] = ()) -> Level:
    """Return the level that a chain runs at: the strictest of every link's floor and of all that was asked for."""
    return strictest([*(floor(origin) for origin in origins), *asked])


def meaning(prop: str) -> str:
    """Return what a property means, in words."""
    return as_text(as_object(read_data("levels")["properties"]).get(prop)) or prop


def in_order(properties: Iterable[str]) -> tuple[str, ...]:
    """Return properties sorted, as messages list them."""
    return tuple(sorted(properties))
