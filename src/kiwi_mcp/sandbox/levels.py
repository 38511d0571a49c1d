"""Data of `data/isolation/`: levels, minimum levels, backend properties, base file system."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from unicodedata import category, normalize

import yaml
from msgspec import Struct, convert

from kiwi_mcp import data
from kiwi_mcp.data import parsed
from kiwi_mcp.domain.isolation import Level
from kiwi_mcp.domain.json import JsonObject, as_object

FOLDER = data.FOLDER / "isolation"
"""Where the data on isolation are."""
HOME = "/tmp/home"  # noqa: S108 - a path inside the sandbox, in a folder of its own
TMP = "/tmp"  # noqa: S108 - likewise
USER = "1000"
"""The number of the user and the group that a confined process takes itself for."""


class LevelRequirements(Struct, frozen=True):
    """What a level asks of a backend."""

    requires: frozenset[str]
    prefers: frozenset[str] = frozenset()
    denies: frozenset[str] = frozenset()


class BackendProperties(Struct, frozen=True):
    """What a backend does: some of it always, the rest where a self-test has shown it."""

    provides: frozenset[str]
    proves: frozenset[str] = frozenset()


class LevelData(Struct, frozen=True):
    """The content of `levels.yaml`."""

    levels: dict[Level, LevelRequirements]
    floors: dict[str, Level]
    """The least strict level by the origin of the code."""
    properties: dict[str, str]
    """The description of each property."""


@cache
def read_data(name: str) -> JsonObject:
    """Return one of the files of data on isolation."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    return parsed(text) or as_object(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))  # noqa: S506 - both are safe loaders, and the file is Kiwi's own


@cache
def _levels() -> LevelData:
    return convert(read_data("levels"), LevelData)


def demands(level: Level) -> LevelRequirements:
    """Return the requirements of a level."""
    return _levels().levels[level]


@cache
def offers() -> Mapping[str, BackendProperties]:
    """Return the properties of each backend, by its name."""
    return convert(read_data("backends"), dict[str, BackendProperties])


def floor(origin: str) -> Level:
    """Return the least strict level that code of an origin may have."""
    floors = _levels().floors
    return floors.get(origin, floors["unknown"])


def meaning(prop: str) -> str:
    """Return the description of a property."""
    return _levels().properties.get(prop, prop)


class BaseData(Struct, frozen=True):
    """The content of `base.yaml`."""

    system: tuple[str, ...]
    readable: tuple[str, ...]
    files: dict[str, str]
    masked: tuple[str, ...]
    protected: tuple[str, ...]
    protected_prefixes: tuple[str, ...]
    may_be_links: tuple[str, ...]
    protected_below: tuple[str, ...]


class BaseFileSystem(Struct, frozen=True):
    """The entries of the base profile, without paths that do not exist on this machine."""

    readable: tuple[str, ...]
    links: Mapping[str, str]
    """System folders that are links, and what each leads to."""
    files: Mapping[str, bytes]
    masked: tuple[str, ...]
    protected: tuple[str, ...]
    """Names that other programs run or read as configuration."""
    protected_prefixes: tuple[str, ...]
    may_be_links: frozenset[str]
    protected_below: frozenset[str]
    protected_folded: frozenset[str]
    """The names without the difference between upper and lower case, as those of the two sets before it are."""
    protected_initials: frozenset[str]
    """What protected names begin with, in upper and lower case: most names of a folder do not."""

    def covers(self, path: str) -> bool:
        """Whether a path is readable without being granted."""
        return any(path == one or path.startswith(f"{one}/") for one in self.readable)

    def is_protected(self, name: str) -> bool:
        """Whether other programs run or read as configuration what has this name."""
        if name[:1] not in self.protected_initials and name.isascii():
            return False
        plain = folded(name)
        return plain in self.protected_folded or plain.startswith(self.protected_prefixes)

    def stays_below(self, name: str) -> bool:
        """Whether what has this name stays as it is also below the top of a writable folder."""
        plain = folded(name)
        return plain in self.protected_below or plain.startswith(self.protected_prefixes)


def folded(name: str) -> str:
    """Return a name as a file system compares it that ignores case, invisible characters, and dots at the end."""
    if not name.isascii():
        visible = "".join(letter for letter in normalize("NFKC", name) if category(letter) != "Cf")
        name = normalize("NFKC", visible.casefold())
    return name.lower().rstrip(" .")


@cache
def base_profile() -> BaseFileSystem:
    """Return the base profile of this machine."""
    data = convert(read_data("base"), BaseData)
    system = [Path(place) for place in data.system]
    links = {str(place): str(place.readlink()) for place in system if place.is_symlink()}
    folders = [str(place) for place in system if place.is_dir() and not place.is_symlink()]
    return BaseFileSystem(
        readable=(*_present(data.readable), *folders),
        links=links,
        files={path: text.encode() for path, text in data.files.items()},
        masked=_present(data.masked),
        protected=data.protected,
        protected_prefixes=data.protected_prefixes,
        may_be_links=frozenset(map(folded, data.may_be_links)),
        protected_below=frozenset(map(folded, data.protected_below)),
        protected_folded=frozenset(map(folded, data.protected)),
        protected_initials=frozenset(case for name in data.protected for case in (name[0].upper(), name[0].lower())),
    )


def _present(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(path for path in paths if Path(path).exists())
