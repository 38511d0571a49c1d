"""A registry over HTTP: one Kiwi serves it, another uses it as a remote, limited by its token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
from msgspec.structs import replace

from kiwi_mcp.catalog.release import check_release
from kiwi_mcp.domain.errors import ArtifactRefused, Denied, KiwiError, NotFound, TokenRefused, VersionConflict
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.domain.registry import Actor, Pin, RegistryEvent, VersionName
from kiwi_mcp.primitives.http import client
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease
from kiwi_mcp.store.remote import http, sync
from kiwi_mcp.store.remote.http import BLOBS, INDEX, LAYOUT, HttpRemote
from kiwi_mcp.store.remote.layout import LayoutEntry, digest_of, encode, index_bytes
from kiwi_mcp.store.remote.sync import LocalRegistry, VersionQuery

T = TypeVar("T")
copy, pull = partial(sync.copy, check=check_release), partial(sync.pull, check=check_release)
Make = Callable[..., CheckedRelease]


class Reply(Protocol):
    status: int
    body: JsonObject


class Served(Protocol):
    url: str
    registry: Registry

    def token(self, name: str, *namespaces: str, can_write: bool = True) -> str: ...
    def remote(self, token: str) -> HttpRemote: ...
    def ask(self, method: str, path: str, body: Json | bytes = None, *, token: str = "") -> Reply: ...


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


async def using(remote: HttpRemote, work: Callable[[HttpRemote], Coroutine[Any, Any, T]]) -> T:
    try:
        return await work(remote)
    finally:
        await remote.aclose()


def push(served: Served, token: str, *releases: CheckedRelease) -> Reply:
    """Send the blobs of releases, then their index, and return the first refusal or the last answer."""
    artifacts = [encode(release) for release in releases]
    for artifact in artifacts:
        for data in (*artifact.blobs.values(), artifact.manifest):
            answer = put(served, token, data)
            if answer.status != 200:
                return answer
    entries = [LayoutEntry.of(release, artifact) for release, artifact in zip(releases, artifacts, strict=True)]
    return served.ask("PUT", INDEX, index_bytes(entries, "a push"), token=token)


def put(served: Served, token: str, data: bytes) -> Reply:
    return served.ask("PUT", blob_path(digest_of(data)), data, token=token)


def blob_path(digest: str) -> str:
    return f"{BLOBS}/{digest.removeprefix('sha256:')}"


def names_in(answer: Reply) -> list[str]:
    rows = map(as_object, as_list(answer.body["manifests"]))
    return [str(as_object(row["annotations"])["vnd.kiwi.tool_id"]) for row in rows]


@pytest.mark.smoke
@pytest.mark.req("K-RG-03", "K-ME-02")
def test_versions_pushed_by_one_machine_are_pulled_by_another_unchanged(
    served: Served, a_release: Make, tmp_path: Path
) -> None:
    base = a_release("acme/base@1.0.0")
    words = a_release("acme/words@1.0.0")
    tool = a_release("acme/greeter@1.0.0", on=base, code="print('${TEAM_TOKEN} \\u0024{X} ü')\n")
    tool = replace(tool, references=(Pin("words", words.name, words.digest),))
    here, there = (open_database(f"sqlite://{tmp_path}/{name}.db") for name in ("here", "there"))
    mine = LocalRegistry(Registry(here, Actor("eve", ("acme",))), "mine", is_own=True)
    theirs = LocalRegistry(Registry(there, Actor("bob", ("public",))), "theirs", is_own=True)
    (written, *_) = run(mine.write([tool, base, words], ()))
    writer, reader = served.token("eve", "acme"), served.token("bob", "public", can_write=False)

    done = run(using(served.remote(writer), lambda remote: copy(mine, remote)))
    assert set(done.new) == {base.name, words.name, tool.name}
    again = run(using(served.remote(writer), lambda remote: copy(mine, remote)))
    assert (again.new, again.unchanged) == ((), 3)

    pulled = run(
        using(
            served.remote(reader),
            lambda remote: pull(remote, theirs, VersionQuery.parse("acme/greeter"), namespaces=()),
        )
    )
    assert [one.name for one in pulled] == [base.name, words.name, tool.name]
    assert pulled[-1].closure == written.closure
    (copied,) = run(theirs.read([tool.name]))
    assert sorted(copied.files, key=lambda file: file.path) == sorted(tool.files, key=lambda file: file.path)
    assert (copied.digest, copied.references) == (tool.digest, tool.references)
    here.close()
    there.close()


def test_a_status_travels_over_http(served: Served, a_release: Make, tmp_path: Path) -> None:
    tool = a_release("acme/base@1.0.0")
    token = served.token("eve", "acme")
    mark = RegistryEvent(0, "yank", tool.name, tool.digest, tool.digest, "eve", "2026-02-01T00:00:00.000Z", "leaks")
    run(using(served.remote(token), lambda remote: remote.write([tool], [mark])))

    (found,) = run(using(served.remote(token), lambda remote: remote.read([tool.name])))
    assert found.yanked is not None
    assert found.yanked.reason == "leaks"
    sight = replace(mark, op="visibility", name=replace(tool.name, version=""), digest="", closure="", reason="private")
    run(using(served.remote(token), lambda remote: remote.write((), [sight])))
    events = run(using(served.remote(token), lambda remote: remote.events()))
    assert [event.op for event in events] == ["publish", "yank", "visibility"]
    assert events[-1].visibility == "private"


def test_a_status_from_the_future_is_refused(served: Served, a_release: Make) -> None:
    tool, token = a_release("acme/base@1.0.0"), served.token("eve", "acme")
    status = RegistryEvent(0, "yank", tool.name, tool.digest, tool.digest, "eve", "2999-02-01T00:00:00.000Z", "leaks")
    with pytest.raises(KiwiError, match="in the future"):
        run(using(served.remote(token), lambda remote: remote.write([tool], [status])))
    (found,) = run(using(served.remote(token), lambda remote: remote.read([tool.name])))
    assert found.yanked is None


@pytest.mark.req("K-RG-04")
def test_one_tenant_cannot_see_private_items_of_another(served: Served, a_release: Make) -> None:
    secret = a_release("acme/secret@1.0.0", visibility="private", code="print('secret')\n")
    served.registry.publish([secret, a_release("acme/open@1.0.0")])
    member, stranger = served.token("eve", "acme"), served.token("bob", "globex")

    seen = run(using(served.remote(member), lambda remote: remote.events()))
    assert {event.name.tool_id for event in seen} == {"secret", "open"}
    seen = run(using(served.remote(stranger), lambda remote: remote.events()))
    assert {event.name.tool_id for event in seen} == {"open"}
    (release,) = run(using(served.remote(member), lambda remote: remote.read([secret.name])))
    assert release.digest == secret.digest

    for path in ("?tool_id=secret", "?tool_id=secrex"):
        assert names_in(served.ask("GET", INDEX + path, token=stranger)) == []
    with pytest.raises(NotFound):
        run(using(served.remote(stranger), lambda remote: remote.read([secret.name])))
    stored = encode(served.registry.read([one.id for one in served.registry.named("secret", "acme")])[0])
    for data in (*stored.blobs.values(), stored.manifest):
        other = data + b"x"
        refused = served.ask("GET", blob_path(digest_of(data)), token=stranger)
        absent = served.ask("GET", blob_path(digest_of(other)), token=stranger)
        assert refused.status == absent.status == 404
        assert str(refused.body).replace(digest_of(data), "") == str(absent.body).replace(digest_of(other), "")
    refused = push(served, stranger, secret)
    ghost = a_release("acme/secrex@1.0.0", visibility="private")
    absent = push(served, stranger, ghost)
    assert refused.status == absent.status == 403
    assert str(refused.body).replace("secret", "secrex") == str(absent.body)
    refused = push(served, stranger, a_release("globex/above@1.0.0", on=secret))
    absent = push(served, stranger, a_release("globex/above@1.0.0", on=ghost))
    assert refused.status == absent.status == 404
    assert str(refused.body).replace("secret", "secrex") == str(absent.body)


def test_a_client_publishes_only_in_its_own_name_and_namespaces(served: Served, a_release: Make) -> None:
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


def test_a_read_only_token_and_a_read_only_server_accept_nothing(
    serving: Callable[..., Served], sqlite_url: str, a_release: Make
) -> None:
    open_server, quiet = serving(sqlite_url), serving(sqlite_url, is_read_only=True)
    reader, writer = open_server.token("bob", "acme", can_write=False), open_server.token("eve", "acme")
    release = a_release("acme/base@1.0.0")
    for server, token in ((open_server, reader), (quiet, writer)):
        artifact = encode(release)
        index = index_bytes([LayoutEntry.of(release, artifact)], "a push")
        for answer in (put(server, token, artifact.manifest), server.ask("PUT", INDEX, index, token=token)):
            assert (answer.status, answer.body["code"]) == (403, "not_permitted")
        assert server.ask("GET", INDEX, token=token).body["manifests"] == []


def test_an_open_server_shows_public_items_and_accepts_nothing(
    serving: Callable[..., Served], sqlite_url: str, a_release: Make
) -> None:
    server = serving(sqlite_url, is_read_only=True, is_open=True)
    releases = [a_release(f"acme/{word}@1.0.0", visibility=word) for word in ("public", "unlisted", "private")]
    server.registry.publish(releases)

    assert names_in(server.ask("GET", INDEX)) == ["public"]
    assert names_in(server.ask("GET", f"{INDEX}?tool_id=private")) == []
    assert names_in(server.ask("GET", f"{INDEX}?tool_id=unlisted")) == ["unlisted"]  # who knows its name may have it
    assert push(server, "", releases[0]).status == 403


def test_a_large_push_goes_in_parts_and_all_of_it_can_be_read(
    served_once: Served, a_release: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = served_once.token("eve", "acme")
    releases = [a_release(f"acme/tool-{number}@1.0.0", code="#" * 1_000) for number in range(25)]
    monkeypatch.setattr(http, "MAX_PUSHED_BLOBS", 4_000)

    async def work(remote: HttpRemote) -> None:
        assert len(await remote.write(releases, ())) == 25
        events = await remote.events()
        assert {event.name for event in events} == {release.name for release in releases}
        assert await remote.events(remote.etag) == ()
        found = await remote.read([release.name for release in releases])
        assert [one.digest for one in found] == [release.digest for release in releases]

    run(using(served_once.remote(token), work))


def test_a_push_without_its_index_shows_nothing_to_anyone(served_once: Served, a_release: Make) -> None:
    eve, member = served_once.token("eve", "acme"), served_once.token("bob", "acme")
    release = a_release("acme/base@1.0.0")
    artifact = encode(release)
    for data in (*artifact.blobs.values(), artifact.manifest):
        assert put(served_once, eve, data).status == 200
        for token in (eve, member):
            assert served_once.ask("GET", blob_path(digest_of(data)), token=token).status == 404
    assert served_once.ask("GET", INDEX, token=eve).body["manifests"] == []
    index = index_bytes([LayoutEntry.of(release, artifact)], "a push")

    answer = served_once.ask("PUT", INDEX, index, token=member)  # blobs of another visitor are not used
    assert (answer.status, answer.body["code"]) == (403, "artifact_refused")
    assert served_once.ask("PUT", INDEX, index, token=eve).status == 200
    assert names_in(served_once.ask("GET", INDEX, token=member)) == ["base"]
    again = served_once.ask("PUT", INDEX, index, token=member)
    assert [as_object(row)["is_new"] for row in as_list(again.body["published"])] == [False]


def test_another_program_can_read_the_layout(served_once: Served, a_release: Make) -> None:
    token = served_once.token("eve", "acme")
    base = a_release("acme/base@1.0.0")
    served_once.registry.publish([base, a_release("acme/greeter@1.0.0", on=base)])

    assert served_once.ask("GET", LAYOUT, token=token).body == {"imageLayoutVersion": "1.0.0"}
    index = served_once.ask("GET", INDEX, token=token).body
    assert index["mediaType"] == "application/vnd.oci.image.index.v1+json"
    for row in map(as_object, as_list(index["manifests"])):
        manifest = served_once.ask("GET", blob_path(str(row["digest"])), token=token).body
        assert manifest["mediaType"] == row["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
        assert as_object(manifest["config"])["digest"] == as_object(row["annotations"])["vnd.kiwi.digest"]


def test_an_unlisted_version_is_pulled_by_its_full_name(served_once: Served, a_release: Make, tmp_path: Path) -> None:
    served_once.registry.publish([a_release("acme/hidden@1.0.0", visibility="unlisted")])
    token = served_once.token("bob", "globex", can_write=False)
    database = open_database(f"sqlite://{tmp_path}/mine.db")
    mine = LocalRegistry(Registry(database, Actor("bob", ("globex",))), "mine", is_own=True)

    def pulling(text: str) -> Callable[[HttpRemote], Coroutine[Any, Any, object]]:
        return lambda remote: pull(remote, mine, VersionQuery.parse(text), namespaces=["globex"])

    with pytest.raises(NotFound):
        run(using(served_once.remote(token), pulling("hidden")))
    run(using(served_once.remote(token), pulling("acme/hidden@1.0.0")))
    assert [event.name.tool_id for event in run(mine.events())] == []  # unlisted here as well
    assert run(mine.read([VersionName("acme", "hidden", "1.0.0")]))
    database.close()


@pytest.mark.case("PATH-08", "PATH-09")
def test_a_push_that_is_not_what_it_says_is_refused_and_nothing_is_stored(served_once: Served, a_release: Make) -> None:
    token = served_once.token("eve", "acme")
    release = a_release("acme/base@1.0.0")
    artifact = encode(release)
    blobs = [*artifact.blobs.values()]
    for data in blobs[1:]:
        put(served_once, token, data)
    text = artifact.manifest.decode()
    manifests = [
        text,  # its first blob was not sent
        text.replace("main.py", "../../x"),
        text.replace("acme", "globex"),
        text.replace("sha256:", "sha256:../"),
        text.replace(digest_of(blobs[0]), digest_of(blobs[1])),
        "[",
    ]
    for manifest in map(str.encode, manifests):
        assert put(served_once, token, manifest).status == 200
        entry = replace(LayoutEntry.of(release, artifact), artifact=digest_of(manifest), size=len(manifest))
        answer = served_once.ask("PUT", INDEX, index_bytes([entry], "a push"), token=token)
        assert (answer.status, answer.body["code"]) == (403, "artifact_refused"), manifest
    wrong = served_once.ask("PUT", blob_path(digest_of(b"one")), b"other", token=token)
    assert (wrong.status, wrong.body["code"]) == (400, "invalid_request")
    assert served_once.ask("GET", INDEX, token=token).body["manifests"] == []


@pytest.mark.parametrize(
    "body", ["", "[", "[]", "null", '{"manifests": 3}', '{"a": 1, "a": 2}', "[" * 9_000, '{"manifests": NaN}']
)
def test_a_body_that_is_no_index_is_refused_with_a_suggestion(served_once: Served, body: str) -> None:
    token = served_once.token("eve", "acme")
    answer = served_once.ask("PUT", INDEX, body, token=token)
    assert (answer.status, answer.body["code"]) == (403, "artifact_refused")
    assert answer.body["suggestion"]


def test_a_wrong_token_is_reported_by_the_client_without_being_shown(served_once: Served) -> None:
    served_once.token("eve", "acme")
    wrong = "kiwi_wrong-and-secret-word"
    with pytest.raises(TokenRefused) as refused:
        run(using(served_once.remote(wrong), lambda remote: remote.events()))
    assert wrong not in repr(refused.value) + str(refused.value.to_response()) + refused.value.suggestion


def test_the_client_names_an_unreachable_server(served_once: Served) -> None:
    network = client.Network()
    remote = HttpRemote("http://127.0.0.1:1", partial(client.send, through=network), network.aclose)
    with pytest.raises(KiwiError) as failed:
        run(using(remote, lambda one: one.events()))
    assert failed.value.suggestion
