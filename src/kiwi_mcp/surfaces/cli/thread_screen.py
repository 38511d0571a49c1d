"""What happens in a thread, shown live: Markdown rendered while it streams, and one line for each call."""

from __future__ import annotations

import os
import re
import sys
from shutil import get_terminal_size
from typing import TextIO

from msgspec import Struct

from kiwi_mcp.domain.json import as_list, as_object, as_text
from kiwi_mcp.domain.messages import ReplyDelta
from kiwi_mcp.domain.safe_text import StreamEscaper, escape_controls
from kiwi_mcp.domain.threads import ThreadEvent
from kiwi_mcp.surfaces.cli.screen import fitted

_RESET, _BOLD, _DIM, _CODE = "\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[36m"
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_BLOCK = re.compile(r"(?P<indent>[ \t]*)(?:(?P<heading>#{1,6}) +|(?P<bullet>[-*+]) +|(?P<quote>>) ?)")
_UNDECIDED = re.compile(r"[ \t]*(?:#{0,6} *|[-*+] *|> ?|`{0,2}|~{0,2})")
"""The beginning of a line of which the next character decides what it is."""
_SPAN = re.compile(r"\*\*(?P<bold>\S|\S[^\n]{0,300}?\S)\*\*|`(?P<code>[^`\n]{1,300})`")
_OPENER = re.compile(r"\*\*(?=\S|$)|\*$|`")
_LONGEST_SPAN = 300
_RED, _ERASE = "\x1b[31m", "\r\x1b[2K"
_SHORT = 60


class MarkdownStream:
    """Renders pieces of a text. Only the beginning of a line, and a span that is not closed yet, wait for more."""

    def __init__(self) -> None:
        self._rest = ""
        """What was not written yet of the current line."""
        self._is_line_start = True
        self._fence = ""
        """How the open code block began; empty outside of one."""
        self._style = ""
        """The style of the current line."""

    def feed(self, piece: str) -> str:
        """Return what can be written now."""
        *lines, last = (self._rest + piece).split("\n")
        written = "".join([f"{self._line(line, is_whole=True)}\n" for line in lines])
        return written + self._line(last, is_whole=False)

    def finish(self) -> str:
        """Return the rest, with every style ended."""
        return self._line(self._rest, is_whole=True)

    def _line(self, text: str, *, is_whole: bool) -> str:
        """Return what of a line can be written; the rest of one that is not whole is stored."""
        self._rest = ""
        if not is_whole and self._is_line_start and _UNDECIDED.fullmatch(text):
            self._rest = text
            return ""
        written = ""
        if self._is_line_start:
            if (fence := _FENCE.match(text)) and (not self._fence or fence[1].startswith(self._fence)):
                if not is_whole:  # all of that line is needed
                    self._rest = text
                    return ""
                self._fence = "" if self._fence else fence[1]
                return f"{_DIM}{text}{_RESET}"
            written, text = self._begin(text)
        written += self._inline(text, is_whole=is_whole)
        self._is_line_start = is_whole
        if is_whole and self._style:
            written, self._style = written + _RESET, ""
        return written

    def _begin(self, text: str) -> tuple[str, str]:
        """Return how a line begins, and the rest of it."""
        if self._fence:
            self._style = _CODE
            return _CODE, text
        found = _BLOCK.match(text)
        if found is None:
            return "", text
        rest, indent = text[found.end() :], found["indent"]
        if found["bullet"]:
            return f"{indent}• ", rest
        self._style = _BOLD if found["heading"] else _DIM
        return f"{indent}{self._style}{'│ ' if found['quote'] else ''}", rest

    def _inline(self, text: str, *, is_whole: bool) -> str:
        if self._fence:
            return text
        written, at = "", 0
        for span in _SPAN.finditer(text):
            style, inner = (_BOLD, span["bold"]) if span["bold"] else (_CODE, span["code"])
            written += f"{text[at : span.start()]}{style}{inner}{_RESET}{self._style}"
            at = span.end()
        rest = text[at:]
        opener = None if is_whole else _OPENER.search(rest)
        if opener and len(rest) - opener.start() <= _LONGEST_SPAN:
            self._rest, rest = rest[opener.start() :], rest[: opener.start()]
        return written + rest


class ShownCall(Struct):
    """A call of a tool, as it is shown."""

    number: int
    name: str
    arguments: str
    began_at: int
    status: str = ""
    content: str = ""
    seconds: float = 0.0

    def line(self) -> str:
        """Return the call in one line."""
        short = fitted(" ".join(self.arguments.split()), _SHORT)
        ended = f"{self.status} {self.seconds:.1f} s" if self.status else "…"
        return f"[{self.number}] {self.name} {short}  {ended}"


class ThreadScreen:
    """Writes text to stdout; calls and notes too where it is a terminal, else to stderr."""

    def __init__(self, *, is_silent: bool = False, has_turns: bool = False) -> None:
        self.calls: list[ShownCall] = []
        self.thread_id = ""
        """The thread that was shown first."""
        self.text = ""
        """The text of the last reply."""
        self.error = ""
        """Why the last request to the model failed."""
        self._open: dict[str, ShownCall] = {}
        self._is_terminal = sys.stdout.isatty()
        self._notes: TextIO = sys.stdout if self._is_terminal else sys.stderr
        self._has_turns = has_turns and not self._is_terminal
        """Whether a line is written for each turn, and the text is left to the result."""
        self._turns = 0
        self._is_silent = is_silent
        """Whether nothing is written, and the text and the calls are only collected."""
        is_capable = self._is_terminal and not is_silent and os.environ.get("TERM") != "dumb"
        self._has_colour = is_capable and not os.environ.get("NO_COLOR")
        self._can_erase = is_capable
        self._escaper, self._markdown = StreamEscaper(), MarkdownStream()
        self._is_in_line = False
        """Whether a line of text is not ended."""
        self._has_status = False

    def show(self, event: ThreadEvent | ReplyDelta) -> None:
        """Show what happened."""
        if isinstance(event, ThreadEvent):
            self.thread_id = self.thread_id or event.thread_id
        match event:
            case ReplyDelta(kind="text", text=text):
                self.clear()
                self.text += text
                if not self._has_turns:
                    self._is_in_line = not text.endswith("\n")
                    if self._is_terminal:
                        text = self._escaper.feed(text)
                        text = self._markdown.feed(text) if self._has_colour else text
                    self._write(sys.stdout, text)
            case ThreadEvent(kind="resumed"):
                self.begin_turn()
            case ThreadEvent(kind="model"):
                self.end_text()
                self._begin_calls(event)
            case ThreadEvent(kind="result"):
                part = as_object(event.body.get("part"))
                if (call := self._open.pop(as_text(part.get("id")), None)) is not None:
                    call.status, call.content = as_text(event.body.get("status")), as_text(part.get("content"))
                    call.seconds = (event.at - call.began_at) / 1_000
                    self.note(call.line(), style=_DIM if call.status == "ok" else _RED)
                self.status(", ".join(one.line() for one in self._open.values()) or "…")
            case ThreadEvent(kind="model_failed"):
                self.error = as_text(event.body.get("message"))
                self.note(f"error: {self.error}", style=_RED)
            case ThreadEvent(kind="spawned"):
                self.note(f"started {as_text(event.body.get('item'))} as {as_text(event.body.get('thread_id'))}")
            case ThreadEvent(kind="limit") if event.body.get("limit"):
                self.note(f"limit reached: {as_text(event.body.get('limit'))}", style=_RED)

    def has_shown(self, result: object) -> bool:
        """Whether a result is the text that was written last."""
        return bool(self.text) and result == self.text and not self._has_turns

    def begin_turn(self) -> None:
        """Forget the reply before; show that the model is asked."""
        self.text = self.error = ""
        self.status("…")

    def status(self, text: str) -> None:
        """Show a line that the next output replaces."""
        self.clear()
        if self._can_erase and not self._is_in_line:
            self._write(self._notes, self._styled(_fit(text), _DIM))
            self._has_status = True

    def clear(self) -> None:
        """Erase the line that is replaced."""
        if self._has_status:
            self._write(self._notes, _ERASE)
            self._has_status = False

    def note(self, text: str, *, style: str = _DIM, is_whole: bool = False) -> None:
        """Write a line beside the text; it is cut to the width of the terminal unless all of it is wanted."""
        self.end_text()
        shown = text if is_whole or not self._is_terminal else _fit(text)
        self._write(self._notes, f"{self._styled(escape_controls(shown), style)}\n")

    def expand(self, call: ShownCall) -> None:
        """Write a call with all of its arguments and its result."""
        self.note(f"[{call.number}] {call.name}  {call.status} {call.seconds:.1f} s")
        self.note(f"{call.arguments}\n\n{call.content}".rstrip(), style="", is_whole=True)

    def end_text(self) -> None:
        """End the text that was streamed."""
        self.clear()
        if self._is_terminal:
            rest = self._escaper.finish()
            rest = self._markdown.feed(rest) + self._markdown.finish() if self._has_colour else rest
            self._write(sys.stdout, rest)
        self._escaper, self._markdown = StreamEscaper(), MarkdownStream()
        if self._is_in_line:
            self._write(sys.stdout, "\n")
            self._is_in_line = False

    def _begin_calls(self, event: ThreadEvent) -> None:
        for part in map(as_object, as_list(event.body.get("parts"))):
            if part.get("type") == "call":
                name, arguments = as_text(part.get("name")), as_text(part.get("arguments"))
                call = ShownCall(len(self.calls) + 1, name, arguments, event.at)
                self._open[as_text(part.get("id"))] = call
                self.calls.append(call)
        if self._has_turns:
            self._turns += 1
            self.note(f"turn {self._turns}: {', '.join(call.name for call in self._open.values()) or 'answer'}")
        if self._open:
            self.text = ""
            self.status(", ".join(call.line() for call in self._open.values()))

    def _write(self, stream: TextIO, text: str) -> None:
        if not self._is_silent:
            stream.write(text)
            stream.flush()

    def _styled(self, text: str, style: str) -> str:
        return f"{style}{text}{_RESET}" if self._has_colour and style else text


def _fit(text: str) -> str:
    return fitted(escape_controls(text).replace("\n", " "), get_terminal_size().columns - 1)
