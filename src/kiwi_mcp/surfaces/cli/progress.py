"""Progress of a call on standard error: nothing for what is quick, a line that changes for what is not."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.markup import escape

from kiwi_mcp.domain.caller import Answers, Ask, Questions, nobody
from kiwi_mcp.domain.outcome import Progress, Report, silent
from kiwi_mcp.surfaces.cli.terminal import shown

_QUIET_SECONDS = 1.0
_WIDTH = 100


@contextmanager
def reporting(*, is_quiet: bool) -> Iterator[Report]:
    """Give a place to report to while a call runs."""
    if is_quiet:
        yield silent
    elif sys.stderr.isatty():
        with Console(stderr=True).status("…", spinner="dots") as status:
            yield _Spinner(status)
    else:
        yield _Lines()


def unspun(report: Report, ask: Ask) -> Ask:
    """Return the same way to ask, with nothing that turns on the screen meanwhile."""

    async def asking(questions: Questions) -> Answers:
        if not isinstance(report, _Spinner):
            return await ask(questions)
        report.status.stop()
        try:
            return await ask(questions)
        finally:
            report.status.start()

    return nobody if ask is nobody else asking


class _Turning(Protocol):
    """The line of `rich`, which loads it when one is shown."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update(self, status: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Spinner:
    """Reports as one line that changes."""

    status: _Turning

    def __call__(self, step: Progress) -> None:
        self.status.update(escape(_line(step) or "…"))


class _Lines:
    """Reports as plain lines, at most one a second, and none in the first second."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _QUIET_SECONDS

    def __call__(self, step: Progress) -> None:
        now = time.monotonic()
        if now >= self._next and (line := _line(step)):
            self._next = now + _QUIET_SECONDS
            print(f"… {line}", file=sys.stderr)  # noqa: T201 - talking to a person is the job


def _line(step: Progress) -> str:
    """Return a step in words; without any it is how much is done, of how much."""
    words = shown(step.message).replace("\n", " ").strip()[:_WIDTH]
    count = f"{step.done:g}/{step.total:g}" if step.total else f"{step.done:g}" if step.done and not words else ""
    return f"{words} ({count})" if words and count else words or count
