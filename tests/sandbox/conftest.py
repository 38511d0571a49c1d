"""A sandbox runner: Kiwi as one user or another, which runs a process at a level and returns its end."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from secrets import token_hex
from tempfile import mkdtemp
from typing import TypeVar

import pytest
from msgspec import Struct, field

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.isolation import Level, ResourceLimits, SandboxProfile
from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.primitives.process import run as subprocess
from kiwi_mcp.primitives.process.namespaces import owner_map as make_owner_map
from kiwi_mcp.primitives.process.run import ProcessResult
from kiwi_mcp.sandbox.backend import Backend, Launch, choose, examine
from kiwi_mcp.sandbox.bubblewrap import UNPRIVILEGED_ID, backends

T = TypeVar("T")
ORDINARY = 23_456
"""A user that exists nowhere else, so that what it owns is the tests' own."""
IS_ROOT = os.geteuid() == 0
PLAIN_PATH = "/usr/local/bin:/usr/bin:/bin"


async def run_confined(confined: Launch, secrets: Mapping[str, str] | None = None) -> ProcessResult:
    """Run what a backend gave through the primitive, with all that its start takes."""
    return await subprocess.run(confined.spec, secrets=secrets or {}, handover=confined.handover, watch=confined.watch)


def processes_with(word: str) -> list[int]:
    """Return the processes of the machine that have a word among their arguments."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


class Cell(Struct, frozen=True):
    """What a process is given for one run, beyond its command."""

    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()
    limits: ResourceLimits = field(default_factory=ResourceLimits)
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    cwd: Path = Path("/")
    timeout: float = 100.0


EMPTY = Cell()


class Warden(Struct, frozen=True):
    """Kiwi as a user, and the level it holds processes at."""

    user: str
    level: Level
    home: Path
    """A folder of the user's own, which a confined process sees nothing of unless it is granted."""
    state: Path
    python: str
    owner_map: int | None = None

    def do(self, work: Callable[[], T]) -> T:
        """Do something as the user; what it raises is raised here."""
        return as_ordinary(work) if self.user == "ordinary" and IS_ROOT else work()

    def run(self, *argv: str, cell: Cell = EMPTY) -> ProcessResult:
        """Run a command confined, and return how it ended; where it could not be confined, that is raised."""
        return self.do(lambda: asyncio.run(self.held(*argv, cell=cell)))

    async def held(self, *argv: str, cell: Cell = EMPTY) -> ProcessResult:
        """Run a command confined; the user must be the right one already."""
        env = {"PATH": PLAIN_PATH, **cell.env}
        spec = ProcessSpec(argv, cwd=str(cell.cwd), env=env, timeout=cell.timeout)
        profile = SandboxProfile(self.level, _paths(cell.readable), _paths(cell.writable), limits=cell.limits)
        with (await self._backend()).wrap(spec, profile) as confined:
            ended = await run_confined(confined, cell.secrets)
            confined.check(ended)
            return ended

    def limited_by(self) -> str:
        """Return what limits all processes of a tool together: `cgroup` or `watchdog`."""
        return self.do(lambda: asyncio.run(self._backend()).limited_by)

    async def _backend(self) -> Backend:
        backend_reports = await examine(backends(owner_map=self.owner_map), self.state, run_confined)
        return choose(self.level, backend_reports).backend

    def python_says(self, code: str, *arguments: str, cell: Cell = EMPTY) -> Json:
        """Run Python code confined, and return the JSON that it printed."""
        ended = self.run(self.python, "-I", "-S", "-c", code, *arguments, cell=cell)
        assert ended.exit_code == 0, (ended.exit_code, ended.signal, ended.timed_out, ended.stderr.decode())
        said: Json = json.loads(ended.stdout)
        return said

    def folder(self, name: str, **files: str) -> Path:
        """Make a folder of the user's own, with files in it; `__` in a name stands for a dot."""
        folder = self.home / f"{name}-{token_hex(4)}"
        folder.mkdir()
        for file, content in files.items():
            (folder / file.replace("__", ".")).write_text(content)
        self.own(folder)
        return folder

    def own(self, *folders: Path) -> None:
        """Make folders and what is in them an ordinary user's own, unless Kiwi runs as root here."""
        if self.user == "ordinary" and IS_ROOT:
            for path in (path for folder in folders for path in (folder, *folder.rglob("*"))):
                os.chown(path, ORDINARY, ORDINARY)


def _paths(paths: tuple[Path, ...]) -> tuple[str, ...]:
    return tuple(map(str, paths))


def as_ordinary(work: Callable[[], T]) -> T:
    """Do something in a copy of this process that belongs to an ordinary user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        answer: tuple[str, object] = ("", None)
        try:
            os.setgroups([])
            os.setresgid(ORDINARY, ORDINARY, ORDINARY)
            os.setresuid(ORDINARY, ORDINARY, ORDINARY)
            answer = ("done", work())
        except KiwiError as fault:
            answer = ("refused", (fault.message, fault.suggestion, dict(fault.details)))
        except BaseException as fault:  # noqa: BLE001 - reported to the waiting process
            answer = ("failed", repr(fault))
        finally:
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(answer, pipe)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        kind, response = pickle.load(pipe)
    os.waitpid(child, 0)
    if kind == "refused":
        message, suggestion, details = response
        raise KiwiError(message, suggestion=suggestion, **details)
    assert kind == "done", response
    result: T = response
    return result


@pytest.fixture(scope="session")
def owner_map(sandbox: None) -> Iterator[int | None]:
    """A user namespace in which root is the user that sandboxes of root's run as."""
    space = make_owner_map(UNPRIVILEGED_ID)
    yield space
    if space is not None:
        os.close(space)


@pytest.fixture(scope="session")
def grounds() -> Iterator[Path]:
    """A folder that every user may enter, as pytest's own are not."""
    folder = Path(mkdtemp(prefix="kiwi-tests-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


HELD: tuple[tuple[str, Level], ...] = (
    ("ordinary", "sandboxed"),
    ("ordinary", "restricted"),
    ("root", "sandboxed"),
    ("root", "restricted"),
)


@pytest.fixture(scope="module", params=HELD, ids="-".join)
def warden(request: pytest.FixtureRequest, grounds: Path, owner_map: int | None) -> Warden:
    """Kiwi as an ordinary user and as root, at each level that the user can have here."""
    user, level = request.param
    return hire(user, level, grounds, owner_map)


@pytest.fixture(scope="module", params=["ordinary", "root"])
def keeper(request: pytest.FixtureRequest, grounds: Path, owner_map: int | None) -> Warden:
    """Kiwi as an ordinary user and as root, at the level `sandboxed`."""
    return hire(request.param, "sandboxed", grounds, owner_map)


@pytest.fixture(scope="module")
def rooted(grounds: Path, owner_map: int | None) -> Warden:
    """Kiwi as root, at the level `sandboxed`."""
    return hire("root", "sandboxed", grounds, owner_map)


@pytest.fixture(scope="module")
def strict(grounds: Path, owner_map: int | None) -> Warden:
    """Kiwi as root, at the level `restricted`."""
    return hire("root", "restricted", grounds, owner_map)


@pytest.fixture(scope="module")
def watched(grounds: Path, sandbox: None) -> Warden:
    """Kiwi as an ordinary user without control groups, at the level `restricted`."""
    return hire("ordinary", "restricted", grounds, None)


def hire(user: str, level: Level, grounds: Path, owner_map: int | None) -> Warden:
    """Return Kiwi as a user; tests that need root are skipped for other users."""
    if user != "ordinary" and not IS_ROOT:
        pytest.skip("only root can start Kiwi as root")
    is_other = user == "ordinary" and IS_ROOT
    python = shutil.which("python3", path=PLAIN_PATH) if is_other else sys.executable
    if python is None:
        pytest.skip("there is no Python that an ordinary user can start")
    home, state = grounds / f"{user}-{level}", grounds / f"state-{user}"
    for folder in (home, state):
        folder.mkdir(exist_ok=True)
        if is_other:
            os.chown(folder, ORDINARY, ORDINARY)
    given = owner_map if user == "root" else None
    return Warden(user, level, home, state, python, given)
