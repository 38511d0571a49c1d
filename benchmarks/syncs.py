"""What a sync costs, the first and the second time, and what the registry's commands cost a new process."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.settings import default_url
from measure import Case, Measured, interleaved
from releases import fill, opened

_BLOB = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Sync:
    """One sync: what was done, in how many seconds, and how many file contents were opened for it."""

    name: str
    versions: int
    seconds: float
    contents_read: int


class Blobs:
    """Counts the files of a layout that this process opens to read, each of which is named by a hash."""

    def __init__(self) -> None:
        self.opened = 0
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            is_read = isinstance(flags, int) and not flags & (os.O_WRONLY | os.O_RDWR)
            if is_read and isinstance(path, str) and _BLOB.fullmatch(path.rpartition("/")[2]):
                self.opened += 1


def measure_syncs(tools: int) -> list[Sync]:
    """Push so many tools to a folder and pull them into an empty store, each twice."""
    blobs = Blobs()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with opened(default_url(folder / "first")) as registry:
            fill(registry, tools)
        layout = str(folder / "layout")
        return [
            _sync(blobs, folder, user, action, layout, again)
            for user, action in (("first", "push"), ("second", "pull"))
            for again in ("", ", again")
        ]


def measure_commands(turns: int) -> list[Measured]:
    """Return the cost of a command that asks the registry, in a store that is there and in one that is not yet."""
    with tempfile.TemporaryDirectory() as name:
        known, new = Path(name, "known"), (Path(name, str(number)) for number in range(turns + 2))
        cases = [
            Case("kiwi version", _kiwi(lambda: known, "version")),
            Case("kiwi versions bash_runtime", _kiwi(lambda: known, "versions", "bash_runtime")),
            Case("the same, first run: schema and seeds", _kiwi(lambda: next(new), "versions", "bash_runtime")),
        ]
        return interleaved(cases, turns=turns)


def _sync(blobs: Blobs, folder: Path, user: str, action: str, layout: str, again: str) -> Sync:
    before, started = blobs.opened, time.perf_counter()
    accepted: JsonObject = {"accept_unsigned": True} if action == "pull" else {}
    answer = asyncio.run(_ask(folder, user, {"action": action, "remote": layout, **accepted}))
    seconds = time.perf_counter() - started
    versions = as_object(answer.get("counts")).get("new")
    return Sync(f"{action}{again}", int(str(versions)), seconds, blobs.opened - before)


async def _ask(folder: Path, user: str, request: JsonObject) -> JsonObject:
    (folder / "project").mkdir(exist_ok=True)
    kernel = Kernel(folder / "project", user=folder / user, cache=folder / "cache")
    try:
        answer = await kernel.call("registry", request)
    finally:
        await kernel.aclose()
    if answer.is_error:
        raise RuntimeError(answer.content)
    return answer.content


def _kiwi(home: Callable[[], Path], *words: str) -> Callable[[], None]:
    def turn() -> None:
        place = home()
        place.mkdir(exist_ok=True)
        # As any ordinary start: bytecode is written, and nothing of this machine's owner is looked at.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"USER_SPACE": str(place / ".ai"), "XDG_CACHE_HOME": str(place / "cache")}
        command = [str(Path(sys.executable).with_name("kiwi")), *words]
        subprocess.run(command, cwd=place, env=environment, capture_output=True, check=True, timeout=60)

    return turn
