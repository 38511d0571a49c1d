"""Migrate: what would become of an old folder, and the change itself."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import indent
from typing import Annotated, Literal

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.item_reader import ITEM_LIMIT, category_of, list_folder, load_bytes, read_head, read_tool
from kiwi_mcp.catalog.item_writer import MANIFEST_NAME, MAX_BYTES, ItemDraft, discard, dump_manifest, place_for, write
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import (
    InvalidManifest,
    InvalidRequest,
    KiwiError,
    PolicyDenied,
    ProjectPathInvalid,
    TooLarge,
)
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import SOURCE_TRAITS, Location, Manifest, Tool, ToolFile
from kiwi_mcp.domain.json import as_list, as_object
from kiwi_mcp.domain.names import is_safe_path
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.paths import project_space
from kiwi_mcp.kernel.verb import (
    AUTHOR,
    AnyJson,
    Argument,
    LongText,
    Option,
    PlaceToWrite,
    ProjectRequest,
    Response,
    Where,
    filled,
    verb,
)
from kiwi_mcp.kernel.verbs.create import Author
from kiwi_mcp.kernel.verbs.sign import SignRequest, sign_checked
from kiwi_mcp.kernel.view import Data, Hint, Notice, ViewItem, issue_text
from kiwi_mcp.manifest.check import check
from kiwi_mcp.manifest.document import read_yaml
from kiwi_mcp.manifest.files import read_file
from kiwi_mcp.manifest.parse import parse
from kiwi_mcp.manifest.python_source import (
    SHARED_CODE,
    ScriptFacts,
    inferred_parameters,
    read_script_facts,
    script_faults,
    undeclared_variables,
)
from kiwi_mcp.manifest.signatures import digest_of, sha256_hex, signature_form, split
from kiwi_mcp.manifest.source_file import read_manifest
from kiwi_mcp.manifest.type_specs import TOOLS, TypeSpecs, load_type_specs

What = Literal["keep", "copy", "convert", "sign", "present", "skip"]
MAX_LOOKED_AT = 10_000
"""The most files and folders that are looked at in one migration."""
MAX_MODULES = 200
MAX_LISTED = 1_000
"""The most items that a response lists; those to which something happens come first."""
_OUTCOMES: dict[What, tuple[str, str]] = {
    "convert": ("would be converted", "converted"),
    "copy": ("would be copied", "copied"),
    "sign": ("would be signed", "signed"),
    "skip": ("skipped", "skipped"),
    "present": ("there already", "there already"),
    "keep": ("left in place", "left in place"),
}
"""What is said of each outcome before and after it, in the order in which items are listed."""
_CHANGES = {"convert", "copy", "sign"}
_FEW = 20
_INSTALLED = frozenset({"venv", "site-packages"})
_MODIFIED = "it was changed after it was signed, so it does not run"
_REPORTED_SUFFIXES = {".py", ".yaml", ".yml", ".js", ".mjs", ".cjs", ".ts", ".sh", ".json", ".toml"}
"""The suffixes of tools in old folders; any other file without metadata is not a tool."""
_OLD_NAMES = re.compile(r"^__(?:tool_type|executor_id|category)__\b", re.MULTILINE)
"""The names in which Python tools said what they are before manifests did."""
_MANIFEST_KEYS = (
    "tool_id", "tool_type", "version", "executor", "name", "description", "category", "tags", "config", "parameters",
    "outputs", "requires", "mutates_state", "effect", "validation", "env_config",
)  # fmt: skip
"""The keys of a manifest in the order in which a person would write them."""


class LegacyFile(Struct, frozen=True):
    """A file that may be an item; with a reason where it is known that it cannot be."""

    path: Path
    kind: str
    """Which folder of a space it belongs into: `tools`, `directives`, `knowledge`, `scripts`."""
    reason: str = ""


class OldItem(Struct, frozen=True):
    """An item, and what is known of its code where that is Python."""

    tool: Tool
    kind: str
    text: str
    facts: ScriptFacts | None = None
    modules: Mapping[str, bytes] = field(default_factory=dict)
    says_so_in_code: bool = False
    """Whether old names at the top of its code say what it is."""

    def faults(self) -> Iterator[Issue]:
        """Yield what its code expects and does not find."""
        if self.facts is not None:
            is_folder = self.tool.origin.is_folder
            yield from script_faults(self.facts, self.tool.manifest, _tops(self.modules), is_folder=is_folder)


class MigrationStep(Struct, frozen=True):
    """What happens to one file: it is kept, copied, converted, signed, there already, or skipped for a reason."""

    what: What
    path: Path
    tool_id: str = ""
    integrity: str = ""
    reason: str = ""
    entry: str = ""
    issues: tuple[Issue, ...] = ()
    draft: ItemDraft | None = None
    shared: Mapping[str, bytes] = field(default_factory=dict)
    """Code that the item imports from the folder that tools share, by its path below `tools`."""
    identity: str = ""
    is_signed: bool = False

    @property
    def is_sound(self) -> bool:
        """Whether nothing keeps the item from being used."""
        return not any(issue.is_error for issue in self.issues)

    def as_item(self, base: Path) -> MigratedItem:
        """Return the step as surfaces show it."""
        draft = self.draft
        is_new = self.what == "convert"
        return filled(
            MigratedItem,
            self,
            source=str(self.path),
            to=str(draft.manifest_path(base)) if draft else UNSET,
            signed=self.is_signed or UNSET,
            manifest=draft.files[draft.manifest_name].decode() if draft and is_new else UNSET,
            issues=[dict(issue.to_json()) for issue in self.issues] or UNSET,
        )


class MigrateRequest(ProjectRequest, frozen=True, kw_only=True):
    """Which old folder to bring along, and how."""

    path: Annotated[
        LongText | None, Argument("An old project, .ai folder or folder of scripts.", "PATH", kind="path")
    ] = None
    apply: Annotated[bool, Option("Do it; otherwise the plan is shown.")] = False
    rewrite: Annotated[bool, Option("Write a tool.yaml beside old Python tools.")] = False
    sign: Annotated[bool, Option("Sign the tools that have no issues.")] = False
    location: PlaceToWrite = None


class MigratedItem(Struct, frozen=True, kw_only=True, rename={"source": "from"}):
    """What happens to one file; empty fields are left out."""

    what: What
    tool_id: str | UnsetType = UNSET
    source: str
    to: str | UnsetType = UNSET
    integrity: str | UnsetType = UNSET
    entry: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    signed: bool | UnsetType = UNSET
    manifest: str | UnsetType = UNSET
    issues: list[dict[str, AnyJson]] | UnsetType = UNSET


class MigrateResponse(Response, frozen=True, kw_only=True):
    """What happens to each item of an old folder."""

    action: str = "migrate"
    status: str
    message: str
    path: str
    target: str
    items: list[MigratedItem]
    left_off: int
    counts: dict[str, int]
    next: str


def _view(response: MigrateResponse) -> Iterator[ViewItem]:
    for item in response.items:
        name = item.tool_id or item.source.rpartition("/")[2]
        state = f" ({item.integrity})" if item.integrity else ""
        place = f" → {item.to}" if item.to else ""
        reason = f": {item.reason}" if item.reason else ""
        yield Data(f"{item.what:<8} {name}{state}{place}{reason}")
        if response.status == "planned" and item.manifest:
            yield Data(indent(item.manifest.rstrip(), "    "))
        for issue in item.issues or ():
            yield Notice(issue_text(issue))
    if response.left_off:
        yield Notice(f"… and {response.left_off} more")
    yield Notice(response.message)
    yield Hint(response.next)


@verb(
    "migrate",
    group="tool",
    wire=("migrate",),
    access=AUTHOR,
    records=lambda payload: bool(payload.get("apply")),
    needs_receipt=lambda payload: bool(payload.get("sign")),
    aliases=("migrate",),
    shows=_view,
)
async def migrate(request: MigrateRequest, context: VerbContext) -> MigrateResponse:
    """Bring the tools of an older folder into this project."""
    services, caller = context.services, context.caller
    catalog, authorship, report = services.catalogs.of(request.project_path), services.authorship(caller), caller.report
    migration = FolderMigration(request, catalog)
    if request.apply and not authorship.is_owner and SOURCE_TRAITS[migration.source].is_in_user_space:
        raise PolicyDenied(
            "Only the owner brings tools to the user's space, where every project uses them.",
            suggestion="Use `location: project`, or ask the owner to type `kiwi migrate --location user --apply`.",
        )
    report(Progress("looking at the folder"))
    found = migration.survey()
    steps: list[MigrationStep] = []
    for number, candidate in enumerate(found):
        report(Progress(f"reading {candidate.path.name}", done=number, total=len(found)))
        step = migration.plan(candidate)
        if step is not None:
            steps.append(migration.write(step) if request.apply else _light(step))
        await asyncio.sleep(0)  # a cancellation of the caller takes effect here
    if request.apply:
        steps = [migration.retire(step) for step in steps]
        authorship.vouches(migration.written_tools(steps))
        author = Author(services.context(caller, catalog), authorship)
        steps = [await migration.sign(step, author) for step in steps]
    # If no file is an item, a long list of files that are not items does not help.
    is_fruitless = len(steps) > _FEW and not any(step.tool_id for step in steps)
    return migration.response([] if is_fruitless else steps)


class FolderMigration:
    """Brings the items of an old folder to a space, once it is decided what happens to each file."""

    def __init__(self, request: MigrateRequest, catalog: Catalog) -> None:
        self._request = request
        self._catalog, self._sheets = catalog, catalog.sheets
        space = catalog.space
        try:  # a folder of another user needs the owner's permission
            wanted = str(space.project / request.path if request.path else space.project)
            folder = project_space(wanted, None, user=space.user, cache=space.cache).project
        except ProjectPathInvalid as error:
            raise InvalidRequest(
                f"`path` cannot be used: {error.message}",
                suggestion="Name a folder of your own: a project, its `.ai`, or a folder of tools.",
            ) from error
        self._old, self._roots = open_folder(folder, space)
        user = os.path.realpath(space.user)
        location = request.location
        is_user = location == "user" or (location is None and str(self._old) == user)
        # A project in the user's own folder has but one space, which is called the project's.
        is_user = is_user and user != os.path.realpath(space.project_ai)
        self.source: Where = "user" if is_user else "project"
        self._base = space.user if is_user else space.project_ai
        # By name: the files of items that are there, each with its digest once that is known.
        self._taken: dict[str, list[tuple[Path, str]]] = {}
        for entry in catalog.all():
            if entry.path.startswith(f"{self._base}{os.sep}"):
                self._taken.setdefault(entry.tool_id, []).append((Path(os.path.realpath(entry.path)), ""))
        kinds = {path.relative_to(self._old).parts[0] for path, _ in self._roots}
        # Whether the items are in that space already.
        self._is_home = os.path.realpath(self._base) == str(self._old) and kinds <= load_type_specs().folders.keys()
        self._known: dict[str, Manifest] = {}

    def survey(self) -> list[LegacyFile]:
        """Return the files with those that others run on first, having read what each calls itself."""
        manifests: dict[Path, Manifest] = {}
        listed = list(candidates(self._old, self._roots))
        for path in (candidate.path for candidate in listed if not candidate.reason):
            with suppress(KiwiError, OSError):  # reported when its step is made
                head = read_head(path, base=self._old, sheets=self._sheets)
                if head is not None:
                    manifests[path] = head.manifest
        self._known = {manifest.tool_id: manifest for manifest in manifests.values()}
        executors = {manifest.executor_id for manifest in manifests.values()}
        carries = {path for path, manifest in manifests.items() if manifest.tool_id in executors}
        return sorted(listed, key=lambda candidate: candidate.path not in carries)

    def plan(self, candidate: LegacyFile) -> MigrationStep | None:
        """Return what happens to a file, or None where it is none of ours."""
        path = candidate.path
        if candidate.reason:
            return MigrationStep("skip", path, reason=candidate.reason)
        try:
            old = self._read(candidate)
            if old is not None:
                return self._decide(old)
            reason = "it holds no metadata, so it is no tool"
            return MigrationStep("skip", path, reason=reason) if path.suffix in _REPORTED_SUFFIXES else None
        except InvalidManifest as error:
            return MigrationStep("skip", path, reason=error.issues[0].reason, issues=error.issues)
        except KiwiError as error:
            issue = Issue("", error.message, error.suggestion)
            return MigrationStep("skip", path, reason=error.message, issues=(issue,))
        except OSError as error:
            return MigrationStep("skip", path, reason=f"it cannot be read: {error.strerror or error}")

    def _read(self, candidate: LegacyFile) -> OldItem | None:
        """Return the item in a file, or None where the file holds none; nothing in it is run."""
        path = candidate.path
        head = read_head(path, base=self._old, sheets=self._sheets)
        if head is None:
            return None
        tool = read_tool(path, source=self.source, base=self._old, sheets=self._sheets)
        facts = read_script_facts(head.text) if path.suffix == ".py" else None
        if facts is None:
            return OldItem(tool, candidate.kind, head.text)
        found = modules_beside(facts, path, self._old / path.relative_to(self._old).parts[0])
        modules = {name: data for name, data in found.items() if name not in {file.path for file in tool.files}}
        return OldItem(tool, candidate.kind, head.text, facts, modules, _OLD_NAMES.search(head.text) is not None)

    def _decide(self, old: OldItem) -> MigrationStep:
        tool, facts, is_script = old.tool, old.facts, old.kind == "scripts"
        step = MigrationStep("skip", tool.origin.path, tool.id, tool.integrity, identity=tool.identity)
        step = replace(step, entry=facts.entry if facts else "")
        if facts and facts.is_module and is_script and not old.says_so_in_code:
            return replace(step, reason="it says nothing about itself and only defines what others import")
        if self._catalog.is_reserved(tool.id):
            return replace(step, reason="a built-in has this name, and is used in its place")
        fix = f"Look at what changed; if it is yours, sign it where it is (`kiwi sign {tool.id}`)."
        changed = (Issue("", _MODIFIED, fix),) if tool.integrity == "modified" else ()
        is_converted = self._request.rewrite and facts is not None and (old.says_so_in_code or is_script)
        if self._is_home and not is_converted:
            step = replace(step, what="keep", issues=(*changed, *self._faults(tool), *old.faults()))
            is_signable = step.is_sound and tool.integrity not in {"signed", "hashed"}
            return replace(step, what="sign") if self._request.sign and is_signable else step
        if changed:
            return replace(step, reason=_MODIFIED, issues=changed)
        if self._sheets.get(tool.manifest.tool_type) is None:
            return replace(step, reason="it says no type, or one that is not known", issues=self._faults(tool))
        return self._converted(step, old, facts) if is_converted and facts else self._copied(step, old)

    def _copied(self, step: MigrationStep, old: OldItem) -> MigrationStep:
        tool, path = old.tool, old.tool.origin.path
        own, shared = dict[str, bytes](), dict[str, bytes]()
        for file in tool.files:
            is_in_folder = tool.origin.is_folder and (tool.origin.root / file.path).exists()
            is_own = is_in_folder or (not tool.origin.is_folder and file.path == path.name)
            (own if is_own else shared)[file.path] = load_bytes(tool, file)
        executables = frozenset(file.path for file in tool.files if file.is_executable)
        # A script that says all of it itself is a tool; the others are what they are because they are in `scripts`.
        kind = "tools" if old.kind == "scripts" and self._says_all(old) else old.kind
        name = path.parent.name if tool.origin.is_folder else path.name
        category = category_of(path, self._old) or (tool.manifest.category if kind == "tools" else "")
        draft = ItemDraft(place_for(kind=kind, category=category, name=name), path.name, own, executables)
        issues = (*self._faults(tool), *old.faults())
        return self._placed(replace(step, what="copy", draft=draft, shared=shared, issues=issues), tool)

    def _says_all(self, old: OldItem) -> bool:
        """Whether a file would be the same item if it were not in the folder of scripts."""
        own = old.tool.manifest
        written = read_manifest(old.tool.origin.path, old.text)
        if written is None:
            return False
        alone = parse(written.value, stem=own.tool_id, sheets=self._sheets)
        return (alone.tool_type, alone.version, alone.executor) == (own.tool_type, own.version, own.executor)

    def _converted(self, step: MigrationStep, old: OldItem, facts: ScriptFacts) -> MigrationStep:
        draft, tool, notes = convert(old.tool, facts, old.modules, self._sheets)
        found = script_faults(facts, tool.manifest, _tops(draft.files), is_folder=True)
        step = replace(step, issues=(*self._faults(tool), *notes, *found))
        if not step.is_sound:
            return replace(step, reason="it has issues that a tool of today may not have")
        return self._placed(replace(step, what="convert", draft=draft), tool)

    def _placed(self, step: MigrationStep, placed: Tool) -> MigrationStep:
        """Return a step that writes something, unless its name or its place is taken."""
        others = [other for other in self._taken.get(placed.id, ()) if other[0] != step.path]
        if placed.digest in [digest or self._digest(path) for path, digest in others]:
            # Written by an earlier run that did not come to the end: the old file is still to go.
            is_left_over = self._is_home and step.what == "convert"
            return replace(step, what="convert" if is_left_over else "present", draft=None, issues=())
        reason = f"another item has this name: {others[0][0]}" if others else ""
        if not reason and step.draft and os.path.lexists(where := self._base / step.draft.place):
            reason = f"{where} is there already"
        for name, data in step.shared.items() if not reason else ():
            file = self._base / "tools" / name
            if os.path.lexists(file) and (file.is_symlink() or file.read_bytes() != data):
                reason = f"tools/{name} of the target is another file than the one it imports"
                break
        if reason:
            return replace(step, what="skip", draft=None, reason=reason)
        path = step.draft.manifest_path(self._base) if step.draft else step.path
        self._taken.setdefault(placed.id, []).append((path, placed.digest))
        return step

    def _digest(self, path: Path) -> str:
        try:
            return read_tool(path, source=self.source, base=self._base, sheets=self._sheets).digest
        except (KiwiError, OSError):
            return ""

    def _faults(self, tool: Tool) -> tuple[Issue, ...]:
        """Return what is wrong with an item; no program is started to find out."""
        below = None
        if tool.manifest.executor is not None:
            try:
                below = self._catalog.below(tool).tool.manifest
            except KiwiError:
                below = self._known.get(tool.manifest.executor_id or "")
        return check(
            tool.manifest,
            sheets=self._sheets,
            file_names=[file.path for file in tool.files],
            is_folder=tool.origin.is_folder,
            executor=below,
            executor_missing=below is None and tool.manifest.executor is not None,
        )

    def write(self, step: MigrationStep) -> MigrationStep:
        """Write what a step has to write: all of an item, or nothing of it."""
        if step.draft is None:
            return step
        try:
            for name, data in step.shared.items():
                if not os.path.lexists(self._base / "tools" / name):
                    write(ItemDraft(f"tools/{name}", Path(name).name, {Path(name).name: data}), self._base)
            write(step.draft, self._base)
        except KiwiError as error:
            return replace(step, what="skip", draft=None, reason=error.message)
        return _light(step)

    def retire(self, step: MigrationStep) -> MigrationStep:
        """Move a file to the trash if its converted form is in the same space; originals elsewhere are not touched.

        This happens after everything is written: until then, scripts that import each other must all be readable.
        """
        if step.what == "convert" and self._is_home:
            try:
                discard(step.path, self._base)
            except KiwiError as error:
                reason = f"the old file could not be moved to the trash: {error}"
                return replace(step, issues=(*step.issues, Issue("", reason, f"Remove {step.path}.", "warning")))
        return step

    def written_tools(self, steps: Sequence[MigrationStep]) -> Iterator[Tool]:
        """Yield the items that were just written."""
        for step in steps:
            if step.draft is not None:
                with suppress(KiwiError):  # the error is reported with the issues of the step
                    yield self._catalog.find(step.tool_id, source=self.source)

    async def sign(self, step: MigrationStep, author: Author) -> MigrationStep:
        """Sign the item of a step, if that is wanted and it has no issues."""
        if not self._request.sign or step.what not in _CHANGES or not step.is_sound:
            return step
        try:
            await sign_checked(SignRequest(item_id=step.identity, location=self.source), author, None)
        except KiwiError as error:
            issue = Issue("", f"it was not signed: {error.message}", error.suggestion, "warning")
            return replace(step, what="keep" if step.what == "sign" else step.what, issues=(*step.issues, issue))
        return replace(step, is_signed=True)

    def response(self, steps: Sequence[MigrationStep]) -> MigrateResponse:
        """Return what happened or would happen to each item."""
        is_done = self._request.apply
        order = list(_OUTCOMES)
        ordered = sorted(steps, key=lambda step: (order.index(step.what), str(step.path)))
        found = Counter(step.what for step in ordered)
        counts: Mapping[What, int] = {what: found[what] for what in order if found[what]}
        path = str(self._roots[0][0] if len(self._roots) == 1 else self._old)
        parts = [f"{count} {_OUTCOMES[what][is_done]}" for what, count in counts.items()]
        return MigrateResponse(
            status="migrated" if is_done else "planned",
            message=", ".join(parts) or f"There is no item in {path}.",
            path=path,
            target=str(self._base),
            items=[step.as_item(self._base) for step in ordered[:MAX_LISTED]],
            left_off=max(len(ordered) - MAX_LISTED, 0),
            counts={str(what): count for what, count in counts.items()},
            next=self._next(counts),
        )

    def _next(self, counts: Mapping[What, int]) -> str:
        request = self._request
        if not counts and request.path:
            return "Name a project, its `.ai` folder, or a folder of tools that describe themselves."
        if _CHANGES.isdisjoint(counts):
            hint = " these are used where they are. `rewrite` (`--rewrite`) gives old Python tools a tool.yaml."
            return (
                f"Nothing to do:{hint}"
                if "keep" in counts and self._is_home and not request.rewrite
                else "Nothing to do."
            )
        if not request.apply:
            return "Nothing was changed. Do it with `apply: true` (`--apply`)."
        if self._is_home and "convert" in counts:
            return "The old files are in the trash (`.trash` of the space). Run one of the tools with `kiwi run NAME`."
        return "The originals are where they were. Run one of the tools with `kiwi run NAME`."


def _light(step: MigrationStep) -> MigrationStep:
    """Return a step with only its manifest file, which is reported: thousands of steps are in memory at once."""
    if step.draft is None:
        return step
    name = step.draft.manifest_name
    return replace(step, draft=replace(step.draft, files={name: step.draft.files[name]}), shared={})


def open_folder(folder: Path, space: Space) -> tuple[Path, Sequence[tuple[Path, str]]]:
    """Return the folder above the kinds of items and the folders to walk, each with its kind.

    A folder is a space, a part of one, or a folder of tools.
    """
    kinds, inner = load_type_specs().folders, folder / ".ai"

    def is_space(path: Path) -> bool:
        is_named = path.name == ".ai" or str(path) == os.path.realpath(space.user)
        return is_named or any((path / kind).is_dir() for kind, home in kinds.items() if home.type)

    has_inner = inner.is_dir() and not inner.is_symlink()
    if has_inner or is_space(folder):
        whole = inner if has_inner else folder
        return whole, [(whole / kind, kind) for kind in kinds]
    for above in (folder, *folder.parents):
        if above.name in kinds and (above == folder or is_space(above.parent)):
            return above.parent, [(folder, above.name)]
    return folder.parent, [(folder, TOOLS.name)]


def candidates(base: Path, roots: Sequence[tuple[Path, str]]) -> Iterator[LegacyFile]:
    """Yield the files that may be items; only names and file types are checked, and links are not followed."""
    folders = [(path, kind, len(path.relative_to(base).parts) - 1) for path, kind in reversed(roots)]
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
        left_out = _INSTALLED if depth else {*_INSTALLED, SHARED_CODE}
        below = [path for path in map(Path, reversed(listing.folders)) if path.name not in left_out]
        folders += [(path, kind, depth + 1) for path in below]


def convert(
    tool: Tool, facts: ScriptFacts, modules: Mapping[str, bytes], sheets: TypeSpecs
) -> tuple[ItemDraft, Tool, Sequence[Issue]]:
    """Return an old tool as a folder: the draft, the item it will be, and what its manifest does not say any more.

    Its code stays as it was, without the line that signed it, beside a new `tool.yaml`.
    """
    name, manifest = tool.origin.path.name, tool.manifest
    own = next(file for file in tool.files if file.path == name)
    _signature, body = split(load_bytes(tool, own).decode(), signature_form(tool.origin.path))
    sheet = sheets.get(manifest.tool_type)
    idle = [word for word in manifest.config if sheet is not None and word not in sheet.words]
    config = {word: value for word, value in manifest.config.items() if word not in {*idle, "lib_imports"}}
    missing = undeclared_variables(facts, manifest)
    if needed := [variable for variable, spare in missing.items() if spare is None]:
        config["variables"] = [*as_list(config.get("variables")), *needed]
    if spared := {variable: f"${{{variable}:-{spare}}}" for variable, spare in missing.items() if spare is not None}:
        config["env"] = {**as_object(config.get("env")), **spared}
    words = {**{key: getattr(manifest, key) for key in _MANIFEST_KEYS}, "config": config, **manifest.extra}
    if not manifest.mutates_state:
        del words["mutates_state"]
    if "effect" not in manifest.written:
        del words["effect"]
    if manifest.parameters == inferred_parameters(body, what=name):
        del words["parameters"]  # not declared: they were inferred from the entry function, and are inferred again
    shown = {word: value for word, value in words.items() if value not in (None, "", {}, [], ())}
    # Code that it shared with other tools is in the new folder, so it need not be shared any more.
    lent = {file.path: load_bytes(tool, file) for file in tool.files if file.path != name}
    draft = ItemDraft(
        place_for(kind="tools", category=manifest.category, name=manifest.tool_id),
        MANIFEST_NAME,
        {MANIFEST_NAME: dump_manifest(shown), name: body.encode(), **lent, **modules},
        frozenset({name} if own.is_executable else ()),
    )
    fix, reason = "Nothing, unless you meant a word of the manifest.", "so it is not in the new manifest"
    return (
        draft,
        _item(draft, tool, sheets),
        [
            Issue(f"config.{word}", f"`{word}` means nothing to Kiwi, {reason}; the code still has it", fix, "warning")
            for word in idle
        ],
    )


def _item(draft: ItemDraft, old: Tool, sheets: TypeSpecs) -> Tool:
    """Return a draft as the item it will be, without writing it anywhere."""
    body = draft.files[MANIFEST_NAME]
    written = as_object(read_yaml(body.decode(), what=MANIFEST_NAME).value)
    manifest = parse(written, stem=old.id, category=old.manifest.category, sheets=sheets)
    if "parameters" not in written:
        manifest = replace(manifest, parameters=old.manifest.parameters)
    files = tuple(
        ToolFile(path, sha256_hex(data), len(data), path in draft.executables)
        for path, data in sorted(draft.files.items())
    )
    digest = digest_of(
        tool_id=manifest.tool_id,
        version=manifest.version,
        executor=manifest.executor,
        manifest_body=body,
        files=[file for file in files if file.path != MANIFEST_NAME],
    )
    path = draft.manifest_path(old.origin.root)
    return Tool(manifest, Location(old.origin.source, path, path.parent), files, digest)


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


def _tops(files: Mapping[str, bytes]) -> frozenset[str]:
    """Return the names under which modules are imported."""
    return frozenset(file.partition("/")[0].removesuffix(".py") for file in files)


def _files_of(name: str, folders: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a module, from the first folder that has any."""
    for folder in folders:
        is_here = False
        for file in _places(name, folder):
            if (data := _read_module(folder, file)) is not None:
                is_here = True
                yield file, data
        if is_here:
            return


def _places(name: str, folder: Path) -> Iterator[str]:
    top, *rest = name.split(".")
    yield f"{top}.py"
    if (folder / top / "__init__.py").is_file():
        # A package may import any part of itself, in ways that cannot be seen from outside.
        count = 0
        for where, folders, names in os.walk(folder / top):
            folders.sort()
            for file in sorted(names):
                count += 1
                if count > MAX_MODULES * 10:
                    return
                if file.endswith(".py"):
                    yield (Path(where) / file).relative_to(folder).as_posix()
    elif rest:
        yield "/".join((top, *rest)) + ".py"


def _read_module(folder: Path, file: str) -> bytes | None:
    """Return the bytes of a file; None where it is not there, or is reached by a link."""
    parts = file.split("/")
    above = [folder.joinpath(*parts[:end]) for end in range(1, len(parts))]
    if not is_safe_path(file) or any(part.is_symlink() for part in above):
        return None
    try:
        return read_file(folder / file, limit=ITEM_LIMIT).data
    except (InvalidManifest, TooLarge):
        return None
