"""Comparing two versions of an item, file by file, so that a person can read what changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import unified_diff

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.read import load_bytes
from kiwi_mcp.catalog.refs import Ref
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, NotFound, ToolNotFound
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.version import Range, Version
from kiwi_mcp.kernel.registry.history import every_version
from kiwi_mcp.kernel.registry.words import DiffWords
from kiwi_mcp.kernel.requests import Where
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.store.registry import Registry

_MAX_DIFF = 200_000
"""How many characters of differences one answer holds."""
_MAX_TEXT = 1_000_000


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two that are compared."""

    title: str
    digest: str
    files: Mapping[str, tuple[bytes, bool]]


def compare(item: str, words: DiffWords, catalog: Catalog, registry: Registry) -> JsonObject:
    """Return what differs between two versions: by default, between the latest published one and what is here now."""
    ref = Ref.parse(item)
    first, second = _sides(ref, words, catalog, registry)
    changes = list(_changes(first, second))
    told: dict[str, Json] = {
        "tool_id": ref.name,
        "action": "diff",
        "from": {"identity": first.title, "digest": first.digest},
        "to": {"identity": second.title, "digest": second.digest},
        "status": "different" if changes else "same",
        "changes": _bounded(changes),
    }
    return told


def _sides(ref: Ref, words: DiffWords, catalog: Catalog, registry: Registry) -> tuple[_Side, _Side]:
    if words.first and words.second:
        return _side(ref, words.first, catalog), _side(ref, words.second, catalog)
    published = every_version(ref, registry)
    latest = next((listed for listed in published if listed.is_latest), published[0])
    if words.first:
        return _side(ref, words.first, catalog), _side(ref, latest.name.version, catalog)
    here = _here(ref, catalog)
    if here is not None and not words.second:
        return _side(ref, latest.name.version, catalog), here
    if words.second:
        return _side(ref, latest.name.version, catalog), _side(ref, words.second, catalog)
    if len(published) < 2:  # noqa: PLR2004 - it takes two
        raise InvalidRequest(
            f"{ref.name!r} has one published version and is in no folder here: there is nothing to compare it with.",
            suggestion="Name two versions with `from` and `to`, or load it into the project and change it.",
        )
    return _side(ref, published[1].name.version, catalog), _side(ref, published[0].name.version, catalog)


def _side(ref: Ref, word: str, catalog: Catalog) -> _Side:
    """Return a version of the registry, or the item in a folder where the word is `project` or `user`."""
    match word:
        case "project" | "user":
            return _read(_in_folder(ref.name, word, catalog))
        case _:
            if Version.parse(word) is None and Range.parse(word) is None and not Ref(ref.name, version=word).digest:
                hint = did_you_mean(word, ("project", "user"))
                raise InvalidRequest(
                    f"{word[:60]!r} is neither a version nor `project` or `user`.",
                    suggestion=f"{hint}`kiwi versions {ref.name}` lists the versions.",
                )
            namespace = ref.namespace if ref.source == "registry" else None
            home = f"registry/{namespace}/" if namespace else ""
            return _read(catalog.find(f"{home}{ref.name}@{word}", source="registry"))


def _in_folder(name: str, source: Where, catalog: Catalog) -> Tool:
    try:
        return catalog.find(name, source=source)
    except ToolNotFound as error:
        raise NotFound(
            f"There is no {name!r} in the {source} space.",
            suggestion=f"Copy it there with `kiwi load {name} --destination {source}`, or name two versions.",
        ) from error


def _here(ref: Ref, catalog: Catalog) -> _Side | None:
    for source in ("project", "user"):
        try:
            return _read(catalog.find(ref.name, source=source))
        except KiwiError:
            continue
    return None


def _read(tool: Tool) -> _Side:
    files = {file.path: (load_bytes(tool, file), file.is_executable) for file in tool.files}
    return _Side(tool.identity, f"sha256:{tool.digest}", files)


def _changes(first: _Side, second: _Side) -> Iterator[JsonObject]:
    for path in sorted({*first.files, *second.files}):
        was, now = first.files.get(path), second.files.get(path)
        if was == now:
            continue
        change = "added" if was is None else "removed" if now is None else "changed"
        told: dict[str, Json] = {"path": path, "change": change}
        if was and now and was[1] != now[1]:
            told["executable"] = now[1]
        before, after = was[0] if was else b"", now[0] if now else b""
        if before != after:
            told |= _difference(path, before, after)
        yield told


def _difference(path: str, before: bytes, after: bytes) -> JsonObject:
    sizes: JsonObject = {"from_bytes": len(before), "to_bytes": len(after)}
    if b"\0" in before + after or max(len(before), len(after)) > _MAX_TEXT:
        return sizes
    old = before.decode(errors="replace").splitlines(keepends=True)
    new = after.decode(errors="replace").splitlines(keepends=True)
    lines = unified_diff(old, new, f"a/{path}", f"b/{path}")
    return {"diff": "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)}


def _bounded(changes: list[JsonObject]) -> list[Json]:
    """Return the changes, without the text of those for which there is no room."""
    room, shown = _MAX_DIFF, list[Json]()
    for change in changes:
        size = len(str(change.get("diff", "")))
        shown.append(change if size <= room else {**change, "diff": "", "truncated": True})
        room -= min(size, room)
    return shown
