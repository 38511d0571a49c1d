"""A registry over HTTP as an OCI image layout: a remote that asks a server, and what one actor gets from a server.

Every answer of a server is checked like one from a stranger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NoReturn, Protocol, TypeAlias, TypeVar, cast
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Struct

from kiwi_mcp.domain.errors import (
    ArtifactRefused,
    Conflict,
    Denied,
    InvalidRequest,
    KiwiError,
    NamespaceDenied,
    NotFound,
    RequestFailed,
    TokenRefused,
    TooLarge,
    VersionConflict,
)
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import NotJson, as_list, as_object, as_text, read_json
from kiwi_mcp.domain.plan import HttpSpec, Retry
from kiwi_mcp.domain.registry import (
    ItemName,
    PublishResult,
    RegistryEvent,
    StatusNote,
    VersionInfo,
    VersionName,
    is_digest,
    is_same_content,
)
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease
from kiwi_mcp.store.registry.rows import EXECUTABLE, STATED, VisibilityFilter, chunks, filled, read_blob, read_by
from kiwi_mcp.store.remote.layout import (
    MAX_INDEX,
    BlobFile,
    LayoutEntry,
    LayoutIndex,
    Read,
    StatusNotes,
    VersionAnnotations,
    add_status,
    apply_status,
    digest_of,
    encode,
    encode_manifest,
    index_bytes,
    read_descriptors,
    read_entries,
    read_release,
)
from kiwi_mcp.store.remote.sync import Check, RegistrySnapshot, all_events, not_available

_In = TypeVar("_In")
_Out = TypeVar("_Out")

LAYOUT, INDEX, BLOBS = "/registry/oci-layout", "/registry/index.json", "/registry/blobs/sha256"
"""The paths of the layout on a server."""
MAX_PUSHED = 500  # the maximum number of versions in the index of one push
MAX_PUSHED_INDEX = 8_000_000  # the maximum size of the index of one push, in bytes
MAX_PUSHED_BLOBS = 8_000_000  # about how many bytes of files belong to one push, unless a single version is larger

_MAX_ANSWER = 1_000_000
_TIMEOUT = 120.0
_AT_ONCE = 8  # how many blobs are read or sent at a time
_OK, _NOT_MODIFIED = 200, 304
_QUOTED = 300
_ERRORS: Mapping[int, type[KiwiError]] = {
    400: InvalidRequest,
    401: TokenRefused,
    403: Denied,
    404: NotFound,
    409: Conflict,
}
_HINTS: Mapping[int, str] = {
    401: "Ask its owner for a token, keep it in a variable, and name that one: `token: ${TEAM_TOKEN}` of the remote.",
    403: "Ask the owner of the registry for a token with that right.",
    404: "Check the address: it is the one that `kiwi up` printed.",
    409: "Give the changed item a new version, then publish that.",
}


class Reply(Protocol):
    """The answer of a server."""

    @property
    def status(self) -> int:
        """The status code."""

    @property
    def body(self) -> bytes:
        """The whole body."""


Send: TypeAlias = Callable[[HttpSpec], Awaitable[Reply]]
"""Sends one request. It knows the value of the token, which the request only names."""


class PushedVersion(Struct, frozen=True):
    """What came of pushing one version."""

    name: str
    digest: str
    closure: str
    is_new: bool


class PushResponse(Struct, frozen=True):
    """The answer to a push."""

    published: list[PushedVersion]


class HttpRemote:
    """The registry at a URL. The token is a template such as `${TEAM_TOKEN}`."""

    def __init__(self, url: str, send: Send, close: Callable[[], Awaitable[None]], *, token: str = "") -> None:
        parts = urlsplit(url)
        self._host = parts.netloc.rpartition("@")[2]
        self._grant = self._host if parts.port else f"{self._host}:{443 if parts.scheme == 'https' else 80}"
        self.key = f"{parts.scheme}://{self._host}{parts.path.rstrip('/')}"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._send = send
        self._close = close
        self._entries: dict[VersionName, LayoutEntry] = {}  # the entries of every index that was read
        self._pushed: dict[VersionName, LayoutEntry] = {}
        self.etag = ""

    async def events(self, unless: str = "") -> Sequence[RegistryEvent]:
        """Return the events of the index; none where the index is still the one that `unless` names."""
        body = await self._ask(
            "GET", INDEX, headers={"If-None-Match": f'"{unless}"'} if unless else {}, max_bytes=MAX_INDEX
        )
        self.etag = unless if body is None else digest_of(body)
        return await self._read_index(body) if body is not None else ()

    async def history(self, tool_id: str) -> Sequence[RegistryEvent]:
        """Return the events of the items of one name, unlisted ones included."""
        body = await self._ask("GET", f"{INDEX}?tool_id={quote(tool_id, safe='')}", max_bytes=MAX_INDEX)
        events = await self._read_index(body or b"")
        if any(event.name.tool_id != tool_id for event in events):
            raise self._invalid_answer("its index has other items than those that were asked for")
        return events

    async def read(self, names: Sequence[VersionName]) -> Sequence[CheckedRelease]:
        """Return these versions with all their files, every byte of which is checked."""
        for tool_id in {name.tool_id: None for name in names if name not in self._entries}:
            await self.history(tool_id)
        if missing := [str(name) for name in names if name not in self._entries]:
            raise not_available(missing)
        return [await self._read_release(self._entries[name]) for name in names]

    async def write(
        self, releases: Sequence[CheckedRelease], events: Sequence[RegistryEvent]
    ) -> Sequence[PublishResult]:
        """Push versions in parts of a bounded size, each whole or not at all, and the status events last."""
        published: list[PublishResult] = []
        for part in _parts(releases):
            artifacts = [encode(release) for release in part]
            blobs = {digest: data for one in artifacts for digest, data in one.blobs.items()}
            blobs |= {one.digest: one.manifest for one in artifacts}
            await _each(lambda digest, data: self._ask("PUT", _blob_path(digest), data), blobs)
            published += await self._push(
                [LayoutEntry.of(release, one) for release, one in zip(part, artifacts, strict=True)]
            )
        if events:
            items = {name.item for name in (*self._entries, *self._pushed)}
            for event in events:
                if event.name.item not in items:
                    await self.history(event.name.tool_id)
            before = {**self._entries, **self._pushed}
            after = dict(before)
            apply_status(after, events, self.key)
            await self._push([entry for name, entry in after.items() if entry != before[name]])
        return published

    async def aclose(self) -> None:
        """Close the connections."""
        await self._close()

    async def _read_index(self, body: bytes) -> Sequence[RegistryEvent]:
        index = await asyncio.to_thread(LayoutIndex.read_partial, body, f"The index of {self.key}")
        self._entries |= index.entries
        return tuple(index.events())

    async def _read_release(self, entry: LayoutEntry) -> CheckedRelease:
        manifest = await self._blob(entry.artifact, entry.size)
        blobs = {entry.artifact: manifest}
        if digest_of(manifest) == entry.artifact:  # otherwise the check below refuses it
            blobs |= await _each(self._blob, {one.digest: one.size for one in read_descriptors(manifest)})
        return await asyncio.to_thread(read_release, entry, lambda digest, _: blobs[digest])

    async def _blob(self, digest: str, size: int) -> bytes:
        """Return the bytes of a blob, no more than its size."""
        data = await self._ask("GET", _blob_path(digest), max_bytes=max(size, _MAX_ANSWER)) or b""
        if len(data) > size:  # many blobs that are longer than stated would fill the memory before they are checked
            raise self._invalid_answer(f"{digest} is longer than the {size} bytes that its manifest states")
        return data

    async def _push(self, entries: Sequence[LayoutEntry]) -> Sequence[PublishResult]:
        """Send the index of a push, which makes its versions visible."""
        published: list[PublishResult] = []
        for start in range(0, len(entries), MAX_PUSHED):
            part = {str(entry.name): entry for entry in entries[start : start + MAX_PUSHED]}
            body = await self._ask("PUT", INDEX, index_bytes(part.values(), self.key))
            try:
                answer = msgspec.json.decode(body or b"", type=PushResponse)
            except msgspec.DecodeError as fault:
                raise self._invalid_answer(str(fault)) from None
            for one in answer.published:
                if one.name not in part or one.digest != part[one.name].digest:
                    raise self._invalid_answer("it published other versions than were sent")
                published.append(PublishResult(part[one.name].name, one.digest, one.closure, one.is_new))
            self._pushed |= {entry.name: entry for entry in part.values()}
        return published

    async def _ask(
        self,
        method: str,
        path: str,
        data: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        max_bytes: int = _MAX_ANSWER,
    ) -> bytes | None:
        """Send one request to the one host that the owner named; return the body, or None if it was not modified."""
        spec = HttpSpec(
            method=method,
            url=f"{self.key}{path}",
            headers={**self._headers, **(headers or {})},
            data=data,
            timeout=_TIMEOUT,
            max_bytes=max_bytes,
            max_redirects=0,
            retry=Retry(attempts=3, delay=0.2),
            granted=(self._grant,),
        )
        reply = await self._send(spec)
        if reply.status == _NOT_MODIFIED and headers:
            return None
        if reply.status != _OK:
            self._refuse(reply.status, reply.body)
        return reply.body

    def _invalid_answer(self, reason: str) -> ArtifactRefused:
        return ArtifactRefused(f"The answer of {self.key}", [Issue("", reason, "Ask the owner of that registry.")])

    def _refuse(self, status: int, body: bytes) -> NoReturn:
        """Raise the refusal of the server. Its message is quoted, and never used as advice."""
        try:
            answer = as_object(read_json(body, max_bytes=_MAX_ANSWER, max_values=10_000))
        except NotJson:
            answer = {}
        if answer.get("code") == VersionConflict.code:
            raise VersionConflict([as_text(name)[:_QUOTED] for name in as_list(answer.get("conflicts"))])
        message = " ".join(as_text(answer.get("message"))[:_QUOTED].split())
        if answer.get("code") == ArtifactRefused.code:
            issue = Issue("", message, "Publish it again from its source.")
            raise ArtifactRefused(f"What was sent to {self.key}", [issue])
        error = _ERRORS.get(status, RequestFailed)
        raise error(
            f"The registry at {self.key} answered {status}{f', and says: {message!r}' if message else ''}.",
            suggestion=_HINTS.get(status, "Try again later, or ask the owner of that registry."),
            status=status,
            refusal=as_text(answer.get("code"))[:_QUOTED],
        )


def _blob_path(digest: str) -> str:
    return f"{BLOBS}/{digest.removeprefix('sha256:')}"


async def _each(do: Callable[[str, _In], Awaitable[_Out]], items: Mapping[str, _In]) -> dict[str, _Out]:
    """Do something with every item, a few at a time, and return the results; the first error ends the others."""
    limit = asyncio.Semaphore(_AT_ONCE)

    async def one(key: str, value: _In) -> _Out:
        async with limit:
            return await do(key, value)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = {key: group.create_task(one(key, value)) for key, value in items.items()}
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return {key: task.result() for key, task in tasks.items()}


def _parts(releases: Sequence[CheckedRelease]) -> Iterator[Sequence[CheckedRelease]]:
    """Yield releases in parts that fit into one push each."""
    part: list[CheckedRelease] = []
    size = 0
    for release in releases:
        weight = len(release.statement) + sum(len(file.data) for file in release.files)
        if part and (size + weight > MAX_PUSHED_BLOBS or len(part) >= MAX_PUSHED):
            yield part
            part, size = [], 0
        part.append(release)
        size += weight
    if part:
        yield part


_CLOCK_SKEW = timedelta(minutes=5)  # how far the clock of a machine that pushes may be ahead
_FILES = """select tool_version_id, path, sha256, size_bytes, mode from tool_version_files
where tool_version_id in ($marks)"""
_STATEMENT = """select v.manifest_canon from tool_versions v cross join tools t
where v.content_hash = ? and t.id = v.tool_id and $sees limit 1"""
_MANIFEST = """select v.manifest_yaml from tool_versions v cross join tools t
where v.manifest_sha256 = ? and t.id = v.tool_id and $sees limit 1"""
_FILE = """select f.content_text, f.storage_key
from tool_version_files f cross join tool_versions v cross join tools t
where f.sha256 = ? and v.id = f.tool_version_id and t.id = v.tool_id and $sees limit 1"""


class ArtifactCache:
    """The artifacts of stored versions by version id; a version is sealed, so an entry stays true."""

    def __init__(self) -> None:
        self._artifacts: dict[str, tuple[str, int]] = {}  # the digest and the size of the manifest of each artifact
        self.versions: dict[str, str] = {}  # the id of the version with the artifact of a digest

    def artifacts_of(self, registry: Registry, versions: Sequence[VersionInfo]) -> Mapping[str, tuple[str, int]]:
        """Return the artifacts of versions, by version id."""
        for version, manifest in _manifests(registry, [one for one in versions if one.id not in self._artifacts]):
            digest = digest_of(manifest)
            self._artifacts[version.id] = (digest, len(manifest))
            self.versions[digest] = version.id
        return self._artifacts


class RegistryLayout:
    """The layout that one actor sees in a registry. Other actors' private versions are not in it."""

    def __init__(self, registry: Registry, cache: ArtifactCache) -> None:
        self._registry = registry
        self._cache = cache

    def index(self, tool_id: str = "") -> bytes:
        """Return `index.json`: every listed version, or all versions of one name, unlisted ones included."""
        registry = self._registry
        versions = registry.named_anywhere(tool_id) if tool_id else registry.find(is_all_versions=True)
        artifacts = self._cache.artifacts_of(registry, versions)
        status = _status(versions, all_events(registry, tool_id=tool_id))
        entries = (
            LayoutEntry(VersionAnnotations.of(one), one.digest, *artifacts[one.id], status[one.name], one.closure)
            for one in versions
        )
        return index_bytes(entries, "the registry")

    def blob(self, digest: str) -> bytes:
        """Return the bytes of a digest, if a version that the actor may see has them."""
        database, sight = self._registry.database, VisibilityFilter(self._registry.actor)
        name = digest.removeprefix("sha256:")
        for statement, value in ((_FILE, name), (_MANIFEST, name), (_STATEMENT, digest)):
            rows = database.read(filled(statement, sees=sight.named), (value, *sight.members))
            if is_digest(digest) and rows:
                text, *key = cast("tuple[str | None, ...]", rows[0])
                return text.encode() if text is not None else read_blob(database, str(key[0]))
        registry = self._registry
        if digest not in self._cache.versions:  # the server started again since the index was read
            self._cache.artifacts_of(registry, registry.find(is_all_versions=True))
        try:
            if (version := self._cache.versions.get(digest)) is not None:
                ((_, manifest),) = _manifests(registry, [registry.get(version)])
                return manifest
        except NotFound:
            pass  # the actor may not see it
        raise NotFound(f"The registry has no blob {digest[:80]}.", suggestion="Read the index again.")

    def push(self, data: bytes, read: Read, check: Check) -> Sequence[PublishResult]:
        """Publish what is new in an index, and apply its status notes; `read` returns blobs that were sent."""

        def read_any(digest: str, size: int) -> bytes:
            try:
                return read(digest, size)
            except LookupError as error:
                try:
                    return self.blob(digest)
                except NotFound:
                    raise error from None

        entries = read_entries(data, "The index that was sent")
        if len(entries) > MAX_PUSHED:
            raise TooLarge("The index", size=len(entries), limit=MAX_PUSHED, unit="versions")
        registry = self._registry
        for namespace in {entry.name.namespace for entry in entries}:
            if not registry.actor.is_member(namespace):
                raise NamespaceDenied(namespace, namespaces=registry.actor.namespaces)
        known = {
            one.name: one
            for namespace, tool_id in {entry.name.item for entry in entries}
            for one in registry.named(tool_id, namespace=namespace)
        }
        if conflicts := [str(one.name) for one in entries if not is_same_content(one, known.get(one.name, one))]:
            raise VersionConflict(conflicts)
        releases = [check(read_release(entry, read_any)) for entry in entries if entry.name not in known]
        published = {one.name: one for one in registry.publish(releases, self._news(entries))}
        return [
            published.get(entry.name)
            or PublishResult(entry.name, entry.digest, known[entry.name].closure, is_new=False)
            for entry in entries
        ]

    def _news(self, entries: Sequence[LayoutEntry]) -> Sequence[RegistryEvent]:
        """Return the status events of entries that the registry does not have yet, the oldest first."""
        tool_ids = {entry.name.tool_id for entry in entries}
        here = RegistrySnapshot.by(event for one in tool_ids for event in all_events(self._registry, tool_id=one))
        events = {event: None for entry in entries for event in entry.status_events() if here.is_news(event)}
        latest = datetime.now(UTC) + _CLOCK_SKEW
        for event in events:
            if datetime.fromisoformat(event.at) > latest:  # no later change could replace it
                raise InvalidRequest(
                    f"{event.name} has a status ({event.op}) with a time in the future: {event.at}.",
                    suggestion="Set the clock of the machine that made it, then change the status again.",
                )
        return sorted(events, key=lambda event: event.at)


def _manifests(registry: Registry, versions: Sequence[VersionInfo]) -> Iterator[tuple[VersionInfo, bytes]]:
    """Yield versions with the manifests of their artifacts, from rows alone: no file is read."""
    for some in chunks(versions):
        ids = [one.id for one in some]
        files: dict[str, list[BlobFile]] = {id_: [] for id_ in ids}
        rows = read_by(registry.database, _FILES, ids)
        for id_, path, sha256, size, mode in cast("Iterator[tuple[str, str, str, int, int]]", rows):
            files[id_].append(BlobFile(path, f"sha256:{sha256}", int(size), mode == EXECUTABLE))
        stated = {str(row[0]): row for row in read_by(registry.database, STATED, ids)}
        for version in some:
            own = files[version.id]
            _, statement, text, sha256 = cast("tuple[str, str, str | None, str]", stated[version.id])
            if text is not None:  # a manifest that is a file of its own
                own.append(BlobFile(version.place.rpartition("/")[2], f"sha256:{sha256}", len(text.encode())))
            yield version, encode_manifest(version, len(statement.encode()), own)


def _status(versions: Sequence[VersionInfo], events: Iterator[RegistryEvent]) -> Mapping[VersionName, StatusNotes]:
    """Return the status notes of versions, from the log: a status that was taken back has a note too."""
    notes: dict[VersionName, StatusNotes] = {
        one.name: {} if one.visibility == "public" else {"visibility": StatusNote("", one.visibility)}
        for one in versions
    }
    by_item: dict[ItemName, list[VersionName]] = {}
    for name in notes:
        by_item.setdefault(name.item, []).append(name)
    for event in events:
        affected = by_item.get(event.name.item, []) if event.op == "visibility" else [event.name]
        for name in affected if event.op != "publish" else ():
            if name in notes:
                notes[name] = add_status(notes[name], event)
    return notes
