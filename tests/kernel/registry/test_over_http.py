"""The HTTP client of a registry, against servers that lie, stall or send too much."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from kiwi_mcp.domain.calls import Space
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
from kiwi_mcp.domain.json import Json, as_object
from kiwi_mcp.domain.registry import Actor, VersionName
from kiwi_mcp.kernel.remotes import open_remote
from kiwi_mcp.kernel.settings import RegistrySettings, RemoteSettings
from kiwi_mcp.primitives.http import client
from kiwi_mcp.store.remote import http
from kiwi_mcp.store.remote.http import HttpRemote
from kiwi_mcp.store.remote.layout import LayoutEntry, VersionAnnotations, digest_of
from kiwi_mcp.store.remote.sync import LayoutRemote

T = TypeVar("T")
TOKEN = "kiwi_a-very-secret-token"
NAME = VersionName("acme", "greeter", "1.0.0")
DIGEST = f"sha256:{'a' * 64}"
ENTRY = LayoutEntry(
    VersionAnnotations(NAME, None, "eve", "2026-01-01T00:00:00.000Z"), DIGEST, DIGEST, 300, closure=DIGEST
).to_json()
ANNOTATIONS = as_object(ENTRY["annotations"])

Speak = Callable[[bytes], bytes | Awaitable[bytes]]


def remote_at(url: str) -> HttpRemote:
    network = client.Network()
    send = partial(client.send, secrets={"TEAM_TOKEN": TOKEN}, through=network)
    return HttpRemote(url, send, network.aclose, token="${TEAM_TOKEN}")


def index(*entries: Json) -> Json:
    return {"schemaVersion": 2, "manifests": list(entries)}


def annotated(**words: Json) -> Json:
    """The index of one version with other annotations."""
    return index(
        {**ENTRY, "annotations": {**ANNOTATIONS, **{f"vnd.kiwi.{name}": word for name, word in words.items()}}}
    )


def against(speak: Speak, work: Callable[[HttpRemote], Awaitable[T]], *, heard: list[bytes] | None = None) -> T:
    """Run work with a remote and a server with scripted answers."""

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
        remote = remote_at(f"http://127.0.0.1:{port}")
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


@pytest.mark.usefixtures("loopback")
def test_the_token_goes_in_a_header_and_nowhere_else() -> None:
    heard: list[bytes] = []
    events = against(lambda _: reply(index(ENTRY)), lambda remote: remote.events(), heard=heard)

    assert [event.name for event in events] == [NAME]
    assert f"authorization: bearer {TOKEN}".encode() in heard[0].lower().replace(TOKEN.lower().encode(), TOKEN.encode())
    assert heard[0].count(TOKEN.encode()) == 1


@pytest.mark.usefixtures("loopback")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"\xff\xfe",
        b"[]",
        b'{"manifests": {}}',
        b'{"schemaVersion": 2, "manifests": [1]}',
        b'{"schemaVersion": 2, "manifests": [], "manifests": []}',
        b'{"manifests": [' + b"[" * 50_000,
        index({**ENTRY, "digest": "sha256:../../x"}),
        index({**ENTRY, "size": 10**30}),
        index({**ENTRY, "mediaType": "text/html"}),
        index(ENTRY, ENTRY),
        annotated(digest="sha256:../../x"),
        annotated(closure="x"),
        annotated(tool_id="../x"),
        annotated(namespace="a b"),
        annotated(published_by="x" * 10_000),
        annotated(**{"yank.at": "yesterday"}),
        annotated(**{"visibility.at": "", "visibility.reason": "secret"}),
    ],
    ids=range(19),
)
def test_an_index_that_is_none_is_refused(body: Json | bytes) -> None:
    with pytest.raises(ArtifactRefused):
        against(lambda _: reply(body), lambda remote: remote.events())


@pytest.mark.usefixtures("loopback")
def test_an_index_of_other_items_than_those_asked_for_is_refused() -> None:
    with pytest.raises(ArtifactRefused, match="other items"):
        against(lambda _: reply(index(ENTRY)), lambda remote: remote.history("other"))


@pytest.mark.usefixtures("loopback")
@pytest.mark.parametrize("blob", [b"", b"{}", b"x" * 300, b"[" * 300], ids=range(4))
def test_a_version_that_is_not_what_its_index_says_is_refused(blob: bytes) -> None:
    """Its manifest has another hash, or is no manifest although its hash is right."""
    for entry in (ENTRY, {**ENTRY, "digest": digest_of(blob), "size": len(blob)}):
        heard: list[bytes] = []
        with pytest.raises(ArtifactRefused):
            against(
                lambda sent, entry=entry: reply(index(entry) if b"index.json" in sent else blob),  # type: ignore[misc] # bound at once
                lambda remote: remote.read([NAME]),
                heard=heard,
            )
        assert len(heard) == 2


@pytest.mark.usefixtures("loopback")
def test_a_blob_that_is_longer_than_stated_is_not_kept() -> None:
    with pytest.raises(ArtifactRefused, match="longer than the 300 bytes"):
        against(
            lambda sent: reply(index(ENTRY) if b"index.json" in sent else b"x" * 301),
            lambda remote: remote.read([NAME]),
        )


@pytest.mark.usefixtures("loopback")
def test_an_index_that_did_not_change_is_not_sent_again() -> None:
    heard: list[bytes] = []

    async def twice(remote: HttpRemote) -> int:
        await remote.events()
        return len(await remote.events(remote.etag))

    data = json.dumps(index(ENTRY)).encode()
    found = against(
        lambda sent: reply(b"", 304) if b"if-none-match" in sent.lower() else reply(data), twice, heard=heard
    )
    assert found == 0
    assert f'"{digest_of(data)}"'.encode() in heard[1]


@pytest.mark.usefixtures("loopback")
@pytest.mark.case("NET-15")
def test_a_huge_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_INDEX", 100_000)
    with pytest.raises(TooLarge):
        against(lambda _: reply(b"x" * 300_000), lambda remote: remote.events())


@pytest.mark.usefixtures("loopback")
def test_a_stalled_server_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_TIMEOUT", 0.3)

    async def never() -> bytes:
        await asyncio.Event().wait()
        return b""

    with pytest.raises(RequestFailed) as late:
        against(lambda _: never(), lambda remote: remote.events())
    assert late.value.details["cause"] == "timeout"


@pytest.mark.usefixtures("loopback")
@pytest.mark.case("NET-13", "SEC-10")
@pytest.mark.parametrize("place", ["http://127.0.0.1:1/x", "http://169.254.169.254/", "file:///etc/passwd", "/other"])
def test_redirects_are_refused(place: str) -> None:
    heard: list[bytes] = []
    with pytest.raises(RequestFailed):
        against(lambda _: reply({}, 302, Location=place), lambda remote: remote.events(), heard=heard)
    assert len(heard) == 1


@pytest.mark.usefixtures("loopback")
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
def test_a_refusal_quotes_the_text_of_the_server(status: int, body: Json | bytes, error: type[KiwiError]) -> None:
    with pytest.raises(error) as refused:
        against(lambda _: reply(body, status), lambda remote: remote.events())
    assert "rm -rf" not in refused.value.suggestion
    assert TOKEN not in str(refused.value.to_response())


@pytest.mark.usefixtures("loopback")
def test_a_token_that_a_server_sends_back_is_not_shown() -> None:
    with pytest.raises(KiwiError) as refused:
        against(lambda _: reply({"message": f"bad {TOKEN}"}, 403), lambda remote: remote.events())
    assert TOKEN not in str(refused.value.to_response()) + repr(refused.value)


@pytest.fixture
def space(project: Path, home: Path) -> Space:
    return Space(project=project, user=home / ".ai", cache=home / ".cache")


def settings(home: Path, **remotes: RemoteSettings) -> RegistrySettings:
    return RegistrySettings(f"sqlite://{home}/own.db", Actor("eve", ("acme",)), remotes)


async def test_each_kind_of_url_opens_its_kind_of_remote(home: Path, space: Space, project: Path) -> None:
    known = settings(home, team=RemoteSettings("http://kiwi.test:8765/base/"), disk=RemoteSettings("oci:exported"))
    for address, kind, key in (
        ("./exported", LayoutRemote, f"oci:{project}/exported"),
        ("oci:exported", LayoutRemote, f"oci:{project}/exported"),
        ("disk", LayoutRemote, f"oci:{project}/exported"),
        ("team", HttpRemote, "http://kiwi.test:8765/base"),
        ("https://kiwi.test", HttpRemote, "https://kiwi.test"),
    ):
        remote = open_remote(address, known, space)
        assert isinstance(remote, kind)
        assert remote.key == key
        await remote.aclose()


@pytest.mark.parametrize("address", ["nowhere", "", "ftp://x", "git@host:repo", "s3://bucket"])
async def test_an_unknown_kind_of_url_is_refused_with_the_known_ones(home: Path, space: Space, address: str) -> None:
    with pytest.raises(RemoteNotFound) as missing:
        open_remote(address, settings(home, team=RemoteSettings("http://kiwi.test")), space)
    assert missing.value.details["remotes"] == ["team"]


@pytest.mark.parametrize("address", ["sqlite:///srv/team.db", "postgresql://eve:pw@db/kiwi", "postgres://db/kiwi"])
def test_a_database_is_not_a_remote(home: Path, space: Space, address: str) -> None:
    with pytest.raises(InvalidRequest, match="database is not a remote") as refused:
        open_remote(address, settings(home), space)
    assert "kiwi up" in str(refused.value.suggestion)
    assert "pw" not in str(refused.value.to_response())


@pytest.mark.parametrize(
    "address", ["https://eve:pw@kiwi.test", "https://kiwi.test?token=pw", "http://", "https://[x", "http://x:99999"]
)
async def test_a_url_with_credentials_or_without_a_host_is_refused_and_not_quoted(
    home: Path, space: Space, address: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        open_remote(address, settings(home), space)
    assert "pw" not in str(refused.value.to_response())


async def test_a_missing_token_variable_is_named(home: Path, space: Space) -> None:
    known = settings(home, team=RemoteSettings("https://kiwi.test", "${TEAM_TOKEN}"))
    for address in ("team", "https://kiwi.test/"):
        with pytest.raises(VariableMissing) as missing:
            open_remote(address, known, space)
        assert missing.value.details["variables"] == ["TEAM_TOKEN"]


async def test_only_the_named_host_is_granted() -> None:
    async def elsewhere() -> None:
        remote = remote_at("http://127.0.0.1:9")
        remote.key = "http://127.0.0.1:10"
        try:
            await remote.events()
        finally:
            await remote.aclose()

    with pytest.raises(AddressDenied):
        await elsewhere()
