"""Kernels that are killed at any moment while tools run in sandboxes and questions wait for the owner.

In every case, no process continues, no question is lost, nothing runs twice, and all records verify.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from secrets import token_hex

import pytest
from tests.faults.conftest import Crew, Worker

from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.store.open import open_database

SEED = 11
AT_ONCE = 2
LONGEST = (0.25, 1.0, 3.0)
"""The longest life of a kernel, in times of its first call: chosen for each, so that some die early and some late."""
SETTLED = 120.0


@dataclass(slots=True)
class Campaign:
    """A project with a tool that writes one line, the kernels that call it and are killed, and their answers."""

    crew: Crew
    project: Path
    url: str
    mark: str
    chance: random.Random = field(default_factory=lambda: random.Random(SEED))
    killed: int = 0
    lives: Iterator[int] = field(default_factory=lambda: count(1))
    asked: dict[str, str] = field(default_factory=dict)
    """The word that each question is about, by the question's id."""
    approved: set[str] = field(default_factory=set)
    ran: dict[str, str] = field(default_factory=dict)
    """The run that each word was done by."""
    left: list[str] = field(default_factory=list)
    """Words with a call that was killed."""

    def go_on(self, kills: int) -> None:
        """Kill a number of kernels, a few of them running at the same time."""
        at_work: list[tuple[float, Worker]] = []
        pace = self._time_to_run()
        while self.killed < kills:
            while len(at_work) < AT_ONCE:
                life = pace * self.chance.uniform(0, self.chance.choice(LONGEST))
                at_work.append((time.monotonic() + life, self._begin()))
            at_work.sort(key=lambda one: one[0])
            moment, worker = at_work.pop(0)
            time.sleep(max(0.0, moment - time.monotonic()))
            self._end(worker)
        for _, worker in at_work:
            self._end(worker)

    def _time_to_run(self) -> float:
        """Return how long a new kernel takes on this machine until the tool has run, in seconds."""
        begun, worker = time.monotonic(), self._begin()
        while not any(kind == "ran" for kind, *_ in worker.lines()) and time.monotonic() < begun + SETTLED:
            time.sleep(0.01)
        self._end(worker)
        return time.monotonic() - begun

    def _begin(self) -> Worker:
        life = next(self.lives)
        # What one died over, the next tries again.
        again, self.left = self.left[:2], self.left[2:]
        words = {"seed": f"{SEED}-{life}", "life": str(life), "left": again, "url": self.url}
        return self.crew.begin("use", project=str(self.project), **words)

    def _end(self, worker: Worker) -> None:
        self.killed += self.crew.kill(worker)
        unsure = ""
        for kind, *rest in worker.lines():
            assert kind != "failed", rest
            id_, word = rest
            if kind == "asked":
                assert self.asked.setdefault(id_, word) == word
            elif kind == "approved":
                self.approved.add(id_)
                unsure = word
            else:
                assert self.ran.setdefault(word, id_) == id_, f"{word} ran twice"
                unsure = ""
        if unsure:
            self.left.append(unsure)


def living(mark: str) -> list[str]:
    """The processes of the machine that have a word among their arguments."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


def state_of(pid: str) -> str:
    """What the machine says about a process that should have ended, and about its share of the processors."""
    said = []
    with suppress(OSError):  # it has ended meanwhile
        said += [Path(f"/proc/{pid}/{name}").read_text() for name in ("status", "wchan", "cgroup")]
        for group in (line.split(":", 2)[2] for line in said[-1].splitlines() if ":cpu:" in line):
            said += [Path(f"/sys/fs/cgroup/cpu{group}/{name}").read_text() for name in ("tasks", "cpu.stat")]
    return "\n".join(said)


@pytest.fixture
def campaign(
    crew: Crew, project: Path, new_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch, sandbox: None
) -> Campaign:
    print(f"seed: {SEED}")  # noqa: T201 - shown when a test fails
    mark = f"0.{int(token_hex(4), 16) % 10**8 + 10**8}"
    (project / "ledger").mkdir()
    folder = project / ".ai" / "tools" / "note"
    folder.mkdir(parents=True)
    manifest = {
        "tool_id": "note", "tool_type": "script", "executor": "bash_runtime", "version": "1.0.0",
        "description": "Write one line", "mutates_state": True, "needs": {"write": ["ledger"]},
        "config": {"entrypoint": "main.sh"}, "parameters": [{"name": "word", "type": "string", "required": True}],
    }  # fmt: skip
    (folder / "tool.yaml").write_text(json.dumps(manifest))
    (folder / "main.sh").write_text(f'echo "$KIWI_PARAM_word" >>"$KIWI_PROJECT/ledger/lines"\nsleep {mark}\n')
    url = new_url()
    monkeypatch.setenv("KIWI_REGISTRY", url)
    assert "error" not in ask(project, "execute", {"action": "sign", "item_id": "note"})
    return Campaign(crew, project, url, mark)


def ask(project: Path, verb: str, request: JsonObject) -> JsonObject:
    """Ask as the owner."""

    async def call() -> JsonObject:
        kernel = Kernel(project)
        try:
            return (await kernel.call(verb, request)).content
        finally:
            await kernel.aclose()

    return asyncio.run(call())


def check(campaign: Campaign) -> None:
    """Check that all acknowledged work exists, and that nothing ran twice or without approval."""
    # A sandbox that got its command in the very moment in which its kernel died may begin a little later, and
    # ends by itself: so nothing may be there for a whole second.
    end, quiet = time.monotonic() + SETTLED, 0
    while quiet < 20 and time.monotonic() < end:
        quiet = 0 if living(campaign.mark) else quiet + 1
        time.sleep(0.05)
    assert {pid: state_of(pid) for pid in living(campaign.mark)} == {}
    written = Counter((campaign.project / "ledger" / "lines").read_text().split())
    assert set(written.values()) == {1}, written.most_common(3)
    assert campaign.ran.keys() <= written.keys()

    listed = as_list(ask(campaign.project, "approvals", {"status": "all", "limit": 1_000})["approvals"])
    questions = {str(row["approval_id"]): row for row in map(as_object, listed)}
    assert campaign.asked.keys() <= questions.keys()
    assert len(questions) < 1_000
    for id_, word in campaign.asked.items():
        status = questions[id_]["status"]
        assert status in ({"approved", "used"} if id_ in campaign.approved else {"pending", "approved", "used"}), word
    used = [row for row in questions.values() if row["status"] == "used"]
    known = {campaign.asked[id_] for id_, row in questions.items() if id_ in campaign.asked and row["status"] == "used"}
    assert written.keys() <= known, "a line without an approval"
    assert len({str(row["run_id"]) for row in used}) == len(used)

    audit = ask(campaign.project, "audit", {"action": "verify"})
    assert audit["status"] == "verified", audit
    database = open_database(campaign.url)
    if database.dialect == "sqlite":
        assert [tuple(row) for row in database.read("PRAGMA integrity_check")] == [("ok",)]
        assert database.read("PRAGMA foreign_key_check") == []
    recorded = {str(row[0]) for row in database.read("select id from runs where status = 'success'")}
    assert {*campaign.ran.values()} <= recorded
    database.close()


@pytest.mark.case("APPR-09")
@pytest.mark.timeout(240)
def test_killed_kernels_lose_no_question_and_run_nothing_twice(campaign: Campaign) -> None:
    campaign.go_on(10)
    check(campaign)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.case("APPR-09")
def test_two_hundred_kills_lose_no_question_run_nothing_twice_and_leave_no_process(campaign: Campaign) -> None:
    for _ in range(4):
        campaign.go_on(campaign.killed + 50)
        check(campaign)
    assert campaign.killed >= 200
    # The moments were such that every part of a call was hit.
    found = as_list(ask(campaign.project, "approvals", {"status": "all", "limit": 1_000})["approvals"])
    statuses = Counter(str(as_object(row)["status"]) for row in found)
    assert min(statuses["pending"], statuses["used"]) >= 10, statuses
    assert statuses["used"] > len(campaign.ran), "no kernel was killed during a tool run"
