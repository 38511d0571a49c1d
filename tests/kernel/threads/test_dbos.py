"""The DBOS engine: what it stores, and that the journal and the lease decide where the two databases differ."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import psycopg
import pytest
from tests.kernel.threads.conftest import Agents
from tests.plugins.scripted_model import ScriptedModel, say

from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.kernel.threads.runner import ThreadRunner
from kiwi_mcp.kernel.threads.wake import worker_lock
from kiwi_mcp.kernel.threads.worker import open_engine
from kiwi_mcp.store.sqlite import library

SECONDS = 60
STORES = pytest.mark.parametrize("engine", ["sqlite", "postgres"], indirect=True)
SOAK_ON_POSTGRES = pytest.mark.parametrize(
    "engine", ["sqlite", pytest.param("postgres", marks=pytest.mark.soak)], indirect=True
)


@dataclass
class EngineTables:
    """A store, and the tables that DBOS has beside it."""

    agents: Agents
    url: str
    file: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @contextmanager
    def open(self) -> Iterator[Any]:
        """Open the tables of DBOS."""
        if self.url:
            with psycopg.connect(self.url, options="-c search_path=kiwi_dbos,public") as connection:
                yield connection
        else:
            with closing(library.connect(self.file)) as connection:
                yield connection
                connection.commit()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the tables of DBOS against writers, but not the store of Kiwi."""
        with self.open() as connection:
            connection.execute("lock table workflow_status in exclusive mode" if self.url else "begin immediate")
            yield

    def read(self, statement: str) -> list[Any]:
        """Return rows of the tables of DBOS."""
        with self.open() as connection:
            rows: list[Any] = connection.execute(statement).fetchall()
            return rows

    def statuses(self) -> list[str]:
        """Return how the workflows ended, the oldest first."""
        return [row[0] for row in self.read("select status from workflow_status order by created_at, workflow_uuid")]

    def start_worker(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a worker, and wait until it serves."""
        before = self.workers()
        argv = [sys.executable, "-m", "kiwi_mcp", "worker", "--engine", "dbos", *words]
        worker = subprocess.Popen(argv, cwd=self.agents.project, stdout=subprocess.DEVNULL)
        self.started.append(worker)
        wait_for(lambda: worker.poll() is not None or self.workers() - before)
        return worker

    def finish(self) -> None:
        """Run a worker until no thread can continue."""
        assert self.start_worker("--until-idle").wait(SECONDS) == 0

    def workers(self) -> set[str]:
        """Return the workers that gave a sign of life."""
        return {str(row[0]) for row in self.store("select process from workers")}

    def threads(self) -> list[tuple[object, ...]]:
        """Return status and lease of every thread."""
        return [*self.store("select status, lease from threads order by id")]

    def store(self, statement: str) -> Any:
        """Read the store of Kiwi."""
        return self.agents.kernel._services.store.registry().database.read(statement)

    async def start_thread(self) -> str:
        """Put a thread into the queue."""
        return str((await self.agents.read("thread", action="start", item_id="study"))["thread_id"])


def wait_for(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def held(model: ScriptedModel, may_answer: Event) -> Semaphore:
    """Let the model answer when it may, and return what counts its requests."""
    asked = Semaphore(0)

    def hold(_: object) -> None:
        asked.release()
        may_answer.wait(SECONDS)

    model.on_request = hold
    return asked


def kill(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()


@pytest.fixture
async def engine(
    request: pytest.FixtureRequest, agents: Agents, processes: None, loopback: None
) -> AsyncIterator[EngineTables]:
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else ""
    if url:
        (agents.user / "registry.yaml").write_text(f"url: {url}\n")
    agents.directive("study")
    await agents.sign("study")
    lock = worker_lock(agents.user)  # no command starts a worker
    assert lock is not None
    engine = EngineTables(agents, url, agents.user / "state" / "engine.db")
    yield engine
    for worker in engine.started:
        kill(worker)
    os.close(lock)


@STORES
async def test_a_worker_that_is_killed_between_the_two_databases_is_repaired_by_the_next(engine: EngineTables) -> None:
    model, may_answer = engine.agents.model, Event()
    asked = held(model, may_answer)
    model.will(say("Birds."))
    first = engine.start_worker()
    with engine.locked():
        await engine.start_thread()
        wait_for(lambda: engine.threads() == [("running", 1)])  # in the journal, and not in the tables of DBOS
        kill(first)
    assert engine.statuses() == []
    second = engine.start_worker()
    assert await asyncio.to_thread(asked.acquire, timeout=SECONDS)
    assert engine.statuses() == ["PENDING"]
    with engine.locked():
        may_answer.set()
        wait_for(lambda: engine.threads() == [("completed", 2)])
        kill(second)
    assert engine.statuses() == ["PENDING"]
    engine.finish()
    assert engine.statuses() == ["CANCELLED"]
    assert engine.threads() == [("completed", 2)]
    assert len(model.requests) == 1


@SOAK_ON_POSTGRES
async def test_a_thread_continues_when_its_workflow_is_cancelled_or_its_worker_is_asked_to_end(
    engine: EngineTables,
) -> None:
    model, may_answer = engine.agents.model, Event()
    asked = held(model, may_answer)
    model.will(say("Lost."), say("Lost, too."), say("Birds."))
    worker = engine.start_worker()
    thread_id = await engine.start_thread()
    assert await asyncio.to_thread(asked.acquire, timeout=SECONDS)
    ((name,),) = engine.read("select workflow_uuid from workflow_status")
    assert name == f"{thread_id}.1.1"
    url = engine.url or f"sqlite:///{engine.file}"
    argv = [Path(sys.prefix, "bin", "dbos"), "workflow", "cancel", name, "--sys-db-url", url, "--schema", "kiwi_dbos"]
    await asyncio.to_thread(subprocess.run, argv, check=True, capture_output=True, timeout=SECONDS)
    assert await asyncio.to_thread(asked.acquire, timeout=SECONDS)  # the lease was given back, and taken again
    assert engine.statuses() == ["CANCELLED", "PENDING"]
    worker.terminate()
    assert worker.wait(SECONDS) == 0
    assert engine.store("select lease_owner from threads") == [("",)]
    may_answer.set()
    engine.finish()
    assert engine.statuses() == ["CANCELLED", "CANCELLED", "SUCCESS"]
    assert engine.threads() == [("completed", 3)]


@SOAK_ON_POSTGRES
async def test_a_worker_that_begins_while_another_one_sweeps_keeps_its_workflow(engine: EngineTables) -> None:
    model, may_answer = engine.agents.model, Event()
    asked = held(model, may_answer)
    model.will(say("Birds."))
    settings = engine.agents.kernel._services.store.settings
    sweeping = open_engine("dbos", settings.url, settings.actor.name, "sweeping")

    async def live_before() -> set[str]:
        """The workers of a moment ago: one begins since then."""
        engine.start_worker()
        await engine.start_thread()
        assert await asyncio.to_thread(asked.acquire, timeout=SECONDS)
        return set()

    try:
        await sweeping.sweep(live_before)
        assert engine.statuses() == ["PENDING"]
    finally:
        may_answer.set()
        await sweeping.aclose()


@SOAK_ON_POSTGRES
async def test_dbos_stores_who_ran_a_segment_and_nothing_of_it_and_forgets_it_after_a_day(
    engine: EngineTables,
) -> None:
    engine.agents.model.will(say("Birds."), say("More birds."))
    for _ in range(2):
        await engine.start_thread()
        engine.finish()
    rows = engine.read("select status, application_version, serialization, executor_id from workflow_status")
    assert [row[:3] for row in rows] == [("SUCCESS", "kiwi-1", "portable_json")] * 2
    assert len({row[3] for row in rows}) == 2
    assert engine.url or stat.S_IMODE(engine.file.stat().st_mode) == 0o600
    stored = engine.read("select inputs, output from workflow_input join workflow_output using (workflow_uuid)")
    assert stored == [('{"namedArgs":{},"positionalArgs":[]}', '"ended"')] * 2
    with engine.open() as connection:
        connection.execute("update workflow_status set completed_at = completed_at - 90000000 where status = 'SUCCESS'")
    lost = await engine.start_thread()
    threads = engine.agents.kernel._services.one(ThreadRunner).stores.threads
    for number in range(11):  # each of them took it, and was lost
        threads.take(lost, f"elsewhere/{number}", number * 3_600_000)
    engine.finish()
    failed = await engine.agents.read("thread", action="show", thread_id=lost)
    assert (failed["status"], failed["code"]) == ("failed", "recovery_limit")
    assert engine.statuses() == []


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
async def test_a_worker_ends_when_dbos_does_not_work_and_its_threads_are_left_to_others(engine: EngineTables) -> None:
    engine.agents.model.will(say("Birds."))
    worker = engine.start_worker()
    with engine.open() as connection:
        connection.execute("alter table workflow_status rename to lost")
    thread_id = await engine.start_thread()
    assert await asyncio.to_thread(worker.wait, SECONDS) == 7
    assert engine.agents.model.requests == []
    done = await engine.agents.read("thread", action="resume", thread_id=thread_id, wait=True)
    assert (done["status"], done["result"]) == ("completed", "Birds.")
    again = engine.start_worker("--until-idle")
    assert await asyncio.to_thread(again.wait, SECONDS) == 7


def test_an_engine_without_its_package_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "kiwi_mcp.engine.dbos", raising=False)
    monkeypatch.setitem(sys.modules, "dbos", None)
    with pytest.raises(Unavailable, match="dbos needs packages") as refused:
        open_engine("dbos", "sqlite:///nowhere.db", "owner", "process")
    assert "dbos>=3.3,<4" in refused.value.suggestion


@pytest.mark.soak
@pytest.mark.timeout(1_800)
@pytest.mark.usefixtures("processes", "loopback")
def test_threads_do_the_same_over_dbos_as_inline(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "suite")]
    own = [str(Path(__file__).parent), "-k", "not kills and not test_dbos"]  # these start workers with either engine
    environment = {**os.environ, "KIWI_TEST_ENGINE": "dbos"}
    done = subprocess.run([*argv, *own], check=False, env=environment, capture_output=True, text=True, timeout=1_700)
    assert done.returncode == 0, done.stdout[-5_000:]
    assert " passed" in done.stdout
