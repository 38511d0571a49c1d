"""One command with its kernel, and the status line on stderr."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import convert

from kiwi_mcp.domain.calls import Answers, Ask, Caller, Questions, no_answers
from kiwi_mcp.domain.json import Json, JsonObject, as_text
from kiwi_mcp.domain.outcome import Progress, Report, silent
from kiwi_mcp.domain.safe_text import escape_controls
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.paths import project_around, usable_project, user_space
from kiwi_mcp.kernel.verb import Verb, payload_of
from kiwi_mcp.kernel.verbs import by_wire
from kiwi_mcp.kernel.view import message_items
from kiwi_mcp.surfaces.cli.help import options_of
from kiwi_mcp.surfaces.cli.inputs import here
from kiwi_mcp.surfaces.cli.screen import Screen, show_error, talk

if TYPE_CHECKING:
    from kiwi_mcp.surfaces.cli.rows import CommandRow

T = TypeVar("T")
_CANCELLED = 143
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_QUIET_SECONDS = 1.0
_WIDTH = 100
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class CliSession:
    """One command: its project, how its answer is shown, and the kernel that answers."""

    def __init__(self, options: Mapping[str, Json], *, project: Path | None = None, is_json: bool = False) -> None:
        self.is_json = is_json or bool(options.get("json"))
        named = as_text(options.get("project"))
        # Without a name that of this folder; None in / and in folders of other users, where your own tools still work.
        self.project = project or (here() / named if named else usable_project(here()))
        if self.project is None and (around := project_around(here())) is not None:
            talk(f"warning: {around} belongs to another user, so its .ai folder is not used.")
            talk(f"hint: If you trust it, add it to `roots:` in {user_space() / 'policy.yaml'}.")

    def call(self, verb: str, request: JsonObject, questions: Ask = no_answers) -> Answer:
        """Send one request to the kernel and return its answer; `questions` asks the person meanwhile."""

        async def calling() -> Answer:
            async with self.opened() as kernel:
                return await self.send(kernel, verb, request, questions)

        return run(calling())

    def read(self, reading: Callable[[Kernel], T]) -> T:
        """Return what a function reads from the kernel of this command."""

        async def opened() -> T:
            async with self.opened() as kernel:
                return reading(kernel)

        return run(opened())

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Kernel]:
        """Open the kernel of this command."""
        # A tool must not outlive the command that runs it, whichever signal ends the command.
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None  # noqa: S101 - a coroutine of a loop runs in one
        for number in _ENDING:
            # As the loop's own handlers, which import `inspect` for 5 ms.
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(task.cancel))
        kernel = Kernel(self.project, surface="cli", is_short_lived=True)
        try:
            yield kernel
        finally:
            await kernel.aclose()
            for number in _ENDING:
                signal.signal(number, signal.SIG_DFL)

    async def send(self, kernel: Kernel, verb: str, request: JsonObject, questions: Ask = no_answers) -> Answer:
        """Send one request to a kernel, and show its progress meanwhile."""
        # A question stays readable: nothing else is written while it is open. `execute` asks before it starts anything.
        is_quiet = self.is_json or (questions is not no_answers and verb not in {"execute", "setup", "thread"})
        words = request.get("action") or verb, request.get("item_id") or request.get("server")
        with reporting(" ".join(as_text(word) for word in words if word), is_quiet=is_quiet) as report:
            return await kernel.call(verb, request, Caller(report, paused(report, questions), is_owner=True))

    def tell(self, row: CommandRow, request: JsonObject, *, is_raw: bool = False, questions: Ask = no_answers) -> int:
        """Send the request of a command, show the answer, and return the exit code."""
        answer = self.call(row["wire"][0], request, questions)
        return self.show(answer, by_wire(row["wire"]), is_raw=is_raw)

    def show(self, answer: Answer, verb: Verb | None, *, is_raw: bool = False) -> int:
        """Show an answer by the view of its verb, or as JSON with `--json`, and return its exit code."""
        screen = Screen(is_raw)
        if self.is_json:
            screen.json(answer.content)
        elif answer.is_error:
            show_error(answer.content, is_json=False)
        elif verb is None or verb.view is None:
            screen.show(message_items(answer.content))
        else:
            screen.show(verb.view(answer.response or convert(answer.content, verb.response)))
        return answer.exit_code


def request_of(row: CommandRow, options: Mapping[str, Json]) -> dict[str, Json]:
    """Return the request of a command as it is sent."""
    local = {option["field"] for option in options_of(row) if option.get("local")}
    sent = {name: value for name, value in options.items() if name not in local}
    return {**payload_of(by_wire(row["wire"]), sent)}


def run(work: Coroutine[None, None, T]) -> T:
    """Run a command's work to its end; a signal that cancels it ends the process with 143."""
    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        sys.exit(_CANCELLED)


@contextmanager
def reporting(what: str, *, is_quiet: bool) -> Iterator[Report]:
    """Yield the function that receives the progress of a call; until there is some, `what` is shown."""
    if is_quiet:
        yield silent
    elif sys.stderr.isatty():
        line = StatusLine(what)
        line.start()
        try:
            yield line
        finally:
            line.stop()
    else:  # plain lines, at most one a second, and none in the first second
        following = time.monotonic() + _QUIET_SECONDS

        def write(step: Progress) -> None:
            nonlocal following
            now = time.monotonic()
            if now >= following and (line := progress_text(step)):
                following = now + _QUIET_SECONDS
                sys.stderr.write(f"… {line}\n")

        yield write


def paused(report: Report, ask: Ask) -> Ask:
    """Return the same way to ask a person, without a status line while the question is open."""

    async def asking(questions: Questions) -> Answers:
        if not isinstance(report, StatusLine):
            return await ask(questions)
        report.stop()
        try:
            return await ask(questions)
        finally:
            report.start()

    return no_answers if ask is no_answers else asking


class StatusLine:
    """Progress on a terminal: one line that changes, after the first second."""

    def __init__(self, what: str) -> None:
        self._text = escape_controls(what)
        self._frame = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_drawn = False

    def __call__(self, step: Progress) -> None:
        """Take the newest step."""
        self._text = progress_text(step) or self._text

    def start(self) -> None:
        """Draw the line from now on."""
        self._timer = asyncio.get_running_loop().call_later(_QUIET_SECONDS, self._draw)

    def stop(self) -> None:
        """Erase the line."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_drawn:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
            self._is_drawn = False

    def _draw(self) -> None:
        self._frame = (self._frame + 1) % len(_FRAMES)
        sys.stderr.write(f"\r\x1b[2K{_FRAMES[self._frame]} {self._text}")
        sys.stderr.flush()
        self._is_drawn = True
        self._timer = asyncio.get_running_loop().call_later(0.1, self._draw)


def progress_text(step: Progress) -> str:
    """Return a step in words; without any it is how much is done, of how much."""
    words = escape_controls(step.message).replace("\n", " ").strip()[:_WIDTH]
    count = f"{step.done:g}/{step.total:g}" if step.total else f"{step.done:g}" if step.done and not words else ""
    return f"{words} ({count})" if words and count else words or count
