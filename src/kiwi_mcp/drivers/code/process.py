"""`ProgramProcess`: the sandboxed process that runs a program of code mode, one segment at a time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Struct

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import TooLarge, Unavailable
from kiwi_mcp.domain.isolation import ResourceLimits, SandboxProfile
from kiwi_mcp.domain.json import JsonObject, compact
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.sandboxed import open_sandbox
from kiwi_mcp.primitives.process.stdio_process import StdioProcess

LONGEST_ANSWER = 8_000_000
"""The most that a segment may answer, in bytes: a value, or calls with a snapshot."""
_SECONDS = 60.0
"""How long a segment may take: its own limit is shorter, and sleeping counts here as well."""
_LIMITS: JsonObject = {
    "max_feed_duration_secs": 20.0,
    "max_memory": 134_217_728,
    "max_recursion_depth": 400,
    "max_suspensions": 10_000,
    "max_total_sleep_secs": 30.0,
}
"""What the engine itself enforces: seconds of work, bytes, nested calls, steps that ask the host."""
_PROCESS = ResourceLimits(memory_bytes=536_870_912, cpu_seconds=120, pids=64, file_bytes=1_048_576, tmp_bytes=1_048_576)


_AT_ONCE = 16
"""How many programs have a process at the same time."""
_gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class ProgramAnswer(Struct, frozen=True):
    """How a segment of a program ended: with calls that it waits for, its value, or why it cannot continue."""

    calls: tuple[tuple[int, str, dict[str, Any]], ...] = ()
    snapshot: str = ""
    value: Any = None
    invalid: str = ""
    """Why it was not started: the faults of the type check, with their lines."""
    failed: str = ""
    printed: str = ""


class ProgramProcess(Struct, frozen=True):
    """A process that runs one program."""

    process: StdioProcess

    async def ask(self, request: JsonObject) -> ProgramAnswer:
        """Run a segment, and return how it ended."""
        self.process.send(compact({**request, "limits": _LIMITS}).encode() + b"\n")
        try:
            async with asyncio.timeout(_SECONDS):
                line = await self.process.line()
        except TimeoutError:
            return ProgramAnswer(failed=f"TimeoutError: no call and no end within {_SECONDS:.0f} seconds.")
        except TooLarge:
            return ProgramAnswer(failed=f"MemoryError: values of more than {LONGEST_ANSWER:,} bytes. Keep less.")
        if line is None:
            raise Unavailable(
                f"The process of the program ended: {self.process.ending() or 'it closed its output'}. "
                f"{self.process.complaints()[-500:]}".strip(),
                suggestion="Let the program use less memory and time, or `kiwi doctor`.",
            )
        try:
            return msgspec.json.decode(line, type=ProgramAnswer)
        except (msgspec.DecodeError, RecursionError) as error:
            return ProgramAnswer(failed=f"The process of the program gave no valid answer: {error}")


@asynccontextmanager
async def open_program(space: Space) -> AsyncIterator[ProgramProcess]:
    """Start the process of a program: without network, without files, with limits of its own."""
    worker = Path(__file__).with_name("worker.py")
    seen = (str(worker), sys.prefix, sys.base_prefix)
    profile = SandboxProfile("restricted", readable=seen, limits=_PROCESS, provenance="model_written")
    sandbox = await open_sandbox(profile, space)
    spec = ProcessSpec(argv=(sys.executable, "-I", "-B", str(worker)), cwd=sys.prefix)
    gate = _gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_AT_ONCE))
    try:
        async with asyncio.timeout(_SECONDS):
            await gate.acquire()
    except TimeoutError as error:
        raise Unavailable(f"{_AT_ONCE} programs run already.", suggestion="Try it again later.") from error
    try:
        async with sandbox.talking(spec, secrets={}, longest_line=LONGEST_ANSWER) as (process, _):
            yield ProgramProcess(process)
    finally:
        gate.release()
