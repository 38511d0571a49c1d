"""Instructions: what the launcher of a sandbox is told, word by word, and the descriptors that the words speak of."""

from __future__ import annotations

import os
from contextlib import ExitStack
from platform import machine

from kiwi_mcp.domain.errors import TooLarge
from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.sandbox.cgroup import Group
from kiwi_mcp.sandbox.levels import demands
from kiwi_mcp.sandbox.seccomp import filter_program

_PIPE = 65_536
"""What a pipe holds before anybody reads it, in bytes."""
_STARTED = b'"exit-code"'
"""What the launcher reports at the end, if it got as far as starting the command."""


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

    def ask_for_report(self) -> int:
        """Let the launcher tell how far it came, and return where."""
        number = self.file_of(b"")
        self.add("--json-status-fd", number)
        return int(number)

    def filter_by(self, jail: Jail) -> None:
        """Let the launcher filter system calls, from its own first process inside on."""
        denied = ("memfd_create",) if "memfd" in demands(jail.level).denies else ()
        self.add("--seccomp", self.file_of(filter_program(machine(), denied=denied)))

    def descriptors(self) -> tuple[int, ...]:
        """Return all that the launcher must inherit."""
        said = sum(len(os.fsencode(word)) + 1 for word in self._words)
        if said > _PIPE:
            raise TooLarge("The list of paths and variables for the sandbox", size=said, limit=_PIPE)
        return (self.pipe, *self._lent)

    def release(self, group: Group | None, pid: int) -> None:
        """Put the launcher under its limits, and only then tell it what to do."""
        if group is not None:
            group.add(pid)
        os.write(self._writing, b"".join(os.fsencode(word) + b"\0" for word in self._words))
        self._end()

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._writing)


def has_begun(report: int) -> bool:
    """Whether a launcher that has ended had started the command, by what it reported."""
    return _STARTED in os.pread(report, _PIPE, 0)
