"""Processes of threads are killed at any moment: no finished call runs again, and nothing is lost."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.threads.conftest import Agents, write_provider
from tests.plugins.scripted_model import MODEL, ModelRequest, ScriptedTurn, say, use

from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.threads import Thread
from kiwi_mcp.kernel.threads.runner import ThreadRunner
from kiwi_mcp.kernel.threads.wake import worker_lock
from kiwi_mcp.policy.tokens import TokenStore
from kiwi_mcp.store.sqlite import library
from kiwi_mcp.store.threads import ThreadFilter

pytestmark = pytest.mark.usefixtures("sandbox")
SEED = 11
EFFECTS = ("pure", "idempotent", "at_most_once")
CHILDREN = 3
SCRIPT = """echo "$KIWI_IDEMPOTENCY_KEY" >> {effect}.txt; sync {effect}.txt; sleep 0.02; echo '{{}}'"""
LONGEST = 6.0
"""How many seconds a process lives at most before it is killed."""


def turn_of(request: ModelRequest) -> ScriptedTurn:
    """Answer by the program of the thread, and by how many turns it had: the same whenever it is asked again."""
    topic = re.search(r"Look into (children|part) ([0-9.]+)\.", json.dumps(request.messages[:2]))
    assert topic is not None
    made: int = sum(message["role"] == "assistant" for message in request.messages)
    calls = [use("execute", item_id=f"do_{effect}", parameters={"turn": made}) for effect in EFFECTS]
    if topic[1] == "part":  # a child
        return (calls[0] & calls[1] & calls[2], calls[2], say("Child done."))[min(made, 2)]
    spawns = [use("spawn", item="study", inputs={"topic": f"part {topic[2]}.{n}"}) for n in range(CHILDREN)]
    script = (spawns[0] & spawns[1] & spawns[2], calls[0] & calls[1] & calls[2], use("wait"), say("All done."))
    return script[min(made, 3)]


@dataclass
class Siege:
    """A home in which processes are killed while they run threads."""

    agents: Agents
    chance: random.Random
    engine: str = "inline"
    token: str = ""
    connections: list[http.client.HTTPConnection] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)
    started: int = 0

    async def kill_often(self, kills: int) -> None:
        """Start processes that run threads, and kill each, until `kills` were killed."""
        while self.killed.total() < kills:
            is_new = not self.under_way() or self.chance.random() < 0.2
            await self.kill(*self.chance.choice([("thread",), ("up",), ("up", "worker")]) if is_new else ("worker",))

    async def kill(self, *victims: str) -> None:
        """Start workers, gateways that are asked for a new thread, or commands that start one, and kill them."""
        await asyncio.to_thread(self.kill_now, victims)
        await self.answer_all()

    def kill_now(self, victims: Sequence[str]) -> None:
        """Kill processes with a random delay after a random number of requests to the model."""
        before = len(self.agents.model.requests) + self.chance.randint(0, 5)
        started = {name: getattr(self, f"start_{name}")() for name in victims}
        delay = self.chance.random() * 0.3
        last = [*started.values()][-1]
        self.wait_for_requests(before, last)
        with suppress(subprocess.TimeoutExpired):
            last.wait(delay)
        for name, process in started.items():
            self.killed[name] += process.poll() is None
            process.kill()
            process.wait()
        while self.connections:
            self.connections.pop().close()

    def start_worker(self) -> subprocess.Popen[bytes]:
        """Start a worker with the engine under test."""
        return self.popen("worker", "--until-idle", "--engine", self.engine)

    def start_thread(self) -> subprocess.Popen[bytes]:
        """Start a command that runs a new thread."""
        return self.popen("thread", "start", "lead", "--wait", "--input", f"topic={self.next_topic()}")

    def start_up(self) -> subprocess.Popen[bytes]:
        """Start a gateway that runs a new thread; its answer is not awaited."""
        argv = [sys.executable, "-m", "kiwi_mcp", "up", "--port", "0", "--json", "--project", str(self.agents.project)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout
        with process.stdout as output:
            address = json.loads(b"".join(iter(output.readline, b"}\n")) + b"}")
        connection = http.client.HTTPConnection("127.0.0.1", address["port"], timeout=60)
        request: Json = {"item_id": "lead", "inputs": {"topic": self.next_topic()}, "wait": True}
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/thread/start", json.dumps(request), headers)
        self.connections.append(connection)  # closed, it would cancel the request
        return process

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Stop a process between two transactions: a file of SQLite that it writes is locked while it is stopped."""
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        while any(map(is_locked, (self.agents.user / "state").glob("*.db"))):
            process.send_signal(signal.SIGCONT)
            time.sleep(self.chance.random() * 0.05)
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.05)

    def next_topic(self) -> str:
        """Return the topic of a new tree of threads."""
        self.started += 1
        return f"children {self.started}"

    def wait_for_requests(self, count: int, process: subprocess.Popen[bytes], seconds: float = LONGEST) -> None:
        """Wait until the model had more requests than a number, the process has ended, or some seconds have passed."""
        until = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < until and len(self.agents.model.requests) <= count:
            time.sleep(0.005)

    def popen(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a command of Kiwi."""
        with (self.agents.project.parent / "log.txt").open("ab") as log:
            argv = [sys.executable, "-m", "kiwi_mcp", *words]
            return subprocess.Popen(argv, cwd=self.agents.project, stdout=log, stderr=log)

    @property
    def runner(self) -> ThreadRunner:
        """The threads of the store."""
        return self.agents.kernel._services.one(ThreadRunner)

    def threads(self) -> tuple[Thread, ...]:
        """Return every thread."""
        return self.runner.stores.threads.list(ThreadFilter(limit=10_000))

    def under_way(self) -> bool:
        """Whether a thread has not ended."""
        return any(not thread.is_ended for thread in self.threads())

    async def answer_all(self) -> None:
        """Say of every call with an unknown end that it was done or was not done."""
        for question in self.runner.stores.questions.open(time.time_ns() // 1_000_000):
            answer = self.chance.choice(["done", "not done"])
            await self.agents.call("thread", action="answer", question_id=question.id, answer=answer)

    async def finish(self) -> None:
        """Let everything run to its end."""
        for _ in range(20):
            if not self.under_way():
                return
            await asyncio.to_thread(self.start_worker().wait, 100)
            await self.answer_all()
        raise AssertionError([(one.id, one.status, one.waits_for) for one in self.threads() if not one.is_ended])

    def write_journals(self) -> None:
        """Write the journals to a file beside the project, to be read when a test fails."""
        with (self.agents.project.parent / "journals.txt").open("w") as file:
            for thread in reversed(self.threads()):
                print(thread.id, thread.parent_id, thread.status, thread.waits_for, thread.message, file=file)
                for event in self.runner.stores.threads.events(thread.id):
                    print(
                        "   ", event.seq, event.at, event.kind, json.dumps(event.body)[:400], event.changes, file=file
                    )

    async def check(self) -> None:
        """Check witness files, journals, budgets and hashes."""
        threads = self.threads()
        lines = {effect: Counter(self.lines(effect)) for effect in EFFECTS}
        assert not [key for key, times in lines["at_most_once"].items() if times > 1]
        for thread in threads:
            # One that lost more than ten processes has failed, and its children are cancelled.
            assert thread.is_ended
            assert (thread.reserved, thread.reserved_tokens) == (0, 0), thread
            assert self.runner.stores.threads.verify(thread.id) == (), thread
            self.check_calls(thread, lines)
            if not thread.parent_id:
                tree = [one for one in threads if one.root_id == thread.id]
                assert len(tree) == 1 + CHILDREN or thread.code == "recovery_limit", thread
                self.check_ledger(thread)
        audit = await self.agents.read("audit", action="verify")
        assert audit["status"] == "verified", audit

    def lines(self, effect: str) -> list[str]:
        """Return the keys of the calls that ran."""
        path = self.agents.project / f"{effect}.txt"
        return path.read_text().split() if path.exists() else []

    def check_calls(self, thread: Thread, lines: dict[str, Counter[str]]) -> None:
        """Check that no call runs more often than it began, and never after its result."""
        model_seq, order, began, ended = 0, list[str](), Counter[str](), set[str]()
        for event in self.runner.stores.threads.events(thread.id):
            body: dict[str, Any] = dict(event.body)
            if event.kind == "model":
                model_seq, order = event.seq, [part["id"] for part in body["parts"] if "arguments" in part]
            elif event.kind == "began":
                key = f"{thread.id}/{model_seq}.{order.index(body['call_id'])}"
                assert key not in ended, (thread.id, event)
                began[key] += 1
            elif event.kind == "result":
                ended.add(f"{thread.id}/{model_seq}.{order.index(body['part']['id'])}")
        for effect in EFFECTS:
            own = {key: times for key, times in lines[effect].items() if key.startswith(thread.id)}
            assert all(times <= began[key] for key, times in own.items()), (own, began)

    def check_ledger(self, root: Thread) -> None:
        """Check that a tree has used exactly what its requests were charged."""
        entries = self.runner.stores.budget.ledger(root.id)
        charged = [one for one in entries if one.kind in {"settle", "charge_maximum", "release"}]
        assert sum(one.spend for one in charged) == root.usage.spend
        assert sum(one.input_tokens + one.output_tokens for one in charged) == root.usage.tokens


def is_locked(path: Path) -> bool:
    """Whether another process is in the middle of a transaction that writes."""
    with closing(library.connect(path, timeout=0.2)) as connection:
        try:
            connection.execute("begin immediate")
        except library.OperationalError:
            return True
        return False


@pytest.fixture(params=["sqlite-inline", "sqlite-dbos", "postgres-inline", "postgres-dbos"])
async def siege(request: pytest.FixtureRequest, agents: Agents) -> Siege:
    return await besieged(request, agents)


def use_store(request: pytest.FixtureRequest, agents: Agents) -> None:
    """Let a home use the store that a test is parametrised with; SQLite if it is not."""
    if getattr(request, "param", "").startswith("postgres"):
        url = request.getfixturevalue("postgres_url")
        (agents.user / "registry.yaml").write_text(f"url: {url}\n")


async def besieged(request: pytest.FixtureRequest, agents: Agents) -> Siege:
    use_store(request, agents)
    engine = request.param.partition("-")[2]
    model: Json = {"context": 32_768, "max_output": 4_096, "price": {"input": 0.03, "output": 0.15}}
    write_provider(agents.user, agents.model, "openai_chat", models={MODEL: model})
    agents.directive("lead", limits="<limits><turns>20</turns><tokens>5000000</tokens></limits>")
    agents.directive("study")
    for effect in EFFECTS:
        script = SCRIPT.format(effect=effect)
        agents.bash_tool(f"do_{effect}", script, effect=effect, needs={"write": ["."]})
        await agents.call("approvals", action="add_rule", item=f"*/do_{effect}@*")
    await agents.sign("lead", "study", *(f"do_{effect}" for effect in EFFECTS))
    agents.model.default = turn_of
    print(f"seed: {SEED}")  # noqa: T201 - shown when a test fails
    tokens = TokenStore(agents.user)
    token = tokens.add("ci", (), can_write=False, can_use_tools=True, kind="owner", can_manage=True)
    return Siege(agents, random.Random(SEED), engine or "inline", token)


@pytest.fixture(autouse=True)
def no_other_worker(agents: Agents) -> Iterator[None]:
    """Let no command start a worker of its own, which no test could kill."""
    lock = worker_lock(agents.user)
    assert lock is not None
    yield
    os.close(lock)


@pytest.mark.timeout(240)
async def test_a_thread_and_its_children_survive_kills(siege: Siege) -> None:
    for victims in ("up",), ("worker",), ("up", "worker"), ("thread",), ("worker",):
        await siege.kill(*victims)
    await siege.finish()
    siege.write_journals()
    await siege.check()
    assert siege.killed["up"], siege.killed


async def stop_past_the_lease(siege: Siege, victim: str) -> bool:
    """Stop a process, let a worker finish its threads, and let it continue; return whether any were left then."""
    agents, database = siege.agents, siege.agents.kernel._services.store.registry().database
    if victim == "worker":
        await agents.call("thread", action="start", item_id="lead", inputs={"topic": siege.next_topic()})
    seen = len(agents.model.requests) + siege.chance.randint(0, 4)
    process = getattr(siege, f"start_{victim}")()
    await asyncio.to_thread(siege.wait_for_requests, seen, process, 60)
    await asyncio.sleep(siege.chance.random() * 0.3)
    await asyncio.to_thread(siege.stop, process)
    with database.transaction() as transaction:  # as if it had been silent for 15 seconds
        transaction.write("update threads set beat_at = 0", ())
        transaction.write("update workers set beat_at = 0", ())
    was_under_way = siege.under_way()
    await siege.finish()
    before = {effect: siege.lines(effect) for effect in EFFECTS}
    process.send_signal(signal.SIGCONT)
    await asyncio.to_thread(process.wait, 60)
    assert {effect: siege.lines(effect) for effect in EFFECTS} == before
    return was_under_way


@pytest.mark.timeout(240)
@pytest.mark.parametrize("siege", ["sqlite-dbos", "postgres-inline"], indirect=True)
async def test_a_worker_that_was_stopped_past_its_lease_begins_no_effect(siege: Siege) -> None:
    assert await stop_past_the_lease(siege, "worker")
    await siege.check()


@pytest.mark.soak
@pytest.mark.timeout(1_800)
async def test_ten_processes_that_were_stopped_past_their_leases_begin_no_effect(siege: Siege) -> None:
    stopped = 0
    while stopped < 10:
        stopped += await stop_past_the_lease(siege, ("thread", "worker")[stopped % 2])
    siege.write_journals()
    await siege.check()


@pytest.mark.soak
@pytest.mark.timeout(7_200)
@pytest.mark.req("K-TH-05")
async def test_two_hundred_kills_repeat_no_finished_call(siege: Siege) -> None:
    await siege.kill_often(200)
    await siege.finish()
    siege.write_journals()
    await siege.check()
    assert min(siege.killed.values()) >= 5, siege.killed
