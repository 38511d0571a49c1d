"""A process that lines are exchanged with."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from signal import SIGCONT, SIGKILL, SIGTERM, Signals

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.domain.process import NOTHING, Handover
from kiwi_mcp.primitives.process.pipes import LineReader, PipeReader, PipeWriter
from kiwi_mcp.primitives.process.process_tree import ProcessTree, TreeMarker, adopting, exit_of
from kiwi_mcp.primitives.process.spawn import completed, locate, start
from kiwi_mcp.primitives.secrets.redaction import Redactor
from kiwi_mcp.primitives.secrets.reveal import reveal

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


class ProcessExit(Struct, frozen=True):
    """How a process that was talked to ended, and what it complained of last."""

    exit_code: int | None
    """Its exit code; None where a signal ended it, or nothing yet."""
    stdout: bytes
    stderr: bytes
    stopped: str = ""


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
            self._ending = _ending(ended) if ended else ""
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


def _ending(ended: os.waitid_result) -> str:
    if ended.si_code == os.CLD_EXITED:
        return f"it ended with exit code {ended.si_status}"
    known = {number.value: number.name for number in Signals}
    return f"it was ended by {known.get(ended.si_status, f'signal {ended.si_status}')}"
