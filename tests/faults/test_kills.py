"""Concurrent processes that are killed at any moment while they publish, pull, record and migrate."""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path

import pytest
from tests.faults.conftest import Crew, Worker

from kiwi_mcp import __version__
from kiwi_mcp.catalog.item_reader import load_bytes, read_tool
from kiwi_mcp.catalog.release import release_of, seed, seeds
from kiwi_mcp.domain.registry import Actor, VersionInfo
from kiwi_mcp.manifest.type_specs import load_type_specs
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease
from kiwi_mcp.store.remote.layout import Layout
from kiwi_mcp.store.runs import RunFilter, Runs

SEED = 7
TEAM = Actor("ann", ("team", "public"))
SLOTS: Sequence[Sequence[str]] = (
    ("publish",),
    ("pull",),
    ("open", "migrate", "open", "author"),
    ("publish", "author", "pull"),
)
"""What is at work at the same time: each slot begins its next work when the one before was killed."""
PER_ROUND = 25
"""After how many kills everything is looked at."""


def knowledge(folder: Path, prefix: str, number: int) -> list[str]:
    """Put pages into a project, and return their names."""
    names = [f"{prefix}_{page}" for page in range(number)]
    for name in names:
        path = folder / ".ai" / "knowledge" / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        head = f"---\nid: {name}\ntitle: {name}\nversion: 1.0.0\nentry_type: reference\n---\n\n"
        path.write_text(f"{head}# {name}\n\n{'All of it. ' * 200}\n", encoding="utf-8")
    return names


def releases_of(folder: Path, names: Sequence[str], namespace: str) -> Iterator[CheckedRelease]:
    for name in names:
        path = folder / ".ai" / "knowledge" / f"{name}.md"
        tool = read_tool(path, source="project", base=folder / ".ai", sheets=load_type_specs())
        data = {file.path: load_bytes(tool, file) for file in tool.files}
        made = release_of(tool, data, namespace=namespace, place=tool.origin.place, executor=None)
        yield CheckedRelease.of(made)


@dataclass(slots=True)
class Siege:
    """A store with workers that are killed, and all their acknowledged writes."""

    crew: Crew
    url: str
    new_url: Callable[[], str]
    folder: Path
    chance: random.Random
    killed: Counter[str] = field(default_factory=Counter)
    kept: dict[str, str] = field(default_factory=dict)
    yanked: set[str] = field(default_factory=set)
    ran: set[str] = field(default_factory=set)
    lives: Iterator[int] = field(default_factory=lambda: count(1))

    def go_on(self, rounds: int, kills: int) -> None:
        """Kill a number of workers in each round, and check the store after each."""
        for number in range(rounds):
            scene = Scene(self, number)
            self._kill(scene, kills)
            scene.check()
            check_store(self)

    def _kill(self, scene: Scene, kills: int) -> None:
        slots = [cycle(works) for works in SLOTS]
        queue: list[tuple[float, int, Worker]] = []
        left = kills
        for slot, works in enumerate(slots):
            self._begin(queue, slot, next(works), scene)
        while queue:
            moment, slot, worker = heapq.heappop(queue)
            time.sleep(max(0.0, moment - time.monotonic()))
            if self.crew.kill(worker):
                self.killed[worker.work] += 1
                left -= 1
            self._hear(worker)
            if left > len(queue):
                self._begin(queue, slot, next(slots[slot]), scene)

    def _begin(self, queue: list[tuple[float, int, Worker]], slot: int, work: str, scene: Scene) -> None:
        """Begin a worker that will die soon after its start, or anywhere in its life."""
        worker = scene.begin(work)
        longest = self.chance.choice((0.02, 0.05, 0.15) if work == "open" else (0.02, 0.2, 0.8))
        heapq.heappush(queue, (time.monotonic() + self.chance.uniform(0, longest), slot, worker))

    def _hear(self, worker: Worker) -> None:
        for word, *rest in worker.lines():
            assert word != "failed", rest
            if word == "kept":
                assert self.kept.setdefault(rest[0], rest[1]) == rest[1]
            elif word in {"yanked", "ran"}:
                (self.yanked if word == "yanked" else self.ran).add(rest[0])


class Scene:
    """What the workers of one round find: a remote, a project with items and old scripts, and an empty store."""

    def __init__(self, siege: Siege, number: int) -> None:
        self._siege = siege
        self._project = siege.folder / f"project-{number}"
        self._source = siege.folder / f"source-{number}"
        self._items = knowledge(self._project, f"page_{number}", 60)
        self._offered = self._fill_source(number)
        self._fresh: list[str] = []
        self.scripts = [f"old_{script}" for script in range(80)]
        for script in self.scripts:
            path = self._project / ".ai" / "scripts" / f"{script}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"def main() -> str:\n    return '{script}'\n", encoding="utf-8")

    def _fill_source(self, number: int) -> dict[str, str]:
        """Make a remote, and return the digests of what it holds."""
        elsewhere = self._siege.folder / f"elsewhere-{number}"
        found = [*releases_of(elsewhere, knowledge(elsewhere, f"note_{number}", 120), "team")]
        self.remote = str(self._source)
        Layout(self._source).write(found)
        return {str(one.name): one.digest for one in found}

    def begin(self, work: str) -> Worker:
        siege = self._siege
        life = f"{next(siege.lives)}"
        words: dict[str, object] = {"seed": f"{SEED}-{life}", "life": life, "project": str(self._project)}
        words |= {"url": self._fresh_url() if work == "open" else siege.url, "source": self.remote}
        return siege.crew.begin(work, **words, offered=self._offered, items=self._items)

    def _fresh_url(self) -> str:
        """A new folder, or one in which a killed process was creating a store."""
        if not self._fresh or self._siege.chance.random() < 0.6:
            self._fresh.append(self._siege.new_url())
        return self._fresh[-1]

    def check(self) -> None:
        """Find whole what the round made: new stores, and the project with its old scripts."""
        for url in self._fresh:
            database = open_database(url)
            registry = Registry(database, TEAM)
            seed(registry, __version__)
            assert registry.count() == len([*seeds()])
            assert [*registry.verify()] == []
            database.close()
        tools = self._project / ".ai" / "tools"
        made = [folder for folder in tools.iterdir() if not folder.name.startswith(".")] if tools.is_dir() else []
        for folder in made:
            assert {path.name for path in folder.iterdir()} == {"tool.yaml", f"{folder.name}.py"}
        old = {path.stem for path in (self._project / ".ai" / "scripts").glob("*.py")}
        assert old | {folder.name for folder in made} == {*self.scripts}


def check_store(siege: Siege) -> None:
    """Check that every acknowledged write is in the store, and that nothing in it is incomplete."""
    database = open_database(siege.url)
    registry = Registry(database, TEAM)
    assert [*registry.verify()] == []
    listed = {str(one.name): one for one in registry.find(is_all_versions=True)}
    lost = {name: digest for name, digest in siege.kept.items() if name not in listed}
    assert lost == {}
    assert {name: listed[name].digest for name in siege.kept} == siege.kept
    assert {name for name in siege.yanked if listed[name].yanked is None} == set()
    _check_pairs([*listed.values()])
    _check_latest([*listed.values()])
    _check_runs(database, siege.ran)
    if database.dialect == "sqlite":
        assert database.read("PRAGMA foreign_key_check") == []
    database.close()


def _check_pairs(listed: Sequence[VersionInfo]) -> None:
    """What was published together is there together."""
    assert set(Counter(one.changelog for one in listed if one.changelog).values()) <= {2}


def _check_latest(listed: Sequence[VersionInfo]) -> None:
    latest = Counter(one.name.tool_id for one in listed if one.is_latest)
    assert latest == Counter({one.name.tool_id for one in listed})


def _check_runs(database: Database, acknowledged: set[str]) -> None:
    runs = Runs(database)
    found = {run.id: run for run in runs.list(RunFilter(limit=100_000))}
    assert acknowledged <= found.keys()
    for run in found.values():
        if run.result_sha256:
            assert len(runs.result(run.id)) == run.result_size


@pytest.fixture
def siege(crew: Crew, new_url: Callable[[], str], tmp_path: Path, home: Path) -> Siege:
    print(f"seed: {SEED}")  # noqa: T201 - shown when a test fails
    url = new_url()
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "registry.yaml").write_text("actor: ann\nnamespaces: [team, public]\n", encoding="utf-8")
    return Siege(crew, url, new_url, tmp_path, random.Random(SEED))


@pytest.mark.case("DB-01", "DB-05")
def test_killed_workers_lose_nothing_that_was_acknowledged(siege: Siege) -> None:
    siege.go_on(rounds=1, kills=12)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.req("K-RG-06")
def test_two_hundred_kills_lose_nothing_and_leave_no_half_version(siege: Siege) -> None:
    siege.go_on(rounds=8, kills=PER_ROUND)

    assert siege.killed.total() == 200
    assert min(siege.killed[work] for work in ("publish", "pull", "migrate", "open", "author")) >= 5, siege.killed
