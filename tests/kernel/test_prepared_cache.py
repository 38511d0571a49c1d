"""A prepared item is used again, and never after a change of anything that it depends on.

Each subject is changed in each way that makes sense for it. Files of items and the lockfile are never read through a
symbolic link, so a swapped link is tried with the owner's files, which may be links. Every case runs with inotify and
with stats alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import pytest
from msgspec.structs import replace

from kiwi_mcp.domain.calls import NO_CALLER, Call
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.mcp import Definition, ServerKey, ServerRecord
from kiwi_mcp.domain.records import RunRecord
from kiwi_mcp.drivers.process import Process
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.manifest.signatures import canonical, sha256_hex
from kiwi_mcp.primitives import file_watch
from kiwi_mcp.primitives.file_watch import FileWatch
from kiwi_mcp.store.runs import new_run

TOOL = """# tool_type: script
# executor: bash_runtime
# version: 1.0.0
# description: Say something
# parameters:
#   - {name: word, type: string}
echo "$KIWI_PARAM_word"
"""
SERVER = """tool_id: files
tool_type: mcp_server
version: 1.0.0
executor: subprocess
config: {transport: stdio, command: sh}
"""
MOST_CALLS = 400
"""How often an item is called until it is kept: files that were just written are read again for a moment."""


class Bench:
    """A signed tool in a project, a kernel, and the files that decide about it."""

    def __init__(self, project: Path, home: Path) -> None:
        self.project, self.home, self.user = project, home, home / ".ai"
        self.kernel = Kernel(project)
        self.tool = project / ".ai" / "tools" / "say.sh"
        self.tool.parent.mkdir(parents=True)
        self.tool.write_text(TOOL)

    async def set_up(self) -> None:
        await self.ask("key", action="new", name="own")
        await self.ask("execute", action="sign", item_id="say", item_type="tool")
        (self.user / "policy.yaml").write_text("hosts: {deny: [a.example]}\n")
        (self.home / "deployment.yaml").write_text("deployment: local\n")

    async def ask(self, verb: str, **request: Json) -> JsonObject:
        return (await self.kernel.call(verb, request)).content

    async def plan(self, item_id: str = "say") -> JsonObject:
        """Return what a call would do; it is prepared as for a run, and nothing starts."""
        return await self.ask("execute", action="run", item_id=item_id, dry_run=True, parameters={})

    def is_kept(self, item_id: str = "say") -> bool:
        services = self.kernel._services
        catalog = services.catalogs.at(None)
        context = services.context(NO_CALLER, catalog)
        return services.prepared.get(Call(item_id, catalog.space), "", catalog, context.rights) is not None

    async def warm(self, item_id: str = "say") -> JsonObject:
        """Call the item until it is kept, and return the response from what is kept."""
        for _ in range(MOST_CALLS):
            response = await self.plan(item_id)
            assert response.get("status") == "planned", response
            if self.is_kept(item_id):
                return await self.plan(item_id)
        raise AssertionError("It was never kept.")


@pytest.fixture
async def bench(project: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(Process, "check", lambda *_: None)  # signing would start bash to check the syntax
    monkeypatch.setenv("KIWI_DEPLOYMENT", str(home / "deployment.yaml"))
    (home / "deployment.yaml").write_text("deployment: local\n")
    bench = Bench(project, home)
    await bench.set_up()
    return bench


@pytest.fixture
async def stored(bench: Bench, store_url: str) -> AsyncIterator[Bench]:
    """The bench with a store of each kind."""
    (bench.user / "registry.yaml").write_text(f"url: {store_url}\nactor: ana\n")
    (bench.user / "state" / "last_store").write_text(store_url)  # as `kiwi registry move --empty` leaves it
    await bench.set_up()
    yield bench
    await bench.kernel.aclose()


@pytest.fixture(params=["inotify", "stat"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How changes of files are noticed."""
    file_watch.watch.close()
    monkeypatch.setattr(file_watch.watch, "_has_inotify", request.param == "inotify")
    return str(request.param)


@dataclass(frozen=True)
class Subject:
    """A file that decides about a call, a change of it, and how the next response shows the change."""

    path: Callable[[Bench], Path]
    change: Callable[[str], str]
    shows: Callable[[JsonObject], bool]


def another_lock(text: str) -> str:
    lock = json.loads(text)
    lock["tools"]["project/local/say"]["chain"][1]["version"] = "0.0.1"
    return json.dumps(lock)


def revoked(text: str) -> str:
    # Each own key begins a block of its facts, the first of which is its name.
    return text.replace("name: own", "revoked: 2020-01-01T00:00:00Z\n    name: own")


def warns(word: str) -> Callable[[JsonObject], bool]:
    return lambda response: any(word in as_text(one) for one in as_list(response.get("warnings")))


def refused(code: str) -> Callable[[JsonObject], bool]:
    return lambda response: response.get("code") == code


SUBJECTS = {
    "tool": Subject(lambda bench: bench.tool, lambda text: f"{text}echo more\n", refused("content_hash_mismatch")),
    "lock": Subject(lambda bench: bench.project / ".ai" / "kiwi.lock", another_lock, warns("lockfile")),
    "policy": Subject(
        lambda bench: bench.user / "policy.yaml",
        lambda _: 'items: {deny: ["*/say@*"]}\n',
        refused("not_permitted"),
    ),
    "key": Subject(lambda bench: bench.user / "trust.yaml", revoked, warns("revoked")),
    "deployment": Subject(
        lambda bench: bench.home / "deployment.yaml",
        lambda _: "deployment: managed\nitems: {allow: []}\n",
        refused("not_permitted"),
    ),
}
OWNERS = ("policy", "key", "deployment")
"""The files that may be symbolic links."""


async def sees(bench: Bench, subject: Subject) -> None:
    response = await bench.plan()
    assert subject.shows(response), response
    assert not bench.is_kept() or subject.shows(await bench.plan())


@pytest.mark.parametrize("name", SUBJECTS)
async def test_the_next_call_sees_a_file_that_was_written(bench: Bench, mode: str, name: str) -> None:
    subject = SUBJECTS[name]
    path = subject.path(bench)
    assert not subject.shows(await bench.warm())
    path.write_text(subject.change(path.read_text()))
    await sees(bench, subject)


@pytest.mark.parametrize("name", SUBJECTS)
async def test_the_next_call_sees_a_file_that_was_replaced(bench: Bench, mode: str, name: str) -> None:
    subject = SUBJECTS[name]
    path = subject.path(bench)
    fresh = bench.home / "fresh"
    fresh.write_text(subject.change(path.read_text()))
    assert not subject.shows(await bench.warm())
    fresh.replace(path)
    await sees(bench, subject)


@pytest.mark.parametrize("name", SUBJECTS)
async def test_the_next_call_sees_a_file_that_another_process_wrote(
    bench: Bench, mode: str, name: str, processes: None
) -> None:
    subject = SUBJECTS[name]
    path = subject.path(bench)
    assert not subject.shows(await bench.warm())
    script = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    text = subject.change(path.read_text())
    subprocess.run([sys.executable, "-I", "-S", "-c", script, str(path), text], check=True)  # noqa: ASYNC221 - a moment
    await sees(bench, subject)


@pytest.mark.parametrize("name", OWNERS)
async def test_the_next_call_sees_a_symbolic_link_that_was_exchanged(bench: Bench, mode: str, name: str) -> None:
    subject = SUBJECTS[name]
    path = subject.path(bench)
    first, second, link = (bench.home / one for one in ("first", "second", "link"))
    second.write_text(subject.change(path.read_text()))
    path.rename(first)
    path.symlink_to(first)
    link.symlink_to(second)
    assert not subject.shows(await bench.warm())
    link.rename(path)
    await sees(bench, subject)


@pytest.mark.parametrize("name", OWNERS)
async def test_the_next_call_sees_a_change_behind_a_symbolic_link(bench: Bench, mode: str, name: str) -> None:
    subject = SUBJECTS[name]
    path, real = subject.path(bench), bench.home / "real"
    path.rename(real)
    path.symlink_to(real)
    assert not subject.shows(await bench.warm())
    real.write_text(subject.change(real.read_text()))
    await sees(bench, subject)


@pytest.mark.parametrize("name", ["tool", "lock", "policy", "key"])
async def test_the_next_call_sees_that_a_parent_folder_was_moved(bench: Bench, mode: str, name: str) -> None:
    subject = SUBJECTS[name]
    path = subject.path(bench)
    # The folder above the `.ai` folder: nothing changes in the folders that are looked through.
    folder = bench.project if path.is_relative_to(bench.project) else bench.home
    other = folder.with_name("other")
    assert not subject.shows(await bench.warm())
    await bench.kernel._services.recorder.aclose()
    shutil.copytree(folder, other)
    changed = other / path.relative_to(folder)
    changed.write_text(subject.change(changed.read_text()))
    assert not subject.shows(await bench.warm())
    folder.rename(folder.with_name("old"))
    other.rename(folder)
    await sees(bench, subject)


@pytest.mark.parametrize("is_linked_later", [False, True])
@pytest.mark.parametrize("name", SUBJECTS)
async def test_the_next_call_sees_a_write_through_a_second_hard_link(
    bench: Bench, mode: str, name: str, *, is_linked_later: bool
) -> None:
    subject = SUBJECTS[name]
    path, second = subject.path(bench), bench.home / "second"
    if not is_linked_later:
        second.hardlink_to(path)
    assert not subject.shows(await bench.warm())
    if is_linked_later:
        second.hardlink_to(path)
        assert not subject.shows(await bench.warm())
    second.write_text(subject.change(second.read_text()))
    await sees(bench, subject)


@pytest.mark.parametrize("name", SUBJECTS)
async def test_the_next_call_sees_a_change_after_the_queue_overflowed(bench: Bench, name: str) -> None:
    subject = SUBJECTS[name]
    path = subject.path(bench)
    assert not subject.shows(await bench.warm())
    flood(path.parent)
    path.write_text(subject.change(path.read_text()))
    await sees(bench, subject)


def flood(folder: Path) -> None:
    """Make more events in a folder than a queue holds; each name is another one, so that none are merged."""
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    for number in range(most // 2 + 100):
        file = folder / f".flood-{number}"
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY))
        file.unlink()


def test_an_event_that_did_not_fit_into_the_queue_counts_as_a_change(tmp_path: Path) -> None:
    watch = FileWatch()
    file = tmp_path / "watched"
    file.write_text("1")
    watch.watch([str(file)])
    before = watch.generation()
    (tmp_path / "another").write_text("not watched")
    assert watch.generation() == before
    flood(tmp_path)
    file.write_text("2")  # the queue is full: nothing tells of this but its overflow
    assert watch.generation() != before
    watch.close()


def test_a_missing_file_is_noticed_when_it_appears_anywhere_on_its_way(tmp_path: Path) -> None:
    watch = FileWatch()
    file = tmp_path / "a" / "b" / "file"
    watch.watch([str(file)])
    before = watch.generation()
    file.parent.mkdir(parents=True)
    watch.watch([str(file)])
    between = watch.generation()
    assert between != before
    watch.watch([str(file)])
    between = watch.generation()
    file.write_text("")
    assert watch.generation() != between
    watch.close()


def test_a_forked_process_takes_no_events_from_its_parent(tmp_path: Path, processes: None) -> None:
    file = tmp_path / "watched"
    file.write_text("1")
    file_watch.watch.watch([str(file)])
    before = file_watch.watch.generation()
    file.write_text("2")
    child = os.fork()
    if child == 0:
        file_watch.watch.generation()
        os._exit(0)
    os.waitpid(child, 0)
    assert file_watch.watch.generation() != before


async def test_a_tool_that_appears_under_the_same_name_is_seen(bench: Bench, mode: str) -> None:
    await bench.warm()
    (bench.user / "tools").mkdir(parents=True, exist_ok=True)
    (bench.user / "tools" / "say.sh").write_text(TOOL.replace("something", "another thing"))
    assert warns("hides user/local/say")(await bench.plan())


async def test_a_new_tool_in_a_folder_that_hides_the_kept_one_is_seen(bench: Bench, mode: str) -> None:
    (bench.user / "tools").mkdir(parents=True, exist_ok=True)
    (bench.user / "tools" / "another.sh").write_text(TOOL)
    first = await bench.warm("another")
    assert as_text(as_object(first["plan"])["identity"]).startswith("user/")
    (bench.project / ".ai" / "tools" / "another.sh").write_text(TOOL)
    response = await bench.plan("another")
    assert as_text(as_object(response["plan"])["identity"]).startswith("project/")


async def test_a_type_that_a_project_adds_is_seen(bench: Bench, mode: str) -> None:
    types = bench.project / ".ai" / "types"
    types.mkdir()
    await bench.warm()
    (types / "odd.yaml").write_text("type: odd\n")
    assert not bench.is_kept()


async def test_an_expired_key_is_seen_without_any_change(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    trust = bench.user / "trust.yaml"
    soon = datetime.now(UTC) + timedelta(hours=1)
    trust.write_text(trust.read_text().replace("name: own", f"expires: {soon:%Y-%m-%dT%H:%M:%SZ}\n    name: own"))
    assert not warns("expired")(await bench.warm())

    class Later(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Later:
            return cls.fromtimestamp(soon.timestamp() + 1, tz)

    monkeypatch.setattr("kiwi_mcp.manifest.trust.datetime", Later)
    assert warns("expired")(await bench.plan())


@pytest.mark.parametrize("is_another", [False, True])
async def test_a_revocation_by_the_verb_is_seen(bench: Bench, *, is_another: bool) -> None:
    await bench.warm()
    keys = await bench.ask("key", action="list")
    fingerprint = as_text(as_object(as_list(keys["own"])[0])["fingerprint"])
    other = Kernel(bench.project) if is_another else bench.kernel
    await other.call("key", {"action": "revoke", "key": fingerprint})
    assert warns("revoked")(await bench.plan())


async def test_an_isolation_level_that_was_relaxed_in_another_kernel_is_seen(stored: Bench) -> None:
    bench = stored
    first = await bench.warm()
    assert as_object(as_object(first["plan"])["jail"])["level"] == "sandboxed"
    other = Kernel(bench.project)
    answer = await other.call("relax", {"action": "apply", "item_id": "say", "to": "trusted", "reason": "test"})
    assert not answer.is_error, answer.content
    await other.aclose()
    second = await bench.plan()
    assert as_object(as_object(second["plan"])["jail"])["level"] == "trusted"


async def test_a_published_version_is_kept_until_it_is_yanked_by_another_kernel(stored: Bench) -> None:
    published = await stored.ask("execute", action="publish", item_id="say")
    name = as_text(published.get("identity"))
    await stored.warm(name.partition("@")[0])
    other = Kernel(stored.project)
    answer = await other.call("execute", {"action": "yank", "item_id": name, "parameters": {"reason": "broken"}})
    assert not answer.is_error, answer.content
    await other.aclose()
    assert not stored.is_kept(name.partition("@")[0])
    response = await stored.plan(name.partition("@")[0])
    assert response.get("status") != "planned" or warns("yanked")(response), response


async def test_what_runs_leave_in_the_store_does_not_end_what_is_kept(stored: Bench) -> None:
    await stored.warm()
    store = stored.kernel._services.store
    before = store.state()
    store.runs().add(RunRecord(new_run(1)[0], "say", "success", "2026-01-01T00:00:00.000Z", 1, "", "", "", "", ""))
    assert stored.is_kept() == (store.state() == before)
    assert store.state() == before or store.registry().database.is_embedded


async def test_a_rule_for_approvals_is_seen(bench: Bench) -> None:
    bench.tool.write_text(TOOL.replace("# parameters", "# mutates_state: true\n# needs: {write: [out]}\n# parameters"))
    (bench.project / "out").mkdir()
    await bench.ask("execute", action="sign", item_id="say", item_type="tool")
    first = await bench.warm()
    assert as_object(first["approval"])["needed"] is True
    other = Kernel(bench.project)
    answer = await other.call("approvals", {"action": "add_rule", "item": "*/say@*"})
    assert not answer.is_error, answer.content
    await other.aclose()
    assert as_object((await bench.plan())["approval"])["needed"] is False


async def test_a_program_that_appears_earlier_on_the_path_is_seen(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bench.home / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    await bench.warm()
    (folder / "bash").symlink_to("/bin/bash")
    response = await bench.plan()
    assert as_list(as_object(as_object(response["plan"])["spec"])["argv"])[0] == str(folder / "bash")


async def test_another_path_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bench.home / "bin"
    folder.mkdir()
    (folder / "bash").symlink_to("/bin/bash")
    await bench.warm()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    response = await bench.plan()
    assert as_list(as_object(as_object(response["plan"])["spec"])["argv"])[0] == str(folder / "bash")


async def test_another_value_in_a_file_of_variables_reaches_the_next_call(
    bench: Bench, sandbox: None, mode: str
) -> None:
    env = bench.project / ".env"
    env.write_text("GREETING=one\n")
    bench.tool.write_text(
        TOOL.replace("# parameters", "# config: {env: {GREETING: '${GREETING}'}}\n# parameters").replace(
            "$KIWI_PARAM_word", "$GREETING"
        )
    )
    await bench.ask("execute", action="sign", item_id="say", item_type="tool")

    async def said() -> JsonObject:
        return await bench.ask("execute", action="run", item_id="say", parameters={})

    assert (await said())["result"] == "one", await said()
    env.write_text("GREETING=two\n")
    assert (await said())["result"] == "two"


async def test_a_definition_that_a_server_changed_is_seen(stored: Bench) -> None:
    bench = stored
    path = bench.project / ".ai" / "tools" / "files.yaml"
    path.write_text(SERVER)
    services = bench.kernel._services
    catalog = services.catalogs.at(None)
    offered: JsonObject = {"name": "read", "inputSchema": {"type": "object"}}
    digest = sha256_hex(canonical(offered))
    definition = Definition("tool", "read", "read", "accepted", offered, digest, offered, digest)
    server = catalog.find("files")
    key = ServerKey(str(bench.project / ".ai"), "files")
    record = ServerRecord(
        key, "project/local/files@1.0.0", str(path), server.digest, "1.0.0", words={"accepted": "yes"}
    )
    definitions = services.catalogs.definitions()
    definitions.change(key, lambda *_: (replace(record, seen_at="2026-01-01T00:00:00.000Z"), (definition,)))
    await bench.warm("mcp/files/read")

    other = Kernel(bench.project)
    changed = replace(definition, state="changed", offered={**offered, "description": "another"}, digest="0" * 64)
    other._services.catalogs.definitions().change(key, lambda known, _: (known or record, (changed,)))
    await other.aclose()
    response = await bench.plan("mcp/files/read")
    assert response.get("status") != "planned", response
