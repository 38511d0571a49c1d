"""Items in folders: what a folder lists, and one item from its files with its digest, integrity and trust."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp.domain.cards import TEXT_LIMIT, Card, described
from kiwi_mcp.domain.errors import IntegrityMismatch, InvalidManifest, KiwiError, TooLarge
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import FOLDER_FILES, TOOL_FILES, Location, Manifest, Signature, Source, Tool, ToolFile
from kiwi_mcp.domain.json import as_list, as_text
from kiwi_mcp.domain.names import is_safe_path, is_tool_id
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest import legacy, python_source
from kiwi_mcp.manifest.files import (
    MISSING,
    Content,
    FileStamp,
    Stamps,
    are_fresh,
    read_file,
    settled,
    stamp_of,
    unreadable,
)
from kiwi_mcp.manifest.parse import parse
from kiwi_mcp.manifest.signatures import (
    DETACHED,
    MAX_SIDECAR,
    digest_of,
    fingerprint,
    has_sidecar,
    read_detached,
    sidecar,
    signature_form,
    split,
    with_sidecar,
)
from kiwi_mcp.manifest.source_file import read_manifest
from kiwi_mcp.manifest.trust import NO_TRUST, has_passed, owner_trust, vouch
from kiwi_mcp.manifest.type_specs import TOOLS, ItemFolder, TypeSpecs, load_type_specs

MANIFESTS = FOLDER_FILES
"""A folder with one of these is one item; the first that is there counts."""

MAX_DEPTH = 16
MAX_NAMES = 100_000

PASSED_OVER = frozenset({"node_modules", "extractors", "parsers"})
"""Folders in which no item is looked for, wherever they are."""

_NEVER_TOOLS = (".md", ".sig")

MAX_FILES = 2_000
MAX_BYTES = 64_000_000

_NOT_ITS_OWN = frozenset({".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", ".DS_Store"})
_DERIVED = (".pyc", ".sig")
_MODULE = lazy_pattern(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)


class FolderListing(Struct, frozen=True, array_like=True):
    """The content of one folder: files that may be items, folders to look into, and names that cannot be used."""

    kind: str
    depth: int
    stamp: FileStamp
    places: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    oddities: tuple[tuple[str, str], ...] = ()
    """Path and reason of what looks like an item and is not read."""


def list_folder(path: str, *, home: ItemFolder, depth: int = 0) -> FolderListing:
    """Return the listing of a folder of items. It reads only names and file types, and follows no links."""
    listing = FolderListing(home.name, depth, settled(stamp_of(path)))
    if os.path.islink(path):  # noqa: PTH114 - text paths, on the hot path
        return listing
    try:
        with os.scandir(path) as entries:
            names = sorted(islice(entries, MAX_NAMES + 1), key=lambda name: name.name)
    except (FileNotFoundError, NotADirectoryError):
        return listing
    except OSError as error:
        return replace(listing, oddities=((path, f"it cannot be listed: {error.strerror}"),))
    found = [_classify(name, home=home, depth=depth) for name in names[:MAX_NAMES]]
    oddities = [(where, reason) for what, where, reason in found if what == "odd"]
    if len(names) > MAX_NAMES:
        oddities.append((path, f"it holds more than {MAX_NAMES:,} names, and the rest is not looked at"))
    return replace(
        listing,
        places=tuple(where for what, where, _ in found if what == "item"),
        folders=tuple(where for what, where, _ in found if what == "folder"),
        oddities=tuple(oddities),
    )


def kind_of(path: Path, base: Path) -> str:
    """Return which of the kinds a file below a source's base belongs to."""
    return path.relative_to(base).parts[0]


def stem_of(path: Path) -> str:
    """Return the name an item has from its place: its folder's, or its file's without the suffix."""
    return path.parent.name if path.name in MANIFESTS else path.stem


def category_of(path: Path, base: Path) -> str:
    """Return the folders between the kind's own folder and the item, joined by `/`."""
    home = path.parent.parent if path.name in MANIFESTS else path.parent
    return "/".join(home.relative_to(base).parts[1:])


def _classify(
    name: os.DirEntry[str], *, home: ItemFolder, depth: int
) -> tuple[Literal["item", "folder", "odd", ""], str, str]:
    if name.name.startswith((".", "_")):
        return "", name.path, ""
    if name.is_symlink():
        return "odd", name.path, "it is a symbolic link, and links are not followed"
    if name.is_dir(follow_symlinks=False):
        is_shared_code = not home.type and depth == 0 and name.name == python_source.SHARED_CODE
        if is_shared_code or name.name in PASSED_OVER:
            return "", name.path, ""
        for manifest in filter(None, (home.file, *TOOL_FILES)):
            if os.path.lexists(where := f"{name.path}/{manifest}"):
                return "item", where, ""
        if depth == MAX_DEPTH:
            return "odd", name.path, f"it is nested more than {MAX_DEPTH} folders deep"
        return "folder", name.path, ""
    may_be_item = name.name.endswith(home.suffix) if home.suffix else not name.name.endswith(_NEVER_TOOLS)
    if not may_be_item or not name.is_file(follow_symlinks=False):
        return "", name.path, ""
    if name.name in MANIFESTS:
        return "odd", name.path, "it needs a folder of its own, named for the item"
    return "item", name.path, ""


class Tree(Struct):
    """Files as they are gathered: what each holds, the stamps to notice changes by, and what could not be taken."""

    what: str
    files: dict[str, ToolFile] = field(default_factory=dict)
    stamps: dict[str, FileStamp] = field(default_factory=dict)
    issues: list[Issue] = field(default_factory=list)
    size: int = 0

    def add(self, path: str, content: Content) -> None:
        """Take one file in under its path below the item's root."""
        self.size += len(content.data)
        self.files[path] = ToolFile(path, sha256(content.data).hexdigest(), len(content.data), content.is_executable)
        if len(self.files) > MAX_FILES:
            raise TooLarge(self.what, size=None, limit=MAX_FILES, unit="files")

    def take_folder(self, root: Path) -> None:
        """Take in every file below a folder; links and special files are left out and reported."""
        for name in self._walk(str(root)):
            path = name.path[len(str(root)) + 1 :]
            if not name.is_file(follow_symlinks=False):
                self._leave_out(path, "is not a regular file")
            elif not is_safe_path(path):
                self._leave_out(path, "has a name that is not safe on every system")
            else:
                content = read_file(Path(name.path), limit=MAX_BYTES - self.size)
                self.stamps[name.path] = content.stamp
                self.add(path, content)

    def take_shared(self, names: Sequence[object], library: Path) -> None:
        """Take in the shared modules an item imports, below `lib/`."""
        for index, name in enumerate(names):
            module = name.removesuffix(".py") if isinstance(name, str) else ""
            where, path = library / f"{module}.py", f"lib/{module}.py"
            if not _MODULE.fullmatch(module) or not os.path.lexists(where):
                self.stamps[str(where)] = stamp_of(str(where))
                fix = f"Name a file of {library}, without its suffix."
                self.issues.append(Issue(f"config.lib_imports[{index}]", f"{name!r} is not shared code", fix))
            elif path in self.files:
                self._leave_out(path, "is named in lib_imports and is also the item's own; its own is used")
            else:
                content = read_file(where, limit=MAX_BYTES - self.size)
                self.stamps[str(where)] = content.stamp
                self.add(path, content)

    def ordered(self) -> tuple[ToolFile, ...]:
        """Return the files by path."""
        return tuple(self.files[path] for path in sorted(self.files))

    def _walk(self, root: str) -> Iterator[os.DirEntry[str]]:
        folders = [root]
        while folders:
            folder = folders.pop()
            if len(self.stamps) > 2 * MAX_FILES:
                raise TooLarge(self.what, size=None, limit=MAX_FILES, unit="folders")
            self.stamps[folder] = settled(stamp_of(folder))
            with os.scandir(folder) as names:
                for name in names:
                    if name.name in _NOT_ITS_OWN or name.name.endswith(_DERIVED):
                        continue
                    if name.is_dir(follow_symlinks=False):
                        folders.append(name.path)
                    else:
                        yield name

    def _leave_out(self, path: str, reason: str) -> None:
        fix = f"Put a regular file in its place, or remove {path!r}."
        self.issues.append(Issue(path, f"{path!r} {reason}", fix, severity="warning"))


ITEM_LIMIT = 1_000_000
"""The most that a file with a manifest in it may hold, in bytes."""

_MAX_EXTRACTORS = 64

Kind = Literal["directive", "tool", "knowledge"]
_KINDS: Mapping[str, Kind] = MappingProxyType({"directives": "directive", "knowledge": "knowledge"})


class ManifestFile(Struct, frozen=True):
    """The manifest of an item and the file it was read from; its other files are not touched."""

    manifest: Manifest
    content: Content
    text: str


class OpenedItem(Struct, frozen=True):
    """An item read in full, and the stamps that tell whether it is still so."""

    tool: Tool
    stamps: Stamps
    valid_until: str = ""
    """When the key expires that vouches for it; empty where it does not."""

    @property
    def is_fresh(self) -> bool:
        """Whether its files are as they were read, and its signature counts as it did."""
        return are_fresh(self.stamps) and not has_passed(self.valid_until)


def read_head(
    path: Path, *, base: Path, sheets: TypeSpecs | None = None, is_draft: bool = False
) -> ManifestFile | None:
    """Return the manifest in a file, or None if it is no item; a draft may have a name that no item can have."""
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
    return ManifestFile(manifest, content, text)


def manifest_in(path: Path, text: str, *, base: Path, sheets: TypeSpecs | None = None) -> Manifest | None:
    """Return the manifest in the text of a file at a path below a base, or None where it is not an item."""
    sheets = sheets or load_type_specs()
    is_old = sheets.folders.get(kind_of(path, base), TOOLS).is_old
    written = read_manifest(path, text, sheets=sheets, is_legacy_script=is_old)
    if written is None:
        return None
    category = category_of(path, base)
    manifest = parse(written.value, stem=stem_of(path), category=category, lines=written.lines, sheets=sheets)
    return replace(manifest, issues=(*written.issues, *manifest.issues))


def read_tool(
    path: Path, *, source: Source, base: Path, sheets: TypeSpecs | None = None, is_draft: bool = False
) -> Tool:
    """Return the item with its manifest in a file below a source's base; nothing in it is executed."""
    return open_tool(path, source=source, base=base, sheets=sheets, is_draft=is_draft).tool


def open_tool(
    path: Path,
    *,
    source: Source,
    base: Path,
    namespace: str = "local",
    sheets: TypeSpecs | None = None,
    is_draft: bool = False,
    trust_file: Path | None = None,
) -> OpenedItem:
    """Return an item and the stamps of all files read for it; without `trust_file`, no key is trusted."""
    head = read_head(path, base=base, sheets=sheets, is_draft=is_draft)
    if head is None:
        raise InvalidManifest(str(path), [Issue(path.name, "it holds no manifest", "Add `tool_id` and `tool_type`.")])
    origin = Location(source, path, path.parent, namespace, base)
    tree = Tree(str(path))
    if origin.is_folder:
        tree.take_folder(origin.root)
    # Use the bytes of the manifest that were parsed: the file may have changed since.
    tree.add(path.name, head.content)
    tree.stamps[str(path)] = head.content.stamp
    tree.take_shared(as_list(head.manifest.config.get("lib_imports")), base / "tools" / "lib")
    files = tree.ordered()
    form = signature_form(path)
    signature, body = split(head.text, form)
    if form.lower() in DETACHED:
        signature = _detached(path, tree)
    elif signature and has_sidecar(form):
        signature = with_sidecar(signature, _detached(path, tree))
    manifest = replace(head.manifest, issues=(*head.manifest.issues, *tree.issues))
    if origin.is_folder:
        manifest = with_parameters(manifest, lambda name: read_file(origin.root / name, limit=ITEM_LIMIT).data)
    digest = digest_of(
        tool_id=manifest.tool_id,
        version=manifest.version,
        executor=manifest.executor,
        manifest_body=body.encode(),
        # The file with the manifest counts by its body: its bytes change when it is signed.
        files=[file for file in files if file.path != path.name],
    )
    integrity = integrity_of(signature, digest, head.text, manifest, path=path, base=base, extractors=_extractors(base))
    if integrity.startswith("valid:") and len(files) > 1:
        integrity = "modified"  # an old hash covers one file, and nothing would protect the others
    if origin.is_built_in and signature is None:
        integrity = "builtin"
    tool = Tool(manifest, origin, files, digest, signature, integrity)
    tool, valid_until = _vouched(tool, trust_file, tree)
    return OpenedItem(tool, tuple(tree.stamps.items()), valid_until)


def _vouched(tool: Tool, trust_file: Path | None, tree: Tree) -> tuple[Tool, str]:
    """Return an item with who vouches for it, and until when; the time is empty where it has no end."""
    signature, trusted = tool.signature, NO_TRUST
    if tool.origin.is_built_in:
        return tool, ""
    if signature and signature.key and trust_file:
        for path in {str(trust_file), os.path.realpath(trust_file)}:  # it may be a link, and then both count
            tree.stamps[path] = settled(stamp_of(path))
        with suppress(KiwiError):  # no key is trusted if the file cannot be parsed; `kiwi key list` shows the error
            trusted = owner_trust(trust_file)
    # Files that the owner can change are signed alike, in whichever of the owner's folders they are.
    namespace = "local" if tool.origin.is_editable else tool.origin.namespace
    trust = vouch(tool.manifest, tool.digest, signature, tool.integrity, namespace=namespace, trusted=trusted)
    if not signature or not signature.key:
        return replace(tool, trust=trust, signer=""), ""
    return replace(tool, trust=trust, signer=fingerprint(signature.key)), trusted.valid_until(signature.key)


def with_parameters(manifest: Manifest, read: Callable[[str], bytes]) -> Manifest:
    """Return a folder item's manifest with the parameters of its Python entry function, where it declares none."""
    entrypoint = as_text(manifest.config.get("entrypoint"))
    is_declared = bool(python_source.DECLARED_IN & manifest.written.keys())
    if is_declared or not entrypoint.endswith(".py") or not is_safe_path(entrypoint):
        return manifest
    try:
        text = read(entrypoint).decode(errors="replace")
        return replace(manifest, parameters=python_source.inferred_parameters(text, what=entrypoint))
    except KiwiError:
        return manifest  # the file is missing or does not parse, which the check of the item says


def load_bytes(tool: Tool, file: ToolFile) -> bytes:
    """Return a file's bytes, exactly those that the item was read with."""
    # The hash decides, so it is enough to look wherever the file can be: below the item, or in the shared code.
    shared = [folder / "tools" for folder in tool.origin.root.parents if file.path.startswith("lib/")]
    for folder in (tool.origin.root, *shared):
        with suppress(KiwiError):
            data = read_file(folder / file.path, limit=MAX_BYTES).data
            if sha256(data).hexdigest() == file.sha256:
                return data
    raise IntegrityMismatch(tool.id, expected=file.sha256, actual="", where=f"{file.path} is not what it was when read")


def bad_name(tool_id: str) -> Issue:
    """Return the issue of a name that no item may have."""
    rule = "a name is lower-case ASCII letters, digits, `_` and `-`, at most 128 of them, and no device name"
    return Issue("tool_id", f"{tool_id[:140]!r} cannot name an item: {rule}", "Choose a name such as `email_enricher`.")


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
    extractors: Iterable[legacy.Extractor] = (),
) -> str:
    """Return whether an item is what its signature line says; `extractors` help to understand hashes of old."""
    if signature is None:
        return "unsigned"
    if signature.hash == digest:
        return "signed" if signature.key else "hashed"  # a hash alone shows that nothing changed, and not who says so
    if signature.key or signature_form(path).lower() in DETACHED:
        return "modified"  # no hash of old stands in such a line
    return legacy.verdict(
        text,
        suffix=path.suffix,
        item_id=manifest.tool_id,
        kind=_KINDS.get(kind_of(path, base), "tool"),
        category=category_of(path, base),
        file_name=path.name,
        extractors=extractors,
    )


def _extractors(base: Path) -> Iterator[legacy.Extractor]:
    # Old projects kept rules for languages of their own; they are read as literals, and only to check old hashes.
    folders = (base / "extractors" / "tool", base / "tools" / "extractors")
    paths = (path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.py")))
    for path in islice(paths, _MAX_EXTRACTORS):
        with suppress(KiwiError):
            source = read_file(path, limit=ITEM_LIMIT).data.decode(errors="replace")
            if (extractor := legacy.read_extractor(source)) is not None:
                yield extractor


def card_of(head: ManifestFile, path: Path, *, base: Path, source: Source, namespace: str) -> Card:
    """Return the card of an item from its manifest."""
    manifest = head.manifest
    return Card(
        source=source,
        namespace=namespace,
        tool_id=manifest.tool_id,
        version=manifest.version,
        path=str(path),
        kind=kind_of(path, base),
        tool_type=manifest.tool_type,
        name=manifest.name,
        description=manifest.description[:TEXT_LIMIT],
        category=category_of(path, base) or manifest.category,
        tags=manifest.tags,
        parameters=described(manifest.parameters.get("properties")),
        modified=head.content.modified,
    )
