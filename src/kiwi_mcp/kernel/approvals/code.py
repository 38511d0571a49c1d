"""The code that a model wrote and nobody ran yet, as its owner sees it before it does: bounded, in plain letters."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from functools import partial

from kiwi_mcp.catalog.read import load_bytes
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.items import Tool, ToolFile
from kiwi_mcp.domain.json import Json, as_list, as_object, as_text, text_of
from kiwi_mcp.kernel.watching import known_as
from kiwi_mcp.primitives.secrets import redact

_MOST_LETTERS = 6_000
"""How much of all files together is shown."""
_MOST_FILES = 20
_LONGEST_PATH = 200
_INDENT = "  | "
"""What stands before each line of code, so that none can be taken for a line of the question."""


def code_of(chain: Chain, first_runs: Collection[str], secrets: Mapping[str, str]) -> list[Json]:
    """Return the files of what never ran, each with its size and as much of its text as there is room for."""
    links = [link for link in chain.links if known_as(link, chain) in first_runs]
    files = [(link, file) for link in links for file in sorted(link.files, key=partial(_rank, link))]
    told: list[Json] = []
    room = _MOST_LETTERS
    for link, file in files[:_MOST_FILES]:
        text = redact(load_bytes(link, file).decode(errors="replace"), secrets) if room else ""
        is_whole = len(text) <= room and room > 0
        told.append({"item": link.id, "path": file.path, "bytes": file.size, "text": text[:room], "whole": is_whole})
        room -= min(len(text), room)
    if rest := [file for _, file in files[_MOST_FILES:]]:
        size = sum(file.size for file in rest)
        told.append({"item": chain.tool.id, "path": f"{len(rest)} more", "bytes": size, "text": "", "whole": False})
    return told


def _rank(link: Tool, file: ToolFile) -> tuple[bool, int, str]:
    """Return where a file stands: what is run first, and nothing large in the way of what is small."""
    return file.path != link.entrypoint, file.size, file.path


def code_in_words(files: Json) -> Iterator[str]:
    """Yield the lines that show some files; nothing in a file can begin a line, or act on a screen."""
    for file in map(as_object, as_list(files)):
        yield f"code: {_plain(as_text(file.get('path'))[:_LONGEST_PATH])} ({text_of(file.get('bytes'))} bytes)"
        text = as_text(file.get("text"))
        yield from (f"{_INDENT}{_plain(line)}" for line in text.removesuffix("\n").split("\n") if text)
        if not file.get("whole"):
            yield f"  (not all of it: `kiwi load {_plain(as_text(file.get('item')))}` shows the rest)"


def _plain(text: str) -> str:
    # A quotation mark needs no escape here, and code is full of them.
    return json.dumps(text, ensure_ascii=True)[1:-1].replace('\\"', '"')
