"""Hashes of code that a command names and no digest covers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import file_digest
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TypeAlias

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.items import Chain, Tool
from kiwi_mcp.domain.json import as_text
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.manifest.runtime import split_words, texts
from kiwi_mcp.manifest.signatures import canonical, sha256_hex
from kiwi_mcp.manifest.templates import placeholders
from kiwi_mcp.primitives.process.spawn import search_path
from kiwi_mcp.sandbox.command_files import script_in
from kiwi_mcp.sandbox.levels import base_profile

_PROJECT = "{project}"
_COMMANDS = frozenset({"command", "run_command", "compile_command"})
"""The keys of a config that name programs."""
_CODE = lazy_pattern(r"\.(?:py[cz]?|[cm]?[jt]s|[jt]sx|rb|pl|php|(?:ba)?sh|lua|r|jar|dll|so|wasm)\Z", re.IGNORECASE)
"""How files end that are code, wherever they stand in a command."""
_STARTED = ("__main__.py", "index.js", "package.json")
"""What an interpreter that is given a folder begins with."""
_LARGEST = 512_000_000
_Stat: TypeAlias = tuple[int, int, int, int, int]
_File: TypeAlias = tuple[str, _Stat]


def external_code(chain: Chain) -> tuple[tuple[str, str], ...]:
    """Return the files that the words of a chain name as code, each with a hash of what it holds."""
    found = dict.fromkeys(one for link in chain.links for one in _named(link, chain.project))
    return tuple((_real(*one), _mark(*one)) for one in found)


def names_code(chain: Chain) -> bool:
    """Whether a chain may name files as code that no digest covers."""
    return any(not link.origin.is_built_in and _COMMANDS & link.manifest.config.keys() for link in chain.links)


def known_as(link: Tool, chain: Chain) -> str:
    """Return the key that a link is remembered by: its digest, combined with the external code of its chain, if any."""
    beside = external_code(chain)
    return sha256_hex(canonical([link.digest, *map(list, beside)])) if beside else link.digest


def _named(link: Tool, project: Path | None) -> Iterator[_File]:
    """Yield the files that a link names as its program and its code; what ships with Kiwi names none."""
    config = link.manifest.config
    if link.origin.is_built_in or not _COMMANDS & config.keys():
        return
    folder = str(Path(project or "/", _filled(as_text(config.get("cwd")), project)))
    try:
        written = [split_words(config.get(name)) for name in ("run_command", "compile_command")]
    except KiwiError:  # such a chain is not run
        return
    for words in ((as_text(config.get("command")), *texts(config.get("args"))), *written):
        if words and words[0]:
            yield from _code_in([_filled(word, project) for word in words], folder)


def _filled(word: str, project: Path | None) -> str:
    return word.replace(_PROJECT, str(project)) if project else word


def _code_in(words: Sequence[str], folder: str) -> Iterator[_File]:
    program: str | None = words[0]
    if "/" not in words[0]:
        places = (f"{part}/{words[0]}" for part in search_path().split(":"))
        program = next((place for place in places if os.access(place, os.X_OK)), None)
    if program and (found := _file(_placed(program, folder))) and not base_profile().covers(_real(*found)):
        yield found
    script = script_in(ProcessSpec(tuple(words), folder))
    for number, word in enumerate(words[1:], 1):
        named = word.partition("=")[2] if word.startswith("-") else word
        if not named or ("{" in named and placeholders(named)):
            continue
        place = _placed(named, folder)
        is_code = number == script or _CODE.search(place)
        is_folder = (state := _state(place)) is not None and S_ISDIR(state.st_mode)
        inside = (f"{place}/{name}" for name in _STARTED) if is_folder else ()
        yield from filter(None, map(_file, (place,) if is_code else inside))


def _placed(named: str, folder: str) -> str:
    return named if named[0] == "/" else f"{folder}/{named}"


def _file(path: str) -> _File | None:
    """Return a file and the state that changes with its content; None if there is no file."""
    state = _state(path)
    if state is None or not S_ISREG(state.st_mode):
        return None
    return path, (state.st_ino, state.st_dev, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


def _state(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116 - on the way of every call, where a Path costs more than the look
    except (OSError, ValueError):  # also a word too long for a name, or with a character that none has
        return None


@lru_cache(maxsize=1_024)
def _real(path: str, _: _Stat) -> str:
    return os.path.realpath(path)


@lru_cache(maxsize=1_024)
def _mark(path: str, stat: _Stat) -> str:
    """Return a hash of what a file holds, found out anew whenever the file was touched."""
    if stat[2] > _LARGEST:
        return repr(stat)
    try:
        with Path(path).open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError as fault:
        return f"unreadable: {fault.strerror}"
