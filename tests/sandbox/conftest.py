"""A warden: Kiwi as one user or another, which holds a process at a level and tells how it ended."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import shutil
import subprocess as starting
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.isolation import Handover, Jail, Level, Limits
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.primitives import subprocess
from kiwi_mcp.primitives.subprocess import ProcessResult
from kiwi_mcp.sandbox.host import backends
from kiwi_mcp.sandbox.port import Confined
from kiwi_mcp.sandbox.standing import Standing, choose, examine

T = TypeVar("T")
ORDINARY = 23_456
"""A user that exists nowhere else, so that what it owns is the tests' own."""
IS_ROOT = os.geteuid() == 0
PLAIN_PATH = "/usr/local/bin:/usr/bin:/bin"


async def run_confined(confined: Confined, secrets: Mapping[str, str] | None = None) -> ProcessResult:
    """Run what a backend gave through the primitive, with all that its start takes."""
    if "handover" in inspect.signature(subprocess.run).parameters:
        hand = {"handover": confined.handover}
        return await subprocess.run(confined.spec, secrets=secrets or {}, **hand)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", _popen(confined.handover))
        return await subprocess.run(confined.spec, secrets=secrets or {})


def _popen(handover: Handover) -> Callable[..., starting.Popen[bytes]]:
    def start(
        argv: tuple[str, ...],
        *,
        pass_fds: tuple[int, ...],
        stdin: int,
        stdout: int,
        stderr: int,
        executable: str,
        cwd: str,
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> starting.Popen[bytes]:
        if handover.owner is not None:
            for pipe in (*pass_fds, stdout, stderr):
                os.fchown(pipe, handover.owner, -1)
        process = starting.Popen(
            argv,
            pass_fds=(*pass_fds, *handover.descriptors),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            executable=executable,
            cwd=cwd,
            env=env,
            start_new_session=start_new_session,
        )
        handover.enter(process.pid)
        return process

    return start


@dataclass(frozen=True)
class Warden:
    """Kiwi as a user, and the level it holds processes at."""

    user: str
    level: Level
    folder: Path
    """The user's own, which a confined process sees nothing of unless it is granted."""
    python: str
    owner_map: int | None = None

    def do(self, work: Callable[[], T]) -> T:
        """Do something as the user; what it raises is raised here."""
        return as_ordinary(work) if self.user == "ordinary" and IS_ROOT else work()

    def standings(self) -> tuple[Standing, ...]:
        """Return what each backend was shown to do; to be asked as the user."""
        made = backends(owner_map=self.owner_map)
        return asyncio.run(examine(made, Path(f"/tmp/kiwi-tests-{os.geteuid()}"), run_confined))

    def run(
        self,
        *argv: str,
        readable: tuple[Path, ...] = (),
        writable: tuple[Path, ...] = (),
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        cwd: Path = Path("/"),
        timeout: float = 20.0,
    ) -> ProcessResult:
        """Run a command confined, and return how it ended; where it could not be confined, that is raised."""
        spec = ProcessSpec(argv, cwd=str(cwd), env={"PATH": PLAIN_PATH, **(env or {})}, timeout=timeout)
        jail = Jail(self.level, tuple(map(str, readable)), tuple(map(str, writable)), limits=limits or Limits())

        async def held() -> ProcessResult:
            standings = await examine(
                backends(owner_map=self.owner_map), Path(f"/tmp/kiwi-tests-{os.geteuid()}"), run_confined
            )
            with choose(self.level, standings).backend.wrap(spec, jail) as confined:
                ended = await run_confined(confined, secrets)
                confined.check(ended)
                return ended

        return self.do(lambda: asyncio.run(held()))

    def python_says(self, code: str, *arguments: str, **words: object) -> object:
        """Run Python code confined, and return the JSON that it printed."""
        ended = self.run(self.python, "-I", "-S", "-c", code, *arguments, **words)  # type: ignore[arg-type] # as `run` takes them
        assert ended.exit_code == 0, (ended.exit_code, ended.signal, ended.stderr.decode())
        return json.loads(ended.stdout)

    def own(self, *paths: Path) -> None:
        """Give files and folders to the user."""
        if self.user == "ordinary" and IS_ROOT:
            for path in paths:
                os.chown(path, ORDINARY, ORDINARY, follow_symlinks=False)


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
        except BaseException as fault:  # noqa: BLE001 - told to the process that waits for it
            answer = ("failed", repr(fault))
        finally:
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(answer, pipe)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        kind, told = pickle.load(pipe)
    os.waitpid(child, 0)
    if kind == "refused":
        message, suggestion, details = told
        raise KiwiError(message, suggestion=suggestion, **details)
    assert kind == "done", told
    result: T = told
    return result


@pytest.fixture(scope="session")
def owner_map() -> Iterator[int | None]:
    """A user namespace in which root is the user that sandboxes of root's run as."""
    if not IS_ROOT:
        yield None
        return
    held = starting.Popen(["/usr/bin/unshare", "--user", "/bin/cat"], stdin=starting.PIPE, stdout=starting.PIPE)
    assert held.stdin is not None
    assert held.stdout is not None
    try:
        held.stdin.write(b"\n")
        held.stdin.flush()
        held.stdout.read(1)  # it has entered the namespace and become `cat`
        Path(f"/proc/{held.pid}/uid_map").write_text("0 65534 1")
        Path(f"/proc/{held.pid}/gid_map").write_text("0 65534 1")
        space = os.open(f"/proc/{held.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        held.stdin.close()
        held.stdout.close()
        held.wait(10)
    yield space
    os.close(space)


HELD = (("ordinary", "sandboxed"), ("root", "sandboxed"), ("root", "restricted"))


@pytest.fixture(scope="module", params=HELD, ids=lambda held: "-".join(held))
def warden(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, owner_map: int | None
) -> Iterator[Warden]:
    """Kiwi as an ordinary user and as root, at each level that the user can have here."""
    user, level = request.param
    yield from _hired(user, level, tmp_path_factory, owner_map)


@pytest.fixture(scope="module", params=["ordinary", "root"])
def keeper(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, owner_map: int | None
) -> Iterator[Warden]:
    """Kiwi as an ordinary user and as root, at the level `sandboxed`."""
    yield from _hired(request.param, "sandboxed", tmp_path_factory, owner_map)


def _hired(
    user: str, level: Level, factory: pytest.TempPathFactory, owner_map: int | None
) -> Iterator[Warden]:
    if user == "root" and not IS_ROOT:
        pytest.skip("only root can start Kiwi as root")
    python = shutil.which("python3", path=PLAIN_PATH) if user == "ordinary" and IS_ROOT else sys.executable
    if python is None:
        pytest.skip("there is no Python that an ordinary user can start")
    # Below a folder that everybody may enter: pytest's own is closed to other users.
    folder = Path(shutil.os.path.realpath(factory.getbasetemp())) if False else _open_folder(user, level)
    warden = Warden(user, level, folder, python, owner_map if user == "root" else None)
    warden.own(folder)
    try:
        yield warden
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open_folder(user: str, level: str) -> Path:
    folder = Path(f"/var/tmp/kiwi-tests-{os.getpid()}-{user}-{level}")
    folder.mkdir()
    return folder
