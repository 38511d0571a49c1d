"""Clients: the programs that use MCP servers, where each keeps its configuration, and how such a file is read."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

import kiwi_mcp.data
from kiwi_mcp.domain.errors import InvalidRequest, TooLarge
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.kernel.mcp.jsonc import MAX_BYTES
from kiwi_mcp.manifest.yaml import read_yaml

Scope: TypeAlias = Literal["project", "user"]
SCOPES: tuple[Scope, ...] = ("project", "user")


@dataclass(frozen=True, slots=True)
class Client:
    """A program that uses MCP servers, as the table of clients describes it."""

    id: str
    title: str
    key: tuple[str, ...]
    has_comments: bool
    entry: JsonObject
    files: Mapping[Scope, Mapping[str, tuple[str, ...]]]
    by_hand: Mapping[str, str]
    here: str = ""
    """What stands for the project's folder in a file of the project."""

    def arguments(self, scope: Scope) -> list[str]:
        """Return the words by which it starts Kiwi: for the project whose file they stand in, or for any."""
        return ["serve", "--project", self.here] if scope == "project" and self.here else ["serve"]

    def places(self, scope: Scope, platform: str = sys.platform) -> tuple[str, ...]:
        """Return the files it reads on a platform, below the home folder or a project's."""
        return self.files[scope].get(platform, ())


@dataclass(frozen=True, slots=True)
class Configuration:
    """A file in which a client keeps its servers."""

    client: Client
    scope: Scope
    path: Path


@cache
def clients() -> Mapping[str, Client]:
    """Return every client that is known, by its name."""
    path = Path(kiwi_mcp.data.__file__).parent / "clients.yaml"
    table = as_object(read_yaml(path.read_text(encoding="utf-8"), what=path.name).value)
    return {name: _client(name, as_object(words)) for name, words in table.items()}


def find_configurations(home: Path, project: Path, *, platform: str = sys.platform) -> tuple[Configuration, ...]:
    """Return the files of known clients that exist here, the project's before the user's."""
    roots: Mapping[Scope, Path] = {"project": project, "user": home}
    found: dict[Path, Configuration] = {}
    for scope in SCOPES:
        for client in clients().values():
            for place in client.places(scope, platform):
                path = roots[scope] / place
                if os.path.isfile(path):  # noqa: PTH113 - pathlib raises for folders that are not ours to see
                    known = found.get(path)
                    # In the home folder a file may be both: then it is the user's own.
                    if known is None or known.scope != scope:
                        found[path] = Configuration(client, scope, path)
    return tuple(found.values())


def client_of(path: Path) -> Client | None:
    """Return the client whose configuration a path is, by the names it ends with."""
    return next((client for client, place in _known_places() if _ends_with(path, place)), None)


def project_of(path: Path) -> Path | None:
    """Return the project that a path would be a configuration of, by the names it ends with."""
    places = (place for client in clients().values() for places in client.files["project"].values() for place in places)
    return next((_above(path, place) for place in places if _ends_with(path, place)), None)


def read_text(path: Path) -> str | None:
    """Return the text of a configuration; None where there is no such file."""
    try:
        # Without blocking, so that a FIFO of this name cannot hold Kiwi up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as fault:
        raise unusable(path, getattr(fault, "strerror", None) or "it has no usable name") from fault
    with open(descriptor, "rb") as file:  # noqa: PTH123 - it is open already
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise unusable(path, "it is not a regular file")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise TooLarge(f"{path}", size=None, limit=MAX_BYTES)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise unusable(path, "it is not UTF-8") from fault


def unusable(path: Path, reason: str) -> InvalidRequest:
    """Return the refusal of a configuration that is not read or written."""
    return InvalidRequest(
        f"{path} cannot be used: {reason}.",
        suggestion="Name a configuration that is a UTF-8 text file of your own.",
        path=str(path),
    )


def _client(name: str, words: JsonObject) -> Client:
    return Client(
        id=name,
        title=text_of(words["title"]),
        key=tuple(text_of(word) for word in as_list(words["key"])),
        has_comments=words["comments"] is True,
        entry=as_object(words.get("entry")),
        files={scope: _places(as_object(words.get(scope))) for scope in SCOPES},
        by_hand={scope: text_of(text) for scope, text in as_object(words.get("by_hand")).items()},
        here=as_text(words.get("here")),
    )


def _places(words: JsonObject) -> Mapping[str, tuple[str, ...]]:
    return {platform: tuple(text_of(place) for place in as_list(places)) for platform, places in words.items()}


def _known_places() -> Iterator[tuple[Client, str]]:
    for client in clients().values():
        for by_platform in client.files.values():
            for places in by_platform.values():
                yield from ((client, place) for place in places)


def _ends_with(path: Path, place: str) -> bool:
    parts = PurePosixPath(place).parts
    return path.parts[-len(parts) :] == parts


def _above(path: Path, place: str) -> Path:
    return path.parents[len(PurePosixPath(place).parts) - 1]
