"""Load: the same raw messages, so many at a time, over pipes or over HTTP, and what the other side used for them.

Whoever is measured is spoken to without any library, so that the cost of asking is small and the same for all.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

VERSION = "2025-06-18"
_GREETING: dict[str, object] = {
    "protocolVersion": VERSION,
    "capabilities": {},
    "clientInfo": {"name": "load", "version": "1"},
}
_LIMIT = 60.0
"""How long one answer may take, in seconds."""
_numbers = count(10)
Words = dict[str, object]
Say = Callable[[str], Words]
"""Gives the parameters of a `tools/call` that echoes a text, or the body of a plain request."""


class Line(Protocol):
    """A way to whoever is measured; asks are as many at a time as there are callers."""

    async def ask(self, text: str) -> bytes:
        """Have a text echoed, and return the answer."""
        ...

    def rest(self) -> None:
        """Leave what the other side may have closed while others had their turn."""
        ...


class Pipes:
    """A conversation of JSON-RPC lines with a process."""

    def __init__(self, process: asyncio.subprocess.Process, say: Say) -> None:
        self._process, self._say = process, say
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._reading = asyncio.create_task(self._read())

    async def greet(self) -> None:
        """Open the conversation as every client does."""
        await self._request("initialize", _GREETING)
        self._write({"jsonrpc": "2.0", "method": "notifications/initialized"})
        await self._request("tools/list", {})

    async def ask(self, text: str) -> bytes:
        """Have a text echoed."""
        return await self._request("tools/call", self._say(text))

    async def _request(self, method: str, params: Words) -> bytes:
        number = next(_numbers)
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        self._write({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        return await waiting

    def _write(self, message: Words) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            waiting = self._waiting.pop(json.loads(line).get("id"), None)
            if waiting is not None:
                waiting.set_result(line)
        for waiting in self._waiting.values():
            waiting.set_exception(EOFError())

    def rest(self) -> None:
        """Keep the pipes, which nobody closes."""

    async def aclose(self) -> None:
        """Stop reading."""
        self._reading.cancel()


@dataclass
class Posts:
    """Requests over HTTP, on as many connections as there are callers."""

    port: int
    path: str
    say: Say
    is_mcp: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    _idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)

    async def greet(self) -> None:
        """Open a session, where that is how it is done."""
        if self.is_mcp:
            head, _ = await self._post({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": _GREETING})
            self.headers["mcp-protocol-version"] = VERSION
            if session := head.get("mcp-session-id"):
                self.headers["mcp-session-id"] = session
            await self._post({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def ask(self, text: str) -> bytes:
        """Have a text echoed."""
        said = self.say(text)
        if self.is_mcp:
            said = {"jsonrpc": "2.0", "id": next(_numbers), "method": "tools/call", "params": said}
        return (await self._post(said))[1]

    async def _post(self, message: Words) -> tuple[Mapping[str, str], bytes]:
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps(message).encode()
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"host: 127.0.0.1:{self.port}",
            "content-type: application/json",
            "accept: application/json, text/event-stream",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        head, answer = await _reply(reader)
        self._idle.append((reader, writer))
        return head, answer

    def rest(self) -> None:
        """Close every connection."""
        while self._idle:
            self._idle.pop()[1].close()

    async def aclose(self) -> None:
        """Close every connection."""
        self.rest()


async def _reply(reader: asyncio.StreamReader) -> tuple[Mapping[str, str], bytes]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    head = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = bytearray()
    if "content-length" in head:
        body += await reader.readexactly(int(head["content-length"]))
    elif head.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    if not first.startswith("HTTP/1.1 2"):
        raise RuntimeError(first, bytes(body))
    return head, bytes(body)


@dataclass(frozen=True, slots=True)
class Spell:
    """What a while of load showed: calls, seconds in all, the middle one's milliseconds, and CPU milliseconds each."""

    calls: int
    seconds: float
    middle_ms: float
    cpu_ms: float


async def spell(line: Line, used: Callable[[], float], *, at_once: int, seconds: float) -> Spell:
    """Ask for some seconds, so many at a time; `used` tells the CPU seconds of whoever is measured."""
    line.rest()
    times: list[float] = []
    before, started = used(), time.perf_counter()
    until = started + seconds

    async def caller() -> None:
        while (begun := time.perf_counter()) < until:
            text = f"{next(_numbers):09}".ljust(100, ".")
            if text.encode() not in (answer := await line.ask(text)):
                raise RuntimeError(answer)
            times.append(time.perf_counter() - begun)

    async with asyncio.timeout(_LIMIT), asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(caller())
    passed, cpu = time.perf_counter() - started, used() - before
    return Spell(len(times), passed, statistics.median(times) * 1_000, cpu / len(times) * 1_000)


def cpu_of(pid: int, *, but: str = "") -> float:
    """Return the CPU seconds of a process and its descendants, but those with such a word in their command line."""
    own, *others = family(pid)
    return _clock(own) + sum(_clock(other) for other in others if not but or not _is_named(other, but))


def family(pid: int) -> Iterator[int]:
    """Give a process and all that descend from it."""
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from family(int(child))


def _clock(pid: int) -> float:
    # The number of another process's clock is made of its pid, as clock_getcpuclockid(3) makes it.
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


def _is_named(pid: int, word: str) -> bool:
    try:
        return word in os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


async def until_it_answers(ask: Callable[[], Awaitable[object]], *, seconds: float = 60.0) -> None:
    """Ask again until there is an answer, for so long."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                await ask()
            except (OSError, EOFError, RuntimeError):
                await asyncio.sleep(0.1)
            else:
                return
