"""Published versions, opened from a checked copy."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from errno import EEXIST, ENOTEMPTY
from pathlib import Path

from msgspec.structs import replace

from kiwi_mcp.catalog.item_reader import MANIFESTS, OpenedItem, open_tool
from kiwi_mcp.catalog.references import Ref
from kiwi_mcp.catalog.release import shipped_digests
from kiwi_mcp.catalog.source import ItemSource
from kiwi_mcp.domain.cards import Card, card_of_version
from kiwi_mcp.domain.errors import IntegrityMismatch, KiwiError, Unavailable
from kiwi_mcp.domain.items import Source, Tool
from kiwi_mcp.domain.registry import (
    BUILTIN_NAMESPACE,
    ChainRow,
    ItemName,
    Pin,
    Release,
    StatusNote,
    VersionInfo,
    pins_from_json,
)
from kiwi_mcp.manifest.type_specs import TypeSpecs
from kiwi_mcp.store.database import within
from kiwi_mcp.store.registry.registry import Registry, changed_items, listed_now

_KEPT = 4_096
_GLANCE, _ANSWER = 2.0, 10.0
"""For how many seconds a server may be silent: when every call looks whether there is news, and when it is asked."""
_ATTEMPTS = 5


class RegistrySource(ItemSource):
    """What a registry holds for its actor, except what ships with Kiwi; nothing while it cannot be reached."""

    name: Source = "registry"
    home = ""
    """Whichever store the user has."""

    def __init__(self, registry: Callable[[], Registry], cache: Path, trust_file: Path | None = None) -> None:
        self._registry = registry
        self._trust_file = trust_file
        self._copies = cache / "registry"
        self._sheets: TypeSpecs | None = None
        self._seen: Registry | None = None
        self._head = self._followed = -1
        self._generation = 0
        self._listed: dict[str, VersionInfo] = {}
        self._named: dict[Ref, Sequence[Card]] = {}
        self._opened: dict[str, OpenedItem] = {}
        self._latest: dict[ItemName, Card] | None = None
        self._entries: Sequence[Card] | None = None

    def registry(self) -> Registry | None:
        """Return the registry, or None if it cannot be opened."""
        try:
            return self._registry()
        except KiwiError:
            return None

    def sync(self, sheets: TypeSpecs) -> int:
        """Notice whether any process published a version or changed the status of one."""
        registry = None
        try:
            with within(_GLANCE):
                registry = self._registry()
                head = registry.head()
                self.fault = None
        except KiwiError as fault:
            head, self.fault = -1, fault
        # Another store, or the same one seen by another actor, may have a log that is just as long.
        if registry is not self._seen or sheets is not self._sheets or not 0 <= self._head <= head:
            self._latest, self._followed = None, -1
            self._listed.clear()
        if head != self._head or registry is not self._seen or sheets is not self._sheets:
            self._generation += 1
            self._named.clear()
            self._opened.clear()
            self._entries = None
            self._head, self._seen, self._sheets = head, registry, sheets
        return self._generation

    def entries(self) -> Sequence[Card]:
        """Return the latest version of every item that lists may show."""
        if self._entries is None:
            self._follow()
            self._entries = [*(self._latest or {}).values()]
        return self._entries

    def _follow(self) -> None:
        """List everything, or only what changed since everything was listed."""
        if self.fault:
            return
        try:
            with within(_ANSWER):
                registry = self._registry()
                changed = None if self._latest is None else changed_items(registry, self._followed)
                if self._latest is None or changed is None:
                    self._latest = {one.name.item: self._enter(one) for one in registry.find() if is_listed(one)}
                else:
                    now = listed_now(registry, changed)
                    for item in changed:
                        self._latest.pop(item, None)
                    self._latest |= {item: self._enter(one) for item, one in now.items() if is_listed(one)}
                self._followed = self._head
        except Unavailable as fault:
            self._fail(fault)

    def named(self, ref: Ref) -> Sequence[Card]:
        """Return the versions that a reference may mean; a yanked one only where it is asked for exactly."""
        if self.fault or ref.source not in {None, "registry"}:
            return ()
        known = self._named.get(ref)
        if known is None:
            used = [one for one in self._versions(ref) if one.yanked is None or ref.is_exactly(one)]
            if ref.version is None:
                # A bare name means the latest version: a pre-release stands behind it, however high its number.
                homes = [*dict.fromkeys(one.name.namespace for one in used)]
                used.sort(key=lambda one: (homes.index(one.name.namespace), not one.is_latest))
            known = [self._enter(one) for one in used]
            if len(self._named) >= _KEPT:
                self._named.clear()
            self._named[ref] = known
        return known

    def withdrawn(self, ref: Ref) -> Sequence[str]:
        """Return the yanked versions of an item."""
        return [one.name.version for one in self._versions(ref) if one.yanked]

    def names(self) -> Iterable[str]:
        """Return the names of the items that lists may show, where they have been listed already."""
        return {entry.tool_id for entry in self._entries or ()}

    def pin(self, tool: Tool, ref: str = "") -> Pin | None:
        """Return which executor a version was published on, or what a name in its config meant then."""
        listed = self._listed.get(tool.identity)
        if listed is None or not ref:
            return listed.executor if listed else None
        return next((pin for pin in listed.references if pin.ref == ref), None)

    def notes(self, tool: Tool) -> Sequence[str]:
        """Return a note if a version is deprecated or yanked, with the reason."""
        listed = self._listed.get(tool.identity)
        marks = (("deprecated", listed.deprecated), ("yanked", listed.yanked)) if listed else ()
        return [f"{tool.identity} is {word}{f': {mark.reason}' if mark.reason else ''}" for word, mark in marks if mark]

    def open(self, entry: Card) -> OpenedItem | None:
        """Return a version in full; its copy is made anew where it is not what was sealed."""
        known = self._opened.get(entry.path)
        if known is None or not known.is_fresh:
            listed = self._listed.get(entry.path)
            if listed is None:  # another thread has seen a change since the entry was given
                return None
            if len(self._opened) >= _KEPT:
                self._opened.clear()
            with within(_ANSWER):
                links = self._registry().resolve(listed.id)
                for index, link in enumerate(links[1:], start=1):
                    version = _version(link, links[index + 1] if index + 1 < len(links) else None)
                    ref = Ref(link.tool_id, "registry", link.namespace, link.version)
                    self._named.setdefault(ref, [self._enter(version)])
                known = self._opened[entry.path] = self._open(listed)
        return known

    def _versions(self, ref: Ref) -> Sequence[VersionInfo]:
        """Return the usable versions of a name; none if the registry cannot answer."""
        if self.fault or ref.source not in {None, "registry"}:
            return ()
        try:
            with within(_ANSWER):
                found = self._registry().named(ref.name, namespace=ref.namespace if ref.source else None)
                return [one for one in found if _is_usable(one)]
        except Unavailable as fault:
            self._fail(fault)
            return ()

    def _fail(self, fault: KiwiError) -> None:
        # With no head known, the next look at the log that goes well begins anew.
        self.fault, self._head = fault, -1

    def _enter(self, listed: VersionInfo) -> Card:
        entry = card_of_version(listed)
        self._listed[entry.path] = listed
        return entry

    def _open(self, listed: VersionInfo) -> OpenedItem:
        # A digest does not cover who signed, and two namespaces may hold the same with two signatures.
        base = self._copies / f"{listed.digest.removeprefix('sha256:')}.{listed.name.namespace}"
        actual = ""
        for attempt in range(_ATTEMPTS):  # another process may be mending the same copy
            is_there = base.exists()
            opened = self._read(listed, base) if is_there else None
            actual = f"sha256:{opened.tool.digest}" if opened else actual
            is_doubted = opened is not None and opened.tool.trust == "tampered" and not attempt
            if opened and actual == listed.digest and not is_doubted:
                is_signed = opened.tool.integrity != "unsigned"
                return opened if is_signed else replace(opened, tool=replace(opened.tool, integrity="published"))
            (release,) = self._registry().read([listed.id])
            try:
                self._copies.mkdir(parents=True, exist_ok=True)
                made = Path(tempfile.mkdtemp(dir=self._copies, prefix=".new-"))
            except OSError as error:
                raise self._unwritable(error) from error
            try:
                lay_out(release, made)
                if is_there:
                    _remove(base, made.with_name(f"{made.name}-old"))
                made.rename(base)
            except OSError as error:
                shutil.rmtree(made, ignore_errors=True)
                if error.errno not in {ENOTEMPTY, EEXIST}:  # otherwise another process was quicker
                    raise self._unwritable(error) from error
        raise IntegrityMismatch(listed.name.tool_id, expected=listed.digest, actual=actual, where=str(base))

    def _read(self, listed: VersionInfo, base: Path) -> OpenedItem | None:
        try:
            return open_tool(
                base / listed.place,
                source="registry",
                base=base,
                namespace=listed.name.namespace,
                sheets=self._sheets,
                trust_file=self._trust_file,
            )
        except (KiwiError, OSError):
            return None

    def _unwritable(self, error: OSError) -> Unavailable:
        return Unavailable(
            f"What is published cannot be copied to {self._copies}: {error.strerror}.",
            suggestion="Make room there, give yourself write access, or name another cache in XDG_CACHE_HOME.",
        )


def _remove(folder: Path, aside: Path) -> None:
    """Remove a folder in one step, so that no reader finds half of it."""
    with suppress(FileNotFoundError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _is_usable(listed: VersionInfo) -> bool:
    """Whether a version is used from here: what ships with Kiwi is not, nor what only says that it does."""
    return not listed.is_builtin and (listed.name.namespace != BUILTIN_NAMESPACE or listed.digest in shipped_digests())


def is_listed(listed: VersionInfo) -> bool:
    """Whether lists may show a version."""
    return _is_usable(listed) and listed.yanked is None


def _version(link: ChainRow, below: ChainRow | None) -> VersionInfo:
    """Return a link of a chain as a version, with the executor it was published on."""
    pin = Pin(link.executor_ref or "", below.name, below.digest) if below else None
    return VersionInfo(
        link.id,
        link.name,
        link.digest,
        link.closure,
        link.place,
        link.tool_type,
        manifest_text=link.manifest_text,
        executor=pin,
        yanked=StatusNote(link.yanked_at) if link.yanked_at else None,
        deprecated=StatusNote(link.deprecated_at) if link.deprecated_at else None,
        references=pins_from_json(link.references),
    )


def lay_out(release: Release, base: Path) -> None:
    """Write the files of a version below a base, with the same relative paths as at publication."""
    place = base / release.place
    for file in release.files:
        # What a single file imports from the shared code stands there; a folder may as well hold it itself.
        is_shared = place.name not in MANIFESTS and file.path not in {place.name, release.sidecar_path}
        path = (base / "tools" if is_shared else place.parent) / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)
        path.chmod(0o755 if file.is_executable else 0o644)
