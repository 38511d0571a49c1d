"""Markdown for a terminal, rendered while it streams: headings, lists, quotes, bold, code."""

from __future__ import annotations

import re

_RESET, _BOLD, _DIM, _CODE = "\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[36m"
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_BLOCK = re.compile(r"(?P<indent>[ \t]*)(?:(?P<heading>#{1,6}) +|(?P<bullet>[-*+]) +|(?P<quote>>) ?)")
_UNDECIDED = re.compile(r"[ \t]*(?:#{0,6} *|[-*+] *|> ?|`{0,2}|~{0,2})")
"""The beginning of a line of which the next character decides what it is."""
_SPAN = re.compile(r"\*\*(?P<bold>\S|\S[^\n]{0,300}?\S)\*\*|`(?P<code>[^`\n]{1,300})`")
_OPENER = re.compile(r"\*\*(?=\S|$)|\*$|`")
_LONGEST_SPAN = 300


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
