"""Copies between registries: new versions, new statuses, and one version with its chain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from itertools import permutations
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec.structs import asdict, replace

from kiwi_mcp.catalog.release import check_release
from kiwi_mcp.domain.errors import (
    ArtifactRefused,
    InvalidRequest,
    KiwiError,
    NamespaceDenied,
    NotFound,
    VersionConflict,
)
from kiwi_mcp.domain.items import ToolFile
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.domain.registry import Actor, Op, Pin, PublishResult, RegistryEvent, Release, ReleaseFile, VersionName
from kiwi_mcp.manifest.signatures import statement_of
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease
from kiwi_mcp.store.remote import sync
from kiwi_mcp.store.remote.layout import Layout
from kiwi_mcp.store.remote.sync import LayoutRemote, LocalRegistry, RegistrySnapshot, RemoteRegistry, VersionQuery

T = TypeVar("T")
EVE = Actor("eve", ("acme", "public"))


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def a_release(
    name: str = "acme/greeter@1.0.0",
    *,
    on: CheckedRelease | None = None,
    tool_type: str = "",
    code: str = "print('hi')\n",
    **words: Any,  # the words of a release, as its own type checks them
) -> CheckedRelease:
    """A version with a manifest and one file, standing on another or on nothing."""
    namespace, _, rest = name.partition("/")
    tool_id, _, version = rest.partition("@")
    kind = tool_type or ("script" if on else "primitive")
    ref = on.name.tool_id if on else None
    text = f"tool_id: {tool_id}\ntool_type: {kind}\nversion: {version}\ndescription: Greets.\n"
    text += f"executor: {ref}\nconfig:\n  entrypoint: main.py\n" if ref else ""
    main = ReleaseFile("main.py", code.encode())
    statement = statement_of(
        tool_id=tool_id,
        version=version,
        executor=ref,
        manifest_body=text.encode(),
        files=[ToolFile(main.path, sha256(main.data).hexdigest(), len(main.data), main.is_executable)],
    )
    made = replace(
        CheckedRelease(
            name=VersionName(namespace, tool_id, version),
            place=f"tools/{tool_id}/tool.yaml",
            statement=statement,
            manifest={},
            files=(ReleaseFile("tool.yaml", text.encode()), main),
            executor=Pin(ref, on.name, on.digest) if on and ref else None,
            created_at="2026-01-02T03:04:05.678Z",
            published_by="eve",
        ),
        **words,
    )
    return check_release(made)


BASE = a_release("acme/base@1.0.0")
RUNTIME = a_release("acme/my_runtime@2.0.0", on=BASE, tool_type="runtime")
GREETER = a_release("acme/greeter@1.0.0", on=RUNTIME)
CHAIN = (BASE, RUNTIME, GREETER)


def a_mark(op: Op, release: Release, at: str = "2026-02-01T00:00:00.000Z", reason: str = "") -> RegistryEvent:
    return RegistryEvent(0, op, release.name, release.digest, release.digest, "eve", at, reason)


def unchecked(release: Release) -> Release:
    """The same release as a server gives it, which may then be changed in any way."""
    return Release(**asdict(release))


class Watched:
    """A remote that counts what is read of it, and may give other things than it holds."""

    def __init__(self, remote: RemoteRegistry, change: Callable[[Release], Release] = lambda release: release) -> None:
        self._remote = remote
        self._change = change
        self.read_names: list[VersionName] = []
        self.written: list[VersionName] = []

    @property
    def key(self) -> str:
        return self._remote.key

    @property
    def etag(self) -> str:
        return self._remote.etag

    async def events(self, unless: str = "") -> Sequence[RegistryEvent]:
        return await self._remote.events(unless)

    async def history(self, tool_id: str) -> Sequence[RegistryEvent]:
        return await self._remote.history(tool_id)

    async def read(self, names: Sequence[VersionName]) -> Sequence[Release]:
        self.read_names += names
        return [self._change(unchecked(release)) for release in await self._remote.read(names)]

    async def write(
        self, releases: Sequence[CheckedRelease], events: Sequence[RegistryEvent]
    ) -> Sequence[PublishResult]:
        self.written += [release.name for release in releases]
        return await self._remote.write(releases, events)

    async def aclose(self) -> None:
        await self._remote.aclose()


copy, pull = partial(sync.copy, check=check_release), partial(sync.pull, check=check_release)
MakeRemote = Callable[..., RemoteRegistry]


@pytest.fixture
def new_remote(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MakeRemote]:
    """Make an empty remote of a kind, with some versions put into it."""
    opened = ExitStack()
    count = 0

    def postgres() -> str:
        return str(request.getfixturevalue("new_postgres_store")())

    def make(
        kind: str = "folder", *releases: CheckedRelease, actor: Actor = EVE, is_own: bool = True
    ) -> RemoteRegistry:
        nonlocal count
        count += 1
        remote: RemoteRegistry
        if kind == "folder":
            remote = LayoutRemote(Layout(tmp_path / f"layout-{count}"), f"oci:{count}")
        else:
            database = open_database(f"sqlite://{tmp_path}/{count}.db" if kind == "sqlite" else postgres())
            opened.callback(database.close)
            remote = LocalRegistry(Registry(database, actor), f"{kind}:{count}", is_own=is_own)
        if releases:
            run(remote.write(releases, ()))
        return remote

    yield make
    opened.close()


@pytest.fixture(params=list(permutations(["folder", "sqlite", "postgres"], 2)), ids="-to-".join)
def kinds(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Any two kinds of remotes."""
    first, second = request.param
    return str(first), str(second)


@pytest.fixture
def source(kinds: tuple[str, str], new_remote: MakeRemote) -> RemoteRegistry:
    """A remote of each kind that holds a chain of three."""
    return new_remote(kinds[0], *CHAIN)


@pytest.fixture
def target(kinds: tuple[str, str], new_remote: MakeRemote) -> RemoteRegistry:
    """An empty remote of another kind."""
    return new_remote(kinds[1])


def held(remote: RemoteRegistry) -> dict[str, str]:
    versions = RegistrySnapshot.by(run(remote.events())).versions
    return {str(name): hashes.digest for name, hashes in versions.items()}


@pytest.mark.req("K-RG-03")
def test_all_content_travels_between_any_two_kinds_of_registry_unchanged(
    source: RemoteRegistry, target: RemoteRegistry
) -> None:
    done = run(copy(source, target))

    names = [release.name for release in CHAIN]
    assert set(done.new) == set(names)
    assert held(target) == held(source) == {str(release.name): release.digest for release in CHAIN}
    found = {release.name: release for release in run(target.read(names))}
    for release in CHAIN:
        copied = found[release.name]
        assert sorted(copied.files, key=lambda file: file.path) == sorted(release.files, key=lambda file: file.path)
        assert (copied.statement, copied.executor, copied.place) == (release.statement, release.executor, release.place)
        assert (copied.created_at, copied.published_by) == (release.created_at, release.published_by)


def test_a_second_sync_of_an_unchanged_registry_reads_and_writes_nothing(
    source: RemoteRegistry, target: RemoteRegistry
) -> None:
    run(copy(source, target))
    watched, written = Watched(source), Watched(target)

    again = run(copy(watched, written))

    assert (again.new, again.unchanged, again.status_changes) == ((), 3, 0)
    assert watched.read_names == written.written == []


def test_a_later_sync_reads_only_what_the_target_lacks(new_remote: MakeRemote) -> None:
    source, target = new_remote("folder", *CHAIN), new_remote("sqlite")
    run(copy(source, target))
    newer = a_release("acme/greeter@1.1.0", on=RUNTIME)
    run(source.write([newer], ()))
    watched = Watched(source)

    done = run(copy(watched, target))

    assert done.new == (newer.name,)
    assert watched.read_names == [newer.name]


@pytest.mark.req("K-RG-02")
def test_yanks_and_deprecations_travel_and_can_be_reversed(source: RemoteRegistry, target: RemoteRegistry) -> None:
    run(copy(source, target))
    run(source.write((), [a_mark("yank", GREETER, reason="leaks"), a_mark("deprecate", RUNTIME, reason="old")]))

    done = run(copy(source, target))

    assert (done.new, done.status_changes) == ((), 2)
    greeter, runtime = run(target.read([GREETER.name, RUNTIME.name]))
    assert greeter.yanked is not None
    assert (greeter.yanked.at, greeter.yanked.reason) == ("2026-02-01T00:00:00.000Z", "leaks")
    assert runtime.deprecated is not None
    assert runtime.deprecated.reason == "old"
    assert run(copy(source, target)).status_changes == 0

    run(source.write((), [a_mark("unyank", GREETER, at="2026-03-01T00:00:00.000Z")]))
    assert run(copy(source, target)).status_changes == 1
    assert run(target.read([GREETER.name]))[0].yanked is None


def test_a_new_version_brings_its_status(new_remote: MakeRemote) -> None:
    source, target = new_remote("sqlite", *CHAIN), new_remote("sqlite")
    run(source.write((), [a_mark("yank", GREETER, reason="leaks")]))

    run(copy(source, target))

    assert run(target.read([GREETER.name]))[0].yanked is not None
    third = new_remote("sqlite", *CHAIN)
    run(copy(target, third))  # the mark is in the log of the copy as well
    assert run(third.read([GREETER.name]))[0].yanked is not None


def test_an_older_status_does_not_replace_a_later_one(new_remote: MakeRemote) -> None:
    source, target = new_remote("sqlite", *CHAIN), new_remote("sqlite", *CHAIN)
    run(source.write((), [a_mark("yank", GREETER, at="2026-02-01T00:00:00.000Z")]))
    run(copy(source, target))
    run(target.write((), [a_mark("unyank", GREETER, at="2026-02-02T00:00:00.000Z")]))

    assert run(copy(source, target)).status_changes == 0
    assert run(target.read([GREETER.name]))[0].yanked is None


def test_every_conflict_is_reported_and_nothing_is_written(new_remote: MakeRemote) -> None:
    others = [replace_code(release) for release in (BASE,)]
    lone = a_release("acme/lone@1.0.0")
    source = new_remote("sqlite", *CHAIN, lone, a_release("acme/fresh@1.0.0"))
    target = new_remote("folder", *others, a_release("acme/lone@1.0.0", code="print('other')\n"))
    before = held(target)

    with pytest.raises(VersionConflict) as refused:
        run(copy(source, target))

    assert refused.value.details["conflicts"] == ["acme/base@1.0.0", "acme/lone@1.0.0"]
    assert held(target) == before


def replace_code(release: CheckedRelease) -> CheckedRelease:
    return a_release(str(release.name), code="print('something else')\n")


def other_bytes(release: Release) -> Release:
    files = tuple(replace(file, data=file.data + b"#") if file.path == "main.py" else file for file in release.files)
    return replace(release, files=files)


def other_statement(release: Release) -> Release:
    return a_release(str(release.name), on=RUNTIME if release.executor else None, code="print('evil')\n")


@pytest.mark.req("K-SI-01")
@pytest.mark.parametrize("change", [other_bytes, other_statement, lambda _: BASE])
def test_a_source_that_returns_other_content_than_announced_is_refused(
    new_remote: MakeRemote, change: Callable[[Release], Release]
) -> None:
    source = Watched(new_remote("folder", *CHAIN), change)
    target = new_remote("sqlite")

    with pytest.raises(ArtifactRefused):
        run(copy(source, target))
    assert held(target) == {}
    with pytest.raises(ArtifactRefused):
        run(pull(source, target, VersionQuery.parse("greeter"), namespaces=EVE.order))
    assert held(target) == {}


def test_an_interrupted_sync_resumes(new_remote: MakeRemote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiwi_mcp.store.remote.sync._FIRST_BATCH", 2)
    monkeypatch.setattr("kiwi_mcp.store.remote.sync._LARGEST_BATCH", 2)
    many = [a_release(f"acme/tool-{number}@1.0.0") for number in range(7)]
    source, target = new_remote("sqlite", *many), new_remote("sqlite")

    class Broken(Watched):
        async def write(
            self, releases: Sequence[CheckedRelease], events: Sequence[RegistryEvent]
        ) -> Sequence[PublishResult]:
            if len(self.written) >= 4:
                raise InvalidRequest("The power is gone.", suggestion="Wait.")
            return await super().write(releases, events)

    with pytest.raises(InvalidRequest):
        run(copy(source, Broken(target)))
    assert len(held(target)) == 4
    watched = Watched(source)
    done = run(copy(watched, target))
    assert len(done.new) == len(watched.read_names) == 3
    assert held(target) == held(source)


def test_progress_is_reported(new_remote: MakeRemote) -> None:
    steps: list[Progress] = []
    run(copy(new_remote("folder", *CHAIN), new_remote("folder"), report=steps.append))

    assert steps
    assert (steps[-1].done, steps[-1].total) == (3, 3)


@pytest.mark.req("K-RG-04")
def test_private_items_are_copied_only_on_request(new_remote: MakeRemote) -> None:
    secret = a_release("acme/secret@1.0.0", visibility="private")
    above = a_release("acme/above@1.0.0", on=secret, visibility="private")
    source = new_remote("sqlite", *CHAIN, secret, above)
    target, full = new_remote("sqlite"), new_remote("sqlite")

    run(copy(source, target))

    assert set(held(target)) == {str(release.name) for release in CHAIN}
    run(copy(source, full, with_private=True))
    assert held(full) == held(source)
    assert run(full.read([secret.name]))[0].visibility == "private"


def test_a_private_executor_does_not_travel_with_a_public_item(new_remote: MakeRemote) -> None:
    secret = a_release("acme/secret@1.0.0", visibility="private")
    source = new_remote("folder", *CHAIN, secret, a_release("acme/above@1.0.0", on=secret))
    target = new_remote("sqlite")

    done = run(copy(source, target))

    assert set(held(target)) == {str(release.name) for release in CHAIN}
    assert done.left_out == ("acme/above@1.0.0: it depends on acme/secret@1.0.0, and it is private",)


def test_a_version_that_is_no_longer_private_is_copied(new_remote: MakeRemote) -> None:
    secret = a_release("acme/secret@1.0.0", visibility="private")
    source, target = new_remote("sqlite", *CHAIN, secret), new_remote("sqlite")
    run(copy(source, target))
    run(source.write((), [a_mark("visibility", secret, reason="public")]))

    assert run(copy(source, target)).new == (secret.name,)


def test_a_selection_includes_its_executors(new_remote: MakeRemote) -> None:
    other = a_release("public/other@1.0.0")
    target = new_remote("sqlite")
    run(copy(new_remote("sqlite", *CHAIN, other), target, only=lambda name: name == GREETER.name))

    assert set(held(target)) == {str(release.name) for release in CHAIN}


@pytest.mark.parametrize("kind", ["folder", "sqlite"])
def test_built_in_items_do_not_travel_and_tools_on_them_do(kind: str, new_remote: MakeRemote) -> None:
    ground = a_release("kiwi/ground@1.0.0", is_builtin=True, is_official=True)
    above = a_release("acme/above@1.0.0", on=ground)
    target = new_remote("sqlite")
    run(copy(new_remote(kind, above), target))

    assert set(held(target)) == {str(above.name)}
    assert run(target.read([above.name]))[0].executor == above.executor
    with pytest.raises(NamespaceDenied):
        run(target.write([ground], ()))
    folder = new_remote("folder", ground)
    assert run(copy(folder, target)).new == ()
    with pytest.raises(InvalidRequest, match="comes with Kiwi"):
        run(pull(folder, target, VersionQuery.parse("kiwi/ground"), namespaces=()))


def test_only_built_in_items_are_official(new_remote: MakeRemote) -> None:
    target = new_remote("sqlite")
    with pytest.raises(ArtifactRefused):
        run(copy(new_remote("folder", a_release("acme/proud@1.0.0", is_official=True)), target))
    assert held(target) == {}


def test_a_tool_on_a_different_executor_is_omitted_and_reported(new_remote: MakeRemote) -> None:
    ground = a_release("acme/ground@1.0.0")
    above = a_release("acme/above@1.0.0", on=ground)
    target = new_remote("sqlite", a_release("acme/ground@1.0.0", code="print('another')\n"))
    source = new_remote("sqlite", ground, above, BASE)

    done = run(copy(source, target, only=lambda name: name.tool_id != "ground"))

    assert done.new == (BASE.name,)
    assert [line.partition(":")[0] for line in done.left_out] == [str(above.name)]


def test_an_actor_writes_only_to_their_own_namespaces_of_a_shared_registry(new_remote: MakeRemote) -> None:
    shared = new_remote("sqlite", actor=Actor("bob", ("bobs",)), is_own=False)
    with pytest.raises(NamespaceDenied):
        run(copy(new_remote("folder", *CHAIN), shared))
    assert held(shared) == {}


@pytest.mark.req("K-ME-02")
def test_one_version_is_pulled_with_its_whole_chain_and_nothing_else(
    source: RemoteRegistry, target: RemoteRegistry
) -> None:
    run(source.write([a_release("acme/other@1.0.0")], ()))

    published = run(pull(source, target, VersionQuery.parse("acme/greeter"), namespaces=()))

    assert [one.name for one in published] == [BASE.name, RUNTIME.name, GREETER.name]
    assert all(one.is_new for one in published)
    assert set(held(target)) == {str(release.name) for release in CHAIN}
    again = run(pull(source, target, VersionQuery.parse(GREETER.digest), namespaces=EVE.order))
    assert [(one.name, one.is_new) for one in again] == [(release.name, False) for release in CHAIN]


@pytest.mark.req("K-CH-04")
@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("greeter", "acme/greeter@1.2.0"),
        ("acme/greeter", "acme/greeter@1.2.0"),
        ("public/greeter", "public/greeter@9.0.0"),
        ("greeter@^1.0", "acme/greeter@1.2.0"),
        ("greeter@1.0.0", "acme/greeter@1.0.0"),
        ("greeter@1.3.0", "acme/greeter@1.3.0"),
        ("greeter@2.0.0-rc.1", "acme/greeter@2.0.0-rc.1"),
        ("pre", "acme/pre@0.1.0-a"),
    ],
)
def test_a_query_selects_the_highest_usable_version(new_remote: MakeRemote, wanted: str, chosen: str) -> None:
    versions = ["acme/greeter@1.0.0", "acme/greeter@1.2.0", "acme/greeter@1.3.0", "acme/greeter@2.0.0-rc.1"]
    releases = [a_release(name) for name in (*versions, "public/greeter@9.0.0", "acme/pre@0.1.0-a")]
    source = new_remote("sqlite", *releases)
    run(source.write((), [a_mark("yank", a_release("acme/greeter@1.3.0"))]))

    response = RegistrySnapshot.by(run(source.events()))

    assert str(VersionQuery.parse(wanted).choose(response, EVE.order)) == chosen
    first = VersionQuery.parse(response.versions[VersionName("acme", "greeter", "1.0.0")].digest)
    assert str(first.choose(response, ["acme"])) == versions[0]


@pytest.mark.parametrize("wanted", ["greeter@^7", "acme/nothing", "strange", f"sha256:{'0' * 64}"])
def test_a_query_without_a_match_lists_the_available_versions(new_remote: MakeRemote, wanted: str) -> None:
    source, target = new_remote("sqlite", *CHAIN, a_release("public/strange@1.0.0")), new_remote("folder")
    with pytest.raises(NotFound) as missing:
        run(pull(source, target, VersionQuery.parse(wanted), namespaces=["acme"]))
    assert missing.value.suggestion
    assert held(target) == {}


@pytest.mark.parametrize("text", ["", "a b", "@1.0.0", "a/b/c", "../x", "x@not a range", "X", "x" * 500, "a@sha256:zz"])
def test_a_query_without_a_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        VersionQuery.parse(text)


def test_a_cyclic_or_endless_chain_is_refused(new_remote: MakeRemote) -> None:
    target = new_remote("sqlite")
    first = a_release("acme/one@1.0.0", on=BASE)
    knot = replace(unchecked(first), executor=Pin("base", first.name, first.digest))
    links = [a_release("acme/link-0@1.0.0")]
    for number in range(1, 40):
        links.append(a_release(f"acme/link-{number}@1.0.0", on=links[-1]))
    for releases, wish in (([knot], "one"), (links, "link-39")):
        with pytest.raises(KiwiError):
            run(pull(Claiming(releases), target, VersionQuery.parse(wish), namespaces=["acme"]))
    assert held(target) == {}


class Claiming:
    """A remote that claims whatever it was made with."""

    key = "claiming"
    etag = ""

    def __init__(self, releases: Sequence[Release]) -> None:
        self._releases = {release.name: release for release in releases}

    async def events(self, unless: str = "") -> Sequence[RegistryEvent]:
        return [replace(a_mark("publish", release), seq=n) for n, release in enumerate(self._releases.values(), 1)]

    async def history(self, tool_id: str) -> Sequence[RegistryEvent]:
        return [event for event in await self.events() if event.name.tool_id == tool_id]

    async def read(self, names: Sequence[VersionName]) -> Sequence[Release]:
        return [self._releases[name] for name in names]

    async def write(
        self, releases: Sequence[CheckedRelease], events: Sequence[RegistryEvent]
    ) -> Sequence[PublishResult]:
        raise AssertionError("it is only read")

    async def aclose(self) -> None:
        pass


def test_a_log_that_publishes_one_version_twice_is_refused() -> None:
    twice = [a_mark("publish", BASE), a_mark("publish", replace_code(BASE))]
    with pytest.raises(ArtifactRefused):
        RegistrySnapshot.by(twice)


class LongHistory(Registry):
    """A registry in which much happened to one item."""

    def history(self, tool_id: str, after: int = 0, limit: int = 100) -> tuple[RegistryEvent, ...]:
        """Return one page of a thousand events."""
        events = (replace(a_mark("yank", BASE), seq=seq) for seq in range(after + 1, min(after + limit, 1_000) + 1))
        return tuple(events)


async def test_the_whole_history_of_a_name_is_read(tmp_path: Path) -> None:
    database = open_database(f"sqlite://{tmp_path}/a.db")
    remote = LocalRegistry(LongHistory(database, Actor("ann", ("acme",))), "here")
    assert [event.seq for event in await remote.history("base")] == [*range(1, 1_001)]
    database.close()
