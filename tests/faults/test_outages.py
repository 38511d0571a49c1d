"""A store that fails, seen through one kernel that goes on: tools run, faults are told, and nothing is lost."""

from __future__ import annotations

import asyncio
import ctypes
import resource
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from tests.plugins.postgres import PostgresServer

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.registry import Release
from kiwi_mcp.kernel import Kernel, store
from kiwi_mcp.kernel.keys.signer import Signer
from kiwi_mcp.kernel.places import user_space
from kiwi_mcp.store.layout import Layout
from kiwi_mcp.store.open import connect_to
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


class Session:
    """One kernel, which is never closed while the store comes and goes."""

    def __init__(self, project: Path, runner: asyncio.Runner) -> None:
        self.project = project
        self.kernel = Kernel(project)
        self._runner = runner

    def ask(self, verb: str, **words: Json) -> JsonObject:
        return self._runner.run(self.kernel.call(verb, words)).content

    def write(self, version: str) -> None:
        """Write a tool of that version."""
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
    """The tool in the folder runs, and its owner is told that the run was not recorded."""
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
    """What a model may have written does not run where nobody can say whether one did."""
    session.write("1.0.49")
    check_refused(session.ask("execute", item_id="say"), *codes)


def check_refused(answer: JsonObject, *codes: str) -> None:
    assert answer["code"] in codes, answer
    assert answer["suggestion"]
    assert answer["message"]


def check_doctor(session: Session) -> None:
    checks = [as_object(check) for check in as_list(session.ask("doctor")["checks"])]
    (told,) = [check for check in checks if check["check"] == "store"]
    assert told["status"] == "problem"
    assert told["fix"]


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
    database = session.kernel._parts.store.registry().database
    assert isinstance(database, SqliteDatabase)
    pages = int(str(database.read("PRAGMA page_count")[0][0]))
    for limit in (pages, 1_000_000):
        for connection in database._connections:
            connection.execute(f"PRAGMA max_page_count={limit}").fetchall()
        if limit == pages:
            yield


@pytest.mark.parametrize("how", ["no larger files", "no further pages"])
def test_a_full_disk_loses_nothing_and_the_same_kernel_goes_on_afterwards(how: str, session: Session) -> None:
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


def test_a_full_disk_without_room_for_a_copy_to_check_is_told(session: Session) -> None:
    session.write("1.0.0")
    (session.project / ".ai" / "tools" / "say" / "large.txt").write_text("word " * 200_000)
    with no_larger_files(40_000):
        check_refused(session.ask("execute", action="validate", item_id="say"), "unavailable")


def test_a_tool_runs_where_not_even_its_run_can_be_recorded(session: Session) -> None:
    assert session.publish("1.0.0")["status"] == "published"
    with no_larger_files(4_096):
        check_the_tool_runs(session)
    check_everything_works(session, "1.0.0")


@pytest.mark.case("DB-06")
def test_a_home_that_is_read_only_is_told_and_used_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.case("DB-03")
@pytest.mark.parametrize("what", ["first page", "cut off", "another file"])
def test_a_store_that_is_damaged_is_told_and_a_backup_of_it_works(what: str, session: Session, file: Path) -> None:
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


@pytest.mark.case("DB-03")
def test_pages_that_are_damaged_are_found_and_the_tools_in_folders_run(session: Session, file: Path) -> None:
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
            told = session.ask("execute", action=action, item_id="say")
            assert told.get("code") in {None, "store_damaged", "integrity_mismatch", "tool_not_found"}, (start, told)

        session.close()
        for rest in file.parent.glob("registry.db-*"):
            rest.unlink()
        file.write_bytes(whole)
    check_everything_works(session, "1.0.1", "1.0.0")


@pytest.mark.case("DB-04")
def test_a_store_of_a_newer_kiwi_is_left_alone_and_works_with_it_again(session: Session, file: Path) -> None:
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
    """A kernel whose store is on a server, with a version in it."""
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
            killed.result(timeout=30)
        finally:
            server.start()
    with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
        connection.execute("drop trigger nap on tool_versions")


NAP = """create function nap() returns trigger language plpgsql as
  $$ begin perform pg_sleep(20); return new; end $$"""


def _kill_while_napping(server: PostgresServer, url: str) -> None:
    asked = "select count(*) from pg_stat_activity where wait_event = 'PgSleep' and datname = current_database()"
    with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
        end = time.monotonic() + 15
        while connection.execute(asked).fetchone() == (0,) and time.monotonic() < end:
            time.sleep(0.005)
    server.kill()


def test_a_server_that_is_gone_is_told_and_used_again_by_the_same_kernel(
    served: Session, postgres_server: PostgresServer
) -> None:
    try:
        postgres_server.kill()
        check_all_refused(served, "store_unavailable")
    finally:
        postgres_server.start()
    served.write("1.0.0")
    check_everything_works(served, "1.0.0")


def test_a_server_that_crashes_while_a_version_is_published_loses_nothing(
    served: Session, postgres_url: str, postgres_server: PostgresServer
) -> None:
    served.write("1.0.1")
    with killed_in_the_middle(postgres_server, postgres_url, "when (new.version = '1.0.1')"):
        check_refused(served.ask("execute", action="publish", item_id="say"), "store_unavailable")

    check_everything_works(served, "1.0.0")


def test_a_server_that_crashes_while_versions_are_pulled_loses_nothing(
    served: Session,
    postgres_url: str,
    postgres_server: PostgresServer,
    tmp_path: Path,
    a_page: Callable[[str], Release],
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
