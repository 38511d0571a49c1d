"""Migrate: what would become of an old folder, and the change itself."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import indent
from typing import Annotated, Literal

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.folder_source import category_of
from kiwi_mcp.catalog.item_reader import load_bytes, read_head, read_tool
from kiwi_mcp.catalog.item_writer import MANIFEST_NAME, ItemDraft, discard, dump_manifest, place_for, write
from kiwi_mcp.catalog.legacy_items import LegacyFile, OldFolder, OldItem, candidates, open_folder, read_old, tops
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import InvalidManifest, InvalidRequest, KiwiError, PolicyDenied, ProjectPathInvalid
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import SOURCE_TRAITS, Location, Manifest, Tool, ToolFile
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
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
    verb,
)
from kiwi_mcp.kernel.verbs.create import Author
from kiwi_mcp.kernel.verbs.sign import SignRequest, sign_checked
from kiwi_mcp.kernel.view import Data, Hint, Notice, ViewItem, issue_text
from kiwi_mcp.manifest.check import check
from kiwi_mcp.manifest.legacy.python_script import ScriptFacts, script_faults, undeclared_variables
from kiwi_mcp.manifest.parse import parse
from kiwi_mcp.manifest.python_source import inferred_parameters
from kiwi_mcp.manifest.signatures import digest_of, sha256_hex, signature_form, split
from kiwi_mcp.manifest.type_specs import TypeSpecs
from kiwi_mcp.manifest.yaml import read_yaml


class Converted(Struct, frozen=True):
    """The folder that an old tool becomes, and what its manifest does not say any more."""

    draft: ItemDraft
    tool: Tool
    """The item that the draft will be."""
    issues: tuple[Issue, ...]


def convert(tool: Tool, facts: ScriptFacts, modules: Mapping[str, bytes], sheets: TypeSpecs) -> Converted:
    """Return an old tool as a folder: its code as it was, without the line that signed it, and a `tool.yaml`."""
    name = tool.origin.path.name
    own = next(file for file in tool.files if file.path == name)
    _signature, body = split(load_bytes(tool, own).decode(), signature_form(tool.origin.path))
    manifest = tool.manifest
    sheet = sheets.get(manifest.tool_type)
    idle = [word for word in manifest.config if sheet is not None and word not in sheet.words]
    # Code that it shared with other tools is in the new folder, so it need not be shared any more.
    lent = {file.path: load_bytes(tool, file) for file in tool.files if file.path != name}
    words = {**_words(manifest), "config": _config(manifest, facts, idle)}
    if manifest.parameters == inferred_parameters(body, what=name):
        del words["parameters"]  # not declared: they were inferred from the entry function, and are inferred again
    shown = {word: value for word, value in words.items() if value not in (None, "", {}, [])}
    draft = ItemDraft(
        place_for(kind="tools", category=manifest.category, name=manifest.tool_id),
        MANIFEST_NAME,
        {MANIFEST_NAME: dump_manifest(shown), name: body.encode(), **lent, **modules},
        frozenset({name} if own.is_executable else ()),
    )
    return Converted(draft, _item(draft, tool, sheets), tuple(_left_out(idle)))


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


def _words(manifest: Manifest) -> dict[str, Json]:
    """Return the words of a manifest in the order in which a person would write them."""
    return {
        "tool_id": manifest.tool_id,
        "tool_type": manifest.tool_type,
        "version": manifest.version,
        "executor": manifest.executor,
        "name": manifest.name,
        "description": manifest.description,
        "category": manifest.category,
        "tags": list(manifest.tags),
        "config": {},
        "parameters": manifest.parameters,
        "outputs": manifest.outputs,
        "requires": list(manifest.requires),
        "mutates_state": manifest.mutates_state or None,
        "effect": manifest.effect if "effect" in manifest.written else None,
        "validation": manifest.validation,
        "env_config": manifest.env_config,
        **manifest.extra,
    }


def _config(manifest: Manifest, facts: ScriptFacts, idle: list[str]) -> JsonObject:
    config = {word: value for word, value in manifest.config.items() if word not in {*idle, "lib_imports"}}
    missing = undeclared_variables(facts, manifest)
    if needed := [name for name, spare in missing.items() if spare is None]:
        config["variables"] = [*as_list(config.get("variables")), *needed]
    if spared := {name: f"${{{name}:-{spare}}}" for name, spare in missing.items() if spare is not None}:
        config["env"] = {**as_object(config.get("env")), **spared}
    return config


def _left_out(idle: list[str]) -> Iterator[Issue]:
    for word in idle:
        reason = f"`{word}` means nothing to Kiwi, so it is not in the new manifest; the code still has it"
        yield Issue(f"config.{word}", reason, "Nothing, unless you meant a word of the manifest.", "warning")


What = Literal["keep", "copy", "convert", "sign", "present", "skip"]
_MODIFIED = "it was changed after it was signed, so it does not run"
_TOLD_SUFFIXES = {".py", ".yaml", ".yml", ".js", ".mjs", ".cjs", ".ts", ".sh", ".json", ".toml"}
"""The suffixes of tools in old folders; any other file without metadata is not a tool."""


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

    def place(self, base: Path) -> Path:
        """Return where the item is when the step is done."""
        return self.draft.manifest_path(base) if self.draft else self.path

    def as_item(self, base: Path) -> MigratedItem:
        """Return the step as surfaces show it."""
        return MigratedItem(
            what=self.what,
            tool_id=self.tool_id or UNSET,
            source=str(self.path),
            to=str(self.place(base)) if self.draft else UNSET,
            integrity=self.integrity or UNSET,
            entry=self.entry or UNSET,
            reason=self.reason or UNSET,
            signed=self.is_signed or UNSET,
            manifest=self.draft.files[self.draft.manifest_name].decode()
            if self.draft and self.what == "convert"
            else UNSET,
            issues=[dict(issue.to_json()) for issue in self.issues] or UNSET,
        )


class Target(Struct, frozen=True):
    """The space that items are brought to, and those that are in it."""

    source: Where
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

    def survey(self, found: Iterable[LegacyFile]) -> list[LegacyFile]:
        """Return the files with those that others run on first, having read what each calls itself."""
        manifests: dict[Path, Manifest] = {}
        listed = list(found)
        for path in (candidate.path for candidate in listed if not candidate.reason):
            try:
                head = read_head(path, base=self._old.base, sheets=self._sheets)
            except (KiwiError, OSError):
                continue  # reported when its step is made
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
            old = read_old(candidate, source=self._target.source, base=self._old.base, sheets=self._sheets)
            if old is None:
                reason = "it holds no metadata, so it is no tool"
                return MigrationStep("skip", path, reason=reason) if path.suffix in _TOLD_SUFFIXES else None
            return self._decide(old)
        except InvalidManifest as error:
            return MigrationStep("skip", path, reason=error.issues[0].reason, issues=error.issues)
        except KiwiError as error:
            return MigrationStep(
                "skip", path, reason=error.message, issues=(Issue("", error.message, error.suggestion),)
            )
        except OSError as error:
            return MigrationStep("skip", path, reason=f"it cannot be read: {error.strerror or error}")

    def _decide(self, old: OldItem) -> MigrationStep:
        tool = old.tool
        step = MigrationStep("skip", tool.origin.path, tool.id, tool.integrity, identity=tool.identity)
        step = replace(step, entry=old.facts.entry if old.facts else "")
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

    def _kept(self, step: MigrationStep, old: OldItem) -> MigrationStep:
        changed = [_modified(old.tool)] if old.tool.integrity == "modified" else []
        step = replace(step, what="keep", issues=(*changed, *self._faults(old.tool), *old.faults()))
        is_signable = step.is_sound and old.tool.integrity not in {"signed", "hashed"}
        return replace(step, what="sign") if self._sign and is_signable else step

    def _copied(self, step: MigrationStep, old: OldItem) -> MigrationStep:
        tool, path = old.tool, old.tool.origin.path
        files = {file.path: load_bytes(tool, file) for file in tool.files}
        lent = {name: data for name, data in files.items() if _is_lent(name, tool)}
        own = {name: data for name, data in files.items() if name not in lent}
        executables = frozenset(file.path for file in tool.files if file.is_executable)
        name = path.parent.name if tool.origin.is_folder else path.name
        # A script that says all of it itself is a tool; the others are what they are by standing in `scripts`.
        kind = "tools" if old.kind == "scripts" and old.says_all(self._sheets) else old.kind
        category = category_of(path, self._old.base) or (tool.manifest.category if kind == "tools" else "")
        draft = ItemDraft(place_for(kind=kind, category=category, name=name), path.name, own, executables)
        issues = (*self._faults(tool), *old.faults())
        return self._placed(replace(step, what="copy", draft=draft, shared=lent, issues=issues), tool)

    def _converted(self, step: MigrationStep, old: OldItem) -> MigrationStep:
        assert old.facts is not None  # noqa: S101 - only Python code is old, and has facts
        made = convert(old.tool, old.facts, old.modules, self._sheets)
        modules = tops(made.draft.files)
        found = [*made.issues, *script_faults(old.facts, made.tool.manifest, modules, is_folder=True)]
        step = replace(step, issues=(*self._faults(made.tool), *found))
        if not step.is_sound:
            return replace(step, reason="it has issues that a tool of today may not have")
        return self._placed(replace(step, what="convert", draft=made.draft), made.tool)

    def _placed(self, step: MigrationStep, placed: Tool) -> MigrationStep:
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
            write(ItemDraft(f"tools/{name}", Path(name).name, {Path(name).name: data}), base)


def _is_lent(name: str, tool: Tool) -> bool:
    """Whether a file of an item is code that tools share, which is elsewhere."""
    return not (tool.origin.root / name).exists() if tool.origin.is_folder else name != tool.origin.path.name


def _modified(tool: Tool) -> Issue:
    fix = f"Look at what changed; if it is yours, sign it where it is (`kiwi sign {tool.id}`)."
    return Issue("", _MODIFIED, fix)


MAX_TOLD = 1_000
"""The most items that an answer lists; those to which something happens come first."""

_ORDER: tuple[What, ...] = ("convert", "copy", "sign", "skip", "present", "keep")
_WORDS: dict[What, tuple[str, str]] = {
    "convert": ("would be converted", "converted"),
    "copy": ("would be copied", "copied"),
    "sign": ("would be signed", "signed"),
    "skip": ("skipped", "skipped"),
    "present": ("there already", "there already"),
    "keep": ("left in place", "left in place"),
}
_FEW = 20
_CHANGES = {"convert", "copy", "sign"}


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
    old = open_folder(_permitted(request.path, catalog.space), catalog.space)
    target = _target(request, old, catalog)
    if request.apply and not authorship.is_owner and SOURCE_TRAITS[target.source].is_in_user_space:
        raise PolicyDenied(
            "Only the owner brings tools to the user's space, where every project uses them.",
            suggestion="Use `location: project`, or ask the owner to type `kiwi migrate --location user --apply`.",
        )
    planner = Planner(old, target, rewrite=request.rewrite, sign=request.sign)
    report(Progress("looking at the folder"))
    found = planner.survey(candidates(old))
    steps: list[MigrationStep] = []
    for number, candidate in enumerate(found):
        report(Progress(f"reading {candidate.path.name}", done=number, total=len(found)))
        step = planner.plan(candidate)
        if step is not None:
            steps.append(_written(step, target.base) if request.apply else _light(step))
        await asyncio.sleep(0)  # a cancellation of the caller takes effect here
    if request.apply:
        steps = [_retired(step, target.base, old) for step in steps]
        authorship.vouches(_written_tools(steps, target))
        author = Author(services.context(caller, catalog), authorship)
        steps = [await _signed(step, request, target, author) for step in steps]
    # If no file is an item, a long list of files that are not items does not help.
    is_fruitless = len(steps) > _FEW and not any(step.tool_id for step in steps)
    return _response(request, [] if is_fruitless else steps, old, target)


def _permitted(asked: str | None, space: Space) -> Path:
    """Return the folder that a request names; a folder of another user needs the owner's permission."""
    wanted = space.project / asked if asked else space.project
    try:
        return project_space(str(wanted), None, user=space.user, cache=space.cache).project
    except ProjectPathInvalid as error:
        raise InvalidRequest(
            f"`path` cannot be used: {error.message}",
            suggestion="Name a folder of your own: a project, its `.ai`, or a folder of tools.",
        ) from error


def _target(request: MigrateRequest, old: OldFolder, catalog: Catalog) -> Target:
    space = catalog.space
    is_user = request.location == "user" or (request.location is None and str(old.base) == os.path.realpath(space.user))
    # A project in the user's own folder has but one space, which is called the project's.
    is_user = is_user and os.path.realpath(space.user) != os.path.realpath(space.project_ai)
    base = space.user if is_user else space.project_ai
    taken: dict[str, list[tuple[Path, str]]] = {}
    for entry in catalog.all():
        if entry.path.startswith(f"{base}{os.sep}"):
            taken.setdefault(entry.tool_id, []).append((Path(os.path.realpath(entry.path)), ""))
    return Target("user" if is_user else "project", base, catalog, taken)


def _written(step: MigrationStep, base: Path) -> MigrationStep:
    """Write what a step has to write: all of an item, or nothing of it."""
    if step.draft is None:
        return step
    try:
        write_shared(step.shared, base)
        write(step.draft, base)
    except KiwiError as error:
        return replace(step, what="skip", draft=None, reason=error.message)
    return _light(step)


def _light(step: MigrationStep) -> MigrationStep:
    """Return a step with only its manifest file, which is reported: thousands of steps are in memory at once."""
    if step.draft is None:
        return step
    name = step.draft.manifest_name
    return replace(step, draft=replace(step.draft, files={name: step.draft.files[name]}), shared={})


def _retired(step: MigrationStep, base: Path, old: OldFolder) -> MigrationStep:
    """Move a file to the trash if its converted form is in the same space; originals elsewhere are not touched.

    This happens after everything is written: until then, scripts that import each other must all be readable.
    """
    if step.what != "convert" or not old.is_within(base):
        return step
    try:
        discard(step.path, base)
    except KiwiError as error:
        issue = Issue("", f"the old file could not be moved to the trash: {error}", f"Remove {step.path}.", "warning")
        return replace(step, issues=(*step.issues, issue))
    return step


def _written_tools(steps: Sequence[MigrationStep], target: Target) -> Iterator[Tool]:
    """Yield the items that were just written."""
    for step in steps:
        if step.draft is not None:
            with suppress(KiwiError):  # the error is reported with the issues of the step
                yield target.catalog.find(step.tool_id, source=target.source)


async def _signed(step: MigrationStep, request: MigrateRequest, target: Target, author: Author) -> MigrationStep:
    if not request.sign or step.what not in _CHANGES or not step.is_sound:
        return step
    request_to_sign = SignRequest(item_id=step.identity, location=target.source)
    try:
        await sign_checked(request_to_sign, author, None)
    except KiwiError as error:
        issue = Issue("", f"it was not signed: {error.message}", error.suggestion, "warning")
        return replace(step, what="keep" if step.what == "sign" else step.what, issues=(*step.issues, issue))
    return replace(step, is_signed=True)


def _response(
    request: MigrateRequest, steps: Sequence[MigrationStep], old: OldFolder, target: Target
) -> MigrateResponse:
    ordered = sorted(steps, key=lambda step: (_ORDER.index(step.what), str(step.path)))
    counts = Counter(step.what for step in ordered)
    tense = 1 if request.apply else 0
    parts = [f"{counts[what]} {_WORDS[what][tense]}" for what in _ORDER if counts[what]]
    return MigrateResponse(
        status="migrated" if request.apply else "planned",
        message=", ".join(parts) or f"There is no item in {_path(old)}.",
        path=_path(old),
        target=str(target.base),
        items=[step.as_item(target.base) for step in ordered[:MAX_TOLD]],
        left_off=max(len(ordered) - MAX_TOLD, 0),
        counts={what: counts[what] for what in _ORDER if counts[what]},
        next=_next(request, counts, is_home=old.is_within(target.base)),
    )


def _path(old: OldFolder) -> str:
    return str(old.roots[0][0] if len(old.roots) == 1 else old.base)


def _next(request: MigrateRequest, counts: Counter[What], *, is_home: bool) -> str:
    if not counts and request.path:
        return "Name a project, its `.ai` folder, or a folder of tools that describe themselves."
    if not any(counts[what] for what in _ORDER if what in _CHANGES):
        keeps = counts["keep"] and is_home and not request.rewrite
        return (
            "Nothing to do: these are used where they are. `rewrite` (`--rewrite`) gives old Python tools a tool.yaml."
            if keeps
            else "Nothing to do."
        )
    if not request.apply:
        return "Nothing was changed. Do it with `apply: true` (`--apply`)."
    if is_home and counts["convert"]:
        return "The old files are in the trash (`.trash` of the space). Run one of the tools with `kiwi run NAME`."
    return "The originals are where they were. Run one of the tools with `kiwi run NAME`."
