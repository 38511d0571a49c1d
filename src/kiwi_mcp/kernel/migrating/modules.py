"""Modules beside a script: the files that it imports from its own folders, gathered so that they can travel with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kiwi_mcp.catalog.files import read_file
from kiwi_mcp.catalog.folder import SHARED_CODE
from kiwi_mcp.catalog.read import ITEM_LIMIT
from kiwi_mcp.domain.errors import InvalidManifest, TooLarge
from kiwi_mcp.kernel.authoring.drafts import MAX_BYTES
from kiwi_mcp.kernel.migrating.habits import Habits, read_habits
from kiwi_mcp.manifest.names import is_safe_path

MAX_MODULES = 200
_PACKAGE = "__init__.py"


def modules_beside(habits: Habits, path: Path, root: Path) -> Mapping[str, bytes]:
    """Return the modules a script imports from its folder, the folder of all scripts or the shared code in that.

    Each stands under the path from which the script finds it when both lie in one folder. What those modules import
    in turn is there too.
    """
    places = dict.fromkeys((path.parent, root, root / SHARED_CODE))
    folders = [folder for folder in places if not folder.is_symlink()]
    found: dict[str, bytes] = {}
    waiting, seen = list(habits.modules), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name.partition(".")[0] in sys.stdlib_module_names:
            continue
        seen.add(name)
        for file, data in _files_of(name, folders):
            if file in found or file == path.name:
                continue
            found[file] = data
            inner = read_habits(data.decode(errors="replace"))
            waiting += inner.modules if inner else ()
            _refuse_too_much(path, found)
    return found


def tops(files: Mapping[str, bytes]) -> frozenset[str]:
    """Return the names under which modules are imported."""
    return frozenset(file.partition("/")[0].removesuffix(".py") for file in files)


def _refuse_too_much(path: Path, found: Mapping[str, bytes]) -> None:
    if len(found) > MAX_MODULES:
        raise TooLarge(f"What {path.name} imports", size=None, limit=MAX_MODULES, unit="files")
    if (size := sum(map(len, found.values()))) > MAX_BYTES:
        raise TooLarge(f"What {path.name} imports", size=size, limit=MAX_BYTES)


def _files_of(name: str, folders: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Give the files of a module, from the first folder that has any."""
    for folder in folders:
        is_here = False
        for file in _places(name, folder):
            if (data := _read(folder, file)) is not None:
                is_here = True
                yield file, data
        if is_here:
            return


def _places(name: str, folder: Path) -> Iterator[str]:
    top, *rest = name.split(".")
    yield f"{top}.py"
    if (folder / top / _PACKAGE).is_file():
        # A package may import any part of itself, in ways that cannot be told from outside.
        yield from _package(folder, top)
    elif rest:
        yield "/".join((top, *rest)) + ".py"


def _package(folder: Path, top: str) -> Iterator[str]:
    count = 0
    for where, folders, names in os.walk(folder / top):
        folders.sort()
        for name in sorted(names):
            count += 1
            if count > MAX_MODULES * 10:
                return
            if name.endswith(".py"):
                yield (Path(where) / name).relative_to(folder).as_posix()


def _read(folder: Path, file: str) -> bytes | None:
    """Return the bytes of a file; None where it is not there, or is reached by a link."""
    parts = file.split("/")
    above = [folder.joinpath(*parts[:end]) for end in range(1, len(parts))]
    if not is_safe_path(file) or any(part.is_symlink() for part in above):
        return None
    try:
        return read_file(folder / file, limit=ITEM_LIMIT).data
    except (InvalidManifest, TooLarge):
        return None
