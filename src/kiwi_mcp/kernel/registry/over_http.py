"""A registry that another Kiwi serves over HTTP; whatever it answers is checked as if a stranger had sent it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NoReturn, TypeVar
from urllib.parse import quote, urlsplit

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
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.plan import HttpSpec, Retry
from kiwi_mcp.domain.registry import Event, Published, Release, VersionName
from kiwi_mcp.kernel.registry import wire
from kiwi_mcp.kernel.registry.port import not_held
from kiwi_mcp.primitives import http_client
from kiwi_mcp.store.artifact import bundle, encode, unbundle
from kiwi_mcp.store.words import marks_of

_T = TypeVar("_T")
_TIMEOUT = 120.0
_MAX_EVENTS = 1_000_000
_MAX_LOG = 256_000_000
"""How many bytes of events are taken in at the most: some hundred thousand events of the usual size."""
_OK = 200
_QUOTED = 300
_FAULTS: Mapping[int, type[KiwiError]] = {
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


class HttpRemote:
    """The registry at a URL. The token is a template such as `${TEAM_TOKEN}`, revealed only as the request leaves."""

    def __init__(self, url: str, token: str = "", secrets: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        self.key = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
        self._host = parts.netloc.rpartition("@")[2]
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._secrets = secrets or {}
        self._network = http_client.Network()

    async def events(self, after: int = 0) -> Sequence[Event]:
        """Return what happened there since an event, page by page."""
        return await self._events("", after)

    async def history(self, tool_id: str) -> Sequence[Event]:
        """Return what happened there to the items of one name."""
        told = await self._events(f"&tool_id={quote(tool_id, safe='')}", 0)
        if any(event.name.tool_id != tool_id for event in told):
            raise self._nonsense("it told of other items than it was asked about")
        return told

    async def _events(self, about: str, after: int) -> Sequence[Event]:
        found: list[Event] = []
        size = 0
        while True:
            body = await self._send("GET", f"{wire.EVENTS}?after={after}&limit={wire.PAGE}{about}")
            size += len(body)
            answer = self._answer(body)
            page = self._understood(wire.events_from, answer.get("events"))
            seqs = [after, *(event.seq for event in page)]
            if any(later <= earlier for earlier, later in pairwise(seqs)):
                raise self._nonsense("its events are not in order")
            found += page
            if not page or answer.get("more") is not True:
                return found
            if len(found) > _MAX_EVENTS or size > _MAX_LOG:
                raise self._nonsense(f"it has more than {_MAX_EVENTS:,} events, or than {_MAX_LOG:,} bytes of them")
            after = page[-1].seq

    async def read(self, names: Sequence[VersionName]) -> Sequence[Release]:
        """Return these versions; the server gives as many at once as fit into an answer."""
        found: list[Release] = []
        while len(found) < len(names):
            left = names[len(found) : len(found) + wire.MAX_NAMES]
            answer = await self._ask("POST", wire.READ, {"names": [wire.name_to_json(name) for name in left]})
            given = [unbundle(as_object(one)) for one in as_list(answer.get("bundles"))[: len(left)]]
            if not given or [one.name for one in given] != list(left[: len(given)]):
                raise self._nonsense("it gave other versions than it was asked for")
            found += given
        return found

    async def write(self, releases: Sequence[Release], marks: Sequence[Event]) -> Sequence[Published]:
        """Send versions in requests of a bounded size, each whole or not at all, and the marks last."""
        published: list[Published] = []
        for part in _parts(releases):
            bundles: list[Json] = [bundle(encode(release), marks_of(release)) for release in part]
            answer = await self._ask("POST", wire.WRITE, {"bundles": bundles})
            published += self._understood(wire.published_from, answer.get("published"))
        for start in range(0, len(marks), wire.MAX_NAMES):
            told: list[Json] = [wire.event_to_json(mark) for mark in marks[start : start + wire.MAX_NAMES]]
            await self._ask("POST", wire.WRITE, {"marks": told})
        return published

    async def aclose(self) -> None:
        """Close the connections."""
        await self._network.aclose()

    async def _ask(self, method: str, path: str, body: JsonObject | None = None) -> JsonObject:
        """Send one request, and return what was answered."""
        return self._answer(await self._send(method, path, body))

    async def _send(self, method: str, path: str, body: JsonObject | None = None) -> bytes:
        """Send one request to the one host that the owner named, and return the body of what it answered."""
        spec = HttpSpec(
            method=method,
            url=f"{self.key}{path}",
            headers={**self._headers, "Content-Type": "application/json"} if body is not None else self._headers,
            # The contents of tools may look like the name of a variable; written like this they never do.
            body=compact(body).replace("${", "\\u0024{") if body is not None else None,
            has_body=body is not None,
            timeout=_TIMEOUT,
            max_bytes=wire.MAX_BODY,
            max_redirects=0,
            retry=Retry(attempts=3, delay=0.2),
            granted=(self._host if urlsplit(self.key).port else f"{self._host}:{_port(self.key)}",),
        )
        reply = await http_client.send(spec, secrets=self._secrets, through=self._network)
        if reply.status != _OK:
            self._refuse(reply.status, reply.body)
        return reply.body

    def _answer(self, body: bytes) -> JsonObject:
        try:
            return wire.read_body(body, what=f"The answer of {self.key}")
        except InvalidRequest as fault:
            raise self._nonsense(fault.message) from fault

    def _understood(self, read: Callable[[Json], _T], value: Json) -> _T:
        try:
            return read(value)
        except InvalidRequest as fault:
            raise self._nonsense(fault.message) from fault

    def _nonsense(self, reason: str) -> ArtifactRefused:
        return ArtifactRefused(f"The answer of {self.key}", [Issue("", reason, "Ask the owner of that registry.")])

    def _refuse(self, status: int, body: bytes) -> NoReturn:
        """Raise what the server refused, in words of our own: a server's words are quoted, and never advice."""
        try:
            answer = wire.read_body(body, what="The refusal")
        except InvalidRequest:
            answer = {}
        if answer.get("code") == VersionConflict.code:
            raise VersionConflict([as_text(name)[:_QUOTED] for name in as_list(answer.get("conflicts"))])
        if answer.get("code") == NotFound.code and answer.get("missing"):
            raise not_held([as_text(name)[:_QUOTED] for name in as_list(answer.get("missing"))])
        said = " ".join(as_text(answer.get("message"))[:_QUOTED].split())
        if answer.get("code") == ArtifactRefused.code:
            issue = Issue("", said, "Publish it again from its source.")
            raise ArtifactRefused(f"What was sent to {self.key}", [issue])
        fault = _FAULTS.get(status, RequestFailed)
        raise fault(
            f"The registry at {self.key} answered {status}{f', and says: {said!r}' if said else ''}.",
            suggestion=_HINTS.get(status, "Try again later, or ask the owner of that registry."),
            status=status,
            refusal=as_text(answer.get("code"))[:_QUOTED],
        )


def _port(url: str) -> int:
    return 443 if url.startswith("https:") else 80


def _parts(releases: Sequence[Release]) -> Iterator[Sequence[Release]]:
    """Yield releases in parts that fit into one request each."""
    part: list[Release] = []
    size = 0
    for release in releases:
        size += wire.weight(release)
        if part and (size > wire.MAX_WEIGHT or len(part) >= wire.MAX_NAMES):
            yield part
            part, size = [], wire.weight(release)
        part.append(release)
    if part:
        yield part
