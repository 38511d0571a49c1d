"""The registry with concurrent writers, tampered rows, and many rows."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import cast

import pytest

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.registry import Actor, Pin, ReleaseFile, VersionName, Visibility
from kiwi_mcp.store.database import Database, Transaction
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease

ANN = Actor("ann", ("team",))
WORKER = """
import pickle, sys
from kiwi_mcp.domain.errors import VersionConflict
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry
with open(sys.argv[2], "rb") as file:
    actor, releases = pickle.load(file)
registry = Registry(open_database(sys.argv[1]), actor)
print("ready", flush=True)
sys.stdin.readline()
for release in releases:
    try:
        (published,) = registry.publish([release])
        print("new" if published.is_new else "same", release.name.version, release.digest, flush=True)
    except VersionConflict:
        print("conflict", release.name.version, release.digest, flush=True)
"""


def release(
    tool_id: str,
    version: str = "1.0.0",
    data: bytes = b"",
    on: CheckedRelease | None = None,
    visibility: Visibility = "public",
    named: tuple[CheckedRelease, ...] = (),
) -> CheckedRelease:
    """A small release with one file beside its manifest."""
    manifest = b"tool_id: x\n"
    statement = {
        "kind": "kiwi.item/1",
        "tool_id": tool_id,
        "version": version,
        "executor": on.name.tool_id if on else None,
        "manifest": sha256(manifest).hexdigest(),
        "files": [{"path": "main.py", "sha256": sha256(data).hexdigest(), "executable": False}],
    }
    return CheckedRelease(
        name=VersionName("team", tool_id, version),
        place=f"tools/{tool_id}/tool.yaml",
        statement=json.dumps(statement, sort_keys=True, separators=(",", ":")).encode(),
        manifest={"tool_id": tool_id, "tool_type": "runtime" if on else "primitive", "version": version},
        files=(ReleaseFile("main.py", data), ReleaseFile("tool.yaml", manifest)),
        executor=Pin(on.name.tool_id, on.name, on.digest) if on else None,
        visibility=visibility,
        references=tuple(Pin(one.name.tool_id, one.name, one.digest) for one in named),
    )


BASE = release("base")
MIDDLE = release("middle", on=BASE)
TOP = release("top", on=MIDDLE)


@pytest.fixture
def registry(database: Database) -> Registry:
    return Registry(database, ANN)


def start_publisher(url: str, path: Path, releases: list[CheckedRelease]) -> subprocess.Popen[str]:
    path.write_bytes(pickle.dumps((ANN, releases)))
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, url, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-RG-02")
def test_one_of_eight_publishers_wins_each_version(store_url: str, registry: Registry, tmp_path: Path) -> None:
    numbers = ["0.9.0", "1.10.0-rc.1", "1.9.0", "1.10.0"]
    publishers = [
        start_publisher(
            store_url, tmp_path / str(number), [release("race", version, b"%d" % number) for version in numbers]
        )
        for number in range(8)
    ]
    try:
        assert [publisher.stdout and publisher.stdout.readline() for publisher in publishers] == ["ready\n"] * 8
        for publisher in publishers:
            assert publisher.stdin
            publisher.stdin.write("go\n")
            publisher.stdin.flush()
        response = [
            line.split() for publisher in publishers for line in publisher.communicate(timeout=120)[0].splitlines()
        ]
    finally:
        for publisher in publishers:
            publisher.kill()
            publisher.communicate()

    won = {version: digest for word, version, digest in response if word == "new"}
    assert sorted(word for word, *_ in response) == ["conflict"] * 28 + ["new"] * 4
    listed = registry.named("race")
    assert {one.name.version: one.digest for one in listed} == won
    assert [one.name.version for one in listed] == ["1.10.0", "1.10.0-rc.1", "1.9.0", "0.9.0"]
    assert [one.name.version for one in listed if one.is_latest] == ["1.10.0"]
    assert [event.seq for event in registry.events()] == [1, 2, 3, 4]
    assert [*registry.verify()] == []


TRIGGERS = {
    "tool_versions": ("versions_are_sealed", "references_are_sealed", "versions_stay"),
    "tool_version_files": ("files_never_change", "files_stay", "files_come_before_their_version"),
    "registry_log": ("log_never_changes", "log_stays"),
    "blobs": ("blobs_never_change", "blobs_of_versions_stay"),
    "tools": ("tools_keep_their_name",),
}
TAMPERED = {
    "update tool_version_files set content_text = 'evil' where content_text = 'top'": "main.py",
    "update tool_version_files set sha256 = '$zero' where content_text = 'top'": "main.py",
    "update tool_version_files set path = 'other.py' where content_text = 'top'": "other.py",
    "update tool_version_files set mode = 493 where content_text = 'top'": "main.py",
    "update tool_versions set manifest_yaml = 'tool_id: evil' where place like '%top%'": "tool.yaml",
    "update tool_versions set manifest_yaml = 'tool_id: evil', manifest_sha256 = '$evil' where place like '%top%'": (
        "tool.yaml is not the file that was stated"
    ),
    "update tool_versions set manifest_canon = '{}' where place like '%top%'": "digest",
    "update tool_versions set content_hash = 'sha256:$zero' where place like '%top%'": "digest",
    "update tool_versions set closure_hash = 'sha256:$zero' where place like '%middle%'": "does not depend on",
    "update tool_versions set executor_version_id = (select id from tool_versions where place like '%base%'),"
    " depth = 2 where place like '%top%'": "depend",
    "update tool_versions set item_references = '[]' where place like '%agent%'": "does not depend on",
    "update tool_versions set item_references = '{' where place like '%agent%'": "what it depends on is missing",
    "update tool_versions set content_hash = 'sha256:$zero' where place like '%program%'": (
        "team/agent@1.0.0: it does not depend on what it was published with"
    ),
    "update tool_versions set version = '1.0.1' where place like '%top%'": "order of versions",
    "update tool_versions set version_key = 'x' where place like '%top%'": "order of versions",
    "update tool_versions set is_latest = false where place like '%top%'": "latest",
    "update tools set latest_version = '9.9.9' where tool_id = 'top'": "latest version is given as 9.9.9",
    "update tools set visibility = 'private' where tool_id = 'base'": "cannot see what it depends on",
    "update registry_log set actor = 'nobody' where seq = 2": "changed after it was written",
    "delete from registry_log where seq = 2": "it is missing",
    "delete from registry_log where seq = 4": "does not say that it was published",
    "update blobs set content = '$text'": "main.py",
    "delete from blobs": "main.py",
}


class Undone(Exception):
    """Ends a transaction without a trace."""


class Inside:
    """A store as it is within a transaction."""

    def __init__(self, database: Database, transaction: Transaction) -> None:
        self._database = database
        self.read = transaction.read

    def __getattr__(self, name: str) -> object:
        return getattr(self._database, name)


@pytest.fixture
def unguarded(registry: Registry, database: Database) -> Database:
    """A store with a chain in it and without the triggers that guard it."""
    chain = [release("base"), release("middle", on=BASE), release("top", data=b"top", on=MIDDLE)]
    program = release("program")
    registry.publish([*chain, release("binary", data=b"\0"), release("agent", on=BASE, named=(program,)), program])
    with database.transaction() as transaction:
        for table, names in TRIGGERS.items():
            for name in names:
                transaction.write(f"drop trigger {name}{f' on {table}' if database.dialect == 'postgres' else ''}")
    return database


def _issues_after(database: Database, statement: str) -> list[Issue]:
    """The issues found after a statement, which is then rolled back."""
    issues: list[Issue] = []
    with suppress(Undone), database.transaction() as transaction:
        assert transaction.write(statement) == 1, statement
        issues += Registry(cast("Database", Inside(database, transaction)), ANN).verify()
        raise Undone
    return issues


def test_any_change_in_the_database_is_detected(registry: Registry, unguarded: Database) -> None:
    assert [*registry.verify()] == []
    for statement, response in TAMPERED.items():
        filled = statement.replace("$zero", "0" * 64).replace("$evil", sha256(b"tool_id: evil").hexdigest())
        issues = _issues_after(unguarded, filled.replace("$text", "x"))
        assert any(response in f"{issue.place}: {issue.reason}" for issue in issues), (statement, issues)
        assert all(issue.fix for issue in issues)
    assert [*registry.verify()] == []


def test_damage_in_hidden_items_is_reported_without_details(registry: Registry, database: Database) -> None:
    registry.publish([release("hidden", data=b"top", visibility="private")])
    stranger = registry.as_seen_by(Actor("bob", ("other",)))
    with database.transaction() as transaction:
        on = " on tool_version_files" if database.dialect == "postgres" else ""
        transaction.write(f"drop trigger files_never_change{on}")
        transaction.write("update tool_version_files set content_text = 'x'")

    assert {issue.place for issue in registry.verify()} == {"team/hidden@1.0.0"}
    assert {issue.place for issue in stranger.verify()} == {"a private version"}
    assert "hidden" not in str([*stranger.verify()])


def test_single_versions_can_be_verified(registry: Registry, unguarded: Database) -> None:
    with unguarded.transaction() as transaction:
        transaction.write("update tool_version_files set content_text = 'evil' where content_text = 'top'")

    (top,) = registry.named("top")
    (base,) = registry.named("base")
    assert [*registry.verify([base.id])] == []
    assert {issue.place for issue in registry.verify([base.id, top.id])} == {"team/top@1.0.0"}


@pytest.mark.usefixtures("processes")
def test_a_chain_is_resolved_without_a_table_scan(registry: Registry, database: Database) -> None:
    registry.publish([TOP, MIDDLE, BASE, *(release(f"tool_{number}", on=MIDDLE) for number in range(300))])
    members = ANN.namespaces
    (top,) = registry.named("top")
    statement, values = registry._resolve, (top.id, *members, *members)
    if database.dialect == "sqlite":
        plans = [[str(row[3]) for row in database.read(f"explain query plan {statement}", values)]]
        plans.append(_plan_of_the_standard_library(database.url, statement, values))
        for plan in plans:
            assert not [step for step in plan if step.startswith("SCAN") and step not in SMALL], plan
    else:
        with database.transaction() as transaction:
            transaction.write("set local enable_seqscan = off")
            shown = [str(row[0]) for row in transaction.read(f"explain {statement}", values)]
        assert not [line for line in shown if "Seq Scan" in line], shown


SMALL = {"SCAN chain", "SCAN top", "SCAN (subquery-2)"}
"""What is read whole, and has sixteen rows at most."""


def _plan_of_the_standard_library(url: str, statement: str, values: tuple[object, ...]) -> list[str]:
    # In a process of its own: two copies of SQLite in one process break each other's locks.
    code = (
        "import json, sqlite3, sys; path, statement, values = json.load(sys.stdin); "
        "print(json.dumps([r[3] for r in sqlite3.connect(path).execute('explain query plan ' + statement, values)]))"
    )
    response = json.dumps([url.removeprefix("sqlite://"), statement, values])
    done = subprocess.run(
        [sys.executable, "-c", code], input=response, capture_output=True, text=True, check=True, timeout=120
    )
    return [str(step) for step in json.loads(done.stdout)]
