"""The files of a git folder that git runs or reads as configuration, which a process that commits cannot change."""

from __future__ import annotations

import os
from collections.abc import Iterator

from msgspec import Struct

GIT_NAMES = ("config", "config.worktree", "hooks", "info")
"""What git runs or obeys: kept free by a placeholder where it is absent."""
NESTED = ("modules", "worktrees")
"""The folders with the git folders of submodules and of further work trees."""
MOST_GIT_FOLDERS = 64
"""Beyond this number of folders around such files, all submodules and work trees stay as they are."""
_POINTERS = ("commondir", "gitdir")
"""Files that lead git to another folder with configuration. git refuses to work where an empty one is."""
_DATA = ("objects", "refs", "logs", "lfs", "rr-cache")
"""Folders where any name may be that of a branch or an object."""


class GitFile(Struct, frozen=True):
    """A file or folder that decides what git does, and the folders around it below the git folder."""

    path: str
    around: tuple[str, ...]
    is_link: bool = False
    """A link is followed when git writes, so a new one may lead git to change any file of the owner."""


def git_files(folder: str) -> Iterator[GitFile]:
    """Yield what decides about git in a git folder, and below its submodules and work trees."""
    waiting: list[tuple[str, tuple[str, ...], bool]] = [(folder, (), True)]
    while waiting:
        where, around, is_named = waiting.pop()
        try:
            entries = list(os.scandir(where))
        except OSError:
            continue
        for entry in entries:
            if entry.is_symlink():
                yield GitFile(entry.path, around, is_link=True)
            elif is_named and entry.name in (*GIT_NAMES, *_POINTERS):
                yield GitFile(entry.path, around)
            elif entry.is_dir(follow_symlinks=False) and entry.name != "objects":
                is_nested = bool(around) or entry.name in NESTED
                inner = (*around, entry.path) if is_nested else ()
                waiting.append((entry.path, inner, is_nested and entry.name not in _DATA))
