"""An item of an old folder, read in full: the item, its habits, and the modules that lie beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kiwi_mcp.catalog.read import read_head, read_tool
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Source, Tool
from kiwi_mcp.kernel.migrating.habits import Habits, faults_of, read_habits
from kiwi_mcp.kernel.migrating.modules import modules_beside, tops
from kiwi_mcp.kernel.migrating.old_folder import Candidate
from kiwi_mcp.manifest.parse import parse
from kiwi_mcp.manifest.placement import read_written
from kiwi_mcp.manifest.sheets import Sheets

_OLD_NAMES = re.compile(r"^__(?:tool_type|executor_id|category)__\b", re.MULTILINE)
"""The names in which Python tools said what they are before manifests did."""


@dataclass(frozen=True, slots=True)
class OldItem:
    """An item, and what is known of its code where that is Python."""

    tool: Tool
    kind: str
    text: str
    habits: Habits | None = None
    modules: Mapping[str, bytes] = field(default_factory=dict)
    says_so_in_code: bool = False
    """Whether old names at the top of its code say what it is."""

    @property
    def is_convertible(self) -> bool:
        """Whether it is Python code that says what it is in the old way, or not at all."""
        return self.habits is not None and (self.says_so_in_code or self.kind == "scripts")

    @property
    def is_module(self) -> bool:
        """Whether it stands among scripts, and is only there for them to import."""
        is_inert = self.habits is not None and self.habits.is_module
        return is_inert and self.kind == "scripts" and not self.says_so_in_code

    def says_all(self, sheets: Sheets) -> bool:
        """Whether the file would be the same item if it did not stand among scripts."""
        own = self.tool.manifest
        written = read_written(self.tool.origin.path, self.text)
        if written is None:
            return False
        alone = parse(written.value, stem=own.tool_id, sheets=sheets)
        return (alone.tool_type, alone.version, alone.executor) == (own.tool_type, own.version, own.executor)

    def faults(self) -> Iterator[Issue]:
        """Give what its code counts on and does not find."""
        if self.habits is not None:
            is_folder = self.tool.origin.is_folder
            yield from faults_of(self.habits, self.tool.manifest, tops(self.modules), is_folder=is_folder)


def read_old(candidate: Candidate, *, source: Source, base: Path, sheets: Sheets) -> OldItem | None:
    """Return the item in a file, or None where the file holds none; nothing in it is run."""
    path = candidate.path
    head = read_head(path, base=base, sheets=sheets)
    if head is None:
        return None
    tool = read_tool(path, source=source, base=base, sheets=sheets)
    habits = read_habits(head.text) if path.suffix == ".py" else None
    if habits is None:
        return OldItem(tool, candidate.kind, head.text)
    root = base / path.relative_to(base).parts[0]
    says_so = _OLD_NAMES.search(head.text) is not None
    own = {file.path for file in tool.files}
    modules = {name: data for name, data in modules_beside(habits, path, root).items() if name not in own}
    return OldItem(tool, candidate.kind, head.text, habits, modules, says_so)
