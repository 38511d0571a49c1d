"""What a server in jail lacks, by what it says when it fails, and what its owner types to give it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from kiwi_mcp.drivers.mcp.server import Server
from kiwi_mcp.drivers.seen import is_too_wide
from kiwi_mcp.sandbox.profile import HOME, base_profile

_MOST = 4
_PATH = re.compile(r"(?<![\w:/.])(/[^\s'\":,;()<>|*?\[\]]{2,400})")
_ABSENT = re.compile(r"(?i)no such file|does not exist|not found|enoent|no module named|cannot find|denied|eacces")
_FIXED = re.compile(r"(?i)read-?only file ?system|erofs")
_UNREACHED = re.compile(
    r"(?i)enotfound|eai_again|econnrefused|getaddrinfo|name or service not known|name resolution|unreachable"
    r"|fetch failed|proxy|not permitted|cannot connect|connection refused|connecterror|failed to resolve"
)
_HOST = re.compile(
    r"(?im)(?:https?://|wss?://|getaddrinfo \w+ |resolve '|host[=:] ?'?|^)((?:[a-z0-9-]+\.)+[a-z]{2,}(?::\d{1,5})?)"
)
_OURS = (f"{HOME}/", "/proc/", "/dev/", "/sys/")
"""Where every sandbox has files of its own."""


def lacking(server: Server, said: str, refused: tuple[str, ...] = ()) -> str:
    """Return what to type where a server seems to fail for want of a path or a host; nothing where it does not.

    `said` are its last words, `refused` the hosts that it asked for in vain.
    """
    if server.transport != "stdio" or server.jail.level in {"trusted", "standard"}:
        return ""
    words = [*_paths(server, said), *(f"--host {host}" for host in (refused or tuple(_hosts(said))))]
    if not words:
        return ""
    listed = " ".join(dict.fromkeys(words[:_MOST]))
    command = f"kiwi mcp allow {server.name} {listed}"
    return f"Its process sees and reaches only what it was given. If it is to have it: `{command}`."


def _paths(server: Server, said: str) -> Iterator[str]:
    """Yield what of this machine's a server speaks of and does not have."""
    if _FIXED.search(said):
        given = server.jail.writable
        word = "--write"
    elif _ABSENT.search(said):
        given = (*server.jail.readable, *server.jail.writable)
        word = "--read"
    else:
        return
    for text in dict.fromkeys(_PATH.findall(said)):
        path = _there(text.rstrip("."), is_written=word == "--write")
        if any(Path(path).is_relative_to(own.resolve()) for own in (server.space.cache, server.space.user)):
            continue  # Kiwi's own, which nothing is given
        if path and not any(path == one or path.startswith(f"{one}/") for one in given):
            yield f"{word} {path}"


def _there(text: str, *, is_written: bool) -> str:
    """Return a path that is there and may be given: itself, or the folder that is to be written to."""
    path = Path(os.path.realpath(text))
    if is_written and not path.is_dir():
        path = path.parent
    if str(path).startswith(_OURS) or is_too_wide(path) or base_profile().covers(str(path)) or not path.exists():
        return ""
    return str(path)


def _hosts(said: str) -> Iterator[str]:
    if _UNREACHED.search(said):
        yield from (host.lower() for host in _HOST.findall(said))
