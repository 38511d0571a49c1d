"""Items of old folders: the files that may be items, each with the modules beside it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from kiwi_mcp.catalog.folder_source import list_folder
from kiwi_mcp.catalog.item_reader import ITEM_LIMIT, read_head, read_tool
from kiwi_mcp.catalog.item_writer import MAX_BYTES
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import InvalidManifest, TooLarge
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Source, Tool
from kiwi_mcp.domain.names import is_safe_path
from kiwi_mcp.manifest.files import read_file
from kiwi_mcp.manifest.legacy.python_script import SHARED_CODE, ScriptFacts, read_script_facts, script_faults
from kiwi_mcp.manifest.parse import parse
from kiwi_mcp.manifest.source_file import read_manifest
from kiwi_mcp.manifest.type_specs import TOOLS, TypeSpecs, load_type_specs

MAX_LOOKED_AT = 10_000
"""The most files and folders that are looked at in one migration."""

_INSTALLED = frozenset({"venv", "site-packages"})


class OldFolder(Struct, frozen=True):
    """A folder to migrate: the folder above its kinds, and the folders to walk, each with its kind."""

    base: Path
    roots: tuple[tuple[Path, str], ...]

    def is_within(self, space: Path) -> bool:
        """Whether the items in it are those of a space already."""
        kinds = {path.relative_to(self.base).parts[0] for path, _ in self.roots}
        return os.path.realpath(space) == str(self.base) and kinds <= load_type_specs().folders.keys()


class LegacyFile(Struct, frozen=True):
    """A file that may be an item; with a reason where it is known that it cannot be."""

    path: Path
    kind: str
    """Which folder of a space it belongs into: `tools`, `directives`, `knowledge`, `scripts`."""
    reason: str = ""


def open_folder(folder: Path, space: Space) -> OldFolder:
    """Return what a folder is taken for: a space, a part of one, or a folder of tools."""
    if (folder / ".ai").is_dir() and not (folder / ".ai").is_symlink():
        return _space_at(folder / ".ai")
    if _is_space(folder, space):
        return _space_at(folder)
    for above in (folder, *folder.parents):
        if above.name in load_type_specs().folders and (above == folder or _is_space(above.parent, space)):
            return OldFolder(above.parent, ((folder, above.name),))
    return OldFolder(folder.parent, ((folder, TOOLS.name),))


def _is_space(folder: Path, space: Space) -> bool:
    is_named = folder.name == ".ai" or str(folder) == os.path.realpath(space.user)
    return is_named or any((folder / kind).is_dir() for kind, home in load_type_specs().folders.items() if home.type)


def _space_at(base: Path) -> OldFolder:
    return OldFolder(base, tuple((base / kind, kind) for kind in load_type_specs().folders))


def candidates(old: OldFolder) -> Iterator[LegacyFile]:
    """Yield the files that may be items; only names and file types are checked, and links are not followed."""
    folders = [(path, kind, len(path.relative_to(old.base).parts) - 1) for path, kind in reversed(old.roots)]
    room = MAX_LOOKED_AT
    while folders:
        folder, kind, depth = folders.pop()
        listing = list_folder(str(folder), home=load_type_specs().folders[kind], depth=depth)
        room -= 1
        for place, reason in (*((place, "") for place in listing.places[: max(room, 0)]), *listing.oddities):
            yield LegacyFile(Path(place), kind, reason)
        room -= len(listing.places)
        if room < 0:
            reason = f"there are more than {MAX_LOOKED_AT:,} files and folders, and the rest was not looked at"
            yield LegacyFile(folder, "", reason)
            return
        below = [Path(name) for name in reversed(listing.folders) if not _is_passed_over(Path(name), depth)]
        folders += [(path, kind, depth + 1) for path in below]


def _is_passed_over(folder: Path, depth: int) -> bool:
    return folder.name in _INSTALLED or (depth == 0 and folder.name == SHARED_CODE)


MAX_MODULES = 200
_PACKAGE = "__init__.py"


def modules_beside(facts: ScriptFacts, path: Path, root: Path) -> Mapping[str, bytes]:
    """Return the modules a script imports from its folder, the folder of all scripts or the shared code in that.

    Each has the path where the script finds it when both are in one folder. The imports of those modules are included.
    """
    places = dict.fromkeys((path.parent, root, root / SHARED_CODE))
    folders = [folder for folder in places if not folder.is_symlink()]
    found: dict[str, bytes] = {}
    waiting, seen = list(facts.modules), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name.partition(".")[0] in sys.stdlib_module_names:
            continue
        seen.add(name)
        for file, data in _files_of(name, folders):
            if file in found or file == path.name:
                continue
            found[file] = data
            inner = read_script_facts(data.decode(errors="replace"))
            waiting += inner.modules if inner else ()
            if len(found) > MAX_MODULES:
                raise TooLarge(f"What {path.name} imports", size=None, limit=MAX_MODULES, unit="files")
            if (size := sum(map(len, found.values()))) > MAX_BYTES:
                raise TooLarge(f"What {path.name} imports", size=size, limit=MAX_BYTES)
    return found


def tops(files: Mapping[str, bytes]) -> frozenset[str]:
    """Return the names under which modules are imported."""
    return frozenset(file.partition("/")[0].removesuffix(".py") for file in files)


def _files_of(name: str, folders: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a module, from the first folder that has any."""
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
        # A package may import any part of itself, in ways that cannot be seen from outside.
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


_OLD_NAMES = re.compile(r"^__(?:tool_type|executor_id|category)__\b", re.MULTILINE)
"""The names in which Python tools said what they are before manifests did."""


class OldItem(Struct, frozen=True):
    """An item, and what is known of its code where that is Python."""

    tool: Tool
    kind: str
    text: str
    facts: ScriptFacts | None = None
    modules: Mapping[str, bytes] = field(default_factory=dict)
    says_so_in_code: bool = False
    """Whether old names at the top of its code say what it is."""

    @property
    def is_convertible(self) -> bool:
        """Whether it is Python code that says what it is in the old way, or not at all."""
        return self.facts is not None and (self.says_so_in_code or self.kind == "scripts")

    @property
    def is_module(self) -> bool:
        """Whether it is in the folder of scripts, and exists only for scripts to import."""
        is_inert = self.facts is not None and self.facts.is_module
        return is_inert and self.kind == "scripts" and not self.says_so_in_code

    def says_all(self, sheets: TypeSpecs) -> bool:
        """Whether the file would be the same item if it were not in the folder of scripts."""
        own = self.tool.manifest
        written = read_manifest(self.tool.origin.path, self.text)
        if written is None:
            return False
        alone = parse(written.value, stem=own.tool_id, sheets=sheets)
        return (alone.tool_type, alone.version, alone.executor) == (own.tool_type, own.version, own.executor)

    def faults(self) -> Iterator[Issue]:
        """Yield what its code expects and does not find."""
        if self.facts is not None:
            is_folder = self.tool.origin.is_folder
            yield from script_faults(self.facts, self.tool.manifest, tops(self.modules), is_folder=is_folder)


def read_old(candidate: LegacyFile, *, source: Source, base: Path, sheets: TypeSpecs) -> OldItem | None:
    """Return the item in a file, or None where the file holds none; nothing in it is run."""
    path = candidate.path
    head = read_head(path, base=base, sheets=sheets)
    if head is None:
        return None
    tool = read_tool(path, source=source, base=base, sheets=sheets)
    facts = read_script_facts(head.text) if path.suffix == ".py" else None
    if facts is None:
        return OldItem(tool, candidate.kind, head.text)
    root = base / path.relative_to(base).parts[0]
    says_so = _OLD_NAMES.search(head.text) is not None
    own = {file.path for file in tool.files}
    modules = {name: data for name, data in modules_beside(facts, path, root).items() if name not in own}
    return OldItem(tool, candidate.kind, head.text, facts, modules, says_so)
