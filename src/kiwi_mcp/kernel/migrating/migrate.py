"""The migrate verb: shows what would become of an old folder, and does it."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import KiwiError, PolicyDenied
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.outcome import Progress, Report
from kiwi_mcp.kernel.authoring import Author
from kiwi_mcp.kernel.authoring.drafts import discard, write
from kiwi_mcp.kernel.migrating.old_folder import OldFolder, candidates, open_folder
from kiwi_mcp.kernel.migrating.steps import Planner, Step, Target, What, write_shared
from kiwi_mcp.kernel.provenance import Authorship
from kiwi_mcp.kernel.requests import ExecuteRequest, MigrateRequest

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


async def migrate(
    request: MigrateRequest, catalog: Catalog, report: Report, authorship: Authorship | None = None
) -> JsonObject:
    """Return what would happen to each item of an old folder; with `apply`, after it happened."""
    old = open_folder(request.path, catalog.space)
    target = _target(request, old, catalog)
    if request.apply and authorship and not authorship.is_owner and target.source == "user":
        raise PolicyDenied(
            "Only the owner brings tools to the user's space, where every project uses them.",
            suggestion="Use `location: project`, or ask the owner to type `kiwi migrate --location user --apply`.",
        )
    planner = Planner(old, target, rewrite=request.rewrite, sign=request.sign)
    report(Progress("looking at the folder"))
    found = planner.survey(candidates(old))
    steps: list[Step] = []
    for number, candidate in enumerate(found):
        report(Progress(f"reading {candidate.path.name}", done=number, total=len(found)))
        step = planner.plan(candidate)
        if step is not None:
            steps.append(_written(step, target.base) if request.apply else _light(step))
        await asyncio.sleep(0)  # where a caller who has had enough is heard
    if request.apply:
        steps = [_retired(step, target.base, old) for step in steps]
        if authorship:
            authorship.vouches(_written_tools(steps, target))
        steps = [await _signed(step, request, target, report, authorship) for step in steps]
    # Where nothing is an item, a long list of what is none helps nobody.
    is_fruitless = len(steps) > _FEW and not any(step.tool_id for step in steps)
    return _told(request, [] if is_fruitless else steps, old, target)


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


def _written(step: Step, base: Path) -> Step:
    """Write what a step has to write: all of an item, or nothing of it."""
    if step.draft is None:
        return step
    try:
        write_shared(step.shared, base)
        write(step.draft, base)
    except KiwiError as error:
        return replace(step, what="skip", draft=None, reason=error.message)
    except OSError as error:
        return replace(step, what="skip", draft=None, reason=f"it cannot be written: {error.strerror or error}")
    return _light(step)


def _light(step: Step) -> Step:
    """Return a step with none of its files but the manifest, which is told: thousands of them are held at once."""
    if step.draft is None:
        return step
    name = step.draft.manifest_name
    return replace(step, draft=replace(step.draft, files={name: step.draft.files[name]}), shared={})


def _retired(step: Step, base: Path, old: OldFolder) -> Step:
    """Move a file whose converted form lies in the same space to the trash; originals elsewhere are not touched.

    This is done when everything is written: until then scripts that import each other are all there to be read.
    """
    if step.what != "convert" or not old.is_within(base):
        return step
    try:
        discard(step.path, base)
    except (KiwiError, OSError) as error:
        issue = Issue("", f"the old file could not be moved to the trash: {error}", f"Remove {step.path}.", "warning")
        return replace(step, issues=(*step.issues, issue))
    return step


def _written_tools(steps: Sequence[Step], target: Target) -> Iterator[Tool]:
    """Yield the items that were just written."""
    for step in steps:
        if step.draft is not None:
            with suppress(KiwiError):  # it is told among the faults of the step
                yield target.catalog.find(step.tool_id, source=target.source)


async def _signed(
    step: Step, request: MigrateRequest, target: Target, report: Report, authorship: Authorship | None
) -> Step:
    if not request.sign or step.what not in _CHANGES or not step.is_sound:
        return step
    words: dict[str, object] = {"location": target.source}
    asked = ExecuteRequest(action="sign", item_id=step.identity, parameters=words)
    try:
        await Author(target.catalog, report, authorship=authorship).act(asked)
    except KiwiError as error:
        issue = Issue("", f"it was not signed: {error.message}", error.suggestion, "warning")
        return replace(step, what="keep" if step.what == "sign" else step.what, issues=(*step.issues, issue))
    return replace(step, is_signed=True)


def _told(request: MigrateRequest, steps: Sequence[Step], old: OldFolder, target: Target) -> JsonObject:
    ordered = sorted(steps, key=lambda step: (_ORDER.index(step.what), str(step.path)))
    counts = Counter(step.what for step in ordered)
    tense = 1 if request.apply else 0
    parts = [f"{counts[what]} {_WORDS[what][tense]}" for what in _ORDER if counts[what]]
    return {
        "action": "migrate",
        "status": "migrated" if request.apply else "planned",
        "message": ", ".join(parts) or f"There is no item in {_path(old)}.",
        "path": _path(old),
        "target": str(target.base),
        "items": [step.to_json(target.base) for step in ordered[:MAX_TOLD]],
        "left_off": max(len(ordered) - MAX_TOLD, 0),
        "counts": {what: counts[what] for what in _ORDER if counts[what]},
        "next": _next(request, counts, is_home=old.is_within(target.base)),
    }


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
