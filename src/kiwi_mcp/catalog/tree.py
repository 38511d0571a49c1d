"""The files of an item: everything below its folder, and the shared code it asks for."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from kiwi_mcp.catalog.files import Content, Stamp, Stamps, read_file, settled, stamp_of
from kiwi_mcp.domain.errors import TooLarge
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import ToolFile
from kiwi_mcp.manifest.names import is_safe_path

MAX_FILES = 2_000
MAX_BYTES = 64_000_000

_NOT_ITS_OWN = frozenset({".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", ".DS_Store"})
_DERIVED = (".pyc", ".sig")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)


@dataclass(slots=True)
class Tree:
    """Files as they are gathered: what each holds, the stamps to notice changes by, and what could not be taken."""

    what: str
    files: dict[str, ToolFile] = field(default_factory=dict)
    stamps: dict[str, Stamp] = field(default_factory=dict)
    issues: list[Issue] = field(default_factory=list)
    size: int = 0

    def add(self, path: str, content: Content) -> None:
        """Take one file in under its path below the item's root."""
        self.size += len(content.data)
        self.files[path] = file_of(path, content)
        if len(self.files) > MAX_FILES:
            raise TooLarge(self.what, size=None, limit=MAX_FILES, unit="files")

    def take_folder(self, root: Path) -> None:
        """Take in every file below a folder; links and special files are left out and reported."""
        for name in self._walk(str(root)):
            path = name.path[len(str(root)) + 1 :]
            if not name.is_file(follow_symlinks=False):
                self._leave_out(path, "is not a regular file")
            elif not is_safe_path(path):
                self._leave_out(path, "has a name that is not safe on every system")
            else:
                content = read_file(Path(name.path), limit=MAX_BYTES - self.size)
                self.stamps[name.path] = content.stamp
                self.add(path, content)

    def take_shared(self, names: Sequence[object], library: Path) -> None:
        """Take in the shared modules an item imports, below `lib/`."""
        for index, name in enumerate(names):
            module = name.removesuffix(".py") if isinstance(name, str) else ""
            where, path = library / f"{module}.py", f"lib/{module}.py"
            if not _MODULE.fullmatch(module) or not os.path.lexists(where):
                self.stamps[str(where)] = stamp_of(str(where))
                fix = f"Name a file of {library}, without its suffix."
                self.issues.append(Issue(f"config.lib_imports[{index}]", f"{name!r} is not shared code", fix))
            elif path in self.files:
                self._leave_out(path, "is named in lib_imports and is also the item's own; its own is used")
            else:
                content = read_file(where, limit=MAX_BYTES - self.size)
                self.stamps[str(where)] = content.stamp
                self.add(path, content)

    def ordered(self) -> tuple[ToolFile, ...]:
        """Return the files by path."""
        return tuple(self.files[path] for path in sorted(self.files))

    def stamped(self) -> Stamps:
        """Return the stamps of all that was looked at."""
        return tuple(self.stamps.items())

    def _walk(self, root: str) -> Iterator[os.DirEntry[str]]:
        folders = [root]
        while folders:
            folder = folders.pop()
            if len(self.stamps) > 2 * MAX_FILES:
                raise TooLarge(self.what, size=None, limit=MAX_FILES, unit="folders")
            self.stamps[folder] = settled(stamp_of(folder))
            with os.scandir(folder) as names:
                for name in names:
                    if name.name in _NOT_ITS_OWN or name.name.endswith(_DERIVED):
                        continue
                    if name.is_dir(follow_symlinks=False):
                        folders.append(name.path)
                    else:
                        yield name

    def _leave_out(self, path: str, reason: str) -> None:
        fix = f"Put a regular file in its place, or remove {path!r}."
        self.issues.append(Issue(path, f"{path!r} {reason}", fix, severity="warning"))


def file_of(path: str, content: Content) -> ToolFile:
    """Return a file of an item from its bytes."""
    return ToolFile(path, sha256(content.data).hexdigest(), len(content.data), content.is_executable)
