"""A process that lines are exchanged with, and its pipes."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from signal import SIGCONT, SIGKILL, SIGTERM, Signals

from msgspec.structs import replace

from kiwi_mcp.domain.errors import TooLarge
from kiwi_mcp.domain.isolation import NOTHING, Handover, ProcessExit
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.primitives.process.process_tree import ProcessTree, TreeMarker, adopting, exit_of
from kiwi_mcp.primitives.process.spawn import completed, locate, start
from kiwi_mcp.primitives.secrets.redaction import Redactor
from kiwi_mcp.primitives.secrets.reveal import reveal

UNREAD = 64_000_000
"""The most that may wait for a reader which does not read, in bytes."""
_AHEAD = 1_000_000
"""The maximum number of bytes that are read ahead of the reader of the lines."""
_LINE = 50
"""What a line takes in memory besides its bytes: without it, empty lines could be read ahead without end."""
_CHUNK = 65_536
_LAST_CHUNKS = 32
"""The maximum number of chunks read from a pipe that is closed here while other processes have it open."""
_AT_ONCE = 8
"""Chunks taken from one pipe before the others have their turn."""
LONGEST_LINE = 16_000_000
"""The most that one line may have, in bytes."""
KEPT = 65_536
"""How much of the end of standard error is kept, in bytes."""
PATIENCE, GRACE = 0.5, 1.0
"""How long a process may take to end after its input is closed, and after a termination signal, in seconds."""
LOOK = 0.25
"""How often a process that is watched is looked at, in seconds."""
DRAIN = 0.25
"""How long output may still come from what a leader left behind, in seconds."""


class LineReader:
    """The reading end of a pipe as lines, read only as far ahead as a limit allows."""

    def __init__(self, descriptor: int, longest: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._longest = longest
        self._ready: deque[bytes] = deque()
        self._ahead = 0
        self._rest = bytearray()
        self._is_open, self._is_reading, self._is_overlong = True, False, False
        self._waiter: asyncio.Future[None] | None = None
        os.set_blocking(descriptor, False)
        self._resume()

    async def take(self) -> bytes | None:
        """Return the next line without its end, or None where there will be none; one over the limit is refused."""
        while not self._ready:
            if self._is_overlong:
                raise TooLarge("A line of the process's output", size=None, limit=self._longest)
            if not self._is_open:
                return None
            self._resume()
            self._waiter = self._loop.create_future()
            await self._waiter
        line = self._ready.popleft()
        self._ahead -= len(line) + _LINE
        return line

    def close(self) -> None:
        """Read the data that is available now and stop; its lines can still be taken."""
        for _ in range(_LAST_CHUNKS):
            if not self._is_open or self._is_overlong or not self._read():
                break
        self._shut()

    def _ready_to_read(self) -> None:
        if self._read() and (self._is_overlong or self._ahead > _AHEAD):
            self._pause()

    def _read(self) -> bool:
        """Read one available chunk, and return whether there was one. The end closes the pipe."""
        try:
            data = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._cut(data)
        else:
            self._shut()
        return bool(data)

    def _cut(self, data: bytes) -> None:
        *whole, rest = data.split(b"\n")
        for line in whole:
            self._rest += line
            if self._refuse_overlong():
                return
            self._add()
        self._rest += rest
        self._refuse_overlong()
        if whole:
            self._wake()

    def _refuse_overlong(self) -> bool:
        if len(self._rest) > self._longest:
            self._is_overlong = True
            self._rest.clear()
            self._wake()
        return self._is_overlong

    def _add(self) -> None:
        self._ready.append(bytes(self._rest))
        self._ahead += len(self._rest) + _LINE
        self._rest.clear()

    def _shut(self) -> None:
        if self._is_open:
            self._is_open = False
            self._pause()
            os.close(self._descriptor)
            if self._rest:  # a last line without its end
                self._add()
            self._wake()

    def _resume(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            self._loop.add_reader(self._descriptor, self._ready_to_read)

    def _pause(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._descriptor)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class PipeWriter:
    """The writing end of a pipe: data waits in memory until it is read, up to a limit."""

    def __init__(self, descriptor: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._waiting = bytearray()
        self._is_open = True
        os.set_blocking(descriptor, False)

    def write(self, data: bytes) -> None:
        """Write, together with all data of this turn of the event loop. The rest is written when the pipe is free."""
        if not self._is_open:
            raise BrokenPipeError
        if len(self._waiting) + len(data) > UNREAD:
            raise BrokenPipeError
        if not self._waiting:
            self._loop.call_soon(self._begin)
        self._waiting += data

    def _begin(self) -> None:
        if self._waiting and self._is_open:
            self._flush()
            if self._waiting and self._is_open:
                self._loop.add_writer(self._descriptor, self._flush)

    def _flush(self) -> None:
        try:
            with memoryview(self._waiting) as view:
                written = os.write(self._descriptor, view[:_CHUNK])
            del self._waiting[:written]
        except BlockingIOError:
            return
        except OSError:  # the reader has closed the pipe
            self._shut()
            return
        if not self._waiting:
            self._loop.remove_writer(self._descriptor)

    def close(self) -> None:
        """Write as much as the pipe accepts now, then close it. The rest is dropped."""
        if self._is_open and self._waiting:
            self._flush()
        self._shut()

    def _shut(self) -> None:
        if self._is_open:
            self._is_open = False
            self._waiting.clear()
            self._loop.remove_writer(self._descriptor)
            os.close(self._descriptor)


class PipeReader:
    """The reading end of a pipe, read as fast as data comes until its end."""

    def __init__(self, descriptor: int, take: Callable[[bytes], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._take = take
        self._is_open = True
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self.read)

    def read(self) -> None:
        """Read the data that is available now."""
        for _ in range(_AT_ONCE):
            if not self._is_open:
                return
            try:
                data = os.read(self._descriptor, _CHUNK)
            except BlockingIOError:
                return
            if data:
                self._take(data)
            else:
                self.close()

    def close(self) -> None:
        """Stop reading."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)


@asynccontextmanager
async def open_stdio(
    spec: ProcessSpec,
    *,
    secrets: Mapping[str, str],
    longest_line: int = LONGEST_LINE,
    handover: Handover = NOTHING,
    watch: Callable[[], str] | None = None,
) -> AsyncIterator[StdioProcess]:
    """Start a process to talk to; it and all processes that it started are ended when the block ends.

    `${NAME}` is revealed in the values of `env`, and in `argv`, which is visible to the whole machine. `watch` observes
    the process and returns why it has to be stopped; an empty text while it may continue.
    """
    env = {name: reveal(value, secrets) for name, value in spec.env.items()}
    response = replace(spec, argv=tuple(reveal(word, secrets) for word in spec.argv))
    with adopting():
        peer = StdioProcess(response, env, Redactor(secrets), longest_line, handover)
        watching = asyncio.create_task(peer.stays_within(watch)) if watch is not None else None
        try:
            yield peer
        finally:
            if watching is not None:
                watching.cancel()
            await completed(peer.end())


class StdioProcess:
    """A running process and its three pipes."""

    def __init__(
        self, spec: ProcessSpec, env: Mapping[str, str], redactor: Redactor, longest_line: int, handover: Handover
    ) -> None:
        self._redactor = redactor
        self._errors = bytearray()
        self._ending = ""
        mark = TreeMarker.new()
        started = start(spec, locate(spec, env), env, handover, mark, has_input=True, has_result=False)
        assert started.stdin is not None
        self._process = started.process
        self._family = ProcessTree(self._process.pid, mark, handover.first)
        self._lines = LineReader(started.stdout, longest_line)
        self._writer = PipeWriter(started.stdin)
        self._stderr = PipeReader(started.stderr, self._complained)
        self._exited = exit_of(started.handle)
        self._exited.add_done_callback(self._leader_ended)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def send(self, data: bytes) -> None:
        """Write to the process, now or as soon as it reads; one that is gone or never reads is a broken pipe."""
        self._writer.write(data)

    async def line(self) -> bytes | None:
        """Return the next line without its end, or None where there will be none; one over the limit is refused."""
        return await self._lines.take()

    def complaints(self) -> str:
        """Return the last part of what the process wrote to standard error, without secrets."""
        return self._redactor.clean(bytes(self._errors))[-KEPT:].decode(errors="replace")

    def ending(self) -> str:
        """Return how the process ended, in words; empty while it runs."""
        if not self._ending and self._exited.done() and self._process.returncode is None:
            # Looked at and not waited for: its family is found by its number, which must stay its own until then.
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended and ended.si_code == os.CLD_EXITED:
                self._ending = f"it ended with exit code {ended.si_status}"
            elif ended:
                known = {number.value: number.name for number in Signals}
                self._ending = f"it was ended by {known.get(ended.si_status, f'signal {ended.si_status}')}"
        return self._ending

    def ended(self) -> ProcessExit:
        """Return how the process ended. Its output was already read by its client."""
        code = self._process.returncode
        return ProcessExit(code if code is not None and code >= 0 else None, b"", self.complaints().encode())

    async def ends_within(self, seconds: float) -> bool:
        """Wait for the process to end; whether it has."""
        await asyncio.wait((self._exited,), timeout=seconds)
        return self._exited.done()

    async def stays_within(self, watch: Callable[[], str]) -> None:
        """Look at the process for as long as it lives, and end it where it has to be stopped."""
        while not await self.ends_within(LOOK):
            if reason := await asyncio.to_thread(watch):
                self._ending = f"it was stopped: it {reason}"
                # A child that outlives its leader for a moment sees its input end, and must not respond as if all were
                # well.
                self._lines.close()
                self._family.signal_group(SIGKILL)
                return

    async def end(self) -> None:
        """End the process: first its input, then politely, then with all that came of it."""
        try:
            self._writer.close()
            if not await self.ends_within(PATIENCE):
                self._family.signal_group(SIGTERM)
                self._family.signal_group(SIGCONT)  # what is stopped hears nothing else
                if not await self.ends_within(GRACE):
                    self._family.signal_group(SIGKILL)
                    await self.ends_within(GRACE)
            await self._family.sweep()
        finally:
            self._family.signal_group(SIGKILL)  # the last resort where the loop itself is being taken down
            self._stderr.read()
            self._stderr.close()
            self._lines.close()
            self.ending()
            self._process.poll()
            self._exited.cancel()

    def _complained(self, data: bytes) -> None:
        self._errors += data
        reach = KEPT + self._redactor.longest
        if len(self._errors) > 2 * reach:
            del self._errors[:-reach]

    def _leader_ended(self, _: object) -> None:
        # What it left behind may hold the pipes open for ever, so their end is not waited for.
        self._writer.close()
        asyncio.get_running_loop().call_later(DRAIN, self._lines.close)
