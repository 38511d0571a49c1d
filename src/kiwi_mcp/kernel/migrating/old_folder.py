"""Old folders: what a path is taken for, and the files in it that may be items."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kiwi_mcp.catalog.folder import KINDS, SHARED_CODE, list_folder
from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import InvalidRequest, ProjectPathInvalid
from kiwi_mcp.kernel.places import project_space

MAX_LOOKED_AT = 10_000
"""The most files and folders that are looked at in one migration."""

_TOOLS = "tools"
_INSTALLED = frozenset({"venv", "site-packages"})


@dataclass(frozen=True, slots=True)
class OldFolder:
    """A folder to migrate: what stands above its kinds, and the folders to walk, each with its kind."""

    base: Path
    roots: tuple[tuple[Path, str], ...]

    def is_within(self, space: Path) -> bool:
        """Whether the items in it are those of a space already."""
        kinds = {path.relative_to(self.base).parts[0] for path, _ in self.roots}
        return os.path.realpath(space) == str(self.base) and kinds <= {*KINDS}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file that may be an item; with a reason where it is known that it cannot be."""

    path: Path
    kind: str
    """Which folder of a space it belongs into: `tools`, `directives`, `knowledge`, `scripts`."""
    reason: str = ""


def open_folder(asked: str | None, space: Space) -> OldFolder:
    """Return the folder that a request means; nobody else's is taken without the owner's word."""
    wanted = space.project / asked if asked else space.project
    try:
        folder = project_space(str(wanted), None, user=space.user, cache=space.cache).project
    except ProjectPathInvalid as error:
        raise InvalidRequest(
            f"`path` cannot be used: {error.message}",
            suggestion="Name a folder of your own: a project, its `.ai`, or a folder of tools.",
        ) from error
    if (folder / ".ai").is_dir() and not (folder / ".ai").is_symlink():
        return _space_at(folder / ".ai")
    if _is_space(folder, space):
        return _space_at(folder)
    return _part(folder, space)


def _is_space(folder: Path, space: Space) -> bool:
    is_named = folder.name == ".ai" or str(folder) == os.path.realpath(space.user)
    return is_named or any((folder / kind).is_dir() for kind in ("directives", "knowledge"))


def _space_at(base: Path) -> OldFolder:
    return OldFolder(base, tuple((base / kind, kind) for kind in KINDS))


def _part(folder: Path, space: Space) -> OldFolder:
    """Return a folder that is one kind of a space, lies below one, or is simply full of tools."""
    for above in (folder, *folder.parents):
        if above.name in KINDS and (above == folder or _is_space(above.parent, space)):
            return OldFolder(above.parent, ((folder, above.name),))
    return OldFolder(folder.parent, ((folder, _TOOLS),))


def candidates(old: OldFolder) -> Iterator[Candidate]:
    """Give the files that may be items; only names and file types are looked at, and links are not followed."""
    folders = [(path, kind, len(path.relative_to(old.base).parts) - 1) for path, kind in reversed(old.roots)]
    room = MAX_LOOKED_AT
    while folders:
        folder, kind, depth = folders.pop()
        listing = list_folder(str(folder), kind=kind, depth=depth)
        room -= 1
        for place, reason in (*((place, "") for place in listing.places[: max(room, 0)]), *listing.oddities):
            yield Candidate(Path(place), kind, reason)
        room -= len(listing.places)
        if room < 0:
            reason = f"there are more than {MAX_LOOKED_AT:,} files and folders, and the rest was not looked at"
            yield Candidate(folder, "", reason)
            return
        below = [Path(name) for name in reversed(listing.folders) if not _is_passed_over(Path(name), depth)]
        folders += [(path, kind, depth + 1) for path in below]


def _is_passed_over(folder: Path, depth: int) -> bool:
    return folder.name in _INSTALLED or (depth == 0 and folder.name == SHARED_CODE)
