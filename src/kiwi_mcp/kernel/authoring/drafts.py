"""Drafts: an item as it will be on disk, complete in memory before anything is written."""

from __future__ import annotations

import os
import secrets
import shutil
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from errno import EEXIST, ENOTDIR, ENOTEMPTY
from pathlib import Path

import yaml

from kiwi_mcp.catalog.folder import MANIFESTS, PASSED_OVER, SHARED_CODE
from kiwi_mcp.domain.errors import AlreadyExists, InvalidManifest, InvalidRequest, TooLarge
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.manifest.names import is_safe_path, is_tool_id
from kiwi_mcp.manifest.signature import sidecar

MANIFEST_NAME = "tool.yaml"
MAX_FILES = 500
MAX_BYTES = 16_000_000
STAGING = ".staging-"
TRASH = ".trash"


@dataclass(frozen=True, slots=True)
class Draft:
    """Where an item goes below its space, and the files it consists of.

    A folder item has a manifest called `tool.yaml`, or `tool.yml` or `tool.json`; any other draft is one single file.
    """

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
    except RecursionError:
        raise too_deep() from None
    return text.encode()


def too_deep() -> InvalidManifest:
    """Return the refusal of a manifest that no YAML writer follows to its bottom."""
    return InvalidManifest("The request", [Issue("manifest", "is nested too deeply", "Flatten it.")])


class _Dumper(yaml.SafeDumper):
    """Writes lists indented below their key, and texts of several lines as blocks."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - PyYAML's
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
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
    issues: list[Issue] = []
    files: dict[str, bytes] = {}
    for path, value in written.items():
        if not is_safe_path(path):
            issues.append(
                Issue(f"files[{path!r}]", "is not a path inside the item", "Use a relative path such as `lib/a.py`.")
            )
            continue
        data = _bytes(value)
        if data is None:
            issues.append(Issue(f"files[{path!r}]", "is neither text nor base64", 'Send text, or {"base64": "…"}.'))
            continue
        files[path] = data
    issues += _collisions(files)
    if issues:
        raise InvalidManifest("The request", issues)
    total = sum(map(len, files.values()))
    if len(files) > MAX_FILES:
        raise TooLarge("The item", size=len(files), limit=MAX_FILES, unit="files")
    if total > MAX_BYTES:
        raise TooLarge("The item", size=total, limit=MAX_BYTES)
    return files


def _bytes(value: Json) -> bytes | None:
    match value:
        case str():
            return value.encode("utf-8", errors="surrogatepass") if value.isascii() or _is_unicode(value) else None
        case {"base64": str(encoded)}:
            try:
                return b64decode(encoded, validate=True)
            except NotBase64:
                return None
        case _:
            return None


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _collisions(files: Mapping[str, bytes]) -> list[Issue]:
    # Two names that differ in case alone are one file on some machines.
    seen: dict[str, str] = {}
    issues = []
    for path in files:
        other = seen.setdefault(path.casefold(), path)
        if other != path:
            issues.append(Issue(f"files[{path!r}]", f"differs from {other!r} in case alone", "Rename one of them."))
    return issues


def place_for(*, kind: str, category: str, name: str) -> str:
    """Return where an item goes: `tools/<category>/<name>`, with every part a safe name."""
    parts = category.split("/") if category else []
    if not all(map(is_tool_id, parts)):
        raise InvalidRequest(
            f"{category!r} is not a category.", suggestion="Use words such as `mail` or `mail/enrich`."
        )
    place = [*parts, name]
    if not PASSED_OVER.isdisjoint(place) or (kind == "tools" and place[0] == SHARED_CODE):
        raise InvalidRequest(
            f"No item is looked for in {kind}/{'/'.join(place)}.", suggestion="Choose another name or category."
        )
    return "/".join([kind, *place])


def write(draft: Draft, base: Path) -> Path:
    """Write a draft below a base and return its manifest's path; it appears whole or not at all."""
    final = base / draft.place
    _refuse_links(final.parent, base)
    if os.path.lexists(final):
        raise AlreadyExists(final.stem, path=str(final))
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


def write_all(drafts: Iterable[Draft], base: Path) -> None:
    """Write several drafts below a base: all of them, or none."""
    written: list[Path] = []
    try:
        for draft in drafts:
            write(draft, base)
            written.append(base / draft.place)
    except BaseException:
        for place in written:
            discard(place, base)
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
    """Give what is staged its name, unless somebody else took the name meanwhile."""
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
    """Move an item out of sight, to a place of its own in the space's trash, and return that place."""
    target = base / TRASH / f"{path.stem}-{secrets.token_hex(4)}" / path.name
    _refuse_links(target.parent, base)
    target.parent.mkdir(parents=True)
    path.rename(target)
    signature = path.with_name(sidecar(path.name))
    if signature.is_file():
        signature.rename(target.with_name(signature.name))
    return target
