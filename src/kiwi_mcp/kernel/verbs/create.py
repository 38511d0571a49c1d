"""Create (also from OpenAPI), update and delete items."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path, PurePosixPath
from typing import Annotated

from msgspec import UNSET, Struct, UnsetType, ValidationError, convert, field
from msgspec.structs import replace
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.item_reader import bad_name, load_bytes
from kiwi_mcp.catalog.item_writer import (
    MANIFEST_NAME,
    ItemDraft,
    contents,
    discard,
    dump_manifest,
    place_for,
    put_back,
    refuse_oversized,
    write,
    write_all,
)
from kiwi_mcp.catalog.lockfile import NAME as LOCK_NAME
from kiwi_mcp.catalog.lockfile import forget, forget_signer, lock_at
from kiwi_mcp.domain.errors import (
    AlreadyExists,
    InvalidManifest,
    InvalidRequest,
    KiwiError,
    PolicyDenied,
    ReservedName,
    VersionSealed,
)
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Source, Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.names import is_tool_id
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.kernel.context import Context, VerbContext
from kiwi_mcp.kernel.paths import refuse_nowhere
from kiwi_mcp.kernel.provenance import AuthorshipLog
from kiwi_mcp.kernel.tool_names import touch_server_names
from kiwi_mcp.kernel.validation import Verdict, judge_draft
from kiwi_mcp.kernel.verb import (
    AUTHOR,
    AnyJson,
    Argument,
    DryRun,
    ItemKind,
    ItemRequest,
    NameText,
    PlaceToWrite,
    ProjectRequest,
    Response,
    Where,
    verb,
)
from kiwi_mcp.manifest.files import writing
from kiwi_mcp.manifest.openapi import OpenApiImport, tools_from_openapi
from kiwi_mcp.manifest.signatures import signature_form, split
from kiwi_mcp.manifest.source_file import read_manifest
from kiwi_mcp.manifest.type_specs import TOOLS, TypeSpecs

CONTROL_WORDS = {"manifest", "files", "content", "filename", "location", "category", "path"}
"""Keys of the request itself; every other key belongs to the manifest."""
_UNNAMED = "unnamed"
_UNINDENTED = re.compile(r"^( *)[^\s#-][^\n]*:[ \t]*\n\1- ", re.MULTILINE)
"""A list that begins in the column of its key."""


class Author(Struct, frozen=True):
    """Who changes items of a project or of the user; each change happens whole or not at all.

    Only the owner says which MCP servers there are, and what starts them: others neither write nor remove one.
    `authorship` records who wrote what, before it is written; None if the caller records that itself.
    """

    context: Context
    authorship: AuthorshipLog | None

    @classmethod
    def of(cls, item_id: str, project_path: str | None, context: VerbContext) -> Author:
        """Return the caller of a verb as an author in a project."""
        services, caller = context.services, context.caller
        catalog = services.catalogs.for_item(item_id, project_path)
        return cls(services.context(caller, catalog), services.authorship(caller))

    @property
    def catalog(self) -> Catalog:
        """The items that the author sees."""
        return self.context.catalog

    @property
    def is_owner(self) -> bool:
        """Whether the author is the owner in person."""
        return self.context.is_owner


class CreateRequest(ProjectRequest, frozen=True, kw_only=True):
    """What to create: `parameters` hold the manifest, files, one whole text, or an OpenAPI document."""

    item_type: ItemKind | None = None
    item_id: Annotated[NameText | None, Argument("The new item's name.", "ITEM")] = None
    parameters: dict[str, AnyJson] = field(default_factory=dict)
    dry_run: DryRun = False

    def brings(self) -> str:
        """Return the identity of the new item, with `*` for what is not known of it yet."""
        words, manifest = self.parameters, as_object(self.parameters.get("manifest"))
        named = self.item_id or manifest.get("tool_id") or words.get("tool_id") or words.get("prefix") or "*"
        version = words.get("version") or manifest.get("version") or "*"
        return f"{words.get('location', 'project')}/local/{named}@{version}"


class ItemChangeResponse(Response, frozen=True, kw_only=True):
    """An item after it was written; `created` and `skipped` list what an OpenAPI document described."""

    tool_id: str | UnsetType = UNSET
    action: str
    status: str
    message: str
    path: str | UnsetType = UNSET
    files: list[str] | UnsetType = UNSET
    created: list[str] | UnsetType = UNSET
    skipped: list[dict[str, AnyJson]] | UnsetType = UNSET
    next: str
    warnings: list[AnyJson] | UnsetType = UNSET


@verb("create", wire=("execute", "create"), access=AUTHOR, everyday="create")
async def create(request: CreateRequest, context: VerbContext) -> ItemChangeResponse:
    """Create a tool from a manifest or from files, or many from an OpenAPI document."""
    return await create_item(request, Author.of(request.item_id or "", request.project_path, context))


async def create_item(request: CreateRequest, author: Author) -> ItemChangeResponse:
    """Create an item, or an api tool for each operation of an OpenAPI document: all of them, or none."""
    words = request.parameters
    space = author.catalog.space
    location: Where = _where(words) or "project"
    if location == "project":
        refuse_nowhere(space)
    base = space.user if location == "user" else space.project_ai
    made: OpenApiImport | None = None
    if "openapi" in words:
        author.context.caller.report(Progress("reading the OpenAPI document"))
        made, drafts = await asyncio.to_thread(_drafts_from_openapi, words, author.catalog.sheets)
    else:
        new = (request.item_id, words, request.item_type or "tool", author.catalog.sheets)
        drafts = dict([await asyncio.to_thread(new_item, *new)])
    verdicts: list[Verdict] = []
    for number, (tool_id, draft) in enumerate(drafts.items()):
        _refuse_taken(author, tool_id, location)
        progress = Progress(f"checking {tool_id}", done=number, total=len(drafts) if made else None)
        verdicts.append(await _checked(author, draft, location, tool_id, progress))
    if not request.dry_run:
        if author.authorship:
            author.authorship.writes([verdict.digest for verdict in verdicts], location)
        write_all(drafts.values(), base)
        for verdict in verdicts:
            _note_servers(author, verdict.tool_type)
    if made is None:
        return _response(request, *next(iter(drafts.items())), base, verdicts[0])
    would_be = "would be " if request.dry_run else ""
    return ItemChangeResponse(
        action="create",
        status="planned" if request.dry_run else "created",
        message=f"{len(drafts)} tool{'s' * (len(drafts) != 1)} {would_be}created from the document",
        created=list(drafts),
        skipped=[dict(issue.to_json()) for issue in made.skipped],
        next="Look at one with `load`, set the variables it names, then run it.",
    )


class UpdateRequest(ItemRequest, frozen=True, kw_only=True):
    """What to change: `parameters` hold keys of the manifest, files, or the whole new text."""

    parameters: dict[str, AnyJson] = field(default_factory=dict)
    dry_run: DryRun = False


@verb("update", group="tool", wire=("execute", "update"), access=AUTHOR, aliases=("update",))
async def update(request: UpdateRequest, context: VerbContext) -> ItemChangeResponse:
    """Change a tool; the old one is moved to the trash."""
    return await update_item(request, Author.of(request.item_id, request.project_path, context))


async def update_item(request: UpdateRequest, author: Author) -> ItemChangeResponse:
    """Change an item: what is not named stays as it is."""
    words = request.parameters
    tool, base = _item_to_change(author, request, _where(words))
    hidden = hidden_names(author, tool, request)
    refuse_tampered(author, tool, base)
    if not words.keys() - {"location"}:
        raise InvalidRequest(
            "The request says nothing that should change.",
            suggestion="Send words of the manifest, `files` or `content` as parameters.",
        )
    root = tool.origin.path.parent if tool.origin.is_folder else tool.origin.path
    draft = await asyncio.to_thread(changed_item, tool, words, root.relative_to(base).as_posix())
    progress = Progress(f"checking {tool.id}")
    verdict = await _checked(author, draft, tool.origin.source, tool.id, progress)
    if not request.dry_run:
        if author.authorship:
            author.authorship.writes([verdict.digest], tool.origin.source, tool)
        old = discard(root, base)
        try:
            write(draft, base)
        except BaseException:
            put_back(old, root)
            raise
        if author.is_owner:
            forget_signer(base / LOCK_NAME, tool)
        _note_servers(author, verdict.tool_type)
    return _response(request, tool.id, draft, base, verdict, hidden)


class DeleteRequest(ItemRequest, frozen=True, kw_only=True):
    """What to delete."""

    location: PlaceToWrite = None
    confirm: bool = False
    """Accepted and not needed: a deleted item is in the trash."""
    dry_run: DryRun = False


class DeleteResponse(Response, frozen=True, kw_only=True):
    """The place in the trash of an item."""

    tool_id: str
    action: str = "delete"
    path: str
    warnings: list[AnyJson] | UnsetType = UNSET
    status: str
    message: str
    trash_path: str | UnsetType = UNSET


@verb("delete", group="tool", wire=("execute", "delete"), access=AUTHOR, needs_receipt=True, aliases=("delete",))
async def delete(request: DeleteRequest, context: VerbContext) -> DeleteResponse:
    """Move a tool to the trash."""
    return delete_item(request, Author.of(request.item_id, request.project_path, context))


def delete_item(request: DeleteRequest, author: Author) -> DeleteResponse:
    """Move an item to the trash, and forget its entry in the lockfile."""
    tool, base = _item_to_change(author, request, request.location)
    root = tool.origin.path.parent if tool.origin.is_folder else tool.origin.path
    response = DeleteResponse(
        tool_id=tool.id,
        path=str(root),
        warnings=warned(hidden_names(author, tool, request)),
        status="planned",
        message=f"{tool.id} would be moved to the trash",
    )
    if request.dry_run:
        return response
    trash = discard(root, base)
    # Only the owner may drop the recorded signer of a name.
    if author.is_owner or lock_at(base / LOCK_NAME).signer(tool) is None:
        try:
            with writing(base):
                forget(base / LOCK_NAME, tool)
        except KiwiError:
            put_back(trash, root)
            raise
    _note_servers(author, tool.manifest.tool_type)
    return replace(response, status="deleted", message=f"{tool.id} was moved to the trash", trash_path=str(trash))


def new_item(item_id: str | None, words: JsonObject, item_type: str, sheets: TypeSpecs) -> tuple[str, ItemDraft]:
    """Return the name and the draft of an item to create."""
    manifest = _manifest_of(words)
    files = contents(_mapping("files", words.get("files")))
    given = as_text(manifest.get("tool_id")) or item_id or as_text(manifest.get("name"))
    tool_id = given or _name_inside(words, files, sheets)
    if item_id and tool_id != item_id:
        raise InvalidRequest(
            f"item_id is {item_id!r} and tool_id is {tool_id!r}.", suggestion="Send one name, or the same name twice."
        )
    category = as_text(words.get("category"))
    # A name that no item can have is reported with all other issues; until then its draft needs a place.
    stem = tool_id if is_tool_id(tool_id) else _UNNAMED
    if "content" in words:
        return tool_id, _single_file(stem, words, item_type, category, sheets)
    spec = next((one for one in sheets.by_type.values() if one.format and one.format.file in files), None)
    if spec and spec.format:
        if not is_tool_id(tool_id):  # its folder is its name
            raise InvalidManifest(tool_id[:140], [bad_name(tool_id)])
        return tool_id, ItemDraft(place_for(kind=spec.folder, category=category, name=stem), spec.format.file, files)
    name = MANIFEST_NAME
    if name not in files:
        named = {"tool_id": tool_id, **manifest, **({"category": category} if category else {})}
        if not files:
            stem = name = f"{stem}.yaml"
        # The only file is the entrypoint, if the type has one and the manifest names none.
        spec = sheets.get(sheets.canonical(as_text(named.get("tool_type")))[0])
        config = as_object(named.get("config"))
        if len(files) == 1 and spec and "entrypoint" in spec.words and "entrypoint" not in {*named, *config}:
            named["config"] = {**config, "entrypoint": next(iter(files))}
        files = {name: dump_manifest(named), **files}
    return tool_id, ItemDraft(place_for(kind=TOOLS.name, category=category, name=stem), name, files)


def _manifest_of(words: JsonObject) -> dict[str, Json]:
    beside = {name: value for name, value in words.items() if name not in CONTROL_WORDS and value is not None}
    manifest = {**beside, **_mapping("manifest", words.get("manifest"))}
    refuse_oversized(manifest)
    return manifest


def _name_inside(words: JsonObject, files: Mapping[str, bytes], sheets: TypeSpecs) -> str:
    """Return the name that a text sent whole gives itself or, where it does not, has from its file."""
    text = as_text(words.get("content")) or files.get(MANIFEST_NAME, b"").decode("utf-8", errors="replace")
    name = as_text(words.get("filename")) or MANIFEST_NAME
    written = read_manifest(Path(name), text, sheets=sheets) if text else None
    said = as_text(written.value.get("tool_id")) if written else ""
    return said or ("" if name == MANIFEST_NAME else PurePosixPath(name).stem)


def _mapping(word: str, value: Json) -> JsonObject:
    if value is not None and not isinstance(value, Mapping):
        raise InvalidManifest("The request", [Issue(word, "is not an object", f'Send `"{word}": {{…}}`.')])
    return as_object(value)


def _single_file(tool_id: str, words: JsonObject, item_type: str, category: str, sheets: TypeSpecs) -> ItemDraft:
    """Return the draft of an item that was sent as one complete text."""
    text = as_text(words.get("content"))
    named = [sheets.get(word) for word in (item_type, as_text(words.get("tool_type")))]
    spec = next((one for one in named if one and one.format), None)
    name = as_text(words.get("filename")) or f"{tool_id}{spec.format.suffix if spec and spec.format else '.yaml'}"
    if "/" in name:
        issue = Issue("filename", f"{name!r} is a path", "Send a bare file name; `category` says the folder.")
        raise InvalidManifest("The request", [issue])
    found = sheets.written_as(Path(name), text)
    spec = spec or (found[0] if found else sheets.with_suffix(PurePosixPath(name).suffix))
    place = place_for(kind=spec.folder if spec else TOOLS.name, category=category, name=name)
    return ItemDraft(place, name, contents({name: text}))


def changed_item(tool: Tool, words: JsonObject, base_relative: str) -> ItemDraft:
    """Return the draft of an item after an update: what is not named stays as it is."""
    name = tool.origin.path.name
    files = {file.path: load_bytes(tool, file) for file in tool.files}
    executables = frozenset(file.path for file in tool.files if file.is_executable)
    sent = _mapping("files", words.get("files"))
    removed = {path for path, value in sent.items() if value is None}
    changes = _manifest_of(words)
    own = tool.origin.path.read_bytes() if "content" not in words else contents({name: words["content"]})[name]
    # A signature holds for nothing that was changed.
    _signature, body = split(own.decode(errors="surrogateescape"), signature_form(tool.origin.path))
    own = body.encode(errors="surrogateescape")
    if changes and "content" not in words:
        own = _edited(own.decode(), tool.origin.path.suffix, changes)
    if not tool.origin.is_folder:
        if sent:
            fix = "Create a folder item with these files."
            raise InvalidManifest(tool.id, [Issue("files", "cannot be added to an item that is one file", fix)])
        return ItemDraft(base_relative, name, {name: own}, executables)
    # Code that tools share is among the files of those that import it, and stays where it is.
    own_files = {path: data for path, data in files.items() if (tool.origin.root / path).exists()}
    kept = {path: data for path, data in own_files.items() if path not in removed and path != name}
    added = contents({path: value for path, value in sent.items() if value is not None})
    return ItemDraft(base_relative, name, {name: own, **kept, **added}, executables)


def _edited(body: str, suffix: str, changes: JsonObject) -> bytes:
    """Return a YAML manifest with words changed and its comments kept."""
    if suffix not in {".yaml", ".yml"}:
        issue = Issue("manifest", f"is inside a {suffix} file", "Send the whole new text as `content`.")
        raise InvalidManifest("The item", [issue])
    editor = YAML()
    editor.preserve_quotes = True
    editor.width = 4_096
    offset = 0 if _UNINDENTED.search(body) else 2
    editor.indent(mapping=2, sequence=2 + offset, offset=offset)
    try:
        document = editor.load(body)
    except YAMLError as error:
        issue = Issue("", f"the present text cannot be edited: {error}", "Send the whole new text as `content`.")
        raise InvalidManifest("The item", [issue]) from error
    for word, value in changes.items():
        document[word] = value
    out = StringIO()
    editor.dump(document, out)
    return out.getvalue().encode()


async def _checked(author: Author, draft: ItemDraft, source: Source, tool_id: str, progress: Progress) -> Verdict:
    """Check a draft as if it were in place, and refuse it with every fault it has."""
    author.context.caller.report(progress)
    verdict = await judge_draft(draft, source, tool_id, author.context)
    _refuse_servers(author, verdict.tool_type)
    verdict.demand(tool_id or "The item")
    return verdict


def _refuse_taken(author: Author, tool_id: str, source: Source) -> None:
    try:
        found = author.catalog.find(tool_id, source=source)
    except KiwiError:
        found = None
    # Asked after the search, which is what makes a new catalog look at its sources.
    if author.catalog.is_reserved(tool_id):
        raise ReservedName(tool_id)
    if found is not None:
        raise AlreadyExists(tool_id, path=str(found.origin.path))


def owned(author: Author, request: ItemRequest, location: Where | None) -> tuple[Tool, Path]:
    """Return an item that may be changed, and the space it is in."""
    if location == "project":
        refuse_nowhere(author.catalog.space)
    tool = author.catalog.find(request.item_id, source=location, item_type=request.of_type)
    if tool.origin.is_editable:
        return tool, author.catalog.space.user if tool.origin.is_in_user_space else author.catalog.space.project_ai
    if tool.origin.is_published:
        raise VersionSealed(tool.identity)
    if tool.origin.server:
        raise InvalidRequest(
            f"{tool.id!r} is what an MCP server offers.",
            suggestion="Copy it first: load it with `destination: project`, then change the copy.",
            tool_id=tool.id,
        )
    raise ReservedName(tool.id)


def _where(words: JsonObject) -> Where | None:
    """Return the location that parameters name."""
    try:
        where: Where | None = convert(words.get("location"), Where | None)
    except ValidationError as error:
        fault = f"{words.get('location')!r} is not a location."
        raise InvalidRequest(fault, suggestion="Use `project` or `user`.") from error
    return where


def _item_to_change(author: Author, request: ItemRequest, location: Where | None) -> tuple[Tool, Path]:
    """Return an item that is to be changed; one that every project uses must be meant by its location."""
    tool, base = owned(author, request, location)
    if tool.origin.base != base:
        raise InvalidRequest(
            f"{tool.id!r} is in {tool.origin.base}, which is not changed through items.",
            suggestion="Change the file itself: in the memory with `memory_write`, else with an editor.",
            tool_id=tool.id,
        )
    _refuse_servers(author, tool.manifest.tool_type)
    space = author.catalog.space
    if tool.origin.is_in_user_space and location is None and space.user != space.project_ai:
        raise InvalidRequest(
            f"{tool.id!r} is in the user's space, which every project uses, and not in this project.",
            suggestion="Say `location: user` (`--location user`) if you mean that one.",
            tool_id=tool.id,
        )
    return tool, base


def hidden_names(author: Author, tool: Tool, request: ItemRequest) -> Sequence[str]:
    """Return which other items have the name as well, for a caller that did not say which type is meant."""
    return author.catalog.shadows(tool) if request.item_type is None else ()


def _refuse_servers(author: Author, tool_type: str) -> None:
    if not author.is_owner and author.catalog.sheets.is_server(tool_type):
        raise PolicyDenied(
            "Only the owner says which MCP servers there are, and what starts them.",
            suggestion="Ask the owner to type `kiwi mcp add NAME -- COMMAND`, or `kiwi mcp remove NAME`.",
        )


def refuse_tampered(author: Author, tool: Tool, base: Path) -> None:
    """Refuse to let anyone but the owner sign or write over content that was changed after it was signed."""
    if author.is_owner:
        return
    is_changed = tool.integrity == "modified" or tool.trust == "tampered"
    if not is_changed and lock_at(base / LOCK_NAME).lost_signature(tool):
        is_changed = author.authorship is None or author.authorship.origins.of(tool) != "model_written"
    if is_changed:
        raise PolicyDenied(
            f"{tool.id!r} was changed after it was signed, and only the owner accepts such a change.",
            suggestion=f"Take the change back, or ask the owner to look at it and type `kiwi sign {tool.id}`.",
            tool_id=tool.id,
        )


def _note_servers(author: Author, tool_type: str) -> None:
    """Let it be known that servers may be others now, where one was written or removed."""
    if author.catalog.sheets.is_server(tool_type):
        touch_server_names(author.catalog.space.user)


def _response(
    request: CreateRequest | UpdateRequest,
    tool_id: str,
    draft: ItemDraft,
    base: Path,
    verdict: Verdict,
    hidden: Sequence[str] = (),
) -> ItemChangeResponse:
    action = "create" if isinstance(request, CreateRequest) else "update"
    done = f"{action}d"
    return ItemChangeResponse(
        tool_id=tool_id,
        action=action,
        status="planned" if request.dry_run else done,
        message=f"{tool_id} {'would be' if request.dry_run else 'was'} {done}",
        path=str(draft.manifest_path(base)),
        files=sorted(draft.files),
        # The owner approves a run of these very bytes, which include the line of a signature.
        next=f"Sign it (action sign, `kiwi sign {tool_id}`), then run it (action run, `kiwi run {tool_id}`): "
        "if it is signed after a run was approved, that is asked about again.",
        warnings=warned([*(issue.to_json() for issue in verdict.warnings), *hidden]),
    )


def warned(warnings: Sequence[Json]) -> list[AnyJson] | UnsetType:
    """Return the warnings of a response; unset if there are none."""
    return list(warnings) or UNSET


def _drafts_from_openapi(words: JsonObject, sheets: TypeSpecs) -> tuple[OpenApiImport, Mapping[str, ItemDraft]]:
    """Return the api tools that an OpenAPI document describes, and their drafts by name."""
    made = tools_from_openapi(
        as_text(words.get("openapi")),
        what="The OpenAPI document",
        prefix=as_text(words.get("prefix")),
        base_url=as_text(words.get("base_url")) or None,
        only=tuple(map(text_of, as_list(words.get("only")))),
        auth=as_object(words.get("auth")),
    )
    category = words.get("category")
    return made, dict(
        new_item(None, {"manifest": one, "category": category or one.get("category")}, "tool", sheets)
        for one in made.manifests
    )
