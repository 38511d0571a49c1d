"""What a call through Kiwi costs, against other gateways and against none, in one run on one machine.

Every gateway stands before the same two servers: one that it starts itself, and one that is reached over HTTP. Those
of one server are all up at once, and take turns under the same load.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from load import Line, Pipes, Posts, Spell, cpu_of, spell, until_it_answers
from peers import ECHO, KIWI, PEERS, STARTED, Place, Upstream, Way, echoed, ways

AT_ONCE = (1, 16, 64)
"""How many calls are on their way at once."""
_SECONDS = 0.4
"""How long each is asked in one turn."""
_GRACE = 5.0
_TOKEN = "up", "token", "add", "bench", "--tools"
_PREFERENCES = (
    "always_send:\n  mcp/echo_stdio/echo: {as: echo_stdio_echo}\n  mcp/echo_http/echo: {as: echo_http_echo}\n"
)
_POLICY = 'hosts: {allow: ["127.0.0.1"]}\n'


class Row(Struct, frozen=True):
    """What one way takes at each load: milliseconds of the middle call, CPU milliseconds of a call, calls a second."""

    name: str
    middle_ms: tuple[float, ...]
    cpu_ms: tuple[float, ...]
    rate: tuple[float, ...]


class Open(Struct, frozen=True):
    """A way that is open: where it is asked, and the CPU seconds that whoever stands in between has used."""

    name: str
    line: Line
    used: Callable[[], float]


def measure(turns: int) -> Mapping[Upstream, list[Row]]:
    """Return the rows of both servers, the direct call first."""
    if not (PEERS / ".stamp").exists():
        raise SystemExit("The other gateways are missing: run scripts/setup.sh --bench")
    return asyncio.run(_measure(turns))


async def _measure(turns: int) -> Mapping[Upstream, list[Row]]:
    found: dict[Upstream, list[Row]] = {}
    upstreams: Sequence[Upstream] = ("stdio", "HTTP")
    with tempfile.TemporaryDirectory() as name:
        async with started((*STARTED, "--http"), Place(Path(name), "")) as echo:
            assert echo.stdout is not None
            port = int(await echo.stdout.readline())
            place = await asyncio.to_thread(_prepared, Place(Path(name), f"http://127.0.0.1:{port}/mcp"))
            for upstream in upstreams:
                async with AsyncExitStack() as stack:
                    direct = [] if upstream == "stdio" else [await _direct(port, echo.pid)]
                    others = [await stack.enter_async_context(_opened(way, place)) for way in ways(upstream, place)]
                    found[upstream] = await take_turns([*direct, *others], turns)
    return found


def _prepared(place: Place) -> Place:
    """Make a home and a project in which Kiwi knows both servers and always sends their tools."""
    user = place.folder / "home" / ".ai"
    for folder in (user, place.project / ".ai"):
        folder.mkdir(parents=True)
    (user / "policy.yaml").write_text(_POLICY, encoding="utf-8")
    (user / "preferences.yaml").write_text(_PREFERENCES, encoding="utf-8")
    _kiwi(place, "mcp", "add", "echo_stdio", "--", *STARTED)
    _kiwi(place, "mcp", "add", "echo_http", "--url", place.url)
    return replace(place, token=_kiwi(place, *_TOKEN).split()[-1])


def _kiwi(place: Place, *words: str) -> str:
    return subprocess.run(
        [KIWI, *words], cwd=place.project, env=place.environment, capture_output=True, check=True, timeout=60, text=True
    ).stdout


async def _direct(port: int, pid: int) -> Open:
    line = Posts(port, "/mcp", echoed)
    await line.greet()
    return Open("direct", line, partial(cpu_of, pid))


@asynccontextmanager
async def _opened(way: Way, place: Place) -> AsyncIterator[Open]:
    port = _free_port()
    command = tuple(word.replace("{port}", str(port)) for word in way.command)
    async with started(command, place) as process:
        line: Pipes | Posts
        if way.path:
            line = Posts(port, way.path, way.say, is_mcp=way.is_mcp, headers=dict(way.headers))
        else:
            line = Pipes(process, way.say)
        # What is counted is what stands in between, not the server that it started.
        used = partial(cpu_of, process.pid, but="" if way.name == "direct" else ECHO.name)
        try:
            await until_it_answers(line.greet)
            await until_it_answers(partial(line.ask, "hello"))
            yield Open(way.name, line, used)
        finally:
            await line.aclose()


@asynccontextmanager
async def started(command: Sequence[str], place: Place) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a program with pipes, and end it with its whole process group."""
    with (place.folder / "errors").open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=place.folder,
            env=dict(place.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.communicate(), _GRACE)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


async def take_turns(opened: Sequence[Open], turns: int) -> list[Row]:
    """Measure every way under every load, in turns. One that hangs is not asked again, and shown without figures."""
    silent: set[str] = set()
    spells: dict[tuple[str, int], list[Spell]] = {(way.name, many): [] for way in opened for many in AT_ONCE}
    for turn in range(turns + 1):
        for many in AT_ONCE:
            for way in opened:
                if way.name in silent:
                    continue
                try:
                    taken = await spell(way.line, way.used, at_once=many, seconds=_SECONDS)
                except TimeoutError:
                    silent.add(way.name)
                    print(f"{way.name} did not answer {many} calls at once in time", file=sys.stderr)
                    continue
                if turn:  # the first one warms up
                    spells[way.name, many].append(taken)
    return [_row(way.name, [spells[way.name, many] for many in AT_ONCE]) for way in opened]


def _row(name: str, spells: Sequence[Sequence[Spell]]) -> Row:
    return Row(
        name,
        tuple(_median([spell.middle_ms for spell in each]) for each in spells),
        tuple(_median([spell.cpu_ms for spell in each]) for each in spells),
        tuple(_median([spell.calls / spell.seconds for spell in each]) for each in spells),
    )


def _median(figures: Sequence[float]) -> float:
    return statistics.median(figures) if figures else math.nan
