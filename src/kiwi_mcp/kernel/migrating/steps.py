"""Steps: what happens to one file of an old folder, decided before anything is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.folder import category_of
from kiwi_mcp.catalog.read import load_bytes, read_head, read_tool
from kiwi_mcp.domain.errors import InvalidManifest, KiwiError
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Manifest, Source, Tool
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.kernel.authoring.drafts import Draft, place_for, write
from kiwi_mcp.kernel.migrating.convert import convert
from kiwi_mcp.kernel.migrating.habits import faults_of
from kiwi_mcp.kernel.migrating.modules import tops
from kiwi_mcp.kernel.migrating.old_folder import Candidate, OldFolder
from kiwi_mcp.kernel.migrating.old_item import OldItem, read_old
from kiwi_mcp.manifest.check import check

What = Literal["keep", "copy", "convert", "sign", "present", "skip"]
_MODIFIED = "it was changed after it was signed, so it does not run"
_TOLD_SUFFIXES = {".py", ".yaml", ".yml", ".js", ".mjs", ".cjs", ".ts", ".sh", ".json", ".toml"}
"""What old folders kept tools in; any other file without metadata is nobody's tool."""


@dataclass(frozen=True, slots=True)
class Step:
    """What happens to one file: it is kept, copied, converted, signed, there already, or skipped for a reason."""

    what: What
    path: Path
    tool_id: str = ""
    integrity: str = ""
    reason: str = ""
    entry: str = ""
    issues: tuple[Issue, ...] = ()
    draft: Draft | None = None
    shared: Mapping[str, bytes] = field(default_factory=dict)
    """Code that the item imports from the folder that tools share, by its path below `tools`."""
    identity: str = ""
    is_signed: bool = False

    @property
    def is_sound(self) -> bool:
        """Whether nothing keeps the item from being used."""
        return not any(issue.is_error for issue in self.issues)

    def place(self, base: Path) -> Path:
        """Return where the item is when the step is done."""
        return self.draft.manifest_path(base) if self.draft else self.path

    def to_json(self, base: Path) -> JsonObject:
        """Return the step as surfaces show it."""
        told: dict[str, Json] = {"what": self.what, "tool_id": self.tool_id, "from": str(self.path)}
        told |= {"to": str(self.place(base)) if self.draft else "", "integrity": self.integrity}
        told |= {"entry": self.entry, "reason": self.reason, "signed": self.is_signed}
        if self.draft and self.what == "convert":
            told["manifest"] = self.draft.files[self.draft.manifest_name].decode()
        told["issues"] = [issue.to_json() for issue in self.issues]
        return {word: value for word, value in told.items() if value}


@dataclass(frozen=True, slots=True)
class Target:
    """The space that items are brought to, and those that are in it."""

    source: Source
    base: Path
    catalog: Catalog
    taken: dict[str, list[tuple[Path, str]]]
    """By name: the files of items that are there, each with its digest once that is known."""


class Planner:
    """Decides what happens to each file of an old folder."""

    def __init__(self, old: OldFolder, target: Target, *, rewrite: bool, sign: bool) -> None:
        self._old = old
        self._target = target
        self._rewrite = rewrite
        self._sign = sign
        self._sheets = target.catalog.sheets
        self._is_home = old.is_within(target.base)
        self._known: dict[str, Manifest] = {}

    def survey(self, found: Iterable[Candidate]) -> list[Candidate]:
        """Return the files with those that others run on first, having read what each calls itself."""
        manifests: dict[Path, Manifest] = {}
        listed = list(found)
        for path in (candidate.path for candidate in listed if not candidate.reason):
            try:
                head = read_head(path, base=self._old.base, sheets=self._sheets)
            except (KiwiError, OSError):
                continue  # told when its turn comes
            if head is not None:
                manifests[path] = head.manifest
        self._known = {manifest.tool_id: manifest for manifest in manifests.values()}
        executors = {manifest.executor_id for manifest in manifests.values()}
        carries = {path for path, manifest in manifests.items() if manifest.tool_id in executors}
        return sorted(listed, key=lambda candidate: candidate.path not in carries)

    def plan(self, candidate: Candidate) -> Step | None:
        """Return what happens to a file, or None where it is none of ours."""
        path = candidate.path
        if candidate.reason:
            return Step("skip", path, reason=candidate.reason)
        try:
            old = read_old(candidate, source=self._target.source, base=self._old.base, sheets=self._sheets)
            if old is None:
                reason = "it holds no metadata, so it is no tool"
                return Step("skip", path, reason=reason) if path.suffix in _TOLD_SUFFIXES else None
            return self._decide(old)
        except InvalidManifest as error:
            return Step("skip", path, reason=error.issues[0].reason, issues=error.issues)
        except KiwiError as error:
            return Step("skip", path, reason=error.message, issues=(Issue("", error.message, error.suggestion),))
        except OSError as error:
            return Step("skip", path, reason=f"it cannot be read: {error.strerror or error}")

    def _decide(self, old: OldItem) -> Step:
        tool = old.tool
        step = Step("skip", tool.origin.path, tool.id, tool.integrity, identity=tool.identity)
        step = replace(step, entry=old.habits.entry if old.habits else "")
        if old.is_module:
            return replace(step, reason="it says nothing about itself and only defines what others import")
        if self._target.catalog.is_reserved(tool.id):
            return replace(step, reason="a built-in has this name, and is used in its place")
        is_converted = self._rewrite and old.is_convertible
        if self._is_home and not is_converted:
            return self._kept(step, old)
        if tool.integrity == "modified":
            return replace(step, reason=_MODIFIED, issues=(_modified(tool),))
        if self._sheets.get(tool.manifest.tool_type) is None:
            return replace(step, reason="it says no type, or one that is not known", issues=self._faults(tool))
        return self._converted(step, old) if is_converted else self._copied(step, old)

    def _kept(self, step: Step, old: OldItem) -> Step:
        changed = [_modified(old.tool)] if old.tool.integrity == "modified" else []
        step = replace(step, what="keep", issues=(*changed, *self._faults(old.tool), *old.faults()))
        is_signable = step.is_sound and old.tool.integrity != "signed"
        return replace(step, what="sign") if self._sign and is_signable else step

    def _copied(self, step: Step, old: OldItem) -> Step:
        tool, path = old.tool, old.tool.origin.path
        files = {file.path: load_bytes(tool, file) for file in tool.files}
        lent = {name: data for name, data in files.items() if _is_lent(name, tool)}
        own = {name: data for name, data in files.items() if name not in lent}
        executables = frozenset(file.path for file in tool.files if file.is_executable)
        name = path.parent.name if tool.origin.is_folder else path.name
        # A script that says all of it itself is a tool; the others are what they are by standing in `scripts`.
        kind = "tools" if old.kind == "scripts" and old.says_all(self._sheets) else old.kind
        category = category_of(path, self._old.base) or (tool.manifest.category if kind == "tools" else "")
        draft = Draft(place_for(kind=kind, category=category, name=name), path.name, own, executables)
        issues = (*self._faults(tool), *old.faults())
        return self._placed(replace(step, what="copy", draft=draft, shared=lent, issues=issues), tool)

    def _converted(self, step: Step, old: OldItem) -> Step:
        assert old.habits is not None  # noqa: S101 - only Python code is old, and has habits
        made = convert(old.tool, old.habits, old.modules, self._sheets)
        modules = tops(made.draft.files)
        found = [*made.issues, *faults_of(old.habits, made.tool.manifest, modules, is_folder=True)]
        step = replace(step, issues=(*self._faults(made.tool), *found))
        if not step.is_sound:
            return replace(step, reason="it has issues that a tool of today may not have")
        return self._placed(replace(step, what="convert", draft=made.draft), made.tool)

    def _placed(self, step: Step, placed: Tool) -> Step:
        """Return a step that writes something, unless its name or its place is taken."""
        others = [other for other in self._target.taken.get(placed.id, ()) if other[0] != step.path]
        digests = [digest or self._digest(path) for path, digest in others]
        if placed.digest in digests:
            # Written by an earlier run that did not come to the end: the old file is still to go.
            is_left_over = self._is_home and step.what == "convert"
            return replace(step, what="convert" if is_left_over else "present", draft=None, issues=())
        if others:
            reason = f"another item has this name: {others[0][0]}"
            return replace(step, what="skip", draft=None, reason=reason)
        if step.draft and os.path.lexists(where := self._target.base / step.draft.place):
            return replace(step, what="skip", draft=None, reason=f"{where} is there already")
        if clash := next((name for name in step.shared if self._is_other(name, step.shared[name])), ""):
            reason = f"tools/{clash} of the target is another file than the one it imports"
            return replace(step, what="skip", draft=None, reason=reason)
        self._target.taken.setdefault(placed.id, []).append((step.place(self._target.base), placed.digest))
        return step

    def _is_other(self, name: str, data: bytes) -> bool:
        where = self._target.base / "tools" / name
        return os.path.lexists(where) and (where.is_symlink() or where.read_bytes() != data)

    def _digest(self, path: Path) -> str:
        try:
            return read_tool(path, source=self._target.source, base=self._target.base, sheets=self._sheets).digest
        except (KiwiError, OSError):
            return ""

    def _faults(self, tool: Tool) -> tuple[Issue, ...]:
        """Return what is wrong with an item; no program is started to find out."""
        below = self._below(tool)
        return check(
            tool.manifest,
            sheets=self._sheets,
            file_names=[file.path for file in tool.files],
            is_folder=tool.origin.is_folder,
            executor=below,
            executor_missing=below is None and tool.manifest.executor is not None,
        )

    def _below(self, tool: Tool) -> Manifest | None:
        if tool.manifest.executor is None:
            return None
        try:
            return self._target.catalog.below(tool).tool.manifest
        except KiwiError:
            return self._known.get(tool.manifest.executor_id or "")


def write_shared(shared: Mapping[str, bytes], base: Path) -> None:
    """Write the shared code that is not there yet."""
    for name, data in shared.items():
        if not os.path.lexists(base / "tools" / name):
            write(Draft(f"tools/{name}", Path(name).name, {Path(name).name: data}), base)


def _is_lent(name: str, tool: Tool) -> bool:
    """Whether a file of an item is code that tools share, which lies elsewhere."""
    return not (tool.origin.root / name).exists() if tool.origin.is_folder else name != tool.origin.path.name


def _modified(tool: Tool) -> Issue:
    fix = f"Look at what changed; if it is yours, sign it where it is (`kiwi sign {tool.id}`)."
    return Issue("", _MODIFIED, fix)
