"""Drafts: an item as it will be on disk, complete in memory before anything is written."""

from __future__ import annotations

import os
import secrets
import shutil
from base64 import b64decode
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from errno import EEXIST, ENOTDIR, ENOTEMPTY
from pathlib import Path

import yaml
from msgspec import Struct, field

from kiwi_mcp.catalog.item_reader import MANIFESTS, PASSED_OVER
from kiwi_mcp.domain.errors import AlreadyExists, InvalidManifest, InvalidRequest, TooLarge
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.names import clashes, is_safe_path, is_tool_id
from kiwi_mcp.manifest.document import BAD_TEXT
from kiwi_mcp.manifest.document import MAX_BYTES as MANIFEST_BYTES
from kiwi_mcp.manifest.document import MAX_DEPTH as MANIFEST_DEPTH
from kiwi_mcp.manifest.document import MAX_NODES as MANIFEST_NODES
from kiwi_mcp.manifest.files import writing
from kiwi_mcp.manifest.python_source import SHARED_CODE
from kiwi_mcp.manifest.signatures import sidecar
from kiwi_mcp.manifest.type_specs import TOOLS

MANIFEST_NAME = "tool.yaml"
MAX_FILES = 500
MAX_BYTES = 16_000_000
STAGING = ".staging-"
TRASH = ".trash"


class ItemDraft(Struct, frozen=True):
    """Where an item goes below its space, and its files: a folder with a manifest, or one single file."""

    place: str
    """The folder of a folder item, or the one file, relative to the space (`tools/mail/enricher`)."""
    manifest_name: str
    files: Mapping[str, bytes]
    executables: frozenset[str] = field(default_factory=frozenset)

    @property
    def is_folder(self) -> bool:
        """Whether the item is a folder."""
        return self.manifest_name in MANIFESTS

    def manifest_path(self, base: Path) -> Path:
        """Return where the file with the manifest is below a base."""
        return base / self.place / self.manifest_name if self.is_folder else base / self.place


def dump_manifest(manifest: JsonObject) -> bytes:
    """Return a manifest as YAML a person would write."""
    try:
        text: str = yaml.dump(
            _plain(manifest), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=False
        )
        return text.encode()
    except UnicodeEncodeError as fault:
        issue = Issue("manifest", f"contains {BAD_TEXT}", "Remove these characters.")
        raise InvalidManifest("The request", [issue]) from fault


def refuse_oversized(manifest: JsonObject) -> None:
    """Refuse a manifest with more values, text or depth than a manifest file may have; nothing is written out first."""
    nodes, size = 1, 0
    waiting: list[tuple[Json, int]] = [(manifest, 1)]
    while waiting:
        part, depth = waiting.pop()
        inner: Collection[Json] = ()
        match part:
            case str():
                size += len(part)
            case Mapping():
                inner = part.values()
                nodes += 2 * len(part)  # a key counts as well
                size += sum(map(len, part))
            case list() | tuple():
                inner = part
                nodes += len(part)
        if nodes > MANIFEST_NODES:
            raise TooLarge("The manifest", size=None, limit=MANIFEST_NODES, unit="values")
        if size > MANIFEST_BYTES:
            raise TooLarge("The manifest", size=None, limit=MANIFEST_BYTES)
        if inner and depth > MANIFEST_DEPTH:
            raise InvalidManifest("The request", [Issue("manifest", "is nested too deeply", "Flatten it.")])
        waiting += [(one, depth + 1) for one in inner]


class _Dumper(yaml.CSafeDumper):
    """Writes texts of several lines as blocks."""


def _text(dumper: yaml.CSafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _plain(value: Json) -> object:
    match value:
        case Mapping():
            return {name: _plain(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case _:
            return value


def contents(written: Mapping[str, Json]) -> dict[str, bytes]:
    """Return the bytes of files sent in a request: text, or `{"base64": …}`; every fault is listed."""
    if len(written) > MAX_FILES:
        raise TooLarge("The item", size=len(written), limit=MAX_FILES, unit="files")
    issues: list[Issue] = []
    files: dict[str, bytes] = {}
    for path, value in written.items():
        place = f"files[{path!r}]"
        data = _bytes(value)
        if not is_safe_path(path):
            issues.append(Issue(place, "is not a path inside the item", "Use a relative path such as `lib/a.py`."))
        elif data is None:
            issues.append(Issue(place, "is neither text nor base64", 'Send text, or {"base64": "…"}.'))
        else:
            files[path] = data
    issues += [
        Issue(f"files[{path!r}]", f"cannot stand beside {other!r} on every system", "Rename one of them.")
        for path, other in clashes([*files])
    ]
    if issues:
        raise InvalidManifest("The request", issues)
    total = sum(map(len, files.values()))
    if total > MAX_BYTES:
        raise TooLarge("The item", size=total, limit=MAX_BYTES)
    return files


def _bytes(value: Json) -> bytes | None:
    with suppress(ValueError):  # half of a surrogate pair is no text
        match value:
            case str():
                return value.encode()
            case {"base64": str(encoded)}:
                return b64decode(encoded, validate=True)
    return None


def place_for(*, kind: str, category: str, name: str) -> str:
    """Return where an item goes: `tools/<category>/<name>`, with every part a safe name."""
    parts = category.split("/") if category else []
    if not all(map(is_tool_id, parts)):
        raise InvalidRequest(
            f"{category!r} is not a category.", suggestion="Use words such as `mail` or `mail/enrich`."
        )
    place = [*parts, name]
    if not PASSED_OVER.isdisjoint(place) or (kind == TOOLS.name and place[0] == SHARED_CODE):
        raise InvalidRequest(
            f"No item is looked for in {kind}/{'/'.join(place)}.", suggestion="Choose another name or category."
        )
    return "/".join([kind, *place])


def write(draft: ItemDraft, base: Path) -> Path:
    """Write a draft below a base and return its manifest's path; it appears whole or not at all."""
    final = base / draft.place
    _refuse_links(final.parent, base)
    if os.path.lexists(final):
        raise AlreadyExists(final.stem, path=str(final))
    with writing(base):
        staging = base / f"{STAGING}{secrets.token_hex(8)}"
        staging.mkdir(parents=True, mode=0o755)
        try:
            for path, data in draft.files.items():
                target = staging / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
                target.chmod(0o755 if path in draft.executables else 0o644)
            final.parent.mkdir(parents=True, exist_ok=True)
            _appear(staging if draft.is_folder else staging / draft.manifest_name, final)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return draft.manifest_path(base)


def write_all(drafts: Iterable[ItemDraft], base: Path) -> None:
    """Write several drafts below a base: all of them, or none."""
    written: list[Path] = []
    try:
        for draft in drafts:
            write(draft, base)
            written.append(base / draft.place)
    except BaseException:
        for place in written:
            shutil.rmtree(place) if place.is_dir() else place.unlink()
        raise


def _refuse_links(folder: Path, base: Path) -> None:
    """Refuse to write where a link leads out of the space; the catalog would not look there either."""
    for part in (folder, *folder.parents):
        if part == base:
            return
        if part.is_symlink():
            raise InvalidRequest(
                f"{part} is a symbolic link, and links are not followed.", suggestion="Put a real folder in its place."
            )


def _appear(staged: Path, final: Path) -> None:
    """Rename staged files to their final name, unless another process has taken that name."""
    try:
        if staged.is_dir():
            staged.rename(final)  # fails where a folder with files is
        else:
            final.hardlink_to(staged)  # renaming would write over a file
    except OSError as error:
        if error.errno in {EEXIST, ENOTEMPTY, ENOTDIR}:
            raise AlreadyExists(final.stem, path=str(final)) from error
        raise


def discard(path: Path, base: Path) -> Path:
    """Move an item to a folder of its own in the space's trash, and return the new path."""
    target = base / TRASH / f"{path.stem}-{secrets.token_hex(4)}" / path.name
    _refuse_links(target.parent, base)
    with writing(base):
        target.parent.mkdir(parents=True)
        path.rename(target)
        signature = path.with_name(sidecar(path.name))
        if signature.is_file():
            signature.rename(target.with_name(signature.name))
    return target


def put_back(discarded: Path, path: Path) -> None:
    """Undo a `discard`: move an item, and the signature beside it, from the trash to where it was."""
    discarded.rename(path)
    signature = discarded.with_name(sidecar(discarded.name))
    if signature.is_file():
        signature.rename(path.with_name(signature.name))
    discarded.parent.rmdir()
