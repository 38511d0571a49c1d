"""Run a process to its end: result, output limits, progress."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from select import EPOLLIN, EPOLLOUT, epoll
from signal import SIGCONT, SIGKILL, SIGTERM
from time import monotonic
from types import MappingProxyType
from weakref import WeakKeyDictionary

from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.isolation import NOTHING, Handover, ProcessExit
from kiwi_mcp.domain.outcome import Progress, Report, silent
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.primitives.process.process_tree import ProcessTree, TreeMarker, adopting
from kiwi_mcp.primitives.process.spawn import completed, locate, start
from kiwi_mcp.primitives.secrets.redaction import Redactor
from kiwi_mcp.primitives.secrets.reveal import reveal

INTERVAL = 0.1
"""The shortest time between two reports, in seconds."""
_LONGEST = 500
"""The most of a line that is reported, in bytes."""
_COUNTED = lazy_pattern(r"::progress\s+(\d{1,15}(?:\.\d{1,9})?)(?:/(\d{1,15}(?:\.\d{1,9})?))?(?:\s+(.*))?", re.DOTALL)
AT_ONCE = 64
"""Processes that run at the same time; further ones wait for their turn."""
QUEUE = 900.0
"""How long a process waits for its turn, in seconds."""
GRACE = 1.0
"""How long a process may take to end after a termination signal, in seconds."""
LOOK = 0.05
"""How often a process that is watched is looked at, in seconds."""
DRAIN = 0.25
"""How long output may still come from what a leader left behind, in seconds."""
_ROUNDS, _MOMENT = 4, 0.001
"""How often the pipes of a process that has ended are read at once, and how many seconds each reading may wait."""
_CHUNK = 65_536
_AT_ONCE = 8
"""How many chunks are read from one pipe before the others have their turn."""
_NOTHING: Mapping[str, str] = MappingProxyType({})
_NO_SECRETS = Redactor(_NOTHING)
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class ProgressLines:
    """One stream cut into lines, each handed on as progress."""

    def __init__(self, pace: ProgressThrottle) -> None:
        self._pace = pace
        self._rest = b""

    def add(self, data: bytes) -> None:
        """Add data from the stream. Only the last line of a chunk is reported: the throttle would drop the others."""
        complete, ended, rest = data.rpartition(b"\n")
        if ended:
            line = complete.rpartition(b"\n")[2] if b"\n" in complete else (self._rest + complete)[: self._pace.most]
            self._rest = b""
            self._pace.tell(line)
        self._rest = (self._rest + rest)[: self._pace.most]


class ProgressThrottle:
    """Reports progress at a limited rate. If lines come too fast, only the newest one is reported."""

    def __init__(self, report: Report, redactor: Redactor) -> None:
        self._loop = asyncio.get_running_loop()
        self._report = report
        self._redactor = redactor
        self.most = _LONGEST * 2 + redactor.longest
        """The maximum size of a line in memory, in bytes. The reported part is much shorter."""
        self._waiting: bytes | None = None
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, line: bytes) -> None:
        """Report a line now, or as soon as the pace allows."""
        if not line.strip():
            return
        self._waiting = line
        if self._timer is None:
            self._now()

    def finish(self) -> None:
        """Report the line that still waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting is not None:
            self._report(self._progress(self._waiting))
            self._waiting = None

    def _now(self) -> None:
        self._timer = None
        if self._waiting is not None:
            line, self._waiting = self._waiting, None
            self._timer = self._loop.call_later(INTERVAL, self._now)
            self._report(self._progress(line))

    def _progress(self, line: bytes) -> Progress:
        is_whole = len(line) < self.most
        cleaned = self._redactor.clean(line) if is_whole else self._redactor.beginning(line)
        text = cleaned.decode(errors="replace").strip()[:_LONGEST]
        if (counted := _COUNTED.fullmatch(text)) is None:
            return Progress(message=text)
        done, total, message = counted.groups()
        return Progress(message=message or "", done=float(done), total=float(total) if total else None)


class ProcessResult(ProcessExit, frozen=True, kw_only=True):
    """How a process that was run to its end ended, and what it gave.

    Of output over the limit the first and the last half are kept, with a line between them that counts the rest.
    A result over its limit is cut at the limit. `result` is None where nothing was written to the channel.
    """

    signal: int | None
    stdout_bytes: int
    stderr_bytes: int
    result: bytes | None
    is_result_truncated: bool
    is_truncated: bool
    timed_out: bool
    duration: float


class Capture(Struct):
    """The first and the last bytes of a stream, and how many there were in between.

    At both cuts, `margin` more bytes are stored, so that a secret across a cut can be recognised.
    """

    limit: int
    margin: int = 0
    total: int = 0
    is_cut: bool = False
    """Whether there was more than the limit."""
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> None:
        """Add data from the stream."""
        self.total += len(data)
        self.is_cut = self.total > self.limit
        room = self.limit + self.margin - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data:
            self.tail += data
            if len(self.tail) > 2 * self._reach:
                del self.tail[: -self._reach]

    @property
    def _reach(self) -> int:
        return self.limit // 2 + self.margin + 1

    def kept(self, clean: Callable[[bytes], bytes]) -> bytes:
        """Return the captured bytes, cleaned: all, or the first half, a line about the cut, and the last half."""
        if not self.is_cut:
            return clean(bytes(self.head))
        half = self.limit // 2
        rest = (bytes(self.head) + bytes(self.tail))[-self._reach :]
        first, last = clean(bytes(self.head))[:half], clean(rest)
        note = f"\n[{self.total - 2 * half} bytes left out]\n".encode()
        return first + note + (last[-half:] if half else b"")


async def run(
    spec: ProcessSpec,
    *,
    secrets: Mapping[str, str] = _NOTHING,
    report: Report = silent,
    handover: Handover = NOTHING,
    watch: Callable[[], str] | None = None,
    confirm: Callable[[], None] | None = None,
) -> ProcessResult:
    """Run a process to its end, and end all that it started.

    `argv` is taken as it stands; `${NAME}` is revealed in the values of `env` alone. `handover` is what a sandbox
    gives the process besides, and `watch` says why it has to be stopped. `confirm` raises if it may not start any more.
    """
    env = dict(spec.env)
    for name, value in spec.env.items():
        if "${" in value:
            env[name] = reveal(value, secrets)
    program = locate(spec, env)
    loop = asyncio.get_running_loop()
    if (turns := _turns.get(loop)) is None:
        turns = _turns[loop] = asyncio.Semaphore(AT_ONCE)
    await (_queued(turns) if turns.locked() else turns.acquire())
    try:
        with adopting():
            if confirm is not None:
                confirm()
                handover = _confirmed(handover, confirm)
            child = _Child(spec, program, env, Redactor(secrets) if secrets else _NO_SECRETS, report, handover)
            stopped = ""
            try:
                if watch is None:
                    await child.ends_within(spec.timeout)
                else:
                    stopped = await child.stays_within(spec.timeout, watch)
            finally:
                timed_out = not stopped and not child.has_exited
                if not child.is_over():
                    await completed(child.end())
            return child.result(timed_out=timed_out, stopped=stopped)
    finally:
        turns.release()


def _confirmed(handover: Handover, confirm: Callable[[], None]) -> Handover:
    """Return a start that is confirmed again at the last moment, when its launcher gets the command."""

    def enter(pid: int) -> None:
        confirm()
        handover.enter(pid)

    return replace(handover, enter=enter)


async def _queued(turns: asyncio.Semaphore) -> None:
    """Wait until one process less runs."""
    try:
        async with asyncio.timeout(QUEUE):
            await turns.acquire()
    except TimeoutError as fault:
        raise Unavailable(
            f"{AT_ONCE} processes are running, and none of them ended for {QUEUE:.0f} seconds.",
            suggestion="Try again later, or give the running tools a shorter timeout.",
        ) from fault


class _Child:
    """A running process: its tree, its pipes, and the moment its leader ends.

    The event loop watches one descriptor, an epoll object with all pipes and the leader in it.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        program: str,
        env: Mapping[str, str],
        redactor: Redactor,
        report: Report,
        handover: Handover,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._started = monotonic()
        self._redactor = redactor
        self._pace = None if report is silent else ProgressThrottle(report, redactor)
        self._stdout = Capture(spec.output_limit, redactor.longest)
        self._stderr = Capture(spec.output_limit, redactor.longest)
        self._result = Capture(spec.result_limit)
        self.has_exited = False
        """Whether the leader has ended."""
        self._waiter: asyncio.Future[None] | None = None
        mark = TreeMarker.new()
        started = start(spec, program, env, handover, mark, has_input=bool(spec.stdin), has_result=True)
        assert started.result is not None
        self._process = started.process
        self._family = ProcessTree(self._process.pid, mark, handover.first)
        self._handle = started.handle
        self._readers = {
            started.stdout: self._stdout.add if self._pace is None else _reported(self._stdout, self._pace),
            started.stderr: self._stderr.add if self._pace is None else _reported(self._stderr, self._pace),
            started.result: self._result.add,
        }
        self._stdin, self._input = started.stdin, memoryview(spec.stdin)
        self._events = epoll()
        for descriptor in (started.stdout, started.stderr, started.result):
            os.set_blocking(descriptor, False)
            self._events.register(descriptor, EPOLLIN)
        self._events.register(self._handle, EPOLLIN)
        if self._stdin is not None:
            os.set_blocking(self._stdin, False)
            self._events.register(self._stdin, EPOLLOUT)
            self._feed()
        self._loop.add_reader(self._events.fileno(), self._ready)

    def _ready(self) -> None:
        """Handle all that is ready: output, room for input, the end of the leader."""
        for descriptor, _ in self._events.poll(0):
            if descriptor in self._readers:
                self._read(descriptor, _AT_ONCE)
            elif descriptor == self._stdin:
                self._feed()
            elif descriptor == self._handle and not self.has_exited:
                self.has_exited = True
                self._events.unregister(self._handle)
                self._wake()

    def _read(self, descriptor: int, most: int) -> None:
        """Read up to `most` chunks that are available now; the end closes the pipe."""
        take = self._readers[descriptor]
        for _ in range(most):
            try:
                data = os.read(descriptor, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                del self._readers[descriptor]
                self._events.unregister(descriptor)
                os.close(descriptor)
                if self.has_exited:
                    self._wake()
                return
            take(data)

    def _feed(self) -> None:
        """Write what the reader takes, then deliver the end."""
        if self._stdin is None:
            return
        try:
            with suppress(BlockingIOError):
                while self._input:
                    self._input = self._input[os.write(self._stdin, self._input) :]
        except OSError:  # the reader has closed its end, which is its right
            self._input = self._input[:0]
        if not self._input:
            self._events.unregister(self._stdin)
            os.close(self._stdin)
            self._stdin = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _waits(self, seconds: float) -> None:
        """Wait until the leader or a pipe ends, and at most for some seconds."""
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(seconds, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()

    async def ends_within(self, seconds: float) -> bool:
        """Wait for the leader; whether it has ended in time."""
        end = monotonic() + seconds
        while not self.has_exited and (rest := end - monotonic()) > 0:
            await self._waits(rest)
        return self.has_exited

    async def stays_within(self, seconds: float, watch: Callable[[], str]) -> str:
        """Wait for the leader for at most `seconds`, and return the reason to stop it earlier, if there is one."""
        end = monotonic() + seconds
        while True:
            has_ended = await self.ends_within(max(0.0, min(LOOK, end - monotonic())))
            if (reason := await asyncio.to_thread(watch)) or has_ended or monotonic() >= end:
                return reason

    def is_over(self) -> bool:
        """Whether the leader has ended, left nothing behind and everything is read, which is the rule."""
        if not self.has_exited:
            return False
        for _ in range(_ROUNDS):
            for descriptor in tuple(self._readers):
                self._read(descriptor, _AT_ONCE)
            # The first process of a sandbox closes its pipes a moment after its launcher has ended.
            if not self._readers or not self._events.poll(_MOMENT):
                break
        if self._readers or self._family.kill():
            return False
        self._close()
        return True

    async def end(self) -> None:
        """End the process tree, with SIGTERM first, and read the rest of the pipes."""
        try:
            if self.has_exited:
                await self._drained()
            else:
                self._family.signal_group(SIGTERM)
                self._family.signal_group(SIGCONT)  # a stopped process receives nothing else
                if not await self.ends_within(GRACE):
                    self._family.signal_group(SIGKILL)
                    await self.ends_within(GRACE)
            await self._family.sweep()
            await self._drained()
        finally:
            self._family.signal_group(SIGKILL)  # the last resort where the loop itself is being taken down
            self._close()

    async def _drained(self) -> None:
        end = monotonic() + DRAIN
        while self._readers and (rest := end - monotonic()) > 0:
            await self._waits(rest)

    def _close(self) -> None:
        self._process.poll()
        if not self._events.closed:
            self._loop.remove_reader(self._events.fileno())
            self._events.close()
            os.close(self._handle)
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None
        for descriptor in self._readers:
            os.close(descriptor)
        self._readers.clear()
        if self._pace is not None:
            self._pace.finish()

    def result(self, *, timed_out: bool, stopped: str) -> ProcessResult:
        """Return how it went; the process must have been ended."""
        code = self._process.returncode
        clean = bytes if self._redactor is _NO_SECRETS else self._redactor.clean
        written = clean(bytes(self._result.head[: self._result.limit])) if self._result.total else None
        return ProcessResult(
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            stdout=self._stdout.kept(clean),
            stderr=self._stderr.kept(clean),
            stdout_bytes=self._stdout.total,
            stderr_bytes=self._stderr.total,
            result=written,
            is_result_truncated=self._result.is_cut,
            is_truncated=self._stdout.is_cut or self._stderr.is_cut,
            timed_out=timed_out,
            duration=monotonic() - self._started,
            stopped=stopped,
        )


def _reported(capture: Capture, pace: ProgressThrottle) -> Callable[[bytes], None]:
    """Return a function that captures a stream, and reports its lines as progress."""
    lines = ProgressLines(pace)

    def take(data: bytes) -> None:
        capture.add(data)
        lines.add(data)

    return take
