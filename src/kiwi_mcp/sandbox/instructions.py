"""Instructions: what the launcher of a sandbox is told, word by word, and the descriptors that the words speak of."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from platform import machine

from kiwi_mcp.domain.errors import TooLarge
from kiwi_mcp.domain.isolation import Gate, Jail
from kiwi_mcp.sandbox.levels import demands
from kiwi_mcp.sandbox.seccomp import filter_program

_PIPE = 65_536
"""What a pipe holds before anybody reads it, in bytes."""
_STARTED = b'"exit-code"'
"""What the launcher reports at the end, if it got as far as starting the command."""
_INTERNET = (2, 10)
"""The families of sockets that a process with a proxy makes: IPv4 and IPv6. Their numbers are the kernel's own."""


class Instructions:
    """The launcher's own words, which it reads from a pipe, and the descriptors they speak of."""

    def __init__(self, keep: ExitStack) -> None:
        self._keep = keep
        self._words: list[str] = []
        self._lent: list[int] = []
        self.pipe, self._writing = os.pipe()
        self._is_open = True
        keep.callback(os.close, self.pipe)
        keep.callback(self._end)

    def add(self, *words: str) -> None:
        """Say something to the launcher."""
        self._words += words

    def lend(self, descriptor: int) -> str:
        """Give the launcher a descriptor, which it closes before the command, and return its number."""
        self._lent.append(descriptor)
        return str(descriptor)

    def file_of(self, content: bytes) -> str:
        """Give the launcher some bytes as a file in memory, and return the number of its descriptor."""
        descriptor = os.memfd_create("kiwi")
        self._keep.callback(os.close, descriptor)
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return self.lend(descriptor)

    def copy_of(self, path: str) -> str:
        """Let the launcher read a file of the system's, and return the number of its descriptor."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._keep.callback(os.close, descriptor)
        return self.lend(descriptor)

    def ask_for_report(self) -> int:
        """Let the launcher tell how far it came, and return where."""
        number = self.file_of(b"")
        self.add("--json-status-fd", number)
        return int(number)

    def ask_to_wait(self) -> Gate:
        """Let the launcher tell whom it started and wait before the command, and return where."""
        told, telling = os.pipe()
        reading, writing = os.pipe()
        # Both ends in one: the launcher would take the end of the pipe for the word to go on, should Kiwi be killed.
        waiting = os.open(f"/proc/self/fd/{reading}", os.O_RDWR | os.O_CLOEXEC)
        for descriptor in (told, telling, reading, writing, waiting):
            self._keep.callback(os.close, descriptor)
        self.add("--info-fd", self.lend(telling), "--block-fd", self.lend(waiting))
        return Gate(told, lambda: _say(writing))

    def filter_by(self, jail: Jail) -> None:
        """Let the launcher filter system calls, from its own first process inside on."""
        families, denied = _INTERNET if jail.hosts else (), demands(jail.level).denied_calls
        self.add("--seccomp", self.file_of(filter_program(machine(), families=families, denied=denied)))

    def descriptors(self) -> tuple[int, ...]:
        """Return all that the launcher must inherit."""
        said = sum(len(os.fsencode(word)) + 1 for word in self._words)
        if said > _PIPE:
            raise TooLarge("The list of paths and variables for the sandbox", size=said, limit=_PIPE)
        return (self.pipe, *self._lent)

    def release(self, bound: Callable[[int], None], pid: int) -> None:
        """Put the launcher under its limits, and only then tell it what to do."""
        bound(pid)
        os.write(self._writing, b"".join(os.fsencode(word) + b"\0" for word in self._words))
        self._end()

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._writing)


def _say(writing: int) -> None:
    os.write(writing, b"\n")


def has_begun(report: int) -> bool:
    """Whether a launcher that has ended had started the command, by what it reported."""
    return _STARTED in os.pread(report, _PIPE, 0)
