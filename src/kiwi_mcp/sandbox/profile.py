"""The base profile: what every private file system begins with, of what this machine has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath

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

    def covers(self, path: str) -> bool:
        """Whether a path is readable without being granted."""
        return any(path == one or path.startswith(f"{one}/") for one in self.readable)


@cache
def base_profile() -> Profile:
    """Return the base profile of this machine."""
    data = read_data("base")
    system = [place for place in _texts(data, "system") if os.path.lexists(place)]
    links = {
        place: os.readlink(place) for place in system if PurePosixPath(os.path.realpath(place)) != PurePosixPath(place)
    }
    folders = [place for place in system if place not in links]
    return Profile(
        readable=tuple(place for place in (*_texts(data, "readable"), *folders) if os.path.exists(place)),
        links=links,
        files={path: as_text(text).encode() for path, text in as_object(data["files"]).items()},
        masked=tuple(place for place in _texts(data, "masked") if os.path.exists(place)),
        protected=_texts(data, "protected"),
        kept_absent=_texts(data, "kept_absent"),
    )


def _texts(data: JsonObject, word: str) -> tuple[str, ...]:
    return tuple(as_text(text) for text in as_list(data[word]))
