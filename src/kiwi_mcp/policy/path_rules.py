"""Anchored patterns, files protected by name."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from msgspec import Struct

from kiwi_mcp.domain.globs import begun, is_met, is_plain, onward
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.sandbox.placeholder import is_placeholder
from kiwi_mcp.sandbox.quarantine import entries_of

HOME = "~/"
MOST_ENTRIES = 20_000
"""How many entries below one folder are searched for one call; beyond that, only down to the depth `NEAR`."""
NEAR = 4
_MOST_NEAR = 200_000
_MOST_KEPT = 256
"""Each costs a mount in a sandbox."""
_CREDENTIALS = (".netrc", ".npmrc", ".pypirc")
_UNSEARCHED = (".git", ".hg")
"""Large folders without files of the owner."""
_SPECIAL = lazy_pattern(r"([*?[])")
_Met = Mapping[str, frozenset[int]]


class TooMany(Exception):
    """There is more below a folder than is looked through for one call."""


def is_pattern(text: str) -> bool:
    """Whether a text can stand for files: below the project, below `~/`, or from the root; never upwards."""
    return bool(text) and ".." not in text.split("/") and "\0" not in text and not re.match(r"~(?!/)", text)


def plain_path(pattern: str) -> str:
    """Return a pattern without what means nothing in it: `./docs/` is `docs`, and `.` all of the project."""
    text = str(PurePosixPath(pattern))
    return "**" if text == "." else text


def placed(text: str, project: str) -> str:
    """Return a path from the root: relative ones begin in the project, and those with `~/` in the home."""
    if text.startswith(HOME):
        return f"{os.path.realpath(Path.home())}/{text.removeprefix(HOME)}"
    return text if text.startswith("/") else f"{project}/{text}"


def is_outside(pattern: str, project: str) -> bool:
    """Whether a pattern can only match paths outside of the project."""
    first = os.path.realpath(_plain_part(placed(pattern, project))[0])
    return not (Path(first).is_relative_to(project) or Path(project).is_relative_to(first))


def anchored(pattern: str, project: str) -> tuple[str, ...]:
    """Return a pattern as an absolute one, and a second one with links resolved if its fixed part contains links.

    A rule that denies the target of a link must also match a path that names the target directly.
    """
    base = _SPECIAL.sub(r"[\1]", project)
    home = _SPECIAL.sub(r"[\1]", os.path.realpath(Path.home()))
    below = pattern.removeprefix(HOME)
    text = pattern if pattern.startswith("/") else f"{home if below != pattern else base}/{below}"
    first, rest = _plain_part(pattern if pattern.startswith("/") else placed(pattern, project))
    real = os.path.realpath(first)
    return (text,) if real == first else (text, "/".join([_SPECIAL.sub(r"[\1]", real), *rest]))


def below(folder: str, patterns: Iterable[str], most: int) -> Iterator[tuple[str, str]]:
    """Yield the paths below a folder that match a pattern, with the pattern; only folders that can match are searched.

    Matches are not searched further, and links are not followed.
    """
    met = {pattern: _through(pattern, folder) for pattern in patterns}
    waiting: list[tuple[str, _Met]] = [(folder, {pattern: places for pattern, places in met.items() if places})]
    seen = 0
    while waiting:
        where, here = waiting.pop()
        for entry in entries_of(where) if here else ():
            seen += 1
            if seen > most:
                raise TooMany
            there = {pattern: onward(pattern, places, entry.name) for pattern, places in here.items()}
            fitting = next((pattern for pattern, places in there.items() if is_met(pattern, places)), None)
            if fitting is not None:
                yield entry.path, fitting
            elif entry.is_dir(follow_symlinks=False):
                waiting.append((entry.path, {pattern: places for pattern, places in there.items() if places}))


class ProtectedFiles(Struct, frozen=True):
    """The paths below a folder that are protected because of their name, at any depth."""

    secrets: tuple[str, ...]
    """`.env` and `.env.*`: variables of the owner's."""
    credentials: tuple[str, ...]
    """What package managers and the like log in with."""
    obeyed: tuple[str, ...]
    """Files that other programs run or obey, except those directly in the folder."""
    is_whole: bool
    """Whether the whole folder was searched; otherwise only the near part."""


def is_secret(name: str) -> bool:
    """Whether a file holds secrets by its very name."""
    return name == ".env" or name.startswith(".env.")


def protected_files(folder: str, stays: Callable[[str], bool]) -> ProtectedFiles:
    """Return the paths below a folder that are protected by name; `stays` says whether a name must not be changed.

    The near part is searched first, so that many files far down or elsewhere cannot hide a near one.
    """
    secrets, credentials, held = list[str](), list[str](), list[str]()
    waiting, seen, is_whole = deque([(folder, 0, False)]), 0, True
    while waiting:
        where, depth, is_held = waiting.popleft()
        if seen > MOST_ENTRIES and depth >= NEAR:
            is_whole = False
            break
        for entry in entries_of(where):
            seen += 1
            name, is_met = entry.name, False
            if name.startswith(".") and not is_placeholder(entry.path):
                is_met = depth > 0 and not is_held and stays(name)
                if is_met:
                    held.append(entry.path)
                if is_secret(name):
                    secrets.append(entry.path)
                    continue
                if name in _CREDENTIALS:
                    credentials.append(entry.path)
            if entry.is_dir(follow_symlinks=False) and name not in _UNSEARCHED:
                waiting.append((entry.path, depth + 1, is_held or is_met))
        if seen > _MOST_NEAR or len(secrets) + len(held) > _MOST_KEPT:
            raise TooMany
    return ProtectedFiles(tuple(secrets), tuple(credentials), tuple(held), is_whole)


def _through(pattern: str, folder: str) -> frozenset[int]:
    met = begun(pattern)
    for name in folder.split("/"):
        met = onward(pattern, met, name) if name else met
    return met


def _plain_part(pattern: str) -> tuple[str, list[str]]:
    names = pattern.split("/")
    plain = next((place for place, name in enumerate(names) if not is_plain(name)), len(names))
    return "/".join(names[:plain]) or "/", names[plain:]
