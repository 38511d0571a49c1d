"""Registries that versions are copied from and to: the user's own, folders, servers; and how they are copied."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from typing import NamedTuple, Protocol, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp.domain.errors import (
    ArtifactRefused,
    Denied,
    Invalid,
    InvalidRequest,
    NamespaceDenied,
    NotFound,
    VersionConflict,
)
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.names import Range, Version, is_namespace, is_tool_id
from kiwi_mcp.domain.outcome import Progress, Report, silent
from kiwi_mcp.domain.registry import (
    BUILTIN_NAMESPACE,
    Actor,
    ItemName,
    PublishResult,
    RegistryEvent,
    Release,
    VersionName,
    Visibility,
    closure_in,
    is_digest,
    pins_of,
)
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import MAX_LINKS, CheckedRelease, order
from kiwi_mcp.store.remote.layout import Layout


class RemoteRegistry(Protocol):
    """A place that versions are copied from and to. The receiver checks what it returns."""

    @property
    def key(self) -> str:
        """A stable name, without a password."""

    @property
    def etag(self) -> str:
        """The state that `events` returned last; empty if the remote has no name for it."""

    async def events(self, unless: str = "") -> Sequence[RegistryEvent]:
        """Return all events, oldest first; none where the state is still the one that `unless` names."""

    async def history(self, tool_id: str) -> Sequence[RegistryEvent]:
        """Return the log entries about the items of one name, oldest first, including unlisted items."""

    async def read(self, names: Sequence[VersionName]) -> Sequence[Release]:
        """Return these versions with all their files; a version that is missing or hidden is an error."""

    async def write(
        self, releases: Sequence[CheckedRelease], events: Sequence[RegistryEvent]
    ) -> Sequence[PublishResult]:
        """Add versions, executors first, then apply the status events. Stored versions stay as they are."""

    async def aclose(self) -> None:
        """Close what was opened."""


class LocalRegistry:
    """A registry in a database; the user's own (`is_own`) takes copies of any namespace."""

    etag = ""

    def __init__(self, registry: Registry, key: str, *, is_own: bool = False) -> None:
        self.key = key
        self._registry = registry
        self._is_own = is_own

    async def events(self, unless: str = "") -> Sequence[RegistryEvent]:  # noqa: ARG002 - it is read as a whole
        """Return the log entries that the actor may see."""
        return await asyncio.to_thread(lambda: [*all_events(self._registry)])

    async def history(self, tool_id: str) -> Sequence[RegistryEvent]:
        """Return the log entries about one name."""
        return await asyncio.to_thread(lambda: [*all_events(self._registry, tool_id=tool_id)])

    async def read(self, names: Sequence[VersionName]) -> Sequence[CheckedRelease]:
        """Return these versions, verified by the store."""
        return await asyncio.to_thread(read_named, self._registry, names)

    async def write(
        self, releases: Sequence[CheckedRelease], events: Sequence[RegistryEvent]
    ) -> Sequence[PublishResult]:
        """Publish in one transaction, then apply the status events."""
        registry = self._registry
        if self._is_own:
            # As a member of all their namespaces, but never of the one that belongs to Kiwi.
            actor = registry.actor
            names = [*(release.name for release in releases), *(event.name for event in events)]
            further = sorted({name.namespace for name in names} - {BUILTIN_NAMESPACE})
            spaces = tuple(dict.fromkeys((*actor.namespaces, *further)))
            registry = registry.as_seen_by(replace(actor, namespaces=spaces))
        return await asyncio.to_thread(registry.publish, releases, events)

    async def aclose(self) -> None:
        """Do nothing: the database belongs to the store."""


class LayoutRemote:
    """A folder in OCI image layout."""

    etag = ""

    def __init__(self, layout: Layout, key: str) -> None:
        self.key = key
        self._layout = layout

    @property
    def is_there(self) -> bool:
        """Whether the folder holds a layout, be it an empty one."""
        return self._layout.is_there

    async def events(self, unless: str = "") -> Sequence[RegistryEvent]:  # noqa: ARG002 - a folder names no state
        """Return all events of the index."""
        return await asyncio.to_thread(self._layout.events)

    async def history(self, tool_id: str) -> Sequence[RegistryEvent]:
        """Return the events of the index about one name."""
        return [event for event in await self.events() if event.name.tool_id == tool_id]

    async def read(self, names: Sequence[VersionName]) -> Sequence[CheckedRelease]:
        """Return these versions."""
        return await asyncio.to_thread(self._layout.read, names)

    async def write(
        self, releases: Sequence[CheckedRelease], events: Sequence[RegistryEvent]
    ) -> Sequence[PublishResult]:
        """Add artifacts, and replace the index last."""
        return await asyncio.to_thread(self._layout.write, releases, events)

    async def aclose(self) -> None:
        """Do nothing: a folder needs no open handle."""


def all_events(registry: Registry, *, tool_id: str = "") -> Iterator[RegistryEvent]:
    """Yield all log entries: of what lists show, or of one name. The store returns them in pages."""
    ask, after = partial(registry.history, tool_id) if tool_id else registry.events, 0
    while page := ask(after):
        yield from page
        after = page[-1].seq


def read_named(registry: Registry, names: Sequence[VersionName]) -> Sequence[CheckedRelease]:
    """Return versions by their names. Missing versions and hidden versions give the same error."""
    ids: dict[VersionName, str] = {}
    for namespace, tool_id in dict.fromkeys(name.item for name in names):
        ids |= {listed.name: listed.id for listed in registry.named(tool_id, namespace=namespace)}
    if missing := [str(name) for name in names if name not in ids]:
        raise not_available(missing)
    return registry.read([ids[name] for name in names])


def not_available(missing: Sequence[str]) -> NotFound:
    """Return the error for versions that a registry does not have, or does not show."""
    return NotFound(
        f"The registry holds no {', '.join(missing[:10])}{' and others' if len(missing) > 10 else ''}.",  # noqa: PLR2004 - ten fit in a sentence
        suggestion="Check the namespace, the name and the version.",
        missing=list(missing),
    )


_ASPECTS = {
    "yank": "yank",
    "unyank": "yank",
    "deprecate": "deprecate",
    "undeprecate": "deprecate",
    "visibility": "visibility",
}
"""The kind of status that each event changes; the last event of a kind is valid."""
_EXAMPLES = "Write `name`, `namespace/name`, `name@^1.2`, `name@1.2.3` or a digest `sha256:…`."
_MAX_LENGTH = 400

StatusKey = tuple[str, str, str, str]
"""What a status event changes: the kind of status, and the version or, for visibility, the whole item."""


class Hashes(NamedTuple):
    """The digest of a version, and its closure."""

    digest: str
    closure: str


class RegistrySnapshot(Struct, frozen=True):
    """A registry without its contents: the hashes, the visibility and the latest status of each version."""

    versions: Mapping[VersionName, Hashes]  # in the order in which they were published
    visibilities: Mapping[ItemName, Visibility]
    statuses: Mapping[StatusKey, RegistryEvent]

    @classmethod
    def by(cls, events: Iterable[RegistryEvent]) -> RegistrySnapshot:
        """Return the snapshot that a log describes. Refuse a log that publishes one version with two contents."""
        versions: dict[VersionName, Hashes] = {}
        visibilities: dict[ItemName, Visibility] = {}
        statuses: dict[StatusKey, RegistryEvent] = {}
        twice = []
        for event in events:
            visibilities[event.name.item] = event.visibility
            hashes = Hashes(event.digest, event.closure)
            if event.op != "publish":
                statuses.pop(status_key(event), None)  # the order of the last events is one in which they were possible
                statuses[status_key(event)] = event
            elif versions.setdefault(event.name, hashes) != hashes:
                twice.append(Issue(str(event.name), "is in the log twice, with two contents", "Ask its owner."))
        if twice:
            raise ArtifactRefused("The log of the registry", twice)
        return cls(versions, visibilities, statuses)

    def is_private(self, name: VersionName) -> bool:
        """Whether only members of its namespace see a version."""
        return self.visibilities.get(name.item) == "private"

    def is_yanked(self, name: VersionName) -> bool:
        """Whether a version is yanked, so that it is no longer selected."""
        event = self.statuses.get(("yank", *name.item, name.version))
        return event is not None and event.op == "yank"

    def is_news(self, event: RegistryEvent) -> bool:
        """Whether a status event from elsewhere changes the status known here, and is not older."""
        known = self.statuses.get(status_key(event))
        if event.op == "visibility" and event.reason == self.visibilities.get(event.name.item):
            return False
        if known is None:
            return event.op not in {"unyank", "undeprecate"}
        is_same = event.op == known.op and event.op != "visibility"
        return not is_same and _moment(event.at) >= _moment(known.at)


def _moment(text: str) -> datetime:
    # A status without a time was there from the beginning.
    return datetime.fromisoformat(text) if text else datetime.min.replace(tzinfo=UTC)


def status_key(event: RegistryEvent) -> StatusKey:
    """Return the key of a status event."""
    aspect, name = _ASPECTS[event.op], event.name
    return (aspect, *name.item, "" if aspect == "visibility" else name.version)


class VersionQuery(Struct, frozen=True):
    """One version of an item: by name, by range or exact version, and by digest or closure."""

    tool_id: str = ""
    namespace: str = ""
    version: str = ""
    digest: str = ""  # its digest, which names its own bytes, or its closure, which names those of its executors too

    @classmethod
    def parse(cls, text: str) -> VersionQuery:
        """Return the query in a text; refuse a text that cannot name anything."""
        if is_digest(text):
            return cls(digest=text)
        place, at, version = text[:_MAX_LENGTH].partition("@")
        namespace, slash, tool_id = place.rpartition("/")
        is_hash = is_digest(version)
        is_range = Version.parse(version) is not None or Range.parse(version) is not None
        is_named = is_tool_id(tool_id) and (not slash or is_namespace(namespace))
        if not is_named or len(text) > _MAX_LENGTH or (at and not is_hash and not is_range):
            raise InvalidRequest(f"{text[:100]!r} names no version.", suggestion=_EXAMPLES)
        return cls(tool_id, namespace, "" if is_hash else version, version if is_hash else "")

    def exactly(self, name: VersionName) -> VersionQuery:
        """Return the query for a chosen version, which still has to have the requested hash."""
        return replace(self, tool_id=name.tool_id, namespace=name.namespace, version=name.version)

    def __str__(self) -> str:
        place = f"{self.namespace}/{self.tool_id}" if self.namespace else self.tool_id
        return "@".join(filter(None, (place, self.version or self.digest)))

    def choose(self, snapshot: RegistrySnapshot, namespaces: Sequence[str]) -> VersionName:
        """Return the version: in the first of the namespaces that has one, the highest that fits.

        A yanked version, and without a range a pre-release, is chosen only where nothing else was asked for.
        """
        is_exact = bool(self.digest) or Version.parse(self.version) is not None
        for namespace in (self.namespace,) if self.namespace else namespaces:
            fitting = [
                name for name in snapshot.versions if name.namespace == namespace and self._covers(name, snapshot)
            ]
            in_use = [name for name in fitting if not snapshot.is_yanked(name)] or (fitting if is_exact else [])
            if in_use:
                return max(in_use, key=self._rank)
        found = [name for name in snapshot.versions if name.tool_id == self.tool_id]
        near = ", ".join(f"`{name}`" for name in found[-5:])
        where = "" if self.namespace else f" in {', '.join(namespaces)}"
        raise NotFound(
            f"The registry has no {str(self)!r}{where}.",
            suggestion=f"{f'It has {near}. ' if near else ''}{_EXAMPLES}",
            wanted=str(self),
        )

    def _covers(self, name: VersionName, snapshot: RegistrySnapshot) -> bool:
        if self.tool_id and name.tool_id != self.tool_id:
            return False
        if self.digest and self.digest not in snapshot.versions[name]:
            return False
        if not self.version or self.version == name.version:
            return True
        wanted, version = Range.parse(self.version), Version.parse(name.version)
        return wanted is not None and version is not None and wanted.covers(version)

    def _rank(self, name: VersionName) -> tuple[bool, Version]:
        version = Version.parse(name.version) or Version(0, 0, 0)
        return (bool(self.version) or not version.pre, version)


_FIRST_BATCH, _LARGEST_BATCH = 32, 500
Check: TypeAlias = Callable[[Release], CheckedRelease]
"""The check of a release from elsewhere: it reads the manifest, and refuses what does not agree with it."""
Admit: TypeAlias = Callable[[Sequence[CheckedRelease]], Awaitable[None]]
"""Raises an error if one of the versions may not come in."""
ReleaseFilter: TypeAlias = Callable[[Sequence[CheckedRelease]], Mapping[VersionName, str]]
"""Returns the versions that are refused, each with the reason."""

_BATCH_BYTES = 16_000_000
"""About how many bytes of files one batch holds: after a larger one, the next has fewer versions."""


class SyncReport(Struct, frozen=True):
    """What a sync did."""

    new: tuple[VersionName, ...] = ()
    unchanged: int = 0
    status_changes: int = 0
    left_out: tuple[str, ...] = ()  # what was not copied although it was asked for, each with the reason
    etag: str = ""  # the state of the source that was copied: the next sync ends at once if it finds the same


class _ReadVersions(Struct):
    """Versions read from a source, in the order of writing, and versions that are not copied, with the reason."""

    releases: list[CheckedRelease] = field(default_factory=list)
    hashes: dict[VersionName, Hashes] = field(default_factory=dict)
    excluded: dict[VersionName, str] = field(default_factory=dict)


class _Writing(Struct):
    """What was written to a target so far, and what it refused."""

    target: RemoteRegistry
    is_planned: bool = False  # whether nothing is written, and only the outcome is returned
    new: list[VersionName] = field(default_factory=list)
    excluded: dict[VersionName, str] = field(default_factory=dict)
    refusal: Denied | None = None
    denied: dict[str, str] = field(default_factory=dict)  # namespaces to which nothing may be written, with the reason

    async def write(self, releases: Sequence[CheckedRelease]) -> Sequence[VersionName]:
        """Write versions, but for the namespaces that the target refuses, and return the names of those it holds."""
        for release in releases:
            name = release.name
            if name.namespace in self.denied:
                self.excluded[name] = self.denied[name.namespace]
            for pin in pins_of(release):
                if pin.name in self.excluded:
                    self.excluded.setdefault(name, f"it depends on {pin.name}, and {self.excluded[pin.name]}")
        ready = [release for release in releases if release.name not in self.excluded]
        if not ready:
            return ()
        if self.is_planned:
            self.new += [release.name for release in ready]
            return [release.name for release in ready]
        try:
            published = await self.target.write(ready, ())
        except Denied as refusal:
            if not _is_about_namespaces(refusal):
                raise
            spaces = [[*group] for _, group in groupby(ready, key=lambda release: release.name.namespace)]
            if len(spaces) == 1:
                self.refusal = refusal
                self.denied[ready[0].name.namespace] = refusal.message
                self.excluded |= {release.name: refusal.message for release in ready}
                return ()
        else:
            self.new += [one.name for one in published if one.is_new]
            return [release.name for release in ready]
        # It was one of several namespaces: each group of neighbours, executors first, is tried on its own.
        return [name for space in spaces for name in await self.write(space)]


def everything(_: VersionName) -> bool:
    """Choose every version."""
    return True


def cursor_name(remote: RemoteRegistry, actor: Actor, *, with_private: bool = False) -> str:
    """Return the name under which the state of a remote is stored: one for each set of versions a pull can see."""
    return f"pull as {', '.join(sorted(actor.namespaces))}{' with private' if with_private else ''}: {remote.key}"


async def copy(
    source: RemoteRegistry,
    target: RemoteRegistry,
    *,
    check: Check,
    unless: str = "",
    only: Callable[[VersionName], bool] = everything,
    with_private: bool = False,
    report: Report = silent,
    accept: ReleaseFilter | None = None,
    is_planned: bool = False,
) -> SyncReport:
    """Copy to the target what it lacks of a source, and repeat the status changes.

    Nothing is written if any version exists already with another closure, or if it `is_planned`. Items that ship with
    Kiwi are not copied, nor versions that `accept` refuses. `unless` is the state that was copied last.
    """
    target_has = RegistrySnapshot.by(await target.events())
    # A target that holds nothing is not the one that was written to before.
    events = await source.events(unless if target_has.versions else "")
    if not events:
        return SyncReport(etag=source.etag)
    snapshot = RegistrySnapshot.by(events)

    def is_meant(name: VersionName) -> bool:
        return name.namespace != BUILTIN_NAMESPACE and only(name) and (with_private or not snapshot.is_private(name))

    wanted = {name: hashes for name, hashes in snapshot.versions.items() if is_meant(name)}
    here = dict(target_has.versions)
    _refuse_conflicts(wanted, here)
    missing = [name for name in wanted if name not in here]
    writing = _Writing(target, is_planned=is_planned)
    done, count = 0, _FIRST_BATCH
    while done < len(missing):
        batch = {name: wanted[name] for name in missing[done : done + count] if name not in here}
        done += count
        gathered = await _gather(source, batch, here, check, with_private=with_private)
        writing.excluded |= gathered.excluded
        if accept is not None:
            writing.excluded |= await asyncio.to_thread(accept, gathered.releases)
        written = await writing.write(gathered.releases)
        here |= {name: hashes for name, hashes in gathered.hashes.items() if name in written}
        report(Progress("Copying versions", done=len(writing.new), total=len(missing)))
        size = sum(len(file.data) for release in gathered.releases for file in release.files)
        count = max(1, count // 4) if size > _BATCH_BYTES else min(count * 2, _LARGEST_BATCH)
    changes = [change for change in _news(snapshot, target_has, here) if is_meant(change.name)]
    refused_changes = () if is_planned else await _repeat(target, changes)
    if writing.refusal is not None and len(missing) == len(wanted) and not writing.new:
        raise writing.refusal  # nothing of it may be written there, which is more than leaving something out
    return SyncReport(
        new=tuple(writing.new),
        unchanged=len(wanted) - len(missing),
        status_changes=len(changes) - len(refused_changes),
        left_out=(*(f"{name}: {why}" for name, why in writing.excluded.items() if is_meant(name)), *refused_changes),
        etag=source.etag,
    )


async def pull(
    source: RemoteRegistry,
    target: RemoteRegistry,
    wanted: VersionQuery,
    *,
    check: Check,
    namespaces: Sequence[str],
    report: Report = silent,
    admit: Admit | None = None,
) -> Sequence[PublishResult]:
    """Copy one version and all its dependencies, the version last; on a fault or refusal nothing is written."""
    snapshot, target_has = await snapshot_of(source, wanted), await snapshot_of(target, wanted)
    name = wanted.choose(snapshot, namespaces)
    if name.namespace == BUILTIN_NAMESPACE:
        raise InvalidRequest(
            f"{name} comes with Kiwi, and is not taken from elsewhere.",
            suggestion="Use the one that is here: `kiwi registry list --namespace kiwi`.",
        )
    asked = {name: snapshot.versions[name]}
    _refuse_conflicts(asked, target_has.versions)
    # Read even if the target has it: a pull also checks that the source still has the same content.
    gathered = await _gather(source, asked, {}, check, with_private=True)
    if gathered.excluded:
        reasons = "; ".join(f"{one}: {why}" for one, why in gathered.excluded.items())
        raise NotFound(
            f"{name} cannot be pulled with everything it depends on: {reasons}.",
            suggestion="Ask its publisher to publish what it depends on where you can see it.",
        )
    if admit is not None:
        await admit(gathered.releases)
    report(Progress(f"{name} and what it depends on", done=len(gathered.releases)))
    changes = [
        change for change in _news(snapshot, target_has, asked) if change.op == "visibility" or change.name == name
    ]
    return await target.write(gathered.releases, changes)


async def snapshot_of(remote: RemoteRegistry, wanted: VersionQuery) -> RegistrySnapshot:
    """Return a remote's snapshot of the items that may be meant, limited to them if their name is known."""
    return RegistrySnapshot.by(await (remote.history(wanted.tool_id) if wanted.tool_id else remote.events()))


def _refuse_conflicts(wanted: Mapping[VersionName, Hashes], target_has: Mapping[VersionName, Hashes]) -> None:
    if conflicts := [str(name) for name, hashes in wanted.items() if target_has.get(name, hashes) != hashes]:
        raise VersionConflict(conflicts)


def _is_about_namespaces(refusal: Denied) -> bool:
    """Whether a target refuses a namespace, and perhaps not all; a server says so in its answer."""
    return NamespaceDenied.code in {refusal.code, refusal.details.get("refusal")}


async def _repeat(target: RemoteRegistry, changes: Sequence[RegistryEvent]) -> Sequence[str]:
    """Repeat status changes at the target; return those that it refuses, each with the reason."""
    if not changes:
        return ()
    try:
        await target.write((), changes)
    except (Invalid, NotFound, Denied) as refusal:
        if isinstance(refusal, Denied) and not _is_about_namespaces(refusal):
            raise
        if len(changes) == 1:
            return (f"{changes[0].name} ({changes[0].op}): {refusal.message}",)
    else:
        return ()
    half = len(changes) // 2
    return (*await _repeat(target, changes[:half]), *await _repeat(target, changes[half:]))


def _news(
    snapshot: RegistrySnapshot, target_has: RegistrySnapshot, digests: Iterable[VersionName]
) -> Iterator[RegistryEvent]:
    """Yield the status changes that a target lacks for the versions it has."""
    names = {*digests}
    items = {name.item for name in names}
    for change in snapshot.statuses.values():
        is_here = change.name.item in items if change.op == "visibility" else change.name in names
        if is_here and target_has.is_news(change):
            yield change


async def _gather(
    source: RemoteRegistry,
    wanted: Mapping[VersionName, Hashes],
    target_has: Mapping[VersionName, Hashes],
    check: Check,
    *,
    with_private: bool,
) -> _ReadVersions:
    """Read versions and the dependencies that the target lacks; check each against the hashes it was named with."""
    found: dict[VersionName, CheckedRelease] = {}
    excluded: dict[VersionName, str] = {}
    left = {name: digest for name, (digest, _) in wanted.items()}
    for _ in range(MAX_LINKS):
        if not left:
            break
        read, absent = await _read(source, list(left))
        excluded |= dict.fromkeys(absent, "the source does not show it")
        shown = {name: digest for name, digest in left.items() if name not in excluded}
        checked = await asyncio.to_thread(_checked, read, shown, check)
        found |= {release.name: release for release in checked}
        pins = [pin for release in checked for pin in pins_of(release) if not pin.is_builtin]
        left = {
            pin.name: pin.digest
            for pin in pins
            if not any(pin.name in known for known in (found, target_has, excluded))
        }
    excluded |= dict.fromkeys(left, "the chain below it is too long")
    private = [] if with_private else [name for name, one in found.items() if one.visibility == "private"]
    excluded |= dict.fromkeys(private, "it is private")
    gathered = _complete(found.values(), target_has, excluded)
    if wrong := [str(name) for name, hashes in wanted.items() if gathered.hashes.get(name, hashes) != hashes]:
        issues = [
            Issue(name, "what it depends on is not that of its closure", "Ask the source's owner.") for name in wrong
        ]
        raise ArtifactRefused("What the source gave", issues)
    return gathered


def _complete(
    found: Iterable[CheckedRelease], target_has: Mapping[VersionName, Hashes], excluded: dict[VersionName, str]
) -> _ReadVersions:
    """Return the versions that can be copied with their whole chain, executors first; bar the others with a reason."""
    gathered = _ReadVersions(excluded=excluded)
    known = {name: digest for name, (digest, _) in target_has.items()} | {one.name: one.digest for one in found}
    closures = {name: closure for name, (_, closure) in target_has.items()}
    for release in order(tuple(found)):
        for pin in pins_of(release):
            if pin.name in excluded:
                excluded.setdefault(release.name, f"it depends on {pin.name}, and {excluded[pin.name]}")
            elif not pin.is_builtin and known.get(pin.name) != pin.digest:
                excluded.setdefault(release.name, f"it depends on another {pin.name} than the one there")
        if release.name not in excluded:
            gathered.releases.append(release)
            closures[release.name] = closure_in(release, closures)
            gathered.hashes[release.name] = Hashes(release.digest, closures[release.name])
    return gathered


async def _read(
    source: RemoteRegistry, names: Sequence[VersionName]
) -> tuple[Sequence[Release], Sequence[VersionName]]:
    """Return versions, and the names of those that the source does not show."""
    try:
        return await source.read(names), ()
    except NotFound:
        if len(names) == 1:
            return (), names
    half = len(names) // 2
    first, absent = await _read(source, names[:half])
    second, absent_too = await _read(source, names[half:])
    return (*first, *second), (*absent, *absent_too)


def _checked(releases: Sequence[Release], wanted: Mapping[VersionName, str], check: Check) -> Sequence[CheckedRelease]:
    """Return releases as they may be stored, or refuse them all if one is not what it claims to be."""
    issues = [
        Issue(str(release.name), "its content is not what its digest names", "Take it from another registry.")
        for release in releases
        if wanted.get(release.name) != release.digest
    ]
    if missing := wanted.keys() - {release.name for release in releases}:
        issues += [Issue(str(name), "was asked for and not given", "Ask the source's owner.") for name in missing]
    if issues:
        raise ArtifactRefused("What the source gave", issues)
    return [check(release) for release in releases]
