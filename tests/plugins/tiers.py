"""Two tiers of tests, chosen by the capabilities that a test uses.

A test that starts processes, opens sockets or needs a server requests a capability fixture, itself or through another
fixture, and runs in the full tier. So does a test marked `slow`. The mark `smoke` returns a test to the fast tier.
An audit hook fails a test that uses a capability without requesting it, so a new test is always in the right tier.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.drivers.sandboxed import backend_reports

CAPABILITIES = frozenset({"loopback", "processes", "sandbox", "postgres_server", "encoder_model", "package_index"})
"""Fixtures that say what a test uses outside of its own process; `postgres_server` is in `plugins/postgres.py`."""
LAUNCHERS = frozenset({"bwrap", "podman", "unshare"})
"""Programs that start a sandbox."""
INTERNET = frozenset({socket.AF_INET, socket.AF_INET6})
ROOT = Path(__file__).resolve().parents[2]
OWN_CODE = (str(ROOT / "tests"), str(ROOT / "src"), str(ROOT / "scripts"), str(ROOT / "benchmarks"))
FRAMES = 8


@pytest.fixture(scope="session")
def loopback() -> None:
    """The test listens on or connects to addresses of this machine."""


@pytest.fixture(scope="session")
def processes(loopback: None) -> None:
    """The test starts processes, which it may talk to over addresses of this machine."""


@pytest.fixture(scope="session")
def sandbox(processes: None) -> None:
    """The test starts processes in a sandbox, which reach the network through a proxy on this machine."""


@pytest.fixture(scope="session")
def encoder_model() -> None:
    """The test loads the sentence encoder that ships with Kiwi."""


@pytest.fixture(scope="session")
def package_index() -> None:
    """The test downloads packages."""


@pytest.fixture(scope="session")
def isolation_report(tmp_path_factory: pytest.TempPathFactory, sandbox: None) -> Path:
    """The file in which Kiwi stores the result of its sandbox self-tests, written once per session."""
    folder = tmp_path_factory.mktemp("isolation")
    asyncio.run(backend_reports(Space(folder, folder, folder)))
    return folder / "isolation.json"


@pytest.fixture
def copy_isolation_report(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    """Copy the isolation report into a cache folder, if the test requests `sandbox`; else do nothing."""

    def copy(cache: Path) -> None:
        if "sandbox" not in request.fixturenames:
            return
        report: Path = request.getfixturevalue("isolation_report")
        cache.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(report, cache / report.name)
        (cache / report.name).chmod(0o600)

    return copy


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the full tier."""
    for item in items:
        is_long = any(item.get_closest_marker(name) for name in ("slow", "soak"))
        is_smoke = item.get_closest_marker("smoke") is not None
        if is_long or (not is_smoke and not CAPABILITIES.isdisjoint(_requested(item))):
            item.add_marker(pytest.mark.full)


def _requested(item: pytest.Item) -> Iterator[str]:
    """Yield the fixtures of a test; a parameter that names PostgreSQL requests the server when the test runs."""
    yield from getattr(item, "fixturenames", ())
    callspec = getattr(item, "callspec", None)
    # A parameter is the kind of a store, or several kinds.
    kinds = [kind for kind in callspec.params.values() if isinstance(kind, str | tuple)] if callspec else []
    if any("postgres" in kind for kind in kinds):
        yield "postgres_server"


@dataclass
class Watch:
    """What a test, or a fixture that several tests share, has used so far without requesting it."""

    subject: str
    allowed: frozenset[str]
    earlier_threads: frozenset[int]
    """Threads that ran before the test started: their events belong to other tests."""
    missing: dict[str, str] = field(default_factory=dict)
    """Each capability that was not requested, with the place where it was used."""

    def use(self, capability: str) -> None:
        """Note a capability that is used now."""
        if capability in self.allowed or capability in self.missing or threading.get_ident() in self.earlier_threads:
            return
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(OWN_CODE)]
        # The last two frames are of this module.
        self.missing[capability] = "".join(traceback.format_list(frames[-FRAMES - 2 : -2]))

    def message(self) -> str:
        """Return what the test has to request, or an empty text."""
        return "\n".join(
            f"{self.subject} must request the fixture `{name}`, which is used here:\n{place}"
            for name, place in self.missing.items()
        )


_watches: list[Watch] = []
"""The watch of the running test; empty between tests and while a test is torn down."""


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if not _watches:  # also at the end of the interpreter, when the names of this module are gone
        return
    find = EVENTS.get(event)
    if find is not None and (capability := find(arguments)) is not None:
        _watches[-1].use(capability)


def _of_program(arguments: tuple[object, ...]) -> str:
    program = arguments[0]
    name = os.fsdecode(program) if isinstance(program, str | bytes | os.PathLike) else ""
    return "sandbox" if Path(name).name in LAUNCHERS else "processes"


def _of_socket(arguments: tuple[object, ...]) -> str | None:
    own = arguments[0]
    return "loopback" if isinstance(own, socket.socket) and own.family in INTERNET else None


EVENTS: dict[str, Callable[[tuple[object, ...]], str | None]] = {
    "subprocess.Popen": _of_program,
    "os.posix_spawn": _of_program,
    "os.fork": lambda _: "processes",
    "os.forkpty": lambda _: "processes",
    "socket.connect": _of_socket,
    "socket.bind": _of_socket,
}

sys.addaudithook(_audit)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Watch the fixtures of a test."""
    main = threading.main_thread().ident
    earlier = {thread.ident for thread in threading.enumerate() if thread.ident is not None} - {main}
    watch = item.stash[WATCH] = Watch("This test", frozenset(_requested(item)), frozenset(earlier))
    with _watched(watch):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Watch a test."""
    with _watched(item.stash[WATCH]):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Watch a fixture that several tests share: it requests what it uses itself, for the tests that come later."""
    if fixturedef.scope == "function" or not _watches:
        return (yield)
    subject, allowed = f"The fixture `{fixturedef.argname}`", frozenset(_closure(fixturedef, request))
    with _watched(Watch(subject, allowed, _watches[-1].earlier_threads)):
        return (yield)


def _closure(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> Iterable[str]:
    """Return a fixture and everything that it requests, directly or not."""
    manager = request.session._fixturemanager
    names, found = [fixturedef.argname], {fixturedef.argname}
    while names:
        for one in manager.getfixturedefs(names.pop(), request._pyfuncitem) or ():
            names += {*one.argnames} - found
            found |= {*one.argnames}
    return found


@contextmanager
def _watched(watch: Watch) -> Iterator[None]:
    """Watch for the length of a block, and fail where something is missing."""
    _watches.append(watch)
    try:
        yield
    except BaseException as error:
        if message := watch.message():
            error.add_note(message)
        raise
    finally:
        _watches.pop()
    if message := watch.message():
        pytest.fail(message, pytrace=False)


WATCH = pytest.StashKey[Watch]()
