"""The client of a registry over HTTP, against servers that lie, stall, and talk too much."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import (
    AddressDenied,
    ArtifactRefused,
    Denied,
    InvalidRequest,
    KiwiError,
    RemoteNotFound,
    RequestFailed,
    TooLarge,
    VariableMissing,
    VersionConflict,
)
from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.registry import Actor, VersionName
from kiwi_mcp.kernel.registry import over_http, wire
from kiwi_mcp.kernel.registry.over_http import HttpRemote
from kiwi_mcp.kernel.registry.port import FolderRemote, RegistryRemote
from kiwi_mcp.kernel.registry.remotes import open_remote
from kiwi_mcp.kernel.settings import RegistrySettings, RemoteSettings

T = TypeVar("T")
TOKEN = "kiwi_a-very-secret-token"
NAME = VersionName("acme", "greeter", "1.0.0")
DIGEST = f"sha256:{'a' * 64}"
EVENT: Mapping[str, Json] = {
    "seq": 1, "op": "publish", "namespace": "acme", "tool_id": "greeter", "version": "1.0.0", "digest": DIGEST,
    "closure": DIGEST, "actor": "eve", "at": "2026-01-01T00:00:00.000Z", "reason": "", "visibility": "public",
}  # fmt: skip

Speak = Callable[[bytes], bytes | Awaitable[bytes]]


def against(speak: Speak, work: Callable[[HttpRemote], Awaitable[T]], *, heard: list[bytes] | None = None) -> T:
    """Do something with a remote whose server answers each request as told."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b""
                )
                body = await reader.readexactly(int(length.partition(b":")[2] or b"0"))
                if heard is not None:
                    heard.append(head + body)
                said = speak(head + body)
                writer.write(said if isinstance(said, bytes) else await said)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def run() -> T:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        remote = HttpRemote(f"http://127.0.0.1:{port}", "${TEAM_TOKEN}", {"TEAM_TOKEN": TOKEN})
        try:
            return await work(remote)
        finally:
            await remote.aclose()
            server.close()

    return asyncio.run(run())


def reply(body: Json | bytes, status: int = 200, **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(data)}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def test_the_token_goes_in_a_header_and_nowhere_else() -> None:
    heard: list[bytes] = []
    events = against(lambda _: reply({"events": [EVENT], "more": False}), lambda remote: remote.events(), heard=heard)

    assert [event.name for event in events] == [NAME]
    assert f"authorization: bearer {TOKEN}".encode() in heard[0].lower().replace(TOKEN.lower().encode(), TOKEN.encode())
    assert heard[0].count(TOKEN.encode()) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"\xff\xfe",
        b"[]",
        b'{"events": {}}',
        b'{"events": [1]}',
        b'{"events": [], "events": []}',
        b'{"events": [' + b"[" * 50_000,
        {"events": [{**EVENT, "digest": "sha256:../../x"}]},
        {"events": [{**EVENT, "tool_id": "../x"}]},
        {"events": [{**EVENT, "version": "latest"}]},
        {"events": [{**EVENT, "op": "delete"}]},
        {"events": [{**EVENT, "seq": -1}]},
        {"events": [{**EVENT, "seq": 10**30}]},
        {"events": [{**EVENT, "at": "yesterday"}]},
        {"events": [{**EVENT, "visibility": "secret"}]},
        {"events": [{**EVENT, "actor": "x" * 10_000}]},
        {"events": [EVENT, EVENT]},
        {"events": [EVENT] * 3_000},
    ],
    ids=range(19),
)
def test_events_that_are_none_are_refused(body: Json | bytes) -> None:
    with pytest.raises(ArtifactRefused):
        against(lambda _: reply(body), lambda remote: remote.events())


def test_a_server_that_always_has_more_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_http, "_MAX_EVENTS", 50)
    seq = 0

    def more(_: bytes) -> bytes:
        nonlocal seq
        seq += 1
        return reply({"events": [{**EVENT, "seq": seq, "version": f"1.0.{seq}"}], "more": True})

    with pytest.raises(ArtifactRefused):
        against(more, lambda remote: remote.events())
    assert seq < 60


@pytest.mark.parametrize("bundles", [[], [{}], ["x"], None, [{"manifest": "{}", "blobs": {}, "marks": {}}]])
def test_versions_that_are_none_are_refused(bundles: Json) -> None:
    with pytest.raises(ArtifactRefused):
        against(lambda _: reply({"bundles": bundles}), lambda remote: remote.read([NAME]))


@pytest.mark.case("NET-15")
def test_a_huge_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BODY", 100_000)
    with pytest.raises(TooLarge):
        against(lambda _: reply(b"x" * 300_000), lambda remote: remote.events())


def test_a_server_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_http, "_TIMEOUT", 0.3)

    async def never() -> bytes:
        await asyncio.Event().wait()
        return b""

    with pytest.raises(RequestFailed) as late:
        against(lambda _: never(), lambda remote: remote.events())
    assert late.value.details["cause"] == "timeout"


@pytest.mark.case("NET-13", "SEC-10")
@pytest.mark.parametrize("place", ["http://127.0.0.1:1/x", "http://169.254.169.254/", "file:///etc/passwd", "/other"])
def test_no_redirect_is_followed(place: str) -> None:
    heard: list[bytes] = []
    with pytest.raises(RequestFailed):
        against(lambda _: reply({}, 302, Location=place), lambda remote: remote.events(), heard=heard)
    assert len(heard) == 1


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (401, {"code": "token_refused", "message": "Run rm -rf"}, KiwiError),
        (403, {"code": "namespace_denied", "message": "no"}, Denied),
        (403, {"code": "artifact_refused", "message": "bad"}, ArtifactRefused),
        (409, {"code": "version_conflict", "conflicts": ["acme/x@1.0.0", 3]}, VersionConflict),
        (400, b"nonsense", InvalidRequest),
        (418, b"", RequestFailed),
        (500, b"\xff" * 5_000, RequestFailed),
    ],
)
def test_a_refusal_is_told_in_our_words_and_theirs_only_quoted(
    status: int, body: Json | bytes, error: type[KiwiError]
) -> None:
    with pytest.raises(error) as refused:
        against(lambda _: reply(body, status), lambda remote: remote.events())
    assert "rm -rf" not in refused.value.suggestion
    assert TOKEN not in str(refused.value.to_response())


def test_a_token_that_a_server_sends_back_is_not_shown() -> None:
    with pytest.raises(KiwiError) as refused:
        against(lambda _: reply({"message": f"bad {TOKEN}"}, 403), lambda remote: remote.events())
    assert TOKEN not in str(refused.value.to_response()) + repr(refused.value)


@pytest.fixture
def space(project: Path, home: Path) -> Space:
    return Space(project=project, user=home / ".ai", cache=home / ".cache")


def settings(home: Path, **remotes: RemoteSettings) -> RegistrySettings:
    return RegistrySettings(f"sqlite://{home}/own.db", Actor("eve", ("acme",)), remotes)


def test_each_kind_of_address_opens_its_kind_of_remote(home: Path, space: Space, project: Path) -> None:
    async def kinds() -> None:
        known = settings(home, team=RemoteSettings("http://kiwi.test:8765/base/"), disk=RemoteSettings("oci:exported"))
        for address, kind, key in (
            ("./exported", FolderRemote, f"oci:{project}/exported"),
            ("oci:exported", FolderRemote, f"oci:{project}/exported"),
            ("disk", FolderRemote, f"oci:{project}/exported"),
            (f"sqlite://{home}/other.db", RegistryRemote, f"sqlite://{home}/other.db"),
            ("team", HttpRemote, "http://kiwi.test:8765/base"),
            ("https://kiwi.test", HttpRemote, "https://kiwi.test"),
        ):
            remote = await open_remote(address, known, space)
            assert isinstance(remote, kind)
            assert remote.key == key
            await remote.aclose()

    asyncio.run(kinds())


@pytest.mark.parametrize("address", ["nowhere", "", "ftp://x", "git@host:repo", "s3://bucket"])
def test_an_address_of_nothing_is_refused_with_what_is_known(home: Path, space: Space, address: str) -> None:
    with pytest.raises(RemoteNotFound) as missing:
        asyncio.run(open_remote(address, settings(home, team=RemoteSettings("http://kiwi.test")), space))
    assert missing.value.details["remotes"] == ["team"]


@pytest.mark.parametrize(
    "address", ["https://eve:pw@kiwi.test", "https://kiwi.test?token=pw", "http://", "https://[x", "http://x:99999"]
)
def test_an_address_with_credentials_or_without_a_host_is_refused_and_not_quoted(
    home: Path, space: Space, address: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asyncio.run(open_remote(address, settings(home), space))
    assert "pw" not in str(refused.value.to_response())


def test_a_token_that_is_set_nowhere_is_named(home: Path, space: Space) -> None:
    known = settings(home, team=RemoteSettings("https://kiwi.test", "${TEAM_TOKEN}"))
    for address in ("team", "https://kiwi.test/"):
        with pytest.raises(VariableMissing) as missing:
            asyncio.run(open_remote(address, known, space))
        assert missing.value.details["variables"] == ["TEAM_TOKEN"]


def test_only_the_host_that_was_named_is_granted() -> None:
    async def elsewhere() -> None:
        remote = HttpRemote("http://127.0.0.1:9")
        remote.key = "http://127.0.0.1:10"
        try:
            await remote.events()
        finally:
            await remote.aclose()

    with pytest.raises(AddressDenied):
        asyncio.run(elsewhere())
