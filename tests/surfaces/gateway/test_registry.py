"""A registry over HTTP: one Kiwi serves, another uses it as a remote, and each sees what their token lets them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from kiwi_mcp.domain.errors import ArtifactRefused, Denied, KiwiError, NotFound, TokenRefused, VersionConflict
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.domain.registry import Actor, Event, Release, VersionName
from kiwi_mcp.kernel.registry import wire
from kiwi_mcp.kernel.registry.over_http import HttpRemote
from kiwi_mcp.kernel.registry.port import RegistryRemote
from kiwi_mcp.kernel.registry.sync import copy, pull
from kiwi_mcp.kernel.registry.told import Wanted
from kiwi_mcp.store.artifact import bundle, encode
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry import Registry
from kiwi_mcp.store.words import marks_of

T = TypeVar("T")
Make = Callable[..., Release]


class Reply(Protocol):
    status: int
    body: JsonObject


class Served(Protocol):
    url: str
    registry: Registry

    def token(self, name: str, *namespaces: str, can_write: bool = True) -> str: ...
    def remote(self, token: str) -> HttpRemote: ...
    def ask(self, method: str, path: str, body: Json = None, *, token: str = "") -> Reply: ...


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


async def using(remote: HttpRemote, work: Callable[[HttpRemote], Coroutine[Any, Any, T]]) -> T:
    try:
        return await work(remote)
    finally:
        await remote.aclose()


def bundled(*releases: Release) -> Json:
    return {"bundles": [bundle(encode(release), marks_of(release)) for release in releases]}


def asked(*names: VersionName) -> Json:
    return {"names": [wire.name_to_json(name) for name in names]}


@pytest.mark.req("K-RG-03", "K-ME-02")
def test_what_one_machine_pushes_another_pulls_byte_for_byte(served: Served, a_release: Make, tmp_path: Path) -> None:
    base = a_release("acme/base@1.0.0")
    tool = a_release("acme/greeter@1.0.0", on=base, code="print('${TEAM_TOKEN} \\u0024{X} ü')\n")
    here, there = (open_database(f"sqlite://{tmp_path}/{name}.db") for name in ("here", "there"))
    mine = RegistryRemote(Registry(here, Actor("eve", ("acme",))), "mine", is_own=True)
    theirs = RegistryRemote(Registry(there, Actor("bob", ("public",))), "theirs", is_own=True)
    run(mine.write([base, tool], ()))
    writer, reader = served.token("eve", "acme"), served.token("bob", "public", can_write=False)

    done = run(using(served.remote(writer), lambda remote: copy(mine, remote)))
    assert set(done.new) == {base.name, tool.name}
    again = run(using(served.remote(writer), lambda remote: copy(mine, remote)))
    assert (again.new, again.unchanged) == ((), 2)

    pulled = run(
        using(served.remote(reader), lambda remote: pull(remote, theirs, Wanted.parse("acme/greeter"), namespaces=()))
    )
    assert [one.name for one in pulled] == [base.name, tool.name]
    (copied,) = run(theirs.read([tool.name]))
    assert sorted(copied.files, key=lambda file: file.path) == sorted(tool.files, key=lambda file: file.path)
    assert copied.digest == tool.digest
    here.close()
    there.close()


def test_marks_travel_over_http(served: Served, a_release: Make, tmp_path: Path) -> None:
    tool = a_release("acme/base@1.0.0")
    token = served.token("eve", "acme")
    mark = Event(0, "yank", tool.name, tool.digest, tool.digest, "eve", "2026-02-01T00:00:00.000Z", "leaks")
    run(using(served.remote(token), lambda remote: remote.write([tool], [mark])))

    (found,) = run(using(served.remote(token), lambda remote: remote.read([tool.name])))
    assert found.yanked is not None
    assert found.yanked.reason == "leaks"
    sight = replace(mark, op="visibility", name=replace(tool.name, version=""), digest="", closure="", reason="private")
    run(using(served.remote(token), lambda remote: remote.write((), [sight])))
    events = run(using(served.remote(token), lambda remote: remote.events()))
    assert [event.op for event in events] == ["publish", "yank", "visibility"]
    assert events[-1].visibility == "private"


@pytest.mark.req("K-RG-04")
def test_one_tenant_cannot_see_what_is_private_to_another(served: Served, a_release: Make) -> None:
    secret = a_release("acme/secret@1.0.0", visibility="private")
    served.registry.publish([secret, a_release("acme/open@1.0.0")])
    member, stranger = served.token("eve", "acme"), served.token("bob", "globex")
    never = VersionName("acme", "secrex", "1.0.0")

    seen = run(using(served.remote(member), lambda remote: remote.events()))
    assert {event.name.tool_id for event in seen} == {"secret", "open"}
    seen = run(using(served.remote(stranger), lambda remote: remote.events()))
    assert {event.name.tool_id for event in seen} == {"open"}
    (release,) = run(using(served.remote(member), lambda remote: remote.read([secret.name])))
    assert release.digest == secret.digest

    refused = served.ask("POST", wire.READ, asked(secret.name), token=stranger)
    absent = served.ask("POST", wire.READ, asked(never), token=stranger)
    assert refused.status == absent.status == 404
    assert str(refused.body).replace("secret", "secrex") == str(absent.body)
    mark = wire.event_to_json(
        Event(0, "yank", secret.name, secret.digest, secret.digest, "bob", "2026-02-01T00:00:00.000Z")
    )
    refused = served.ask("POST", wire.WRITE, {"marks": [mark]}, token=stranger)
    absent = served.ask("POST", wire.WRITE, {"marks": [{**mark, "tool_id": "secrex"}]}, token=stranger)
    assert refused.status == absent.status
    assert str(refused.body).replace("secret", "secrex") == str(absent.body)
    above = a_release("globex/above@1.0.0", on=secret)
    refused = served.ask("POST", wire.WRITE, bundled(above), token=stranger)
    ghost = a_release("acme/secrex@1.0.0", visibility="private")
    absent = served.ask("POST", wire.WRITE, bundled(a_release("globex/above@1.0.0", on=ghost)), token=stranger)
    assert refused.status == absent.status == 404
    assert str(refused.body).replace("secret", "secrex") == str(absent.body)


def test_a_visitor_publishes_in_their_own_name_and_namespaces_alone(served: Served, a_release: Make) -> None:
    bob = served.token("bob", "globex")
    with pytest.raises(Denied, match="403"):
        run(using(served.remote(bob), lambda remote: remote.write([a_release("acme/base@1.0.0")], ())))

    claimed = replace(a_release("globex/base@1.0.0"), published_by="the queen", is_official=True)
    run(using(served.remote(bob), lambda remote: remote.write([claimed], ())))
    (found,) = run(using(served.remote(bob), lambda remote: remote.read([claimed.name])))
    assert (found.published_by, found.is_official) == ("bob", False)
    with pytest.raises(ArtifactRefused):
        run(using(served.remote(bob), lambda remote: remote.write([replace(claimed, is_builtin=True)], ())))


def test_other_content_for_a_version_is_a_conflict_that_names_it(served: Served, a_release: Make) -> None:
    token = served.token("eve", "acme")
    run(using(served.remote(token), lambda remote: remote.write([a_release("acme/base@1.0.0")], ())))
    other = a_release("acme/base@1.0.0", code="print('other')\n")
    with pytest.raises(VersionConflict) as refused:
        run(using(served.remote(token), lambda remote: remote.write([other], ())))
    assert refused.value.details["conflicts"] == ["acme/base@1.0.0"]


def test_a_token_that_only_reads_and_a_server_that_only_gives_take_nothing(
    serving: Callable[..., Served], sqlite_url: str, a_release: Make
) -> None:
    open_server, quiet = serving(sqlite_url), serving(sqlite_url, is_read_only=True)
    reader, writer = open_server.token("bob", "acme", can_write=False), open_server.token("eve", "acme")
    release = a_release("acme/base@1.0.0")
    for server, token in ((open_server, reader), (quiet, writer)):
        answer = server.ask("POST", wire.WRITE, bundled(release), token=token)
        assert (answer.status, answer.body["code"]) == (403, "not_permitted")
        assert server.ask("GET", wire.EVENTS, token=token).body == {"events": [], "more": False}


def test_an_open_server_shows_everybody_what_is_public_and_takes_nothing(
    serving: Callable[..., Served], sqlite_url: str, a_release: Make
) -> None:
    server = serving(sqlite_url, is_read_only=True, is_open=True)
    releases = [a_release(f"acme/{word}@1.0.0", visibility=word) for word in ("public", "unlisted", "private")]
    server.registry.publish(releases)

    answer = server.ask("GET", wire.EVENTS)
    assert [as_object(event)["tool_id"] for event in as_list(answer.body["events"])] == ["public"]
    assert server.ask("POST", wire.READ, asked(releases[2].name)).status == 404
    assert server.ask("POST", wire.READ, asked(releases[1].name)).status == 200  # who knows its name may have it
    assert server.ask("POST", wire.WRITE, bundled(releases[0])).status == 403


def test_events_come_in_pages_and_versions_in_portions(
    served_once: Served, a_release: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = served_once.token("eve", "acme")
    releases = [a_release(f"acme/tool-{number}@1.0.0", code="#" * 1_000) for number in range(25)]
    monkeypatch.setattr(wire, "PAGE", 4)
    monkeypatch.setattr(wire, "MAX_WEIGHT", 4_000)

    async def work(remote: HttpRemote) -> None:
        assert len(await remote.write(releases, ())) == 25
        events = await remote.events()
        assert {event.name for event in events} == {release.name for release in releases}
        assert await remote.events(events[-3].seq) == events[-2:]
        found = await remote.read([release.name for release in releases])
        assert [one.digest for one in found] == [release.digest for release in releases]

    run(using(served_once.remote(token), work))


def test_an_unlisted_version_is_pulled_by_whoever_can_name_it(
    served_once: Served, a_release: Make, tmp_path: Path
) -> None:
    served_once.registry.publish([a_release("acme/hidden@1.0.0", visibility="unlisted")])
    token = served_once.token("bob", "globex", can_write=False)
    database = open_database(f"sqlite://{tmp_path}/mine.db")
    mine = RegistryRemote(Registry(database, Actor("bob", ("globex",))), "mine", is_own=True)

    def pulling(text: str) -> Callable[[HttpRemote], Coroutine[Any, Any, object]]:
        return lambda remote: pull(remote, mine, Wanted.parse(text), namespaces=["globex"])

    with pytest.raises(NotFound):
        run(using(served_once.remote(token), pulling("hidden")))
    run(using(served_once.remote(token), pulling("acme/hidden@1.0.0")))
    assert [event.name.tool_id for event in run(mine.events())] == []  # unlisted here as well
    assert run(mine.read([VersionName("acme", "hidden", "1.0.0")]))
    database.close()


@pytest.mark.case("PATH-08", "PATH-09")
def test_a_bundle_that_is_not_what_it_says_is_refused_and_nothing_is_kept(served_once: Served, a_release: Make) -> None:
    token = served_once.token("eve", "acme")
    whole = as_object(as_list(as_object(bundled(a_release("acme/base@1.0.0")))["bundles"])[0])
    blobs = as_object(whole["blobs"])
    manifest = str(whole["manifest"])
    bad: list[Json] = [
        {**whole, "blobs": dict(list(blobs.items())[:-1])},
        {**whole, "blobs": {**blobs, f"sha256:{'0' * 64}": "aGk="}},
        {**whole, "blobs": dict.fromkeys(blobs, "AAAA")},
        {**whole, "manifest": manifest.replace("main.py", "../../x")},
        {**whole, "manifest": manifest.replace("acme", "globex")},
        {**whole, "manifest": manifest.replace("sha256:", "sha256:../")},
        {**whole, "manifest": "["},
        {},
        "text",
    ]
    for one in bad:
        answer = served_once.ask("POST", wire.WRITE, {"bundles": [one]}, token=token)
        assert answer.status == 403, one
        assert answer.body["code"] in {"artifact_refused", "namespace_denied"}
    assert served_once.ask("GET", wire.EVENTS, token=token).body["events"] == []


@pytest.mark.parametrize(
    "body", ["", "[", "[]", "null", '{"names": []}', '{"names": 3}', '{"a": 1, "a": 2}', "[" * 9_000, '{"names": NaN}']
)
def test_a_body_that_is_no_request_is_refused_with_words(served_once: Served, body: str) -> None:
    token = served_once.token("eve", "acme")
    answer = served_once.ask("POST", wire.READ, body, token=token)
    assert answer.status == 400
    assert answer.body["suggestion"]


def test_a_wrong_token_is_told_by_the_client_without_being_shown(served_once: Served) -> None:
    served_once.token("eve", "acme")
    wrong = "kiwi_wrong-and-secret-word"
    with pytest.raises(TokenRefused) as refused:
        run(using(served_once.remote(wrong), lambda remote: remote.events()))
    assert wrong not in repr(refused.value) + str(refused.value.to_response()) + refused.value.suggestion


def test_the_client_names_a_server_that_is_not_there(served_once: Served) -> None:
    remote = HttpRemote("http://127.0.0.1:1")
    with pytest.raises(KiwiError) as failed:
        run(using(remote, lambda one: one.events()))
    assert failed.value.suggestion
