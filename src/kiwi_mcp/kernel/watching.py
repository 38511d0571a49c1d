"""Watching: the code that a chain runs and that is in no item's digest, by the hash of what it holds now.

A manifest may name a script anywhere (`python /srv/server.py`) or a program of the project (`{project}/bin/run`). What
the owner said of such a chain was said of those files too. Only the files that the words name are watched: not what
they import, nor what lies beside them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import file_digest
from pathlib import Path

from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import as_text
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.seen import script_in
from kiwi_mcp.drivers.words import split_words, texts
from kiwi_mcp.manifest.digest import canonical, sha256_hex
from kiwi_mcp.manifest.render import placeholders
from kiwi_mcp.primitives.program import search_path
from kiwi_mcp.sandbox.profile import base_profile

_PROJECT = "{project}"
_CODE = re.compile(r"\.(?:py[cz]?|[cm]?[jt]s|[jt]sx|rb|pl|php|(?:ba)?sh|lua|r|jar|dll|so|wasm)", re.IGNORECASE)
"""How files end that are code, wherever they stand in a command."""
_STARTED = ("__main__.py", "index.js", "package.json")
"""What an interpreter that is given a folder begins with."""
_LARGEST = 512_000_000
_Stat = tuple[int, int, int, int, int]


def watched(chain: Chain) -> tuple[tuple[str, str], ...]:
    """Return the files that the words of a chain name as code, each with a hash of what it holds."""
    found = dict.fromkeys(path for link in chain.links for path in _named(link, chain.project))
    return tuple((path, _mark(path)) for path in found)


def known_as(link: Tool, chain: Chain) -> str:
    """Return what a link is remembered by: its digest, and what is watched of its chain where anything is."""
    beside = watched(chain)
    return sha256_hex(canonical([link.digest, *map(list, beside)])) if beside else link.digest


def _named(link: Tool, project: Path | None) -> Iterator[str]:
    """Yield the files that a link names as its program and its code; what ships with Kiwi names none."""
    config = link.manifest.config
    if link.origin.source == "builtin" or not {"command", "run_command", "compile_command"} & config.keys():
        return
    folder = Path(project or "/", _filled(as_text(config.get("cwd")), project))
    try:
        written = [split_words(config.get(name)) for name in ("run_command", "compile_command")]
    except KiwiError:  # such a chain is not run
        return
    for words in ((as_text(config.get("command")), *texts(config.get("args"))), *written):
        if words and words[0]:
            yield from _code_in([_filled(word, project) for word in words], folder)


def _filled(word: str, project: Path | None) -> str:
    return word.replace(_PROJECT, str(project)) if project else word


def _code_in(words: Sequence[str], folder: Path) -> Iterator[str]:
    program = words[0] if "/" in words[0] else shutil.which(words[0], path=search_path())
    if program and _is_file(place := _real(folder, program)) and not base_profile().covers(str(place)):
        yield str(place)
    script = script_in(ProcessSpec(tuple(words), str(folder)))
    for number, word in enumerate(words[1:], 1):
        named = word.partition("=")[2] if word.startswith("-") else word
        if not named or placeholders(named):
            continue
        place = _real(folder, named)
        inside = [place / name for name in _STARTED]
        is_code = number == script or _CODE.fullmatch(place.suffix) is not None
        yield from (str(one) for one in (*([place] if is_code else []), *inside) if _is_file(one))


def _real(folder: Path, named: str) -> Path:
    return Path(os.path.realpath(folder / named.replace("\0", "")))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a word too long for a name
        return False


def _mark(path: str) -> str:
    """Return a hash of what a file holds, found out anew whenever the file was touched."""
    try:
        stat = Path(path).stat()
        return _hashed(path, (stat.st_ino, stat.st_dev, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    except OSError as fault:
        return f"unreadable: {fault.strerror}"


@lru_cache(maxsize=1_024)
def _hashed(path: str, stat: _Stat) -> str:
    if stat[2] > _LARGEST:
        return repr(stat)
    with Path(path).open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
