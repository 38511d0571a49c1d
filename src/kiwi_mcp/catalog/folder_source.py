"""An `.ai` folder: scan, follow changes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from msgspec import Struct

from kiwi_mcp.domain.items import FOLDER_FILES, TOOL_FILES
from kiwi_mcp.manifest import python_source
from kiwi_mcp.manifest.files import FileStamp, settled, stamp_of
from kiwi_mcp.manifest.type_specs import ItemFolder

MANIFESTS = FOLDER_FILES
"""A folder with one of these is one item; the first that is there counts."""

MAX_DEPTH = 16
MAX_NAMES = 100_000

PASSED_OVER = frozenset({"node_modules", "extractors", "parsers"})
"""Folders in which no item is looked for, wherever they are."""

_NEVER_TOOLS = (".md", ".sig")


class FolderListing(Struct, frozen=True):
    """The content of one folder: files that may be items, folders to look into, and names that cannot be used."""

    kind: str
    depth: int
    stamp: FileStamp
    places: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    oddities: tuple[tuple[str, str], ...] = ()
    """Path and reason of what looks like an item and is not read."""


def list_base(path: str, names: Iterable[str]) -> FolderListing:
    """Return which folders of items a source has, of those with some names."""
    stamp = stamp_of(path)
    folders = (f"{path}/{name}" for name in names)
    return FolderListing("", 0, settled(stamp), folders=tuple(folder for folder in folders if os.path.lexists(folder)))


def list_folder(path: str, *, home: ItemFolder, depth: int = 0) -> FolderListing:
    """Return the listing of a folder of items. It reads only names and file types, and follows no links."""
    stamp, kind = stamp_of(path), home.name
    try:
        names = _names(path)
    except (FileNotFoundError, NotADirectoryError):
        return FolderListing(kind, depth, settled(stamp))
    except OSError as error:
        return FolderListing(kind, depth, settled(stamp), oddities=((path, f"it cannot be listed: {error.strerror}"),))
    found = [_classify(name, home=home, depth=depth) for name in names[:MAX_NAMES]]
    oddities = [(where, reason) for what, where, reason in found if what == "odd"]
    if len(names) > MAX_NAMES:
        oddities.append((path, f"it holds more than {MAX_NAMES:,} names, and the rest is not looked at"))
    return FolderListing(
        kind,
        depth,
        settled(stamp),
        tuple(where for what, where, _ in found if what == "item"),
        tuple(where for what, where, _ in found if what == "folder"),
        tuple(oddities),
    )


def kind_of(path: Path, base: Path) -> str:
    """Return which of the kinds a file below a source's base belongs to."""
    return path.relative_to(base).parts[0]


def stem_of(path: Path) -> str:
    """Return the name an item has from its place: its folder's, or its file's without the suffix."""
    return path.parent.name if path.name in MANIFESTS else path.stem


def category_of(path: Path, base: Path) -> str:
    """Return the folders between the kind's own folder and the item, joined by `/`."""
    home = path.parent.parent if path.name in MANIFESTS else path.parent
    return "/".join(home.relative_to(base).parts[1:])


def _names(path: str) -> Sequence[os.DirEntry[str]]:
    if os.path.islink(path):  # noqa: PTH114 - text paths, on the hot path
        raise NotADirectoryError
    with os.scandir(path) as names:
        return sorted(islice(names, MAX_NAMES + 1), key=lambda name: name.name)


def _classify(
    name: os.DirEntry[str], *, home: ItemFolder, depth: int
) -> tuple[Literal["item", "folder", "odd", ""], str, str]:
    if name.name.startswith((".", "_")):
        return "", name.path, ""
    if name.is_symlink():
        return "odd", name.path, "it is a symbolic link, and links are not followed"
    if name.is_dir(follow_symlinks=False):
        is_shared_code = not home.type and depth == 0 and name.name == python_source.SHARED_CODE
        if is_shared_code or name.name in PASSED_OVER:
            return "", name.path, ""
        for manifest in filter(None, (home.file, *TOOL_FILES)):
            if os.path.lexists(where := f"{name.path}/{manifest}"):
                return "item", where, ""
        if depth == MAX_DEPTH:
            return "odd", name.path, f"it is nested more than {MAX_DEPTH} folders deep"
        return "folder", name.path, ""
    if not name.is_file(follow_symlinks=False) or not _may_be_item(name.name, home):
        return "", name.path, ""
    if name.name in MANIFESTS:
        return "odd", name.path, "it needs a folder of its own, named for the item"
    return "item", name.path, ""


def _may_be_item(name: str, home: ItemFolder) -> bool:
    return name.endswith(home.suffix) if home.suffix else not name.endswith(_NEVER_TOOLS)
