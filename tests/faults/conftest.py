"""Shared fixtures: worker processes that are killed at any moment, and the stores they fill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

import kiwi_mcp
from kiwi_mcp.catalog.release import check_release
from kiwi_mcp.domain.registry import Release, ReleaseFile, VersionName
from kiwi_mcp.manifest.signatures import statement_of

PROGRAM = Path(__file__).with_name("workers.py")


@dataclass(frozen=True, slots=True)
class Worker:
    """A running process, and the file in which it logs acknowledged writes."""

    pid: int
    work: str
    log: Path

    def lines(self) -> list[list[str]]:
        """The logged writes, as lists of words."""
        text = self.log.read_text(encoding="utf-8") if self.log.exists() else ""
        # A partial line was never acknowledged.
        return [line.split(" ", 2) for line in text.split("\n")[:-1]]


class Crew:
    """Workers that are begun in no time, as their parent has imported everything already."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._numbers = count(1)

    def begin(self, work: str, **words: object) -> Worker:
        """Begin a worker."""
        response = self._folder / f"{work}-{next(self._numbers)}"
        return Worker(self._ask(work=work, log=str(response), **words), work, response)

    def kill(self, worker: Worker) -> bool:
        """Kill a worker, and say whether it was still at work."""
        os.kill(worker.pid, signal.SIGKILL)
        return self._ask(wait=worker.pid) == -signal.SIGKILL

    def wait(self, worker: Worker) -> int:
        """Wait for the end of a worker."""
        return self._ask(wait=worker.pid)

    def _ask(self, **words: object) -> int:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{json.dumps(words)}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@pytest.fixture
def crew(tmp_path: Path, home: Path, processes: None) -> Iterator[Crew]:
    """A parent of workers; what is left of them ends with the test."""
    folder = tmp_path / "logs"
    folder.mkdir()
    path = os.pathsep.join([str(Path(kiwi_mcp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        yield Crew(process, folder)


@pytest.fixture(params=["sqlite", "postgres"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Make an empty place for one more store, and return its URL: the test runs once for each kind."""
    numbers = count(1)
    if request.param == "sqlite":
        return lambda: f"sqlite://{tmp_path}/stores/{next(numbers)}.db"
    make_database: Callable[[], str] = request.getfixturevalue("new_postgres")
    url = make_database()
    with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
        connection.execute("create extension vector")

    def make_schema() -> str:
        # Schemas of one database are as far apart as databases are, and made in no time.
        name = f"store_{next(numbers)}"
        with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
            connection.execute(sql.SQL("create schema {}").format(sql.Identifier(name)))
        return f"{url}?options=-csearch_path%3D{name}%2Cpublic"

    return make_schema


@pytest.fixture
def a_page() -> Callable[[str], Release]:
    """Make a version of a knowledge page, which has no executor."""

    def make(name: str, text: str = "All of it.") -> Release:
        namespace, _, rest = name.partition("/")
        tool_id, _, version = rest.partition("@")
        head = f"---\nid: {tool_id}\ntitle: {tool_id}\nversion: {version}\nentry_type: reference\n---\n\n"
        data = f"{head}# {tool_id}\n\n{text}\n".encode()
        statement = statement_of(tool_id=tool_id, version=version, executor=None, manifest_body=data, files=[])
        place = f"knowledge/{tool_id}.md"
        files = (ReleaseFile(f"{tool_id}.md", data),)
        return check_release(Release(VersionName(namespace, tool_id, version), place, statement, {}, files))

    return make
