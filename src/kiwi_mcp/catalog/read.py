"""Reading one item: its manifest, its files, its digest, and whether it is what was signed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from kiwi_mcp.catalog.files import MISSING, Content, Stamps, read_file, settled, stamp_of, unreadable
from kiwi_mcp.catalog.folder import category_of, kind_of, stem_of
from kiwi_mcp.catalog.tree import MAX_BYTES, Tree
from kiwi_mcp.domain.errors import IntegrityMismatch, InvalidManifest, KiwiError
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Manifest, Origin, Signature, Source, Tool, ToolFile
from kiwi_mcp.domain.json import as_list, as_text
from kiwi_mcp.manifest.digest import digest_of
from kiwi_mcp.manifest.keys import fingerprint
from kiwi_mcp.manifest.legacy import verdict
from kiwi_mcp.manifest.legacy_tools import Extractor, read_extractor
from kiwi_mcp.manifest.names import is_safe_path, is_tool_id
from kiwi_mcp.manifest.parse import parse
from kiwi_mcp.manifest.placement import read_written
from kiwi_mcp.manifest.python_source import DECLARED_IN, inferred_parameters
from kiwi_mcp.manifest.sheets import Sheets
from kiwi_mcp.manifest.signature import (
    DETACHED,
    MAX_SIDECAR,
    completed,
    is_apart,
    read_detached,
    sidecar,
    split,
)
from kiwi_mcp.manifest.trust import NOBODY, Trusted, owner_trust, vouch

ITEM_LIMIT = 1_000_000
"""The most that a file with a manifest in it may hold, in bytes."""

_MAX_EXTRACTORS = 64

Kind = Literal["directive", "tool", "knowledge"]
_KINDS: Mapping[str, Kind] = MappingProxyType({"directives": "directive", "knowledge": "knowledge"})


@dataclass(frozen=True, slots=True)
class Head:
    """The manifest of an item and the file it was read from; its other files are not touched."""

    manifest: Manifest
    content: Content
    text: str


@dataclass(frozen=True, slots=True)
class Opened:
    """An item read in full, and the stamps that tell whether it is still so."""

    tool: Tool
    stamps: Stamps


def read_head(path: Path, *, base: Path, sheets: Sheets | None = None, is_draft: bool = False) -> Head | None:
    """Return the manifest in a file below a source's base, or None where the file is not an item.

    A draft is read to be checked, so its name may be one that no item can have.
    """
    content = read_file(path, limit=ITEM_LIMIT)
    if b"\0" in content.data:  # a picture, an archive, a program: no author wrote a manifest in it
        return None
    try:
        text = content.data.decode()
    except UnicodeDecodeError as error:
        raise unreadable(path, f"it is not UTF-8 text (byte {error.start})") from error
    manifest = manifest_in(path, text, base=base, sheets=sheets)
    if manifest is None:
        return None
    if not is_draft and not is_tool_id(manifest.tool_id):
        raise InvalidManifest(str(path), [bad_name(manifest.tool_id)])
    return Head(manifest, content, text)


def manifest_in(path: Path, text: str, *, base: Path, sheets: Sheets | None = None) -> Manifest | None:
    """Return the manifest in the text of a file at a path below a base, or None where it is not an item."""
    written = read_written(path, text, is_legacy_script=kind_of(path, base) == "scripts")
    if written is None:
        return None
    category = category_of(path, base)
    manifest = parse(written.value, stem=stem_of(path), category=category, lines=written.lines, sheets=sheets)
    return replace(manifest, issues=(*written.issues, *manifest.issues))


def read_tool(path: Path, *, source: Source, base: Path, sheets: Sheets | None = None, is_draft: bool = False) -> Tool:
    """Return the item whose manifest is in a file below a source's base; nothing in it is executed."""
    return open_tool(path, source=source, base=base, sheets=sheets, is_draft=is_draft).tool


def open_tool(
    path: Path,
    *,
    source: Source,
    base: Path,
    namespace: str = "local",
    sheets: Sheets | None = None,
    is_draft: bool = False,
    trust_file: Path | None = None,
) -> Opened:
    """Return the item whose manifest is in a file, with the stamps of all that was read for it.

    `trust_file` says whose keys count; without it nobody's do.
    """
    head = read_head(path, base=base, sheets=sheets, is_draft=is_draft)
    if head is None:
        raise InvalidManifest(
            str(path), [Issue("", f"{path.name} holds no manifest", "Add `tool_id` and `tool_type`.")]
        )
    origin = Origin(source, path, path.parent, namespace, base)
    tree = _files(head, origin, base)
    signature, body = split(head.text, path.suffix)
    if path.suffix.lower() in DETACHED:
        signature = _detached(path, tree)
    elif signature and is_apart(path.suffix):
        signature = completed(signature, _detached(path, tree))
    manifest = replace(head.manifest, issues=(*head.manifest.issues, *tree.issues))
    if origin.is_folder:
        manifest = with_parameters(manifest, lambda name: read_file(origin.root / name, limit=ITEM_LIMIT).data)
    digest = digest_of(
        tool_id=manifest.tool_id,
        version=manifest.version,
        executor=manifest.executor,
        manifest_body=body.encode(),
        # The file with the manifest counts by its body: its bytes change when it is signed.
        files=[file for file in tree.ordered() if file.path != path.name],
    )
    integrity = integrity_of(signature, digest, head.text, manifest, path=path, base=base, extractors=_extractors(base))
    if integrity.startswith("valid:") and len(tree.ordered()) > 1:
        integrity = "modified"  # an old hash speaks of one file, and nothing would vouch for the others
    if source == "builtin" and signature is None:
        integrity = "builtin"
    tool = Tool(manifest, origin, tree.ordered(), digest, signature, integrity)
    return Opened(_vouched(tool, trust_file, tree), tree.stamped())


def _vouched(tool: Tool, trust_file: Path | None, tree: Tree) -> Tool:
    """Return an item with who vouches for it."""
    signature, trusted = tool.signature, NOBODY
    if tool.origin.source == "builtin":
        return tool
    if signature and signature.key and trust_file:
        tree.stamps[str(trust_file)] = settled(stamp_of(str(trust_file)))
        trusted = _trusted(trust_file)
    trust = vouch(
        tool.manifest, tool.digest, signature, tool.integrity, namespace=tool.origin.namespace, trusted=trusted
    )
    return replace(tool, trust=trust, signer=fingerprint(signature.key) if signature and signature.key else "")


def _trusted(path: Path) -> Trusted:
    try:
        return owner_trust(path)
    except KiwiError:  # nobody is trusted by a file that cannot be understood; `kiwi key list` says what is wrong
        return NOBODY


def with_parameters(manifest: Manifest, read: Callable[[str], bytes]) -> Manifest:
    """Return a folder item's manifest with the parameters of its Python entry function, where it declares none."""
    entrypoint = as_text(manifest.config.get("entrypoint"))
    is_declared = bool(DECLARED_IN & manifest.written.keys())
    if is_declared or not entrypoint.endswith(".py") or not is_safe_path(entrypoint):
        return manifest
    try:
        text = read(entrypoint).decode(errors="replace")
        return replace(manifest, parameters=inferred_parameters(text, what=entrypoint))
    except KiwiError:
        return manifest  # the file is missing or does not parse, which the check of the item says


def load_bytes(tool: Tool, file: ToolFile) -> bytes:
    """Return a file's bytes, exactly those that the item was read with."""
    for path in _homes(tool, file):
        try:
            data = read_file(path, limit=MAX_BYTES).data
        except KiwiError:
            continue
        if sha256(data).hexdigest() == file.sha256:
            return data
    raise IntegrityMismatch(tool.id, expected=file.sha256, actual="", where=f"{file.path} is not what it was when read")


def bad_name(tool_id: str) -> Issue:
    """Return the issue of a name that no item may have."""
    rule = "a name is lower-case ASCII letters, digits, `_` and `-`, at most 128 of them, and no device name"
    return Issue("tool_id", f"{tool_id[:140]!r} cannot name an item: {rule}", "Choose a name such as `email_enricher`.")


def _files(head: Head, origin: Origin, base: Path) -> Tree:
    tree = Tree(str(origin.path))
    if origin.is_folder:
        tree.take_folder(origin.root)
    # The manifest's bytes are those that were parsed, whatever the file holds by now.
    tree.add(origin.path.name, head.content)
    tree.stamps[str(origin.path)] = head.content.stamp
    tree.take_shared(as_list(head.manifest.config.get("lib_imports")), base / "tools" / "lib")
    return tree


def _detached(path: Path, tree: Tree) -> Signature | None:
    where = path.with_name(sidecar(path.name))
    if stamp_of(str(where)) == MISSING:
        tree.stamps[str(where)] = MISSING
        return None
    content = read_file(where, limit=MAX_SIDECAR)
    tree.stamps[str(where)] = content.stamp
    return read_detached(content.data.decode(errors="replace"))


def integrity_of(
    signature: Signature | None,
    digest: str,
    text: str,
    manifest: Manifest,
    *,
    path: Path,
    base: Path = Path(),
    extractors: Iterable[Extractor] = (),
) -> str:
    """Return whether an item is what its signature line says; `extractors` help to understand hashes of old."""
    if signature is None:
        return "unsigned"
    if signature.hash == digest:
        return "signed"
    if signature.key or path.suffix.lower() in DETACHED:
        return "modified"  # no hash of old stands in such a line
    return verdict(
        text,
        suffix=path.suffix,
        item_id=manifest.tool_id,
        kind=_KINDS.get(kind_of(path, base), "tool"),
        category=category_of(path, base),
        file_name=path.name,
        extractors=extractors,
    )


def _extractors(base: Path) -> Iterator[Extractor]:
    # Old projects kept rules for languages of their own; they are read as literals, and only to check old hashes.
    folders = (base / "extractors" / "tool", base / "tools" / "extractors")
    paths = (path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.py")))
    for path in islice(paths, _MAX_EXTRACTORS):
        with suppress(KiwiError):
            source = read_file(path, limit=ITEM_LIMIT).data.decode(errors="replace")
            if (extractor := read_extractor(source)) is not None:
                yield extractor


def _homes(tool: Tool, file: ToolFile) -> Iterator[Path]:
    # The hash decides, so it is enough to look wherever the file can be: below the item, or in the shared code.
    yield tool.origin.root / file.path
    if file.path.startswith("lib/"):
        yield from (folder / "tools" / file.path for folder in tool.origin.root.parents)
