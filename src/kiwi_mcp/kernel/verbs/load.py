"""load: show the definition of an item or a page of an output, or copy an item elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.item_reader import load_bytes
from kiwi_mcp.catalog.item_writer import ItemDraft, write
from kiwi_mcp.catalog.lockfile import NAME as LOCK_NAME
from kiwi_mcp.catalog.lockfile import SignedBy, lock_at, lost_signatures, record
from kiwi_mcp.catalog.references import text_file
from kiwi_mcp.domain.errors import AlreadyExists, IntegrityMismatch, InvalidRequest, KiwiError, NotFound
from kiwi_mcp.domain.grants import Rights
from kiwi_mcp.domain.items import SOURCE_TRAITS, ItemType, Source, Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.paths import outputs_home
from kiwi_mcp.kernel.permission import ItemVisibility
from kiwi_mcp.kernel.provenance import AuthorshipLog
from kiwi_mcp.kernel.tool_names import touch_server_names
from kiwi_mcp.kernel.verb import (
    ANYONE,
    AUTHOR,
    ITEM,
    Answer,
    AnyJson,
    Argument,
    ItemKind,
    ItemRequest,
    NameText,
    Option,
    Response,
    Where,
    verb,
)
from kiwi_mcp.kernel.view import Data, Hint, Notice, ViewItem, warning_rows
from kiwi_mcp.manifest.files import read_file, writing
from kiwi_mcp.manifest.markdown import body, sections
from kiwi_mcp.manifest.signatures import MAX_SIDECAR, has_sidecar, sidecar, signature_form
from kiwi_mcp.policy.authorize import refuse_lost
from kiwi_mcp.store.outputs import read_page

_TEXT_LIMIT = 200_000
_MOST_LINKS = 100


class LoadRequest(ItemRequest, frozen=True, kw_only=True):
    """Which item or which result to read, or where to copy an item."""

    item_type: Annotated[
        ItemKind | None,
        Option("", "--type", metavar="TYPE", help="tool, directive, knowledge, skill; output for a result."),
    ] = None
    item_id: Annotated[NameText, Argument("Name, name@range or full identity", "ITEM", help=ITEM)]
    source: Annotated[Source | None, Option("", help="project, user, registry, mcp or builtin.")] = None
    destination: Annotated[
        Where | None,
        Option("Copy it there", "--to", "--destination", metavar="SPACE", help="Copy it to project or user."),
    ] = None
    file: Annotated[NameText | None, Option("One of its files", help="One file of an item with several.")] = None
    offset: Annotated[
        int, Meta(ge=0), Option("Read on from here", help="The first character of an output to show.")
    ] = 0
    length: Annotated[int, Meta(ge=1, le=1_000_000)] = 64_000
    grep: Annotated[
        NameText | None,
        Option("Only its lines with a|b", help="Only the lines of an output that contain a text; `a|b` for either."),
    ] = None

    def named_item(self) -> str:
        """Return the item; a result is none."""
        return "" if self.item_type == "output" else self.item_id

    def named_kind(self) -> tuple[ItemType | None, Source | None]:
        """Return the type and the source of the item."""
        return self.of_type, self.source

    def brings(self) -> str:
        """Return the identity of the copy, with any version."""
        name = self.item_id.partition("@")[0].rpartition("/")[2]
        return f"{self.destination}/local/{name}@*" if self.destination else ""


class ItemSummary(Struct, frozen=True):
    """What the manifest of an item says about it."""

    name: str
    description: str
    version: str
    tool_type: str
    executor_id: str | None
    category: str
    tags: list[str]


class FileSize(Struct, frozen=True):
    """A file of an item."""

    path: str
    size: int


class LoadResponse(Response, frozen=True, kw_only=True):
    """One item, or a page of a result: a page has a `handle`, an item an `identity`."""

    handle: str = ""
    name: str = ""
    path: str
    content: str
    offset: int = 0
    total_characters: int = 0
    next_offset: int | None = None
    """Where to go on: a character, with `grep` a line."""
    matches: int = 0
    source: str = ""
    metadata: ItemSummary | None = None
    parameters: dict[str, AnyJson] = field(default_factory=dict)
    identity: str = ""
    digest: str = ""
    integrity: str = ""
    trust: str = ""
    signer: str = ""
    files: tuple[FileSize, ...] = ()
    links: dict[str, str] = field(default_factory=dict)
    """Where the links of a text lead, by their names."""
    broken_links: tuple[str, ...] = ()
    backlinks: tuple[str, ...] = ()
    """The texts that link to it."""
    chain: list[str] | None = None
    problem: str = ""
    permitted: bool = True
    not_permitted: str = ""
    destination: str = ""
    message: str = ""
    also_copied: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def _view(response: LoadResponse) -> Iterator[ViewItem]:
    if not response.identity:
        yield Data(response.content)
        if response.next_offset is not None:
            yield Hint(f"go on with --offset {response.next_offset}")
        return
    if response.message:
        yield Data(response.message)
        yield Notice(f"  path: {response.path}")
        return
    yield from warning_rows(response.warnings)
    signed = f"{response.trust.replace('_', ' ')}, {response.signer}" if response.signer else response.integrity
    yield Notice(f"{response.identity} ({signed}) {response.path}")
    if response.chain:
        yield Notice("chain: " + " → ".join(response.chain))
    required = as_list(response.parameters.get("required"))
    for name, schema in as_object(response.parameters.get("properties")).items():
        declared = as_object(schema)
        words = [text_of(declared.get("type", "any")), *(["required"] if name in required else [])]
        if "default" in declared:
            words.append(f"default {text_of(declared['default'])}")
        if "enum" in declared:
            words.append("one of " + ", ".join(map(text_of, as_list(declared["enum"]))))
        described = as_text(declared.get("description"))
        yield Notice(f"  {name}: {', '.join(words)}{f': {described}' if described else ''}")
    yield Data(response.content)


@verb(
    "load",
    access=lambda request: AUTHOR if request.destination else ANYONE,
    records=lambda payload: bool(payload.get("destination")),
    receipt="copy",
    needs_rules=True,
    everyday="load",
    response=LoadResponse,
    shows=_view,
)
async def load(request: LoadRequest, context: VerbContext) -> Answer:
    """Show one item, or copy it between project and user space."""
    services, caller = context.services, context.caller
    is_in_project = any(SOURCE_TRAITS[one].is_in_project for one in (request.source, request.destination) if one)
    if is_in_project:
        catalog = services.catalogs.of(request.project_path)
    else:
        catalog = services.catalogs.for_item(request.item_id, request.project_path)
    if request.grep and request.item_type != "output":
        raise InvalidRequest("`grep` searches in an output.", suggestion="Add `item_type: output`, or leave it out.")
    if request.item_type == "output":
        return Answer(_page(request, catalog, context))
    rights, authorship = services.rights(caller), services.authorship(caller)
    tool = catalog.find(request.item_id, source=request.source, item_type=request.of_type)
    if request.destination is not None and request.destination != tool.origin.source:
        response = _copied(tool, catalog, request.destination, authorship)
    else:
        response = definition(tool, catalog, request.file, rights)
        names_type = request.item_type is not None or ItemVisibility(catalog, rights).hides
        if hidden := () if names_type else catalog.shadows(tool):
            response = {**response, "warnings": list(hidden), **catalog.version_warning(tool)}
    services.recall_log.add_use(as_text(response["identity"]), catalog.space, caller, is_run=False)
    return Answer(response, is_instructions=services.provenance.may_instruct(tool))


def _page(request: LoadRequest, catalog: Catalog, context: VerbContext) -> JsonObject:
    """Return a page of a result. The owner reads all results; other callers read only those of their own runs."""
    services, caller, user = context.services, context.caller, catalog.space.user
    home = outputs_home(catalog.space.project_ai, user)

    read = partial(
        read_page,
        handle=request.item_id,
        offset=request.offset,
        length=request.length,
        grep=request.grep or "",
        stored=lambda run_id: services.runs(caller).result(run_id),
        check=lambda run_id: services.runs(caller).get(run_id) if caller.name else None,
    )
    try:
        return read(home)
    except NotFound:  # a call that was made without a project has left its output with the user
        if home == user:
            raise
        return read(user)


def definition(
    tool: Tool, catalog: Catalog, file: str | None = None, rights: Callable[[], Rights] | None = None
) -> JsonObject:
    """Return all that a model or a person needs to know of an item before using it."""
    manifest = tool.manifest
    # An item of a server has no text besides this answer, and no location that means anything to a reader.
    is_offered = bool(tool.origin.server) and file is None
    links = _links(tool, catalog)
    try:
        chain: JsonObject = {"chain": list(catalog.resolve(tool.identity, item_type=tool.item_type).names)}
    except KiwiError as error:
        chain = {"chain": None, "problem": error.message}
    # An item that the owner does not let run can be read, and spoken of.
    denial = ItemVisibility(catalog, rights).refusal(tool.identity)
    return {
        "name": tool.id,
        "path": "" if is_offered else str(tool.origin.path),
        "content": "" if is_offered else _text(tool, file),
        "source": tool.origin.source,
        "metadata": {
            "name": manifest.name or tool.id,
            "description": manifest.description,
            "version": manifest.version,
            "tool_type": manifest.written_type,
            "executor_id": manifest.executor_id,
            "category": manifest.category,
            "tags": list(manifest.tags),
        },
        "parameters": manifest.parameters,
        "identity": tool.identity,
        "digest": tool.digest,
        "integrity": tool.integrity,
        **({"trust": tool.trust} if tool.trust else {}),
        **({"signer": tool.signer} if tool.signer else {}),
        "files": [{"path": one.path, "size": one.size} for one in tool.files],
        **links,
        **chain,
        **({"permitted": False, "not_permitted": denial} if denial else {}),
    }


def _links(tool: Tool, catalog: Catalog) -> JsonObject:
    """Return where the links of a text lead, and the texts that link to it; nothing for other items."""
    sheet = catalog.sheets.get(tool.manifest.tool_type)
    if sheet is None or "links" not in sheet.words:
        return {}
    named = [as_text(one) for one in as_list(tool.manifest.config.get("links"))]
    found: dict[str, str] = {}
    for name in named:
        with suppress(KiwiError):
            found[name] = catalog.find(name, item_type=tool.item_type).identity
    back: list[Json] = []
    for card in catalog.all(("project", "user")):
        other_sheet = catalog.sheets.get(card.tool_type)
        has_links = other_sheet is not None and "links" in other_sheet.words
        if has_links and card.tool_id != tool.id and len(back) < _MOST_LINKS:
            with suppress(KiwiError):
                other = catalog.find(card.identity, item_type=tool.item_type).manifest.config
                if tool.id in as_list(other.get("links")):
                    back.append(card.tool_id)
    broken: list[Json] = [name for name in named if name not in found]
    parts: dict[str, Json] = {"links": found, "broken_links": broken, "backlinks": back}
    return {word: value for word, value in parts.items() if value}


def _text(tool: Tool, name: str | None) -> str:
    if name and name.startswith("#"):
        return _section(tool, name)
    wanted = name or tool.origin.path.name
    for file in tool.files:
        if file.path == wanted:
            return load_bytes(tool, file).decode("utf-8", errors="replace")[:_TEXT_LIMIT]
    listed = ", ".join(file.path for file in tool.files)
    raise NotFound(f"{tool.id!r} has no file {wanted!r}.", suggestion=f"Its files are: {listed}.", tool_id=tool.id)


def _section(tool: Tool, name: str) -> str:
    """Return the part of a text that a search found: `#3` is its third part, `#Retries` the one with that heading."""
    found = sections(body(load_bytes(tool, text_file(tool)).decode("utf-8", errors="replace")))
    for number, (heading, text) in enumerate(found, 1):
        if name[1:].casefold() in {str(number), heading.casefold()}:
            return text
    listed = ", ".join(f"#{heading or number}" for number, (heading, _) in enumerate(found, 1))
    raise NotFound(f"{tool.id!r} has no part {name!r:.80}.", suggestion=f"Its parts are: {listed}.", tool_id=tool.id)


def _copied(tool: Tool, catalog: Catalog, destination: Where, authorship: AuthorshipLog) -> JsonObject:
    """Copy an item and the executors below it that the destination does not see, then return it as copied."""
    base = catalog.space.folder(destination)
    if tool.origin.is_built_in:
        raise InvalidRequest(
            f"{tool.id!r} is built in, so it is in every space already.", suggestion="Name an item of your own."
        )
    chain = catalog.resolve(tool.identity, item_type=tool.item_type)
    referred = (catalog.resolve(one.tool.identity, item_type=one.tool.item_type) for one in chain.references)
    named = [link for other in referred for link in other.links]  # with what they run on
    others = {link.origin.path: link for link in (*chain.links[1:], *named) if link.origin.path != tool.origin.path}
    below = [link for link in others.values() if link.origin.source == tool.origin.source]
    for link in (tool, *below):
        if link.integrity == "modified":
            expected = link.signature.hash if link.signature else ""
            raise IntegrityMismatch(link.id, expected=expected, actual=link.digest, where=str(link.origin.path))
    refuse_lost(lost_signatures((tool, *below), catalog.space))
    copies = [link for link in below if not _is_there(link, catalog, destination)]
    is_there = _is_there(tool, catalog, destination)
    authorship.copies(copies if is_there else [tool, *copies], destination)
    if is_there:
        path = catalog.find(tool.id, source=destination, item_type=tool.item_type).origin.path
        message = f"Tool is in {destination} already, with the same content"
    else:
        path = _copy(tool, base)
        if catalog.sheets.is_server(tool.manifest.tool_type):
            touch_server_names(catalog.space.user)
        message = f"Tool copied from {tool.origin.source} to {destination}"
    for link in copies:
        _copy(link, base)
    for link in copies if is_there else [tool, *copies]:
        _record(catalog.find(link.id, source=destination, item_type=link.item_type), catalog, base)
    response: dict[str, Json] = {
        **definition(catalog.find(tool.id, source=destination, item_type=tool.item_type), catalog),
        "path": str(path),
        "source": tool.origin.source,
        "destination": destination,
        "message": message,
    }
    if copies:
        response["also_copied"] = [link.id for link in copies]
    return response


def _record(copy: Tool, catalog: Catalog, base: Path) -> None:
    """Write into the lockfile who signed a copy, so that it does not run once the signature is gone."""
    path, signer = base / LOCK_NAME, SignedBy.of(copy)
    if signer and lock_at(path).signer(copy) is None:
        record(path, catalog.resolve(copy.identity, item_type=copy.item_type), signer)


def _is_there(tool: Tool, catalog: Catalog, destination: Where) -> bool:
    try:
        found = catalog.find(tool.id, source=destination, item_type=tool.item_type)
    except NotFound:
        return False
    if found.item_type != tool.item_type:
        return False
    if found.digest != tool.digest:
        raise AlreadyExists(tool.id, path=str(found.origin.path))
    return True


def _copy(tool: Tool, base: Path) -> Path:
    root = tool.origin.path.parent if tool.origin.is_folder else tool.origin.path
    shared = {f"lib/{text_of(name)}.py" for name in as_list(tool.manifest.config.get("lib_imports"))}
    files = {file.path: load_bytes(tool, file) for file in tool.files}
    executables = frozenset(file.path for file in tool.files if file.is_executable)
    own = {path: data for path, data in files.items() if path not in shared}
    beside: dict[str, bytes] = {}
    signature = tool.origin.path.with_name(sidecar(tool.origin.path.name))  # says who signed an item
    if tool.signature and has_sidecar(signature_form(tool.origin.path)) and signature.is_file():
        beside[signature.name] = read_file(signature, limit=MAX_SIDECAR).data
    if tool.origin.is_folder:
        own |= beside
    path = write(
        ItemDraft(root.relative_to(tool.origin.base).as_posix(), tool.origin.path.name, own, executables), base
    )
    with writing(base):
        if not tool.origin.is_folder:
            for name, data in beside.items():
                path.with_name(name).write_bytes(data)
        for name in shared & files.keys():
            target = base / "tools" / name
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(files[name])
    return path
