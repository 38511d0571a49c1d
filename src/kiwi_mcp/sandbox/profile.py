"""The base profile: what every private file system begins with, of what this machine has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.sandbox.levels import read_data

HOME = "/tmp/home"  # noqa: S108 - a path inside the sandbox, in a folder of its own
TMP = "/tmp"  # noqa: S108 - likewise
USER = "1000"
"""The number of the user and the group that a confined process takes itself for."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The words of the base profile, without what is not on this machine."""

    readable: tuple[str, ...]
    links: Mapping[str, str]
    """System folders that are links, and what each leads to."""
    files: Mapping[str, bytes]
    masked: tuple[str, ...]
    protected: tuple[str, ...]
    kept_absent: tuple[str, ...]
    protected_below: frozenset[str]

    def covers(self, path: str) -> bool:
        """Whether a path is readable without being granted."""
        return any(path == one or path.startswith(f"{one}/") for one in self.readable)


@cache
def base_profile() -> Profile:
    """Return the base profile of this machine."""
    data = read_data("base")
    system = [Path(place) for place in _texts(data, "system")]
    links = {str(place): str(place.readlink()) for place in system if place.is_symlink()}
    folders = [str(place) for place in system if place.is_dir() and not place.is_symlink()]
    return Profile(
        readable=(*_present(_texts(data, "readable")), *folders),
        links=links,
        files={path: as_text(text).encode() for path, text in as_object(data["files"]).items()},
        masked=_present(_texts(data, "masked")),
        protected=_texts(data, "protected"),
        kept_absent=_texts(data, "kept_absent"),
        protected_below=frozenset(_texts(data, "protected_below")),
    )


def _present(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(path for path in paths if Path(path).exists())


def _texts(data: JsonObject, word: str) -> tuple[str, ...]:
    return tuple(as_text(text) for text in as_list(data[word]))
