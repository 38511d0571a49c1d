"""Shared fixtures: a home and a project for each test, a kernel, and comparable folders."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kiwi_mcp.catalog.release import BUILTIN
from kiwi_mcp.catalog.source import FolderSource
from kiwi_mcp.domain.calls import Answers, Caller, Questions, no_answers
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.manifest.type_specs import load_type_specs

pytest_plugins = [
    "tests.plugins.machines",
    "tests.plugins.posting",
    "tests.plugins.postgres",
    "tests.plugins.scripted_model",
    "tests.plugins.tiers",
]


# How long an example takes says how busy the machine is.
settings.register_profile("kiwi", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kiwi")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without a search for garbage, and leave the thousands of tests and modules out of all later searches."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run `async def` tests on asyncio, as Kiwi itself does."""
    return "asyncio"


@pytest.fixture(scope="session")
def builtin_listing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of what ships with Kiwi, written once, so that not every test reads these manifests."""
    cache = tmp_path_factory.mktemp("listing")
    source = FolderSource("builtin", BUILTIN, namespace="kiwi", cache=cache)
    source.sync(load_type_specs())
    (listing,) = (cache / "catalog").iterdir()
    return listing


@pytest.fixture(autouse=True)
def home(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    copy_isolation_report: Callable[[Path], None],
    builtin_listing: Path,
) -> Iterator[Path]:
    """A home folder for this test alone: no test touches the real one."""
    folder = tmp_path / "home"
    cache = folder / ".cache" / "kiwi"
    (cache / "catalog").mkdir(parents=True)
    shutil.copy(builtin_listing, cache / "catalog")
    copy_isolation_report(cache)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USER_SPACE", str(folder / ".ai"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / ".cache"))
    # Meanings arrive in their own time; whatever is about them says so.
    monkeypatch.setenv("KIWI_SEARCH", "words")
    # The interpreters that set-up chose come first, however the tests were started.
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.prefix, "bin")), os.environ.get("PATH", os.defpath)]))
    yield folder
    # The process that sleeps until something of this home is due ends when its lock is gone.
    with suppress(OSError):  # most tests start none
        os.unlink(folder / ".ai" / "state" / "worker.lock")  # noqa: PTH108 - some tests replace Path.unlink


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project folder with an empty `.ai` in it."""
    folder = tmp_path / "project"
    (folder / ".ai").mkdir(parents=True)
    return folder


@pytest.fixture
def kernel(project: Path) -> Kernel:
    """One kernel for the whole test."""
    return Kernel(project)


async def _agree(questions: Questions) -> Answers:
    if not all(question.is_own for question in questions.values()):
        return await no_answers(questions)
    return {key: {"action": "accept", "content": {"approve": True}} for key in questions}


@pytest.fixture
def owner() -> Caller:
    """An owner who sits there and says yes to whatever Kiwi asks first; what tools ask is not answered."""
    return Caller(ask=_agree, is_owner=True)


@pytest.fixture
def ask(kernel: Kernel, owner: Caller) -> Callable[..., Answer]:
    """Send one request, as an owner would who agrees to it, and return its answer."""

    async def call(verb: str, request: JsonObject) -> Answer:
        try:
            return await kernel.call(verb, request, owner)
        finally:
            await kernel.aclose()

    return lambda verb, **request: asyncio.run(call(verb, json.loads(json.dumps(request))))


@pytest.fixture
def tree() -> Callable[[Path], Mapping[str, str]]:
    """Every file below a folder, by path, with a hash of its bytes; the store, which takes refusals down, apart."""

    def hashes(folder: Path) -> Mapping[str, str]:
        left_out = {"__pycache__", "state"}
        files = (path for path in sorted(folder.rglob("*")) if path.is_file() and left_out.isdisjoint(path.parts))
        return {path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files}

    return hashes
