"""Concurrent use of the store: opened once, never closed under a reader, and never waited for without a limit."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.plugins.machines import Machine, MakeMachine

import kiwi_mcp
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.kernel.store import Store

CLOSING = """
import sys, threading
from pathlib import Path
from kiwi_mcp.domain.errors import StoreUnavailable
from kiwi_mcp.kernel.store import Store

for _ in range(5):
    store = Store(Path(sys.argv[1]))
    registry = store.registry()

    def read():
        try:
            while True:
                registry.find()
        except StoreUnavailable:
            pass

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    store.close()
    for thread in threads:
        thread.join(120)
print("alive")
"""


class Relay:
    """A way to a server that may go silent: connections stay, and nothing comes back."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self.speaks = threading.Event()
        self.speaks.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.speaks.set()
        self._door.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._door.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._carry, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._carry, args=(server, client, True), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with suppress(OSError), source, target:
            while data := source.recv(65_536):
                if is_answer:
                    self.speaks.wait(60)
                target.sendall(data)


@pytest.fixture
def relay(postgres_url: str) -> Iterator[Relay]:
    made = Relay(urlsplit(postgres_url).port or 0)
    yield made
    made.close()


@contextmanager
def seconds_at_most(limit: float) -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < limit


def test_threads_that_open_a_store_concurrently_share_it(home: Path) -> None:
    for number in range(5):
        store = Store(home / str(number))
        begin = threading.Barrier(6)

        def use(store: Store = store, begin: threading.Barrier = begin) -> int:
            begin.wait(120)
            registry = store.registry()
            assert registry.head() > 0
            assert store.runs() is not None
            return id(registry.database)

        with ThreadPoolExecutor(6) as threads:
            uses = [threads.submit(use) for _ in range(6)]
            assert len({one.result(120) for one in uses}) == 1
        store.close()


def test_changed_settings_do_not_disturb_readers_of_the_old_store(home: Path) -> None:
    store = Store(home)
    before = store.registry()
    (home / "registry.yaml").write_text("namespaces: [public, acme]\n")
    after = store.registry()

    assert after.actor.namespaces == ("public", "acme")
    assert after.database is not before.database
    assert before.find() == after.find()
    store.close()


def test_a_replaced_store_is_closed_with_its_last_user(home: Path) -> None:
    def files() -> int:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum(str(link.readlink()).startswith(str(home)) for link in links)

    store = Store(home)
    store.registry()
    usual = files()
    for number in range(10):
        (home / "registry.yaml").write_text(f"namespaces: [public, x{number}]\n")
        store.registry()
        assert files() == usual
    store.close()
    assert files() == 0


@pytest.mark.usefixtures("processes")
def test_closing_a_store_ends_its_readers_and_not_the_process(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLOSING, str(home)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])},
    )
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr


@pytest.mark.usefixtures("sandbox")
async def test_concurrent_calls_are_all_answered_while_the_settings_change(a_machine: MakeMachine) -> None:
    ann = a_machine("ann")
    ann.script("local", says="here")

    async def story() -> list[JsonObject]:
        answers: list[JsonObject] = []
        for number in range(5):
            requests: list[JsonObject] = [{"action": "list"}, {"action": "verify"}, {"item_id": "local"}] * 2
            calls = [asyncio.ensure_future(ann.kernel.call("execute", request)) for request in requests]
            await asyncio.sleep(0)
            ann.settle(namespaces=["public", f"x{number}"])
            answers += [answer.content for answer in await asyncio.gather(*calls)]
        await ann.kernel.aclose()
        return answers

    assert [answer for answer in await story() if "code" in answer or "warnings" in answer] == []


@pytest.mark.usefixtures("sandbox")
def test_invalid_settings_refuse_the_registry_and_local_tools_run(a_machine: MakeMachine) -> None:
    ann = a_machine("ann")
    ann.script("local", says="here")
    ann.vouch("local")
    ann.settle(ulr="x")

    ran = ann.do("run", "local")
    assert (ran["result"], ran["run_id"]) == ("here", None)
    assert "registry.yaml" in str(ran["warnings"])
    for action in ("publish", "versions", "list"):
        assert ann.refused(action, "local") == "invalid_manifest"


@pytest.mark.usefixtures("sandbox")
def test_a_search_through_published_items_does_not_block_the_event_loop(a_machine: MakeMachine) -> None:
    ann = a_machine("ann")
    ann.publish("published")
    threads = list[int]()
    registry = ann.kernel._services.store.registry

    def noted() -> object:
        threads.append(threading.get_ident())
        return registry()

    ann.kernel._services.store.registry = noted  # type: ignore[method-assign,assignment]  # the store itself, with a witness
    assert ann.names("says a word called published", "registry") == ["published"]
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.usefixtures("loopback")
def test_a_silent_database_server_delays_a_local_tool_once(
    a_machine: MakeMachine, relay: Relay, postgres_url: str
) -> None:
    ann = a_machine("ann", url=postgres_url.replace(str(urlsplit(postgres_url).port), str(relay.port)))
    ann.script("local", says="here")
    ann.vouch("local")

    async def run(machine: Machine) -> JsonObject:
        request: dict[str, Json] = {"item_id": "local"}
        return (await machine.kernel.call("execute", request)).content

    async def story() -> None:
        assert (await run(ann))["run_id"] is not None
        relay.speaks.clear()
        for limit in (30.0, 10.0, 10.0):
            with seconds_at_most(limit):
                ran = await run(ann)
            assert (ran["result"], ran["run_id"]) == ("here", None)
            assert "does not answer" in str(ran["warnings"])
        await ann.kernel.aclose()

    asyncio.run(story())


def _callers(door: socket.socket) -> int:
    """Return how many connections were opened since this was last asked."""
    number = 0
    with suppress(BlockingIOError):
        while True:
            door.accept()[0].close()
            number += 1
    return number


@pytest.mark.usefixtures("sandbox")
@pytest.mark.usefixtures("loopback")
def test_a_database_server_that_accepts_no_connection_is_abandoned(
    a_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiwi_mcp.kernel.store._PATIENCE", 60.0)  # the machine may be slow
    with socket.create_server(("127.0.0.1", 0)) as door:  # it takes the call and says nothing
        ann = a_machine("ann")
        ann.script("local", says="here")
        ann.vouch("local")
        ann.settle(url=f"postgresql://127.0.0.1:{door.getsockname()[1]}/kiwi")
        run: tuple[str, JsonObject] = ("execute", {"item_id": "local"})
        door.setblocking(False)
        for waits in (1, 0):  # the first call waits once until the time limit, and the next one does not wait
            with seconds_at_most(30.0):
                (answer,) = ann.ask_all([run])
            assert _callers(door) == waits
            assert answer.content["result"] == "here"
            assert "does not answer" in str(answer.content["warnings"])
