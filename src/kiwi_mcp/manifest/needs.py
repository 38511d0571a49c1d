"""The check of `needs`: what an item says it cannot do without, in words that can be given to it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial

from kiwi_mcp.domain.globs import is_plain
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, as_list, as_object
from kiwi_mcp.domain.needs import WORDS
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.manifest.sheets import Sheets

_FILES = ("read", "write")
_MOST = 100
_SYSTEM = re.compile(r"/(?:|bin|boot|dev|etc|home|lib|lib64|media|mnt|opt|proc|root|run|sbin|srv|sys|tmp|usr|var)")
"""Folders at the root that hold what is everybody's."""
_HELD, _SERVED = "process", "mcp"
"""The drivers whose processes are given something: those of tools, and those of servers, which tools stand on."""
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_PORT = r"(?::(?:[1-9]\d{0,4}))?"
_HOST = re.compile(
    rf"(?:(?:\*\.)?{_LABEL}(?:\.{_LABEL})*\.?{_PORT}|\[[0-9A-Fa-f:.]+\]{_PORT}|[0-9A-Fa-f:]*::?[0-9A-Fa-f:.]+)"
)
_COMMAND = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")


def needs_faults(written: Json, tool_type: str, sheets: Sheets) -> Iterator[Issue]:
    """Yield everything that is wrong with what stands under `needs`."""
    sheet = sheets.get(tool_type)
    is_process = (
        sheet is None or sheet.driver == _HELD or any(map(partial(sheets.carries, tool_type), (_HELD, _SERVED)))
    )
    if not is_process:
        fix = "Remove it: only scripts, runtimes and MCP servers are processes that are given something."
        yield Issue("needs", f"nothing is given to items of the type {tool_type}", fix)
        return
    if not isinstance(written, Mapping):
        yield Issue("needs", "is not a mapping", f"Write lists below it: {', '.join(WORDS)}.")
        return
    for word, value in as_object(written).items():
        place, listed = f"needs.{word}", as_list(value)
        if word not in WORDS:
            fix = f"{did_you_mean(word, WORDS)}Use one of: {', '.join(WORDS)}."
            yield Issue(place, "is nothing that an item can need", fix)
        elif not isinstance(value, list) or not all(isinstance(text, str) for text in listed):
            yield Issue(place, "is not a list of texts", f'Write `{word}: ["…"]`.')
        elif len(listed) > _MOST:
            yield Issue(place, f"asks for more than {_MOST} things", "Name the folder that they are in.")
        else:
            yield from (issue for text in listed for issue in _faults(word, str(text), place))


def _faults(word: str, text: str, place: str) -> Iterator[Issue]:
    if word in _FILES:
        yield from _path_faults(text, place)
    elif word == "hosts" and (not _HOST.fullmatch(text) or len(text) > 253):  # noqa: PLR2004 - the longest name
        yield Issue(place, f"{text!r:.80} is not a host", "Write `name`, `name:port`, `*.name` or an address.")
    elif word == "commands" and not _COMMAND.fullmatch(text):
        yield Issue(place, f"{text!r:.80} is not the name of a program", "Write its name alone, such as `git`.")


def _path_faults(text: str, place: str) -> Iterator[Issue]:
    plain = text.removesuffix("/**").rstrip("/") or text[:1]
    if not text or "\0" in text or ".." in text.split("/"):
        yield Issue(place, f"{text!r:.80} is not a path", "Write one below the project, without `..`.")
    elif plain in {"~", "$HOME"} or _SYSTEM.fullmatch(plain):
        yield Issue(place, f"{text!r:.80} is more than any item needs", "Name the folder in it that is meant.")
    elif re.match(r"~[^/]", plain):
        yield Issue(place, f"{text!r:.80} is in somebody's home", "Write `~/…` for the owner's own.")
    elif plain != "**" and not is_plain(plain):
        fix = "Name a folder, which is all that lies in it, or a file."
        yield Issue(place, f"{text!r:.80} is a pattern, and what it gives would change by itself", fix)
