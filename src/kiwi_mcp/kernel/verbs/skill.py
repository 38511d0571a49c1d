"""skill: what the `skill` tool does; list, import and export skills."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from msgspec import field, to_builtins
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.item_reader import MAX_BYTES, Tree, load_bytes
from kiwi_mcp.catalog.item_writer import ItemDraft, write
from kiwi_mcp.domain.errors import AlreadyExists, InvalidRequest, KiwiError, NotFound
from kiwi_mcp.domain.items import SKILL_FILE, Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.domain.names import is_safe_path, is_tool_id
from kiwi_mcp.domain.threads import NewEvent
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.permission import ItemVisibility
from kiwi_mcp.kernel.threads.instructions import missing_tools, use_of
from kiwi_mcp.kernel.verb import (
    ANYONE,
    OWNER,
    AnyJson,
    Argument,
    Item,
    LongText,
    Option,
    ProjectRequest,
    Response,
    Where,
    verb,
)
from kiwi_mcp.kernel.verbs.thread_tools import calling_thread
from kiwi_mcp.kernel.view import Data, Hint, Notice, TableRow, ViewItem, warning_rows
from kiwi_mcp.manifest.files import read_file

_MOST_LISTED = 50


class SkillToolRequest(ProjectRequest, frozen=True, kw_only=True):
    """The arguments of the `skill` tool."""

    arguments: dict[str, AnyJson] = field(default_factory=dict)


class SkillToolResponse(Response, frozen=True, kw_only=True):
    """What the `skill` tool returns."""

    content: AnyJson

    def to_json(self) -> JsonObject:
        """Return the fields of the tool itself."""
        return as_object(self.content)


@verb("use", group="skill_tools", access=ANYONE, records=False)
async def use_skill(request: SkillToolRequest, context: VerbContext) -> SkillToolResponse:
    """List skills, load one, or read a file of one."""
    name, file = as_text(request.arguments.get("name")), as_text(request.arguments.get("file"))
    catalog = context.services.catalogs.at(request.project_path)
    if not name:
        if file:
            raise InvalidRequest("`file` is a file of a skill.", suggestion="Add the `name` of the skill.")
        return SkillToolResponse(content=_listed(as_text(request.arguments.get("query")), catalog, context))
    try:
        tool = catalog.find(name, item_type="skill")
    except NotFound as error:
        error.suggestion = "Call `skill` without a name: it lists the skills."
        raise
    # The gates of an ordinary call decide whether the caller may read it.
    parameters: JsonObject = {"file": file} if file else {}
    call: JsonObject = {"item_id": tool.identity, "item_type": "skill", "parameters": parameters}
    project: JsonObject = {"project_path": request.project_path} if request.project_path else {}
    answer = await context.services.dispatch("execute", {**call, **project}, replace(context.caller, journal=None))
    if answer.error is not None:
        raise answer.error
    found: JsonObject = {**as_object(answer.content.get("result")), "is_instructions": answer.is_instructions}
    if file:
        return SkillToolResponse(content=found)
    if context.caller.origin.thread:
        # The journal of the calling thread says that it loaded a skill, which may narrow what it may use.
        stores, thread = await calling_thread(context)
        event = NewEvent("skill", to_builtins(use_of(tool)))
        await stores.do(lambda: stores.threads.append(thread, [event]))
    missing = missing_tools(tool, catalog)
    return SkillToolResponse(content={**found, **({"missing_tools": missing} if missing else {})})


def _listed(query: str, catalog: Catalog, context: VerbContext) -> JsonObject:
    """Return the skills that the caller may use and that have a word of a query, the best first."""
    visible = ItemVisibility(catalog, lambda: context.rights)
    words = query.casefold().split()

    def fit(tool: Tool) -> int:
        text = f"{tool.id} {tool.manifest.description} {' '.join(tool.manifest.tags)}".casefold()
        return sum(word in text for word in words)

    ranked = sorted(_skills(catalog), key=lambda tool: (-fit(tool), tool.id))
    found = [tool for tool in ranked if fit(tool) or not words]
    found = [tool for tool in found if not (visible.is_hidden(tool.identity) or visible.refusal(tool.identity))]
    shown: list[Json] = [{"name": one.id, "description": one.manifest.description} for one in found[:_MOST_LISTED]]
    return {"skills": shown, **({"omitted": len(found) - _MOST_LISTED} if len(found) > _MOST_LISTED else {})}


def _skills(catalog: Catalog) -> list[Tool]:
    """Return the skills that names mean here: of several with one name, the one that is used."""
    found: dict[str, Tool] = {}
    for card in catalog.all(("project", "user")):
        if catalog.sheets.is_skill(card.tool_type) and card.tool_id not in found:
            with suppress(KiwiError):  # `kiwi tool validate` shows what is wrong
                found[card.tool_id] = catalog.find(card.tool_id, item_type="skill")
    return [*found.values()]


class SkillListResponse(Response, frozen=True, kw_only=True):
    """The skills of a project and of the user."""

    skills: list[AnyJson]


def _list_view(response: SkillListResponse) -> Iterator[ViewItem]:
    for one in map(as_object, response.skills):
        state = "" if one["is_trusted"] else " (unsigned: models read it as data)"
        yield TableRow(f"{one['name']}{state}  {as_text(one['description'])}")
    if not response.skills:
        yield Notice("There are no skills.")
        yield Hint("`kiwi new NAME --skill` writes one, `kiwi skill import FOLDER` copies one.")


@verb("list", group="skill", access=OWNER, shows=_list_view)
def list_skills(request: ProjectRequest, context: VerbContext) -> SkillListResponse:
    """List the skills of this project, of your user folder and of your memory."""
    catalog = context.services.catalogs.at(request.project_path)
    return SkillListResponse(
        skills=[
            {
                "name": tool.id,
                "description": tool.manifest.description,
                "identity": tool.identity,
                "path": str(tool.origin.path),
                "is_trusted": context.services.provenance.may_instruct(tool),
            }
            for tool in _skills(catalog)
        ]
    )


class SkillImportRequest(ProjectRequest, frozen=True, kw_only=True):
    """A folder with a `SKILL.md`, and where to copy it."""

    path: Annotated[LongText, Argument("A folder with a SKILL.md, or one Markdown file.", "FOLDER", kind="path")]
    destination: Annotated[Where, Option("project or user.", "--to", metavar="SPACE")] = "project"


class SkillFilesResponse(Response, frozen=True, kw_only=True):
    """A skill that was copied."""

    status: str
    name: str
    path: str
    files: list[str]
    warnings: list[str] = field(default_factory=list)


def _files_view(response: SkillFilesResponse) -> Iterator[ViewItem]:
    yield from warning_rows(response.warnings)
    yield Data(response.path)
    if response.status == "imported":
        yield Hint(f"Read it, then `kiwi sign {response.name}`: unsigned, models read it as data.")


@verb("import", group="skill", access=OWNER, is_local=True, shows=_files_view)
async def import_skill(request: SkillImportRequest, context: VerbContext) -> SkillFilesResponse:
    """Copy a published skill folder, byte for byte; links in it are left out."""
    catalog = context.services.catalogs.at(request.project_path)
    return await asyncio.to_thread(_imported, request, catalog)


def _imported(request: SkillImportRequest, catalog: Catalog) -> SkillFilesResponse:
    given = Path(request.path)
    root = given.parent if given.name == SKILL_FILE else given
    is_folder = root.is_dir() and not root.is_symlink() and (root / SKILL_FILE).is_file()
    if not is_folder and not (given.is_file() and given.suffix == ".md"):
        raise NotFound(f"{given} is no skill.", suggestion=f"Name a folder with a {SKILL_FILE}, or a Markdown file.")
    name = root.resolve().name if is_folder else given.stem
    if not is_tool_id(name):
        fix = "Rename the folder: lower-case letters, digits and single hyphens."
        raise InvalidRequest(f"{name!r:.80} cannot name a skill.", suggestion=fix)
    tree = Tree(str(given))
    if is_folder:
        tree.take_folder(root)
        files = {one.path: read_file(root / one.path, limit=MAX_BYTES).data for one in tree.ordered()}
        programs = frozenset(one.path for one in tree.ordered() if one.is_executable)
        draft = ItemDraft(f"skills/{name}", SKILL_FILE, files, programs)
    else:
        files = {given.name: read_file(given, limit=MAX_BYTES).data}
        draft = ItemDraft(f"skills/{given.name}", given.name, files)
    path = write(draft, catalog.space.folder(request.destination))
    tool = catalog.find(name, source=request.destination, item_type="skill")
    warnings = [f"{one.place}: {one.reason}" for one in (*tree.issues, *tool.manifest.issues)]
    warnings += [f"It allows the tool {one!r:.80}, which is not here." for one in missing_tools(tool, catalog)]
    return SkillFilesResponse(
        status="imported", name=name, path=str(path), files=sorted(files), warnings=[*dict.fromkeys(warnings)]
    )


class SkillExportRequest(ProjectRequest, frozen=True, kw_only=True):
    """A skill, and the folder in which a folder of its name is made."""

    item_id: Item
    path: Annotated[LongText, Argument("The folder to copy it into.", "FOLDER", kind="path")]

    def named_item(self) -> str:
        """Return the skill."""
        return self.item_id


@verb("export", group="skill", access=OWNER, is_local=True, shows=_files_view)
async def export_skill(request: SkillExportRequest, context: VerbContext) -> SkillFilesResponse:
    """Copy a skill to a folder, byte for byte and without its signature."""
    catalog = context.services.catalogs.at(request.project_path)
    tool = catalog.find(request.item_id, item_type="skill")
    return await asyncio.to_thread(_exported, tool, Path(request.path) / tool.id)


def _exported(tool: Tool, root: Path) -> SkillFilesResponse:
    if root.exists():
        raise AlreadyExists(tool.id, path=str(root))
    for file in tool.files:
        if not is_safe_path(file.path):
            continue
        target = root / (file.path if tool.origin.is_folder else SKILL_FILE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(load_bytes(tool, file))
        target.chmod(0o755 if file.is_executable else 0o644)
    return SkillFilesResponse(status="exported", name=tool.id, path=str(root), files=[one.path for one in tool.files])
