"""The primitive `subprocess`: one process, from its start to the end of everything it started.

The child gets exactly the environment of its spec, its own session, standard input that ends, and a third channel
for its result: the path in `KIWI_RESULT`, to which any language can write. When the leader ends, its time is up or the
caller goes away, nothing of it is left running.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from signal import SIGCONT, SIGKILL, SIGTERM
from subprocess import DEVNULL, Popen
from time import monotonic
from types import MappingProxyType
from typing import TypeAlias
from weakref import WeakKeyDictionary

from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.isolation import NOTHING, Handover
from kiwi_mcp.domain.outcome import Report, silent
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.primitives.children import abandon, completed, exit_of, give_away, pipe
from kiwi_mcp.primitives.family import MARK, Family, Mark, adopting
from kiwi_mcp.primitives.pipes import Capture, Sink, Source
from kiwi_mcp.primitives.program import locate, spawning
from kiwi_mcp.primitives.progress import Lines, Pace
from kiwi_mcp.primitives.secrets import Redactor, reveal

AT_ONCE = 64
"""Processes that run at the same time; further ones wait for their turn."""
QUEUE = 900.0
"""How long a process waits for its turn, in seconds."""
GRACE = 1.0
"""How long a process that is told to end may take to do so, in seconds."""
LOOK = 0.05
"""How often a process that is watched is looked at, in seconds."""
DRAIN = 0.25
"""How long output may still come from what a leader left behind, in seconds."""
RESULT = "KIWI_RESULT"
"""The variable with the path of the result channel."""
Watch: TypeAlias = Callable[[], str]
"""Looks at what a process does, and says why it has to be stopped; nothing while it may go on."""
_NOTHING: Mapping[str, str] = MappingProxyType({})
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """How a process ended and what it gave, without the values of its secrets.

    Of output over the limit the first and the last half are kept, with a line between them that counts the rest.
    A result over its limit is cut at the limit. `result` is None where nothing was written to the channel.
    """

    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    stdout_bytes: int
    stderr_bytes: int
    result: bytes | None
    is_result_truncated: bool
    is_truncated: bool
    timed_out: bool
    duration: float
    stopped: str = ""
    """Why it was stopped, or would have been, by what watched it."""


async def run(
    spec: ProcessSpec,
    *,
    secrets: Mapping[str, str] = _NOTHING,
    report: Report = silent,
    handover: Handover = NOTHING,
    watch: Watch | None = None,
) -> ProcessResult:
    """Run a process to its end, and end all that it started.

    `argv` is taken as it stands; `${NAME}` is revealed in the values of `env` alone. `handover` is what a sandbox
    gives the process besides, and `watch` says why it has to be stopped.
    """
    env = {name: reveal(value, secrets) for name, value in spec.env.items()}
    program = locate(spec, env)
    async with _turn():
        with adopting():
            child = _Child(spec, program, env, Redactor(secrets), report, handover)
            stopped = ""
            try:
                stopped = await child.stays_within(spec.timeout, watch)
            finally:
                timed_out = not stopped and not child.has_exited
                if not child.is_over():
                    await completed(child.end())
            return child.result(timed_out=timed_out, stopped=stopped)


@asynccontextmanager
async def _turn() -> AsyncIterator[None]:
    turns = _turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE))
    try:
        async with asyncio.timeout(QUEUE if turns.locked() else None):
            await turns.acquire()
    except TimeoutError as fault:
        raise Unavailable(
            f"{AT_ONCE} processes are running, and none of them ended for {QUEUE:.0f} seconds.",
            suggestion="Try again later, or give the running tools a shorter timeout.",
        ) from fault
    try:
        yield
    finally:
        turns.release()


class _Child:
    """A running process: its family, its pipes, and the moment its leader ends."""

    def __init__(
        self,
        spec: ProcessSpec,
        program: str,
        env: Mapping[str, str],
        redactor: Redactor,
        report: Report,
        handover: Handover,
    ) -> None:
        self._started = monotonic()
        self._redactor = redactor
        self._pace = None if report is silent else Pace(report, redactor)
        self._stdout = Capture(spec.output_limit, redactor.longest)
        self._stderr = Capture(spec.output_limit, redactor.longest)
        self._result = Capture(spec.result_limit)
        mark = Mark.new()
        with ExitStack() as theirs, ExitStack() as ours, spawning(spec):
            stdout, stderr, result = (pipe(ours, theirs) for _ in range(3))
            stdin = pipe(theirs, ours) if spec.stdin else None
            give_away(handover, stdout[1], stderr[1], result[1], *([stdin[0]] if stdin else []))
            with mark.pressed():
                self._process = handover.start(
                    lambda: Popen(
                        spec.argv,
                        executable=program,
                        cwd=spec.cwd,
                        env={**env, RESULT: f"/dev/fd/{result[1]}", MARK: mark.name},
                        stdin=stdin[0] if stdin else DEVNULL,
                        stdout=stdout[1],
                        stderr=stderr[1],
                        pass_fds=(result[1], *handover.descriptors),
                        start_new_session=not handover.makes_session,
                        process_group=handover.group,
                    )
                )
            ours.callback(abandon, self._process)
            handover.enter(self._process.pid)
            handle = os.pidfd_open(self._process.pid)
            ours.pop_all()
        mark.seal(self._process.pid)
        self._family = Family(self._process.pid, mark)
        self._sink = Sink(stdin[1], spec.stdin) if stdin else None
        self._sources = (
            Source(stdout[0], self._told(self._stdout)),
            Source(stderr[0], self._told(self._stderr)),
            Source(result[0], self._result.add),
        )
        self._exited = exit_of(handle)

    @property
    def has_exited(self) -> bool:
        """Whether the leader has ended."""
        return self._exited.done()

    async def ends_within(self, seconds: float) -> bool:
        """Wait for the leader; whether it has ended in time."""
        await asyncio.wait((self._exited,), timeout=seconds)
        return self._exited.done()

    async def stays_within(self, seconds: float, watch: Watch | None) -> str:
        """Wait for the leader, for so long at most, and return why it has to be stopped before."""
        end = monotonic() + seconds
        while watch is not None:
            has_ended = await self.ends_within(max(0.0, min(LOOK, end - monotonic())))
            if (reason := await asyncio.to_thread(watch)) or has_ended or monotonic() >= end:
                return reason
        await self.ends_within(seconds)
        return ""

    def is_over(self) -> bool:
        """Whether the leader has ended, left nothing behind and everything is read, which is the rule."""
        if not self._exited.done():
            return False
        for source in self._sources:
            source.read()
        if not all(source.ended.done() for source in self._sources) or self._family.kill():
            return False
        self._close()
        return True

    async def end(self) -> None:
        """End the family, softly first, and read what is left in the pipes."""
        try:
            if self._exited.done():
                await self._drained()
            else:
                await self._stopped()
            await self._family.sweep()
            await self._drained()
        finally:
            self._close()

    async def _stopped(self) -> None:
        self._family.signal_group(SIGTERM)
        self._family.signal_group(SIGCONT)  # what is stopped hears nothing else
        if not await self.ends_within(GRACE):
            self._family.signal_group(SIGKILL)
            await self.ends_within(GRACE)

    async def _drained(self) -> None:
        if pending := [source.ended for source in self._sources if not source.ended.done()]:
            await asyncio.wait(pending, timeout=DRAIN)

    def _close(self) -> None:
        self._family.signal_group(SIGKILL)  # the last resort where the loop itself is being taken down
        self._process.poll()
        self._exited.cancel()
        if self._sink is not None:
            self._sink.close()
        for source in self._sources:
            source.close()
        if self._pace is not None:
            self._pace.finish()

    def _told(self, capture: Capture) -> Callable[[bytes], None]:
        if self._pace is None:
            return capture.add
        lines = Lines(self._pace)

        def take(data: bytes) -> None:
            capture.add(data)
            lines.add(data)

        return take

    def result(self, *, timed_out: bool, stopped: str) -> ProcessResult:
        """Return how it went; the process must have been ended."""
        code = self._process.returncode
        written = self._redactor.clean(self._result.first())
        return ProcessResult(
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            stdout=self._stdout.kept(self._redactor.clean),
            stderr=self._stderr.kept(self._redactor.clean),
            stdout_bytes=self._stdout.total,
            stderr_bytes=self._stderr.total,
            result=written if self._result.total else None,
            is_result_truncated=self._result.is_cut,
            is_truncated=self._stdout.is_cut or self._stderr.is_cut,
            timed_out=timed_out,
            duration=monotonic() - self._started,
            stopped=stopped,
        )
