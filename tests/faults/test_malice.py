"""Malicious versions, by every way into a registry: refused before the store or the cache is written."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from threading import Thread

import pytest
import uvicorn
from msgspec.structs import replace

import kiwi_mcp
from kiwi_mcp.domain.items import ToolFile
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.registry import Actor, Pin, Release, ReleaseFile, VersionName
from kiwi_mcp.kernel import Answer
from kiwi_mcp.manifest.signatures import statement_of
from kiwi_mcp.policy.tokens import TokenStore
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import MAX_FILES
from kiwi_mcp.store.remote.http import BLOBS, INDEX
from kiwi_mcp.store.remote.layout import LayoutEntry, encode
from kiwi_mcp.surfaces.gateway.auth import Authenticator
from kiwi_mcp.surfaces.gateway.server import GatewayConfig, _config, gateway

Ask = Callable[..., Answer]
Tree = Callable[[Path], Mapping[str, str]]

TABLES = (
    "namespaces", "tools", "tool_versions", "tool_version_files", "blobs", "registry_log", "remotes", "tool_types",
)  # fmt: skip
MAIN = ReleaseFile("main.sh", b"echo hello\n")


def a_release(
    name: str = "public/say@1.0.0",
    *,
    on: Pin | None = None,
    kind: str = "script",
    files: Sequence[ReleaseFile] = (MAIN,),
    manifest: str = "",
) -> Release:
    """A version as an attacker makes it: whatever the files are, it is stated and hashed as it should be."""
    namespace, _, rest = name.partition("/")
    tool_id, _, version = rest.partition("@")
    text = manifest or f"tool_id: {tool_id}\ntool_type: {kind}\nversion: {version}\ndescription: Says.\n" + (
        f"executor: {on.ref}\nconfig:\n  entrypoint: main.sh\n" if on else ""
    )
    statement = statement_of(
        tool_id=tool_id,
        version=version,
        executor=on.ref if on else None,
        manifest_body=text.encode(),
        files=[ToolFile(file.path, file.sha256, len(file.data), file.is_executable) for file in files],
    )
    whole = (*files, ReleaseFile("tool.yaml", text.encode()))
    return Release(VersionName(namespace, tool_id, version), f"tools/{tool_id}/tool.yaml", statement, {}, whole, on)


def pin(release: Release) -> Pin:
    return Pin(release.name.tool_id, release.name, release.digest)


BASE = a_release("public/base@1.0.0", kind="primitive")
RUNTIME = a_release("public/my_runtime@1.0.0", kind="runtime", on=pin(BASE))
SAY = a_release(on=pin(RUNTIME))


def layout_of(folder: Path, *releases: Release) -> Path:
    """A folder with these versions and a matching index, without any check."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    rows = []
    for release in releases:
        artifact = encode(release)
        rows.append(LayoutEntry.of(release, artifact).to_json())
        for data in {artifact.manifest, *artifact.blobs.values()}:
            if not (path := blobs / sha256(data).hexdigest()).exists():
                path.write_bytes(data)
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": rows}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


def blob_of(folder: Path, data: bytes) -> Path:
    return folder / "blobs" / "sha256" / sha256(data).hexdigest()


def with_files(*files: ReleaseFile) -> Callable[[Path], Path]:
    return lambda folder: layout_of(folder, BASE, RUNTIME, a_release(on=pin(RUNTIME), files=(MAIN, *files)))


def linked(folder: Path) -> Path:
    layout_of(folder, BASE, RUNTIME, SAY)
    outside = folder.with_name("outside")
    outside.write_bytes(MAIN.data)
    blob_of(folder, MAIN.data).unlink()
    blob_of(folder, MAIN.data).symlink_to(outside)
    return folder


def with_other_bytes(folder: Path) -> Path:
    layout_of(folder, BASE, RUNTIME, SAY)
    blob_of(folder, MAIN.data).write_bytes(MAIN.data.replace(b"hello", b"EVIL!"))
    return folder


def with_a_larger_blob(folder: Path) -> Path:
    layout_of(folder, BASE, RUNTIME, SAY)
    with blob_of(folder, MAIN.data).open("r+b") as file:
        file.truncate(5_000_000_000)  # a hole: it takes no room, and would take all memory
    return folder


def without_a_blob(folder: Path) -> Path:
    layout_of(folder, BASE, RUNTIME, SAY)
    blob_of(folder, MAIN.data).unlink()
    return folder


def with_a_false_index(folder: Path) -> Path:
    layout_of(folder, BASE, RUNTIME, SAY)
    index = folder / "index.json"
    index.write_text(index.read_text().replace(SAY.digest, f"sha256:{'0' * 64}"))
    return folder


def with_a_false_name(folder: Path) -> Path:
    other = a_release("public/other@1.0.0", on=pin(RUNTIME))
    return layout_of(folder, BASE, RUNTIME, replace(other, name=SAY.name, place=SAY.place))


def with_a_bomb(folder: Path) -> Path:
    levels = "".join(f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 9)}]\n" for level in range(1, 9))
    text = f"tool_id: say\ntool_type: primitive\nversion: 1.0.0\nl0: &l0 [x]\n{levels}"
    return layout_of(folder, a_release(kind="primitive", manifest=text))


def in_a_circle(folder: Path) -> Path:
    first = a_release("public/first@1.0.0", kind="runtime", on=Pin("say", SAY.name, f"sha256:{'1' * 64}"))
    return layout_of(folder, first, a_release(on=pin(first)))


def with_a_thousand_links(folder: Path) -> Path:
    chain = [BASE]
    for number in range(1_000):
        name = "public/say@1.0.0" if number == 999 else f"public/link_{number}@1.0.0"
        chain.append(a_release(name, kind="runtime", on=pin(chain[-1])))
    return layout_of(folder, *chain)


MALICE: Mapping[str, Callable[[Path], Path]] = {
    "a path above": with_files(ReleaseFile("../../evil.sh", b"evil")),
    "an absolute path": with_files(ReleaseFile("/tmp/evil.sh", b"evil")),
    "a path of another system": with_files(ReleaseFile("..\\evil.sh", b"evil")),
    "a path twice": with_files(ReleaseFile("a.sh", b"a"), ReleaseFile("a.sh", b"a")),
    "letters that collide": with_files(ReleaseFile("a.sh", b"a"), ReleaseFile("A.sh", b"b")),
    "a file that is a folder": with_files(ReleaseFile("lib", b"a"), ReleaseFile("lib/a.sh", b"b")),
    "files without end": with_files(*(ReleaseFile(f"f{number}", b"") for number in range(MAX_FILES + 1))),
    "a link": linked,
    "other bytes": with_other_bytes,
    "a larger blob": with_a_larger_blob,
    "a missing blob": without_a_blob,
    "a false index": with_a_false_index,
    "a false name": with_a_false_name,
    "a bomb": with_a_bomb,
    "a circle": in_a_circle,
    "a thousand links": with_a_thousand_links,
}


def dump(database: Database) -> dict[str, list[str]]:
    """Every row of the registry's tables."""
    return {table: sorted(map(repr, database.read(f"select * from {table}"))) for table in TABLES}


@pytest.fixture
def own(store_url: str, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """The user's own store, seeded, of each kind."""
    monkeypatch.setenv("KIWI_REGISTRY", store_url)
    assert "error" not in ask("registry").content
    database = open_database(store_url)
    yield database
    database.close()


def check_refused(answer: JsonObject) -> None:
    assert answer["code"] == "artifact_refused", answer
    assert answer["suggestion"]
    issues = [as_object(issue) for issue in as_list(answer["issues"])]
    assert issues
    assert all(issue["reason"] and issue["fix"] for issue in issues)


@pytest.mark.case("PATH-03", "PATH-08", "PATH-09", "BOMB-08")
@pytest.mark.parametrize("what", MALICE)
def test_a_malicious_folder_is_refused_before_anything_is_written(
    what: str, own: Database, ask: Ask, tmp_path: Path, home: Path, tree: Tree
) -> None:
    folder = MALICE[what](tmp_path / "folder")
    before, files = dump(own), tree(home)

    begun = time.monotonic()
    check_refused(ask("registry", action="pull", remote=str(folder)).content)
    check_refused(ask("execute", action="pull", item_id="public/say", parameters={"from": str(folder)}).content)
    assert time.monotonic() - begun < 60

    assert dump(own) == before
    assert tree(home) == files


def test_all_problems_of_a_folder_are_reported_at_once(own: Database, ask: Ask, tmp_path: Path) -> None:
    bad = [a_release(f"public/bad_{number}@1.0.0", kind="primitive", files=[MAIN, ReleaseFile(path, b"")])
           for number, path in enumerate(("../x", "/x", "a//b"))]  # fmt: skip
    before = dump(own)

    refused = ask("registry", action="pull", remote=str(layout_of(tmp_path / "folder", *bad))).content

    check_refused(refused)
    places = " ".join(as_text(as_object(issue)["place"]) for issue in as_list(refused["issues"]))
    assert all(str(release.name) in places for release in bad)
    assert dump(own) == before


def test_a_bad_version_among_many_good_ones_never_arrives(own: Database, ask: Ask, tmp_path: Path) -> None:
    good = [a_release(f"public/good_{number}@1.0.0", kind="primitive") for number in range(60)]
    bad = a_release("public/bad@1.0.0", kind="primitive", files=[MAIN, ReleaseFile("../x", b"")])

    folder = str(layout_of(tmp_path / "folder", *good, bad))
    check_refused(ask("registry", action="pull", remote=folder, accept_unsigned=True).content)

    registry = Registry(own, Actor("ann"))
    assert registry.named("bad", "public") == ()
    assert [*registry.verify()] == []


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that runs before a store, and tokens that may write to it."""

    port: int
    tokens: TokenStore

    def push(self, folder: Path, rows: Sequence[Json]) -> JsonObject:
        """Send at most a hundred blobs of a folder and then an index, as an attacker does."""
        token = self.tokens.add(f"eve-{len(self.tokens.all())}", ["public"], can_write=True)
        for blob in islice((folder / "blobs" / "sha256").iterdir(), 100):
            with blob.open("rb") as file:
                data = file.read(100_000)
            self._put(f"{BLOBS}/{sha256(data).hexdigest()}", data, token)
        return self._put(INDEX, json.dumps({"schemaVersion": 2, "manifests": rows}).encode(), token)

    def _put(self, path: str, data: bytes, token: str) -> JsonObject:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("PUT", path, data, {"Authorization": f"Bearer {token}"})
            return as_object(json.loads(connection.getresponse().read()))
        finally:
            connection.close()


@pytest.fixture
def served(own: Database, home: Path) -> Iterator[Gateway]:
    tokens = TokenStore(home / ".ai")
    door = Authenticator(tokens, host="127.0.0.1", names=[], is_read_only=False, is_open=False)
    server = uvicorn.Server(_config(gateway(Registry(own, Actor("owner", ("public",))), door), GatewayConfig(port=0)))
    with _running(server):
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Gateway(port, tokens)


@contextmanager
def _running(server: uvicorn.Server) -> Iterator[None]:
    thread = Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    end = time.monotonic() + 120
    while not server.started:
        assert time.monotonic() < end
        time.sleep(0.005)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(120)


@pytest.mark.usefixtures("loopback")
@pytest.mark.case("PATH-03", "PATH-08", "PATH-09", "BOMB-08")
def test_malicious_pushes_are_refused_by_the_gateway_before_anything_is_written(
    served: Gateway, own: Database, tmp_path: Path
) -> None:
    before = dump(own)
    # A link exists in a folder alone.
    for what in MALICE.keys() - {"a link"}:
        folder = MALICE[what](tmp_path / what)
        answer = served.push(folder, rows_of(folder))
        assert answer["code"] == ("too_large" if what == "a thousand links" else "artifact_refused"), (what, answer)
        assert answer["suggestion"]
        assert dump(own) == before, what


def rows_of(folder: Path) -> list[Json]:
    rows: list[Json] = json.loads((folder / "index.json").read_text())["manifests"]
    return rows


@pytest.fixture
def impostors(tmp_path: Path) -> Path:
    """A folder that impersonates Kiwi: a new primitive, newer versions of built-in items, and a trap."""
    evil = a_release("kiwi/evil@1.0.0", kind="primitive")
    runtime = a_release("kiwi/bash_runtime@99.0.0", kind="runtime", on=pin(evil))
    server = a_release("kiwi/github_mcp@99.0.0", on=pin(runtime))
    trap = a_release("public/trap@1.0.0", on=pin(runtime))
    official = [replace(one, is_official=True, is_builtin=True) for one in (evil, runtime, server)]
    return layout_of(tmp_path / "impostors", *official, trap)


def identity(answer: Answer) -> Json:
    return answer.content.get("identity", answer.content.get("code"))


def test_no_item_from_outside_takes_a_name_of_kiwi(own: Database, ask: Ask, impostors: Path) -> None:
    names = ("evil", "bash_runtime", "github_mcp", "registry/kiwi/evil", "registry/kiwi/github_mcp")
    before = {name: identity(ask("load", item_id=name)) for name in names}
    assert before["evil"] == "tool_not_found"
    assert "kiwi/bash_runtime@" in str(before["bash_runtime"])

    everything = ask("registry", action="pull", remote=str(impostors), accept_unsigned=True).content
    for name in ("kiwi/github_mcp@99.0.0", "kiwi/evil@1.0.0", "public/trap"):
        ask("execute", action="pull", item_id=name, parameters={"from": str(impostors)})

    assert "error" not in everything
    assert {name: identity(ask("load", item_id=name)) for name in names} == before
    exact = [identity(ask("load", item_id=f"registry/kiwi/{name}")) for name in ("evil@1.0.0", "github_mcp@99.0.0")]
    assert not {f"registry/kiwi/{name}" for name in ("evil@1.0.0", "github_mcp@99.0.0")} & {*map(str, exact)}
    assert ask("execute", item_id="evil").content["code"] == "tool_not_found"
    found = str(ask("search", query="says", source="all", limit=100).content)
    assert "kiwi/evil" not in found
    assert "99.0.0" not in found
    latest = {one.name.tool_id: one.name.version for one in Registry(own, Actor("ann")).find() if one.is_official}
    assert "99.0.0" not in latest.values()
    assert "evil" not in latest


@pytest.mark.usefixtures("sandbox")
def test_a_tool_on_an_impostor_runs_on_the_built_in_and_reports_it(ask: Ask, own: Database, impostors: Path) -> None:
    ask("registry", action="pull", remote=str(impostors), accept_unsigned=True)

    ran = ask("execute", item_id="trap").content

    assert ran["result"] == "hello"
    assert any("kiwi/bash_runtime@99.0.0" in as_text(warning) for warning in as_list(ran["warnings"]))


@pytest.mark.usefixtures("loopback")
def test_the_gateway_refuses_an_impostor(served: Gateway, own: Database, impostors: Path) -> None:
    before = dump(own)
    rows = rows_of(impostors)
    for some in (rows, rows[:1], rows[:3]):
        answer = served.push(impostors, some)
        assert answer["code"] in {"namespace_denied", "artifact_refused"}, answer
    assert dump(own) == before


@pytest.mark.usefixtures("processes")
def test_the_commands_report_the_refusal_and_leave_nothing(tmp_path: Path, project: Path, home: Path) -> None:
    folder = MALICE["a path above"](tmp_path / "folder")
    for words in (["registry", "remote", "pull", str(folder)], ["pull", "public/say", "--from", str(folder)]):
        done = kiwi(project, *words)
        assert done.returncode == 5, done.stderr
        assert "evil.sh" in done.stderr
        assert "hint:" in done.stderr
        assert done.stdout == ""
    listed = kiwi(project, "registry", "list", "--json").stdout
    assert '"bash_runtime"' in listed
    assert '"say"' not in listed
    assert [*tmp_path.rglob("evil.sh")] == []


def kiwi(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    program = [sys.executable, "-c", "from kiwi_mcp.surfaces.start import main; main()"]
    env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])}
    return subprocess.run(
        [*program, *words, "--project", str(project)], env=env, capture_output=True, text=True, timeout=120, check=False
    )
