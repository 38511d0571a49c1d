"""The load verb: one item's definition and text, and its copy to another space."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.files import read_file
from kiwi_mcp.catalog.read import load_bytes
from kiwi_mcp.domain.errors import AlreadyExists, IntegrityMismatch, InvalidRequest, KiwiError, NotFound
from kiwi_mcp.domain.grants import Rights
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, text_of
from kiwi_mcp.kernel.authoring.drafts import Draft, write
from kiwi_mcp.kernel.naming import mark_changed
from kiwi_mcp.kernel.permission import Permission
from kiwi_mcp.kernel.places import outputs_home
from kiwi_mcp.kernel.provenance import Authorship
from kiwi_mcp.kernel.requests import LoadRequest, Where
from kiwi_mcp.manifest.signature import MAX_SIDECAR, is_apart, sidecar
from kiwi_mcp.store.outputs import read_page

_TEXT_LIMIT = 200_000


def load(
    request: LoadRequest,
    catalog: Catalog,
    stored: Callable[[str], bytes],
    check: Callable[[str], object] | None = None,
    authorship: Authorship | None = None,
    rights: Callable[[], Rights] | None = None,
) -> JsonObject:
    """Return one item, or a page of a result; copy it first where a destination is given.

    `stored` gives the result that is in the store, by the id of its run; `check` refuses runs that are not the
    reader's to see; `authorship` takes down what is copied; `rights` are the reader's.
    """
    if request.item_type == "output":
        return _page(request, catalog, stored, check)
    tool = catalog.find(request.item_id, source=request.source)
    if request.destination is None or request.destination == tool.origin.source:
        return definition(tool, catalog, request.file, rights)
    return _copied(tool, catalog, request.destination, authorship)


def _page(
    request: LoadRequest, catalog: Catalog, stored: Callable[[str], bytes], check: Callable[[str], object] | None
) -> JsonObject:
    user = catalog.space.user
    home = outputs_home(catalog.space.project_ai, user)
    read = partial(
        read_page,
        handle=request.item_id,
        offset=request.offset,
        length=request.length,
        stored=stored,
        check=check,
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
    # What a server offers has no text besides what is told here, and no place that means anything to anybody.
    is_offered = tool.origin.source == "mcp" and file is None
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
        **_chain(tool, catalog),
        **_denial(tool, catalog, rights),
    }


def _chain(tool: Tool, catalog: Catalog) -> JsonObject:
    try:
        return {"chain": list(catalog.resolve(tool.identity).names)}
    except KiwiError as error:
        return {"chain": None, "problem": error.message}


def _denial(tool: Tool, catalog: Catalog, rights: Callable[[], Rights] | None) -> JsonObject:
    """Return that the owner does not let an item run, where that is so: it can be read, and spoken of."""
    reason = Permission(catalog, rights).refusal(tool.identity)
    return {"permitted": False, "not_permitted": reason} if reason else {}


def _text(tool: Tool, name: str | None) -> str:
    wanted = name or tool.origin.path.name
    for file in tool.files:
        if file.path == wanted:
            return load_bytes(tool, file).decode("utf-8", errors="replace")[:_TEXT_LIMIT]
    listed = ", ".join(file.path for file in tool.files)
    raise NotFound(f"{tool.id!r} has no file {wanted!r}.", suggestion=f"Its files are: {listed}.", tool_id=tool.id)


def _copied(tool: Tool, catalog: Catalog, destination: Where, authorship: Authorship | None) -> JsonObject:
    """Copy an item and the executors below it that the destination does not see, then return it as copied."""
    base = catalog.space.project_ai if destination == "project" else catalog.space.user
    if tool.origin.source == "builtin":
        raise InvalidRequest(
            f"{tool.id!r} is built in, so it is in every space already.", suggestion="Name an item of your own."
        )
    below = [link for link in catalog.resolve(tool.identity).links[1:] if link.origin.source == tool.origin.source]
    for link in (tool, *below):
        if link.integrity == "modified":
            expected = link.signature.hash if link.signature else ""
            raise IntegrityMismatch(link.id, expected=expected, actual=link.digest, where=str(link.origin.path))
    copies = [link for link in below if not _is_there(link, catalog, destination)]
    is_there = _is_there(tool, catalog, destination)
    if authorship:
        authorship.copies(copies if is_there else [tool, *copies], destination)
    if is_there:
        path = catalog.find(tool.id, source=destination).origin.path
        message = f"Tool is in {destination} already, with the same content"
    else:
        path = _copy(tool, base)
        if catalog.sheets.carries(tool.manifest.tool_type, "mcp"):
            mark_changed(catalog.space.user)
        message = f"Tool copied from {tool.origin.source} to {destination}"
    for link in copies:
        _copy(link, base)
    told: dict[str, Json] = {
        **definition(catalog.find(tool.id, source=destination), catalog),
        "path": str(path),
        "source": tool.origin.source,
        "destination": destination,
        "message": message,
    }
    if copies:
        told["also_copied"] = [link.id for link in copies]
    return told


def _is_there(tool: Tool, catalog: Catalog, destination: Where) -> bool:
    try:
        found = catalog.find(tool.id, source=destination)
    except NotFound:
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
    beside = _beside(tool)
    if tool.origin.is_folder:
        own |= beside
    path = write(Draft(root.relative_to(tool.origin.base).as_posix(), tool.origin.path.name, own, executables), base)
    if not tool.origin.is_folder:
        for name, data in beside.items():
            path.with_name(name).write_bytes(data)
    for name in shared & files.keys():
        target = base / "tools" / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(files[name])
    return path


def _beside(tool: Tool) -> Mapping[str, bytes]:
    """Return the file that tells who signed an item, where there is one."""
    path = tool.origin.path.with_name(sidecar(tool.origin.path.name))
    if not (tool.signature and is_apart(tool.origin.path.suffix) and path.is_file()):
        return {}
    return {path.name: read_file(path, limit=MAX_SIDECAR).data}
