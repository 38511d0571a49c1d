"""What a server in jail lacks, by what it says when it fails, and what its owner types to give it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.mcp.server import Server
from kiwi_mcp.drivers.seen import is_too_wide
from kiwi_mcp.sandbox.profile import HOME, base_profile
from kiwi_mcp.sandbox.programs import Around, program_at

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
    is_fixed = _FIXED.search(said) is not None
    if not is_fixed and not _ABSENT.search(said):
        return
    seen = (*server.jail.readable, *server.jail.writable, *_brought(server))
    for text in dict.fromkeys(_PATH.findall(said)):
        path = Path(os.path.realpath(text.rstrip(".")))
        # What is nowhere is to be made, which takes the folder around it.
        is_made = is_fixed or not path.exists()
        wanted = path.parent if is_made and not path.is_dir() else path
        if _may_be_given(wanted, server) and not _is_in(wanted, server.jail.writable if is_made else seen):
            yield f"{'--write' if is_made else '--read'} {wanted}"


def _brought(server: Server) -> tuple[str, ...]:
    """Return what the program of a server brings with it: paths of it in a complaint are not what is missing."""
    if not isinstance(server.spec, ProcessSpec):
        return ()
    program = shutil.which(server.spec.argv[0], path=server.spec.env.get("PATH"))
    around = Around(trusted=(str(server.space.cache), sys.prefix, sys.base_prefix))
    return program_at(program, base_profile().covers, around).roots if program else ()


def _may_be_given(path: Path, server: Server) -> bool:
    """Whether a path is there, and is neither of every sandbox's own nor Kiwi's, nor as wide as a home."""
    is_own = any(path.is_relative_to(own.resolve()) for own in (server.space.cache, server.space.user))
    is_everywhere = f"{path}/".startswith(_OURS) or base_profile().covers(str(path))
    return path.exists() and not is_own and not is_everywhere and not is_too_wide(path)


def _is_in(path: Path, folders: Iterable[str]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _hosts(said: str) -> Iterator[str]:
    if _UNREACHED.search(said):
        yield from (host.lower() for host in _HOST.findall(said))
