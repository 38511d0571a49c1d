"""Every issue of an item or a draft, also by the driver's own syntax check."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.item_reader import MANIFESTS, load_bytes, read_tool
from kiwi_mcp.catalog.item_writer import ItemDraft, write
from kiwi_mcp.catalog.references import circles_in, inheriting
from kiwi_mcp.domain.calls import Call
from kiwi_mcp.domain.errors import (
    CommandMissing,
    InvalidManifest,
    InvalidRequest,
    IsolationUnavailable,
    KiwiError,
    NotFound,
    PolicyDenied,
    Untrusted,
)
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import SOURCE_TRAITS, Chain, Source, Tool
from kiwi_mcp.domain.json import as_list, as_text
from kiwi_mcp.drivers import Driver
from kiwi_mcp.kernel.context import Context
from kiwi_mcp.kernel.paths import refuse_nowhere
from kiwi_mcp.kernel.pipeline import judge_plan, prepare, refuse_denied
from kiwi_mcp.manifest.check import check
from kiwi_mcp.manifest.composite import call_faults
from kiwi_mcp.manifest.files import writing
from kiwi_mcp.manifest.json_schema import faults
from kiwi_mcp.manifest.program import input_issues
from kiwi_mcp.manifest.python_source import SHARED_CODE
from kiwi_mcp.manifest.source_file import read_manifest
from kiwi_mcp.manifest.type_specs import TypeSpecs


class Verdict(Struct, frozen=True):
    """What checking found: errors keep the item from being used, warnings do not."""

    issues: tuple[Issue, ...]
    tool_type: str = ""
    digest: str = ""
    """The digest of the item, as it was checked."""

    @property
    def errors(self) -> tuple[Issue, ...]:
        """The issues that keep the item from being used."""
        return tuple(issue for issue in self.issues if issue.is_error)

    @property
    def warnings(self) -> tuple[Issue, ...]:
        """The issues that an author should know of."""
        return tuple(issue for issue in self.issues if not issue.is_error)

    def with_issue(self, issue: Issue) -> Verdict:
        """Return the verdict with one issue more."""
        return replace(self, issues=(*self.issues, issue))

    def demand(self, what: str) -> None:
        """Refuse the item if it has errors."""
        if self.errors:
            raise InvalidManifest(what, self.errors)


async def examine(tool: Tool, context: Context) -> Verdict:
    """Return every issue of an item: in its manifest, its files, its chain and its syntax."""
    catalog = context.catalog
    below: Chain | None = None
    missing: KiwiError | None = None
    if tool.manifest.executor:
        try:
            below = catalog.below(tool)
        except KiwiError as error:
            missing = error
    issues = list(
        check(
            tool.manifest,
            sheets=catalog.sheets,
            file_names=[file.path for file in tool.files],
            is_folder=tool.origin.is_folder,
            executor=below.tool.manifest if below else None,
            executor_missing=missing is not None,
            lines=_lines(tool, catalog.sheets),
        )
    )
    sheet = catalog.sheets.get(tool.manifest.tool_type)
    issues += [*_reference_issues(tool, catalog), *_broken_links(tool, catalog)]
    if missing is not None and (near := catalog.near(tool.manifest.executor_id or "")):
        guess = f"Did you mean `{near[0]}`?"
        issues = [replace(one, fix=f"{guess} {one.fix}") if one.place == "executor" else one for one in issues]
    if missing is not None and sheet is not None and not any(issue.place == "executor" for issue in issues):
        issues.append(Issue("executor", missing.message, missing.suggestion))
    driver = context.services.drivers.named(sheet.driver) if sheet else None
    if driver and sheet and not any(issue.is_error for issue in issues):
        links, traits = (below.links, below.traits) if below else ((), ())
        issues += await _driver_issues(Chain((tool, *links), (sheet.traits, *traits)), below, driver, context)
    return Verdict(tuple(issues), tool.manifest.tool_type, tool.digest)


def _broken_links(tool: Tool, catalog: Catalog) -> Iterator[Issue]:
    """Yield a warning for each `[[link]]` of a text that leads nowhere."""
    for name in map(as_text, as_list(tool.manifest.config.get("links"))):
        try:
            catalog.find(name, item_type=tool.item_type)
        except KiwiError:
            fix = f"Create {name!r:.100}, or correct the link."
            yield Issue("links", f"[[{name[:100]}]] leads nowhere", fix, "warning")


def _reference_issues(tool: Tool, catalog: Catalog) -> Sequence[Issue]:
    """Return the issues of the items that an item names: absent, in a cycle, or with other inputs than it gives."""
    try:
        referred, absent = catalog.references(tool)
        inherited = [one.tool for one in referred if one.by == tool.identity]
        sheet = catalog.sheets.get(tool.manifest.tool_type)
        if sheet is not None and sheet.inputs_for:
            named = [one for one in inherited if one.item_type == sheet.references.get(sheet.inputs_for)]
            given = [
                issue for one in named for issue in input_issues(tool.manifest, inheriting(one, referred).manifest)
            ]
            return [*absent, *given]
        inheriting(tool, referred)
        circles = list(circles_in(tool, referred))
        if "steps" in tool.manifest.config and sheet is not None and not faults(sheet.config, tool.manifest.config):
            called = {one.ref: one.tool.manifest for one in referred if one.by == tool.identity}
            return [*absent, *circles, *call_faults(tool.manifest, called)]
    except InvalidManifest as error:
        return error.issues
    return absent


async def _driver_issues(chain: Chain, below: Chain | None, driver: Driver, context: Context) -> Sequence[Issue]:
    """Return what the driver finds. Its program starts only if it passes the gates of a call that need no arguments."""
    tool, call = chain.tool, Call(chain.tool.identity, context.space)
    try:
        # The item itself may be a draft, or changed since it was signed; what it runs on may not.
        prepared = prepare(below, driver, call, context) if below else None
        refuse_denied(context.rights.item_verdict([tool.identity], chain.item_traits), tool)
        check = driver.check(chain, context.space)
        if check is None or prepared is None:
            return ()
        judge_plan(check.plan, replace(prepared, chain=chain), call, context)
        return await check.run()
    except InvalidManifest as invalid:
        return invalid.issues
    except Untrusted as refused:
        return [Issue("executor", refused.message, refused.suggestion)]
    except (PolicyDenied, CommandMissing, IsolationUnavailable) as refused:
        reason = f"the syntax was not checked: {refused.message}"
        return [Issue(tool.entrypoint, reason, refused.suggestion, severity="warning")]


def _lines(tool: Tool, sheets: TypeSpecs) -> Mapping[str, int]:
    """Return the line of each place in the manifest, where its format tells."""
    by_name = {file.path: file for file in tool.files}
    text = load_bytes(tool, by_name[tool.origin.path.name]).decode("utf-8", errors="replace")
    written = read_manifest(tool.origin.path, text, sheets=sheets)
    return written.lines if written else {}


async def judge_draft(draft: ItemDraft, source: Source, tool_id: str, context: Context) -> Verdict:
    """Return every fault of a draft, as if it were in place; nothing of it stays."""
    space = context.space
    with writing(space.cache):
        space.cache.mkdir(parents=True, exist_ok=True)
        trial = Path(tempfile.mkdtemp(prefix="draft-", dir=space.cache))
    try:
        with writing(space.cache):
            path = write(draft, trial)
            # Let a draft see the code that the tools of its space share.
            base = space.user if SOURCE_TRAITS[source].is_in_user_space else space.project_ai
            tools = trial / "tools"
            tools.mkdir(exist_ok=True)
            (tools / SHARED_CODE).symlink_to(base / "tools" / SHARED_CODE)
        tool = _read(path, source, trial, context.catalog)
        verdict = await examine(tool, context)
        if tool.id == tool_id:
            return verdict
        reason = f"the item was asked for as {tool_id!r} and calls itself {tool.id!r}"
        return verdict.with_issue(Issue("tool_id", reason, "Use one name."))
    except InvalidManifest as error:
        error.message = error.message.replace(f"{trial}/", "")
        raise
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def _read(path: Path, source: Source, base: Path, catalog: Catalog) -> Tool:
    return read_tool(path, source=source, base=base, sheets=catalog.sheets, is_draft=True)


def read_path(path: Path, catalog: Catalog) -> Tool:
    """Return the item at a path of the project or of the user's space, wherever it is there."""
    space = catalog.space
    if "\0" in str(path):
        raise InvalidRequest("A path cannot hold a NUL character.", suggestion="Check the path.")
    if not path.is_absolute():
        refuse_nowhere(space)
    manifest = Path(os.path.realpath(path if path.is_absolute() else space.project / path))
    if not any(map(manifest.is_relative_to, map(os.path.realpath, (space.project, space.user, space.memory)))):
        raise InvalidRequest(
            f"{path} lies outside the project and the user's space.", suggestion="Name a path inside one of them."
        )
    if os.path.isdir(manifest):  # noqa: PTH112 - pathlib raises for names that are too long
        found = [manifest / name for name in MANIFESTS if (manifest / name).is_file()]
        if not found:
            raise NotFound(f"{path} holds no tool.yaml.", suggestion="Name a tool's folder, or a single file.")
        manifest = found[0]
    elif not os.path.exists(manifest):  # noqa: PTH110 - pathlib raises for names that are too long
        raise NotFound(f"{path} does not exist.", suggestion="Check the path.")
    homes: tuple[tuple[Source, Path], ...] = (
        ("project", space.project_ai), ("user", space.memory), ("user", space.user)
    )  # fmt: skip
    for source, base in homes:
        if manifest.is_relative_to(base):
            return _read(manifest, source, base, catalog)
    base = manifest.parent.parent if manifest.name in MANIFESTS else manifest.parent
    return _read(manifest, "project", base, catalog)
