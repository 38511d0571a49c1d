"""A registry that is served over HTTP as an OCI image layout; every answer is checked like one from a stranger."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import NoReturn, Protocol, TypeAlias, TypeVar
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Struct

from kiwi_mcp.domain.errors import (
    ArtifactRefused,
    Conflict,
    Denied,
    InvalidRequest,
    KiwiError,
    NotFound,
    RequestFailed,
    TokenRefused,
    VersionConflict,
)
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import NotJson, as_list, as_object, as_text, read_json
from kiwi_mcp.domain.plan import HttpSpec, Retry
from kiwi_mcp.domain.registry import PublishResult, RegistryEvent, VersionName
from kiwi_mcp.store.registry.release_check import CheckedRelease
from kiwi_mcp.store.remote.artifact import digest_of, encode, read_descriptors
from kiwi_mcp.store.remote.layout import MAX_INDEX, LayoutEntry, LayoutIndex, apply_status, index_bytes, read_release
from kiwi_mcp.store.remote.sync import not_available

_In = TypeVar("_In")
_Out = TypeVar("_Out")

LAYOUT, INDEX, BLOBS = "/registry/oci-layout", "/registry/index.json", "/registry/blobs/sha256"
"""The paths of the layout on a server."""
MAX_PUSHED = 500
"""The maximum number of versions in the index of one push."""
MAX_PUSHED_INDEX = 8_000_000
"""The maximum size of the index of one push, in bytes."""
MAX_PUSHED_BLOBS = 8_000_000
"""About how many bytes of files belong to one push, unless a single version is larger."""

_MAX_ANSWER = 1_000_000
_TIMEOUT = 120.0
_AT_ONCE = 8
"""How many blobs are read or sent at a time."""
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
        self._entries: dict[VersionName, LayoutEntry] = {}
        """The entries of every index that was read."""
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
