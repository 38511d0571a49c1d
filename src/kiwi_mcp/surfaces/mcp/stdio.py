"""Standard input and output as a wire that belongs to the protocol alone."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from types import FrameType


class Wire:
    """The two ends that carry the conversation: private duplicates, which no child inherits."""

    __slots__ = ("inbound", "outbound")

    def __init__(self, inbound: int, outbound: int) -> None:
        self.inbound = inbound
        self.outbound = outbound

    def write(self, data: bytes) -> None:
        """Write all of the data, however long it takes; a client that has left ends the process quietly."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self.outbound, rest) :]
        except BrokenPipeError:
            raise SystemExit(0) from None


def claim() -> Wire:
    """Take standard input and output for the protocol, and leave nothing and standard error in their places.

    A stray `print`, of Kiwi or of a library, then goes to standard error and never between two messages; and a
    program that reads standard input finds it empty instead of eating a request.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    wire = Wire(_duplicate(0), _duplicate(1))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    try:
        os.dup2(2, 1)
    except OSError:  # started without standard error
        os.dup2(nothing, 1)
    os.close(nothing)
    return wire


def _duplicate(number: int) -> int:
    try:
        # Above the standard three: one of them may be closed, and its number must not become the wire.
        private = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:
        raise SystemExit(0) from None  # there is nobody to talk to
    os.set_blocking(private, True)
    return private


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)
