"""What one execute costs besides the tool itself: request to answer, output file and run record included."""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from inspect import iscoroutinefunction
from itertools import count, islice
from pathlib import Path
from typing import cast

from msgspec.structs import astuple

from chains import lay_out
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import Plan
from kiwi_mcp.domain.records import RunRecord
from kiwi_mcp.drivers import Driver, process
from kiwi_mcp.kernel import Kernel, kernel, pipeline, recorder
from kiwi_mcp.kernel.context import Catalogs, Services
from kiwi_mcp.kernel.prepared import PreparedItems
from kiwi_mcp.kernel.settings import default_url
from kiwi_mcp.store import runs
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.sqlite import library
from releases import fill, opened

_BATCH = 20
_ROOM = 4_000_000_000
_STAGES: Sequence[tuple[str, object, str]] = (
    ("read the request", kernel, "parse"),
    ("find the catalog", Catalogs, "for_item"),
    ("find the store", Services, "runs_or_error"),
    ("use the prepared item", PreparedItems, "get"),
    ("accept the parameters", pipeline, "accept"),
    ("digest of the plan", pipeline, "plan_digest"),
    ("output file", recorder, "keep"),
    ("run record", runs, "_record"),
)
"""What is called once on the way, in this order, by its module or class and its name there."""


@dataclass(frozen=True, slots=True)
class Spread:
    """CPU microseconds of one call: the best of many small batches, and their median."""

    name: str
    best: float
    median: float


class Idle:
    """The process driver, which says what it would do and does nothing."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def bind(self, chain: Chain, inputs: JsonObject, space: Space) -> Plan:
        """Say what would happen."""
        return self._driver.bind(chain, inputs, space)

    async def prepare(self, *_: object) -> None:
        """Check nothing."""

    async def drive(self, *_: object, **__: object) -> Outcome:
        """Answer at once."""
        return Outcome("success", "hello")

    async def aclose(self) -> None:
        """Close nothing."""


@contextmanager
def calling(folder: Path, store: Path | None, tools: int) -> Iterator[Callable[[], None]]:
    """Give a batch of calls in a new project with so many tools, whose user has a copy of a store."""
    item = lay_out(folder, tools).tool_id
    if store is not None:
        target = Path(default_url(folder / "user").removeprefix("sqlite://"))
        target.parent.mkdir(parents=True)
        shutil.copy(store, target)
    loop = asyncio.new_event_loop()
    asked = Kernel(folder / "project", user=folder / "user", cache=folder / "cache")

    async def batch() -> None:
        for _ in range(_BATCH):
            answer = await asked.call("execute", {"item_id": item, "parameters": {"text": "hello"}})
            if answer.is_error:
                raise RuntimeError(answer.content)

    with closing(loop):
        time.sleep(0.1)  # files as young as this are read again at each call, as they may still change
        yield lambda: loop.run_until_complete(batch())
        loop.run_until_complete(asked.aclose())


def measure(store: Path, published: int, turns: int) -> tuple[list[Spread], list[Spread]]:
    """Return the CPU time of a call, with a store of so many tools and with a small one, and the parts of one call."""
    with _idle(), memory_folder() as memory, tempfile.TemporaryDirectory() as disk, ExitStack() as stack:
        few = memory / "few.db"
        with opened(f"sqlite://{few}") as registry:
            fill(registry, 10)
        places: Sequence[tuple[str, Path, Path, int]] = (
            ("10 published, 10 in the project", memory, few, 10),
            ("10 published, 10,000 in the project", memory, few, 10_000),
            (f"{published:,} published, 10 in the project", memory, store, 10),
            (f"{published:,} published, 10 in the project, on the disk", Path(disk), store, 10),
        )
        cases = {"the same file and row by hand": by_hand(memory / "bare")}
        for number, (name, base, copied, tools) in enumerate(places):
            cases[name] = stack.enter_context(calling(base / str(number), copied, tools))
        whole = spread(cases, turns)
        return whole, split(cases[places[0][0]], turns)


def spread(cases: Mapping[str, Callable[[], None]], turns: int) -> list[Spread]:
    """Measure all cases in turns, a batch of calls each."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(turns + 3):
        for name, turn in cases.items():
            started = time.thread_time_ns()
            turn()
            if number > 2:
                times[name].append((time.thread_time_ns() - started) / _BATCH / 1_000)
    return [Spread(name, min(found), statistics.median(found)) for name, found in times.items()]


def split(turn: Callable[[], None], turns: int) -> list[Spread]:
    """Measure the parts of a call where they are, since each is much quicker when it is repeated by itself."""
    times: dict[str, list[int]] = {}
    with ExitStack() as stack:
        for name, home, word in (*_STAGES, ("bind", Idle, "bind")):
            stack.callback(setattr, home, word, getattr(home, word))
            setattr(home, word, _timed(getattr(home, word), times.setdefault(name, [])))
        for _ in range(turns):
            turn()
    return [Spread(name, min(found) / 1_000, statistics.median(found) / 1_000) for name, found in times.items()]


def by_hand(folder: Path) -> Callable[[], None]:
    """Return a batch of what no bookkeeping can do without: a file is made, the oldest goes, and a row is added."""
    folder.mkdir()
    path = f"{folder}/runs.db"
    open_database(f"sqlite://{path}").close()
    connection = library.connect(path, isolation_level=None)
    connection.execute("pragma synchronous=NORMAL")
    run = RunRecord(
        "", "tool_5", "success", "2026-01-02T03:04:05.678Z", 1, "me", path, "a/b/tool_5", "0" * 64, "0" * 64
    )
    columns, (_, *values) = RunRecord.__struct_fields__, astuple(run)
    statement = f"insert into runs ({', '.join(columns)}) values ({', '.join('?' * len(columns))})"
    numbers = count()

    def batch() -> None:
        for number in islice(numbers, _BATCH):
            descriptor = os.open(f"{folder}/{number}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(descriptor, b"x" * 600)
            os.close(descriptor)
            if number >= _BATCH:
                os.unlink(f"{folder}/{number - _BATCH}.json")  # noqa: PTH108 - as Kiwi does it
            connection.execute(statement, (f"{number:026}", *values))

    return batch


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Give a folder in memory where there is one, so that no disk's file system is measured."""
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > _ROOM
    with tempfile.TemporaryDirectory(dir=memory if has_room else None) as name:
        yield Path(name)


@contextmanager
def _idle() -> Iterator[None]:
    """Let the process driver do nothing."""
    create = process.create_driver
    vars(process)["create_driver"] = lambda: Idle(create())
    yield
    vars(process)["create_driver"] = create


def _timed(function: Callable[..., object], times: list[int]) -> Callable[..., object]:
    async def awaited(*values: object, **named: object) -> object:
        started = time.thread_time_ns()
        found = await cast("Awaitable[object]", function(*values, **named))
        times.append(time.thread_time_ns() - started)
        return found

    def called(*values: object, **named: object) -> object:
        started = time.thread_time_ns()
        found = function(*values, **named)
        times.append(time.thread_time_ns() - started)
        return found

    return awaited if iscoroutinefunction(function) else called
