"""The sources of variables, the grammar of `.env` files, and adding lines to them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from errno import ENXIO
from pathlib import Path

from kiwi_mcp.domain.errors import InvalidRequest, TooLarge
from kiwi_mcp.domain.patterns import lazy_pattern

LIMIT = 1_000_000
"""The most bytes an `.env` file may have."""
_NAME = lazy_pattern(r"[A-Za-z_][A-Za-z0-9_]*")


def read(path: Path) -> Mapping[str, str]:
    """Return the variables of a file; none where there is no such file."""
    try:
        # Without blocking, so that a FIFO of this name cannot hold Kiwi up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as fault:
        if fault.errno == ENXIO:  # a socket: the placeholder that keeps the name free while a sandbox is running
            return {}
        raise _unreadable(path, fault.strerror or "unknown fault") from fault
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _unreadable(path, "it is not a regular file")
        data = os.read(descriptor, LIMIT + 1)
    finally:
        os.close(descriptor)
    if len(data) > LIMIT:
        raise TooLarge(f"{path.name} in {path.parent}", size=max(status.st_size, len(data)), limit=LIMIT)
    try:
        return parse(data.decode("utf-8-sig"))
    except UnicodeDecodeError as fault:
        raise _unreadable(path, "it is not UTF-8") from fault


def parse(text: str) -> Mapping[str, str]:
    """Return the variables of a text; the last line of a name wins, and lines that are no assignment are skipped."""
    found: dict[str, str] = {}
    for line in re.split(r"\r\n|\r|\n", text):
        name, assigned, value = line.strip().removeprefix("export ").partition("=")
        if assigned and _NAME.fullmatch(name.strip()):
            found[name.strip()] = _value(value.strip())
    return found


def _value(text: str) -> str:
    if text[:1] in {'"', "'"}:
        return text[1:].partition(text[0])[0]
    if text.startswith("#"):
        return ""
    return re.split(r"\s#", text, maxsplit=1)[0].rstrip()


def _unreadable(path: Path, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path} cannot be read: {reason}.",
        suggestion="Make it a UTF-8 text file that you can read, or move it away.",
        path=str(path),
    )
