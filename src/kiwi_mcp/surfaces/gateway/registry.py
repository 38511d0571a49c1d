"""The registry's part of the gateway: an OCI image layout, read by GET and pushed by PUT, as each token allows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from threading import Lock
from weakref import finalize

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive

from kiwi_mcp.catalog.release import check_release
from kiwi_mcp.domain.errors import InvalidRequest, NotFound, PolicyDenied, TooLarge, TooSlow
from kiwi_mcp.domain.registry import Release, is_digest
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import MAX_BYTES, CheckedRelease
from kiwi_mcp.store.remote.http import MAX_PUSHED_INDEX, ArtifactCache, PushedVersion, PushResponse, RegistryLayout
from kiwi_mcp.store.remote.layout import INDEX_TYPE, MAX_MANIFEST, digest_of
from kiwi_mcp.surfaces.gateway.auth import GatewayUser, visitor_of

_BODY_SECONDS = 60.0
_AT_ONCE = 4
"""How many requests that carry versions are handled at a time, each way: each may hold a large body."""
_MAX_BLOB = max(MAX_BYTES, MAX_MANIFEST)
_MAX_STORED = 2 * MAX_BYTES
"""The maximum number of bytes that one visitor has sent and not published."""
_STORED_SECONDS = 900.0
"""How long a blob is stored that belongs to no version yet."""
_CACHED = 8
"""For how many kinds of visitors the index is cached."""


class RegistryRoutes:
    """One registry as a layout, for each visitor with the versions that they may see."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._artifacts = ArtifactCache()
        self._pushed = PushedBlobs()
        self._indexes: dict[tuple[str, ...], tuple[int, bytes]] = {}
        # A slow sender delays other senders, but no readers.
        self._reads, self._writes = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_AT_ONCE)

    async def layout(self, _: Request) -> Response:
        """Answer with the file that says that this is a layout."""
        return JSONResponse({"imageLayoutVersion": "1.0.0"})

    async def index(self, request: Request) -> Response:
        """Answer with the index: of everything that lists show the visitor, or of all versions of one name."""
        visitor, tool_id = visitor_of(request), request.query_params.get("tool_id", "")
        async with self._reads:
            data = await asyncio.to_thread(self._index, visitor, tool_id)
        etag = f'"{digest_of(data)}"'
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers={"ETag": etag})
        return Response(data, media_type=INDEX_TYPE, headers={"ETag": etag})

    async def blob(self, request: Request) -> Response:
        """Answer with the bytes of a digest, if a version that the visitor may see has them."""
        async with self._reads:
            data = await asyncio.to_thread(self._layout(visitor_of(request)).blob, _digest(request))
        return Response(data, media_type="application/octet-stream")

    async def put_blob(self, request: Request) -> Response:
        """Store a blob for a push; no one can read it before the push is complete."""
        visitor, digest = _writer(request), _digest(request)
        async with self._writes:
            data = await _body(request, _MAX_BLOB)
            if digest_of(data) != digest:
                raise InvalidRequest("The body is not what its digest names.", suggestion="Send the blob again.")
            await asyncio.to_thread(self._pushed.put, visitor.principal, digest, data)
        return JSONResponse({})

    async def put_index(self, request: Request) -> Response:
        """Publish the versions of an index in the visitor's name, all of them or none; versions are never removed."""
        visitor = _writer(request)
        async with self._writes:
            body = await _body(request, MAX_PUSHED_INDEX)
            answer = await asyncio.to_thread(self._push, visitor, body)
        return Response(answer, media_type="application/json")

    def _push(self, visitor: GatewayUser, body: bytes) -> bytes:
        def check(release: Release) -> CheckedRelease:
            # Stored in the name of the visitor, and never as official: items of Kiwi come with Kiwi alone.
            own = replace(release, published_by=visitor.actor.name, is_official=False, is_builtin=False)
            return check_release(own)

        used: set[str] = set()

        def read(digest: str, size: int) -> bytes:
            used.add(digest)
            return self._pushed.read(visitor.principal, digest, size)

        published = self._layout(visitor).push(body, read, check)
        self._pushed.drop(visitor.principal, used)
        rows = [PushedVersion(str(one.name), one.digest, one.closure, one.is_new) for one in published]
        return msgspec.json.encode(PushResponse(rows))

    def _index(self, visitor: GatewayUser, tool_id: str) -> bytes:
        layout = self._layout(visitor)
        if tool_id:
            return layout.index(tool_id)
        head, members = self._registry.head(), visitor.actor.namespaces
        known = self._indexes.get(members)
        if known is None or known[0] != head:
            known = (head, layout.index())
            while len(self._indexes) >= _CACHED and members not in self._indexes:
                self._indexes.pop(next(iter(self._indexes)), None)
            self._indexes[members] = known
        return known[1]

    def _layout(self, visitor: GatewayUser) -> RegistryLayout:
        return RegistryLayout(self._registry.as_seen_by(visitor.actor), self._artifacts)


class PushedBlobs:
    """Blobs that visitors sent and did not publish yet, each readable by its sender alone."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._lock = Lock()
        self._sizes: dict[tuple[str, str], tuple[int, float]] = {}
        """The size of each blob and when it came, the oldest first."""

    def put(self, visitor: str, digest: str, data: bytes) -> None:
        """Store a blob. The oldest blobs of the same visitor make room for it."""
        with self._lock:
            self._remove((visitor, digest))
            expired = time.monotonic() - _STORED_SECONDS
            for key in [key for key, (_, at) in self._sizes.items() if at < expired]:
                self._remove(key)
            own = [(key, size) for key, (size, _) in self._sizes.items() if key[0] == visitor]
            total = sum(size for _, size in own) + len(data)
            for key, size in own:
                if total > _MAX_STORED:
                    self._remove(key)
                    total -= size
            self._path(visitor, digest).write_bytes(data)
            self._sizes[visitor, digest] = (len(data), time.monotonic())

    def read(self, visitor: str, digest: str, size: int) -> bytes:
        """Return a blob of a visitor; LookupError says why it is not there."""
        stored, _ = self._sizes.get((visitor, digest), (-1, 0.0))
        if stored < 0 or stored > size:
            raise LookupError("it is missing" if stored < 0 else "it is larger than its size")
        try:
            return self._path(visitor, digest).read_bytes()
        except OSError:
            raise LookupError("it is missing") from None

    def drop(self, visitor: str, digests: Iterable[str]) -> None:
        """Remove blobs of a visitor."""
        with self._lock:
            for digest in digests:
                self._remove((visitor, digest))

    def _remove(self, key: tuple[str, str]) -> None:
        if self._sizes.pop(key, None) is not None:
            self._path(*key).unlink(missing_ok=True)

    def _path(self, visitor: str, digest: str) -> Path:
        if self._folder is None:
            self._folder = Path(mkdtemp(prefix="kiwi-push-"))
            finalize(self, rmtree, self._folder, ignore_errors=True)
        return self._folder / sha256(f"{visitor} {digest}".encode()).hexdigest()


def _writer(request: Request) -> GatewayUser:
    visitor = visitor_of(request)
    if not visitor.can_write:
        raise PolicyDenied(visitor.why_not, suggestion="Ask the owner of this registry for a token that may write.")
    return visitor


def _digest(request: Request) -> str:
    digest = f"sha256:{request.path_params['digest']}"
    if not is_digest(digest):
        raise NotFound("That is not the digest of a blob.", suggestion="Write 64 hexadecimal digits.")
    return digest


async def _body(request: Request, limit: int) -> bytes:
    """Return the body. It is refused if it is too large or too slow."""
    if declared_length(request.headers) > limit:
        raise TooLarge("The body", size=declared_length(request.headers), limit=limit)
    return await Request(request.scope, timely(request.receive, limit)).body()


def timely(receive: Receive, limit: int) -> Receive:
    """Return where a body is received from, which has to come within its limits of size and time."""
    end, size, is_whole = asyncio.get_running_loop().time() + _BODY_SECONDS, 0, False

    async def receiving() -> Message:
        nonlocal size, is_whole
        if is_whole:
            return await receive()
        try:
            async with asyncio.timeout_at(end):
                message = await receive()
        except TimeoutError:
            raise TooSlow("The body did not come in time.", suggestion="Send it faster, or less of it.") from None
        size, is_whole = size + len(message.get("body", b"")), not message.get("more_body", False)
        if size > limit:
            raise TooLarge("The body", size=None, limit=limit)
        return message

    return receiving


def declared_length(headers: Mapping[str, str]) -> int:
    """Return the length that a request states for its body; 0 where it states none."""
    text = headers.get("content-length", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0  # noqa: PLR2004 - of any body
