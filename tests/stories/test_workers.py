"""Several workers on one PostgreSQL: every thread and every time of a schedule runs once, and more workers do more."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.kernel.threads.conftest import ALL_TOOLS, DIRECTIVE, write_provider
from tests.plugins.scripted_model import ModelRequest, ScriptedModel, ScriptedTurn, say, use

from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.kernel.threads.wake import worker_lock
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.schedules import Schedules

pytestmark = pytest.mark.usefixtures("processes", "loopback", "postgres_server")
ENGINES = pytest.mark.parametrize("engine", ["inline", "dbos"])
HOUR = 3_600_000
THINKING = 0.3


RELAY = """
import asyncio, sys

def parts(place):
    kind, _, where = place.partition(":")
    return kind == "unix", where

async def pump(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()

async def relay(reader, writer):
    is_unix, where = parts(sys.argv[2])
    opening = asyncio.open_unix_connection(where) if is_unix else asyncio.open_connection("127.0.0.1", int(where))
    far_reader, far_writer = await opening
    await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer), return_exceptions=True)

async def main():
    is_unix, where = parts(sys.argv[1])
    serving = asyncio.start_unix_server if is_unix else asyncio.start_server
    async with await serving(relay, *([where] if is_unix else ["127.0.0.1", int(where)])) as server:
        await server.serve_forever()

asyncio.run(main())
"""
"""Passes connections on: a machine with its own network reaches the model through a socket in the file system."""


class _Forgotten(dict[bytes, ModelRequest]):
    """Requests of threads that begin alike look the same, so none is compared with the one before."""

    def get(self, key: bytes, default: object = None) -> None:  # type: ignore[override]  # it has nothing
        return None


@pytest.fixture
def shared(home: Path, project: Path, scripted_model: ScriptedModel, postgres_url: str) -> str:
    """A home on PostgreSQL; its model takes 300 ms for an answer, calls a tool, then ends."""
    user = home / ".ai"
    (user / "directives").mkdir(parents=True)
    (user / "tools").mkdir()
    (user / "registry.yaml").write_text(f"url: {postgres_url}\nactor: team\n")
    write_provider(user, scripted_model, "openai_chat")
    text = DIRECTIVE.format(name="study", permissions=ALL_TOOLS, limits="", outputs="", model="")
    (user / "directives" / "study.md").write_text(text)

    def answer(request: ModelRequest) -> ScriptedTurn:
        return use("help", topic="tool") if len(request.messages) < 6 else say("Done.")

    scripted_model._before = _Forgotten()
    scripted_model.on_request = lambda _: time.sleep(THINKING)
    scripted_model.default = answer
    kiwi("sign", "study")
    return postgres_url


def kiwi(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "kiwi_mcp", *words], check=True, timeout=120, capture_output=True)


@contextmanager
def machines(hosts: Sequence[str], model: ScriptedModel, folder: Path, engine: str) -> Iterator[None]:
    """Run a worker on each machine: a host name and a network of its own, with the file system in common."""
    port, place = model.url("openai_chat").split("/")[2].partition(":")[2], folder / "model.sock"
    relay = [sys.executable, "-c", RELAY]
    worker = f"'{sys.executable}' -m kiwi_mcp worker --concurrency 2 --engine {engine}"
    script = f'"$@" & exec {worker}'
    spaces = ["bwrap", "--dev-bind", "/", "/", "--unshare-net", "--unshare-uts", "--unshare-pid", "--die-with-parent"]
    started = [subprocess.Popen([*relay, f"unix:{place}", f"tcp:{port}"])]
    for host in hosts:
        inner = ["sh", "-c", script, "sh", *relay, f"tcp:{port}", f"unix:{place}"]
        started.append(subprocess.Popen([*spaces, "--hostname", host, *inner], stdout=subprocess.DEVNULL))
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait(60)


@contextmanager
def workers(count: int, engine: str) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    argv = [sys.executable, "-m", "kiwi_mcp", "worker", "--concurrency", "4", "--engine", engine]
    started = [subprocess.Popen(argv, env=os.environ, stdout=subprocess.DEVNULL) for _ in range(count)]
    try:
        yield started
    finally:
        for worker in started:
            worker.terminate()
        for worker in started:
            assert worker.wait(60) == 0  # it gives its threads back


def serve(url: str, threads: int, count: int, engine: str) -> float:
    """Let workers serve the missed times of a schedule; return how many threads a second ended."""
    with closing(open_database(url)) as database:
        schedules = Schedules(database, "team")
        name = f"missed{now_ms()}"
        kiwi("schedule", "add", name, "study", "0 * * * *", "--overlap", "allow", "--misfire", "all")
        ended = "select count(*) from threads where ended_at > 0 and starter = ?"
        with workers(count, engine):
            while len(database.read("select 1 from workers", ())) < count:
                time.sleep(0.1)
            at = now_ms() - now_ms() % HOUR - (threads - 1) * HOUR - 1
            schedules.put_times(replace(schedules.get(name), next_at=at, due_at=at))
            began = time.monotonic()
            while int(str(database.read(ended, (f"schedule:{name}",))[0][0])) < threads:
                assert time.monotonic() - began < 300
                time.sleep(0.05)
            seconds = time.monotonic() - began
        made = schedules.occurrences(schedules.get(name), 1_000)
        assert Counter(one.status for one in made) == {"started": threads}
        assert len({one.thread_id for one in made}) == threads
        results = "select distinct status, code, message from threads where starter = ?"
        assert database.read(results, (f"schedule:{name}",)) == [("completed", "", "")]
        kiwi("schedule", "remove", name)
    return threads / seconds


@ENGINES
@pytest.mark.slow
@pytest.mark.req("K-TH-07")
def test_four_workers_serve_each_time_once(shared: str, scripted_model: ScriptedModel, engine: str) -> None:
    serve(shared, 12, 4, engine)
    assert len(scripted_model.requests) == 12 * 3  # no turn was made twice


@ENGINES
@pytest.mark.slow
@pytest.mark.req("K-TH-07")
@pytest.mark.usefixtures("sandbox")
def test_workers_on_two_machines_share_the_queue_over_a_unix_socket(
    shared: str, home: Path, scripted_model: ScriptedModel, tmp_path: Path, engine: str
) -> None:
    with closing(open_database(shared)) as database:
        folder = str(database.read("show unix_socket_directories", ())[0][0])
        port, name = shared.rpartition(":")[2].split("/")
        (home / ".ai" / "registry.yaml").write_text(
            f"url: postgresql://kiwi@/{name}?host={folder}&port={port}\nactor: team\n"
        )
        lock = worker_lock(home / ".ai")  # no command starts a worker on this machine
        assert lock is not None
        for _ in range(4):
            kiwi("thread", "start", "study")
        working = "select host from workers join threads on lease_owner = process"
        hosts, until = set[str](), time.monotonic() + 120
        with machines(["kiwi-one", "kiwi-two"], scripted_model, tmp_path, engine):
            while database.read("select 1 from threads where ended_at = 0 limit 1", ()):
                hosts |= {str(row[0]) for row in database.read(working, ())}
                assert time.monotonic() < until
                time.sleep(0.05)
        os.close(lock)
        assert hosts == {"kiwi-one", "kiwi-two"}
        assert database.read("select distinct status, code, message from threads", ()) == [("completed", "", "")]
    assert len(scripted_model.requests) == 4 * 3  # no turn was made twice


@ENGINES
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.req("K-TH-07")
def test_more_workers_do_more_work_and_take_no_more_time_of_the_processor_for_it(shared: str, engine: str) -> None:
    rates, costs = dict[int, float](), dict[int, float]()
    for count in (1, 2, 4):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        rates[count] = serve(shared, 24 * count, count, engine)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        costs[count] = seconds / (24 * count)
    sys.stderr.write(f"\n{engine}: threads per second by workers {rates}, seconds of CPU per thread {costs}\n")
    assert costs[4] / costs[1] < 1.5, costs
    if (os.cpu_count() or 1) >= 8:  # workers, model and PostgreSQL on fewer cores wait for each other
        assert rates[2] / rates[1] >= 1.6, rates
        assert rates[4] / rates[2] >= 1.6, rates
