"""A failing store, seen by one kernel: tools run, errors are reported, and nothing is lost."""

from __future__ import annotations

import asyncio
import ctypes
import resource
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from tests.plugins.postgres import PostgresServer

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Kernel, store
from kiwi_mcp.kernel.paths import user_space
from kiwi_mcp.kernel.signer import Signer, sign_item
from kiwi_mcp.store.open import connect_to
from kiwi_mcp.store.registry.release_check import CheckedRelease
from kiwi_mcp.store.remote.layout import Layout
from kiwi_mcp.store.sqlite import SqliteDatabase

SAY = """\
tool_id: say
tool_type: script
version: {version}
description: Says a word.
executor: bash_runtime
config:
  entrypoint: main.sh
"""
NEW: JsonObject = {
    "tool_type": "script",
    "executor": "bash_runtime",
    "version": "1.0.0",
    "description": "Says it again.",
    "config": {"entrypoint": "main.sh"},
    "files": {"main.sh": "echo again\n"},
}


class Session:
    """One kernel, which is never closed while the store comes and goes."""

    def __init__(self, project: Path, runner: asyncio.Runner) -> None:
        self.project = project
        self.kernel = Kernel(project)
        self._runner = runner

    def ask(self, verb: str, **words: Json) -> JsonObject:
        return self._runner.run(self.kernel.call(verb, words)).content

    def write(self, version: str) -> None:
        """Write a tool of that version anew, of which no lockfile says who signed it."""
        (self.project / ".ai" / "kiwi.lock").unlink(missing_ok=True)
        folder = self.project / ".ai" / "tools" / "say"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "main.sh").write_text("echo hello\n")
        (folder / "tool.yaml").write_text(SAY.format(version=version))

    def publish(self, version: str) -> JsonObject:
        self.write(version)
        return self.ask("execute", action="publish", item_id="say")

    def sign(self) -> None:
        """Sign the tool with a key of the owner's, by which it shows without a store that no model wrote it."""
        if Signer.of(user_space()) is None:
            self.ask("key", action="new")
        signed = self.ask("execute", action="sign", item_id="say")
        assert signed["status"] == "signed", signed

    def versions(self) -> Json:
        answer = self.ask("execute", action="versions", item_id="say")
        return [as_object(one)["version"] for one in as_list(answer["versions"])] if "versions" in answer else answer

    def close(self) -> None:
        self._runner.run(self.kernel.aclose())


@pytest.fixture
def session(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A kernel with a tool of its own, which tries a store that failed again at once."""
    monkeypatch.setattr(store, "_PATIENCE", 0.0)
    with asyncio.Runner() as runner:
        opened = Session(project, runner)
        yield opened
        opened.close()


def check_the_tool_runs(session: Session) -> None:
    """The tool in the folder runs, and the owner gets a warning that the run was not recorded."""
    ran = session.ask("execute", item_id="say")
    assert (ran.get("status"), ran.get("result")) == ("success", "hello"), ran
    assert ran["run_id"] is None
    assert any(as_text(warning).startswith("The run was not recorded") for warning in as_list(ran["warnings"]))
    assert as_list(session.ask("search", query="say a word")["results"])


def check_everything_works(session: Session, *versions: str) -> None:
    """The store answers, holds these versions, and takes a new one and a run."""
    assert session.versions() == [*versions]
    last = versions[0].rpartition(".")[2]
    new = f"1.0.{int(last) + 1}"
    assert session.publish(new)["status"] == "published"
    assert session.versions() == [new, *versions]
    assert session.ask("execute", action="verify")["issues"] == []
    if Signer.of(user_space()):
        session.sign()
    ran = session.ask("execute", item_id="say")
    assert ran["run_id"] is not None
    assert session.ask("runs", action="show", run_id=ran["run_id"])["status"] == "success"
    assert "warnings" not in ran


def check_an_unsigned_tool_does_not_run(session: Session, *codes: str) -> None:
    """An item that a model may have written does not run while its author is unknown."""
    session.write("1.0.49")
    check_refused(session.ask("execute", item_id="say"), *codes)


def check_refused(answer: JsonObject, *codes: str) -> None:
    assert answer["code"] in codes, answer
    assert answer["suggestion"]
    assert answer["message"]


def check_doctor(session: Session) -> None:
    checks = [as_object(check) for check in as_list(session.ask("doctor")["checks"])]
    (response,) = [check for check in checks if check["check"] == "store"]
    assert response["status"] == "problem"
    assert response["fix"]


def check_all_refused(session: Session, *codes: str) -> None:
    check_the_tool_runs(session)
    session.write("1.0.50")
    check_refused(session.ask("execute", action="publish", item_id="say"), *codes)
    for action in ("versions", "verify", "list"):
        request: JsonObject = {"action": action, "item_id": "say"} if action != "list" else {"action": action}
        check_refused(session.ask("execute", **request), *codes)
    for verb in ("runs", "registry"):
        check_refused(session.ask(verb), *codes)
    check_doctor(session)


@contextmanager
def no_larger_files(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as on a disk that is full."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@contextmanager
def no_further_pages(session: Session) -> Iterator[None]:
    """Let the store's file not grow, for any of its connections."""
    database = session.kernel._services.store.registry().database
    assert isinstance(database, SqliteDatabase)
    pages = int(str(database.read("PRAGMA page_count")[0][0]))
    for limit in (pages, 1_000_000):
        for connection in database._connections:
            connection.execute(f"PRAGMA max_page_count={limit}").fetchall()
        if limit == pages:
            yield


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("how", ["no larger files", "no further pages"])
def test_a_full_disk_loses_nothing_and_the_same_kernel_continues_afterwards(how: str, session: Session) -> None:
    assert session.publish("1.0.0")["status"] == "published"
    session.write("1.0.1")
    # More than any free page holds, so that the file has to grow.
    large = session.project / ".ai" / "tools" / "say" / "large.txt"
    large.write_text("word " * 200_000)
    # The copy from which a tool is checked is made now, so that the store is the first to find no room.
    assert session.ask("execute", action="validate", item_id="say")["status"] == "valid"

    with no_larger_files(40_000) if how == "no larger files" else no_further_pages(session):
        refused = session.ask("execute", action="publish", item_id="say")
        check_refused(refused, "store_unavailable")
        assert "Nothing was written" in as_text(refused["message"])
        assert session.versions() == ["1.0.0"]

    large.unlink()
    check_everything_works(session, "1.0.0")


def test_a_full_disk_without_space_for_a_snapshot_is_reported(session: Session) -> None:
    session.write("1.0.0")
    (session.project / ".ai" / "tools" / "say" / "large.txt").write_text("word " * 200_000)
    with no_larger_files(40_000):
        check_refused(session.ask("execute", action="validate", item_id="say"), "unavailable")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(("action", "item_id"), [("create", "new"), ("update", "say")])
def test_a_full_disk_refuses_a_new_item_and_leaves_no_draft(
    action: str, item_id: str, session: Session, home: Path
) -> None:
    session.write("1.0.0")
    assert session.ask("execute", action="validate", item_id="say")["status"] == "valid"
    before = [*session.project.rglob("*"), *(home / ".cache").rglob("draft-*")]
    large = {"main.sh": "echo\n", "large.txt": "x" * 5_000_000}
    sent: JsonObject = {**(NEW if action == "create" else {}), "files": large}

    with no_larger_files(4_000_000):
        refused = session.ask("execute", action=action, item_id=item_id, parameters=sent)

    check_refused(refused, "unavailable")
    assert "space" in as_text(refused["suggestion"])
    assert [*session.project.rglob("*"), *(home / ".cache").rglob("draft-*")] == before


def test_a_signature_cut_off_by_a_full_disk_leaves_the_file_unchanged(session: Session) -> None:
    session.write("1.0.0")
    folder = session.project / ".ai" / "tools" / "say"
    tool = session.kernel.catalog().find("say")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    with no_larger_files(20), pytest.raises(OSError, match="large"):
        sign_item(tool, "2026-01-01T00:00:00Z")

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


READ_ONLY: Mapping[str, tuple[str, str, JsonObject]] = {
    "create in the project": ("project/.ai", "execute", {"action": "create", "item_id": "new", "parameters": NEW}),
    "create in the cache": ("cache/kiwi", "execute", {"action": "create", "item_id": "new", "parameters": NEW}),
    "update": ("project/.ai/tools", "execute", {"action": "update", "item_id": "say", "parameters": {"tags": ["a"]}}),
    "delete": ("project/.ai", "execute", {"action": "delete", "item_id": "say"}),
    "sign": ("project/.ai/tools/say", "execute", {"action": "sign", "item_id": "say"}),
    "sign into the lockfile": ("project/.ai", "execute", {"action": "sign", "item_id": "say"}),
    "load to the user": ("home/.ai", "load", {"item_id": "say", "destination": "user"}),
    "mcp add": (
        "home/.ai",
        "mcp",
        {"action": "add", "server": "notes", "command": "true", "location": "user", "start": False},
    ),
}


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("what", READ_ONLY)
def test_a_read_only_folder_refuses_changes_of_items_with_a_next_step(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, verb, request = READ_ONLY[what]
    with tempfile.TemporaryDirectory() as name, asyncio.Runner() as runner, bound_by_modes():
        folder = Path(name)
        for variable, home in (("HOME", "home"), ("USER_SPACE", "home/.ai"), ("XDG_CACHE_HOME", "cache")):
            (folder / home).mkdir()
            monkeypatch.setenv(variable, str(folder / home))
        (folder / "project" / ".ai").mkdir(parents=True)
        session = Session(folder / "project", runner)
        session.write("1.0.0")
        session.sign()
        session.ask("execute", action="update", item_id="say", parameters={"tags": ["b"]})
        before = {path for path in (folder / "project").rglob("*") if ".trash" not in path.parts}
        drafts = [*(folder / "cache").rglob("draft-*"), *(folder / "home").rglob(".staging-*")]
        (folder / place).chmod(0o555)
        try:
            refused = session.ask(verb, **request)
        finally:
            (folder / place).chmod(0o755)

        check_refused(refused, "unavailable")
        assert "write access" in as_text(refused["suggestion"])
        assert {path for path in (folder / "project").rglob("*") if ".trash" not in path.parts} == before
        assert [*(folder / "cache").rglob("draft-*"), *(folder / "home").rglob(".staging-*")] == drafts == []
        assert session.ask("load", item_id="say")["name"] == "say"
        session.close()


@pytest.mark.usefixtures("sandbox")
def test_a_tool_runs_even_if_its_run_cannot_be_recorded(session: Session) -> None:
    assert session.publish("1.0.0")["status"] == "published"
    with no_larger_files(4_096):
        check_the_tool_runs(session)
    check_everything_works(session, "1.0.0")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("DB-06")
def test_a_read_only_home_is_reported_and_used_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as name, asyncio.Runner() as runner, bound_by_modes():
        folder = Path(name)
        monkeypatch.setattr(store, "_PATIENCE", 0.0)
        for variable, place in (("HOME", "home"), ("USER_SPACE", "home/.ai"), ("XDG_CACHE_HOME", "cache")):
            (folder / place).mkdir()
            monkeypatch.setenv(variable, str(folder / place))
        (folder / "project" / ".ai").mkdir(parents=True)
        session = Session(folder / "project", runner)
        session.write("1.0.0")
        session.sign()
        session.close()
        # The home knows whom to trust, and has no store yet.
        user, aside = folder / "home" / ".ai", folder / "aside"
        (user / "state").rename(aside)
        there = {path.name for path in user.iterdir()}
        user.chmod(0o555)
        check_all_refused(session, "store_unavailable")
        assert {path.name for path in user.iterdir()} == there

        user.chmod(0o755)
        aside.rename(user / "state")
        assert session.publish("1.0.0")["status"] == "published"
        check_everything_works(session, "1.0.0")
        session.close()


_CAPABILITIES = 0x20080522  # the third version of the interface: two sets of 32 bits each


@contextmanager
def bound_by_modes() -> Iterator[None]:
    """Take from this thread, and those it starts, root's right to write where a file's mode forbids it."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITIES, 0))
    before = ctypes.create_string_buffer(24)
    assert libc.capget(header, before) == 0
    effective, *others = struct.unpack("=6I", before.raw)
    without = ctypes.create_string_buffer(struct.pack("=6I", effective & ~0b110, *others))  # CAP_DAC_*: bits 1 and 2
    assert libc.capset(header, without) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


@pytest.fixture
def file(session: Session, home: Path) -> Path:
    """The store's file, with a version in it, closed."""
    for version in ("1.0.0", "1.0.1"):
        assert session.publish(version)["status"] == "published"
    session.sign()
    session.close()
    return home / ".ai" / "state" / "registry.db"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("DB-03")
@pytest.mark.parametrize("what", ["first page", "cut off", "another file"])
def test_a_damaged_store_is_reported_and_its_backup_works(what: str, session: Session, file: Path) -> None:
    whole = file.read_bytes()
    damaged = {
        "first page": b"\xff" * 8_192 + whole[8_192:],
        "cut off": whole[:5_000],
        "another file": b"Dear diary\n" * 500,
    }
    file.write_bytes(damaged[what])

    check_all_refused(session, "store_damaged")
    check_an_unsigned_tool_does_not_run(session, "store_damaged")
    assert file.read_bytes() == damaged[what]

    session.close()
    file.write_bytes(whole)
    check_everything_works(session, "1.0.1", "1.0.0")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("DB-03")
def test_damaged_pages_are_detected_and_folder_tools_run(session: Session, file: Path) -> None:
    session.write("1.0.1")
    session.sign()
    session.close()
    whole = file.read_bytes()
    for start in range(8_192, len(whole) - 8_192, 12_288):
        file.write_bytes(whole[:start] + b"\xff" * 8_192 + whole[start + 8_192 :])

        ran = session.ask("execute", item_id="say")
        assert ran.get("result") == "hello", (start, ran)
        found = session.ask("execute", action="verify")
        assert found.get("code") == "store_damaged" or found["issues"], start
        for action in ("versions", "publish"):
            response = session.ask("execute", action=action, item_id="say")
            assert response.get("code") in {None, "store_damaged", "integrity_mismatch", "tool_not_found"}, (
                start,
                response,
            )

        session.close()
        for rest in file.parent.glob("registry.db-*"):
            rest.unlink()
        file.write_bytes(whole)
    check_everything_works(session, "1.0.1", "1.0.0")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("DB-04")
def test_a_store_of_a_newer_kiwi_is_not_changed_and_works_with_the_newer_kiwi(session: Session, file: Path) -> None:
    tell = "insert into schema_migrations (number, name, checksum, applied_at) values (999, 'later', 'x', 'then')"
    _write(file, tell)

    check_all_refused(session, "store_newer")

    _write(file, "delete from schema_migrations where number = 999")
    check_everything_works(session, "1.0.1", "1.0.0")


def _write(file: Path, statement: str) -> None:
    database = connect_to(f"sqlite://{file}")
    with database.transaction() as transaction:
        transaction.write(statement)
    database.close()


@pytest.fixture
def served(session: Session, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A kernel with a store on a server, with a version in it."""
    monkeypatch.setenv("KIWI_REGISTRY", postgres_url)
    assert session.publish("1.0.0")["status"] == "published"
    session.sign()
    return session


@contextmanager
def killed_in_the_middle(server: PostgresServer, url: str, place: str) -> Iterator[None]:
    """Let the server crash while it takes a version that was published from a place; then start it again."""
    with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
        connection.execute(NAP)
        connection.execute(
            f"create trigger nap before insert on tool_versions for each row {place} execute function nap()"
        )
    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(_kill_while_napping, server, url)
        try:
            yield
            killed.result(timeout=120)
        finally:
            server.start()
    with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
        connection.execute("drop trigger nap on tool_versions")


NAP = """create function nap() returns trigger language plpgsql as
  $$ begin perform pg_sleep(20); return new; end $$"""


def _kill_while_napping(server: PostgresServer, url: str) -> None:
    asked = "select count(*) from pg_stat_activity where wait_event = 'PgSleep' and datname = current_database()"
    with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
        end = time.monotonic() + 120
        while connection.execute(asked).fetchone() == (0,) and time.monotonic() < end:
            time.sleep(0.005)
    server.kill()


@pytest.mark.usefixtures("sandbox")
def test_a_lost_database_server_is_reported_and_used_again_by_the_same_kernel(
    served: Session, postgres_server: PostgresServer
) -> None:
    try:
        postgres_server.kill()
        check_all_refused(served, "store_unavailable")
    finally:
        postgres_server.start()
    served.write("1.0.0")
    check_everything_works(served, "1.0.0")


@pytest.mark.usefixtures("sandbox")
def test_a_database_crash_during_a_publish_loses_nothing(
    served: Session, postgres_url: str, postgres_server: PostgresServer
) -> None:
    served.write("1.0.1")
    with killed_in_the_middle(postgres_server, postgres_url, "when (new.version = '1.0.1')"):
        check_refused(served.ask("execute", action="publish", item_id="say"), "store_unavailable")

    check_everything_works(served, "1.0.0")


@pytest.mark.usefixtures("sandbox")
def test_a_database_crash_during_a_pull_loses_nothing(
    served: Session,
    postgres_url: str,
    postgres_server: PostgresServer,
    tmp_path: Path,
    a_page: Callable[[str], CheckedRelease],
) -> None:
    folder = tmp_path / "remote"
    pages = [a_page(f"public/page_{number:03}@1.0.0") for number in range(120)]
    Layout(folder).write(pages)
    with killed_in_the_middle(postgres_server, postgres_url, "when (new.place like '%page_070%')"):
        refused = served.ask("registry", action="pull", remote=str(folder), accept_unsigned=True)
        check_refused(refused, "store_unavailable")

    offered = {f"registry/{page.name}" for page in pages}
    listed = as_list(served.ask("execute", action="list", parameters={"limit": 1000})["items"])
    kept = {as_text(as_object(one)["identity"]) for one in listed} & offered
    # Versions come in batches, each of which is there whole or not at all.
    assert {f"registry/{page.name}" for page in pages[:32]} <= kept
    assert f"registry/{pages[70].name}" not in kept
    assert served.ask("execute", action="verify")["issues"] == []
    pulled = as_object(served.ask("registry", action="pull", remote=str(folder), accept_unsigned=True)["counts"])
    assert (pulled["new"], pulled["unchanged"]) == (120 - len(kept), len(kept))
    check_everything_works(served, "1.0.0")
