"""Why a server failed; which grant would help."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED
from pydantic import ValidationError

from kiwi_mcp.domain.errors import Denied, InvalidRequest, KiwiError, LoginRequired, Unavailable
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.drivers.mcp.oauth.account import NoOAuthOffered, no_login
from kiwi_mcp.drivers.mcp.server import ServerConfig
from kiwi_mcp.drivers.mcp.transport import LoginNeeded, ServerStreams
from kiwi_mcp.manifest.mcp.launch_command import known_package
from kiwi_mcp.primitives.http.origin_client import is_login_wanted
from kiwi_mcp.sandbox.command_files import ProgramFolders, is_in_any, is_too_wide, program_at
from kiwi_mcp.sandbox.levels import HOME, base_profile

_MOST = 4
_PATH = re.compile(r"(?<![\w:/.])(/[^\s'\":,;()<>|*?\[\]]{2,400})")
_ABSENT = re.compile(
    r"(?i)no such file|does not exist|not found|enoent|no module named|cannot find|permission denied|eacces|eperm"
)
_FIXED = re.compile(r"(?i)read-?only file ?system|erofs|readonly database")
_UNREACHED = re.compile(
    r"(?i)enotfound|eai_again|econnrefused|enetunreach|getaddrinfo|name or service not known|name resolution"
    r"|unreachable|fetch failed|proxy|not permitted|cannot connect|connection refused|connecterror|failed to resolve"
    r"|connection (?:issue|error)|could ?n[o']t connect|err_(?:name_not_resolved|internet_disconnected|tunnel\w*)"
    r"|max retries exceeded|all connection attempts failed|network (?:is )?(?:error|unavailable)"
)
_NO_SOCKETS = "address family not supported"
_HOST = re.compile(
    r"(?im)(?:https?://|wss?://|getaddrinfo \w+ |resolve '|host[=:] ?'?|^)((?:[a-z0-9-]+\.)+[a-z]{2,}(?::\d{1,5})?)"
)
_OURS = (f"{HOME}/", "/proc/", "/dev/", "/sys/", "/etc/")
"""Where every sandbox has files of its own."""
_WEB_PORT = re.compile(r":(?:80|443)$")


def lacking(
    server: ServerConfig, said: str, denied: Sequence[str] = (), earlier: Sequence[str] = (), *, is_silent: bool = False
) -> str:
    """Return what to type where a server seems to fail for want of a path or a host; nothing where it does not.

    `said` is its last output, `denied` are the hosts that the proxy denied meanwhile, `earlier` those before that.
    `is_silent` says that nothing was sent through the proxy.
    """
    if server.transport != "stdio" or server.profile.level in {"trusted", "standard"}:
        return ""
    is_unreached = _UNREACHED.search(said) is not None
    hosts = [*denied] or ([*_hosts(server, said, earlier)] if is_unreached else [])
    words = [*_paths(server, said), *(f"--host {shlex.quote(_WEB_PORT.sub('', host))}" for host in hosts)]
    more = ""
    if _NO_SOCKETS in said.lower() and not server.profile.has_sockets:
        words.append("--unix-sockets")
    if not words and is_unreached and not server.profile.hosts:
        words, more = ["--host HOST"], " (HOST as in api.example.com; '*' is any public host)"
    if not words and is_unreached and is_silent and server.package and server.package.kind == "node":
        return (
            "Node before version 22.21 does not use the proxy of its sandbox: install a newer one (`node --version`)."
        )
    if not words:
        return ""
    listed = " ".join(dict.fromkeys(words[:_MOST]))
    command = f"kiwi mcp allow {server.name} {listed}"
    return f"Its sandbox allows only what its owner allowed. To allow this: `{command}`{more}."


def _paths(server: ServerConfig, said: str) -> Iterator[str]:
    """Yield the paths of this machine that a server mentions and may not access."""
    is_fixed = _FIXED.search(said) is not None
    if not is_fixed and not _ABSENT.search(said):
        return
    seen = (*server.profile.readable, *server.profile.writable, *_brought(server))
    for text in dict.fromkeys(_PATH.findall(said)):
        path = Path(os.path.realpath(text.rstrip(".")))
        if ".git" in path.parts:  # what a git server writes is given with its repository
            path = Path(*path.parts[: path.parts.index(".git")])
        # What is nowhere is to be made, which takes the folder around it.
        is_made = is_fixed or not path.exists()
        wanted = path.parent if is_made and not path.is_dir() else path
        if _may_be_given(wanted, server) and not is_in_any(wanted, server.profile.writable if is_made else seen):
            yield f"{'--write' if is_made else '--read'} {wanted}"


def _brought(server: ServerConfig) -> tuple[str, ...]:
    """Return what the program of a server brings with it: paths of it in a complaint are not what is missing."""
    if not isinstance(server.spec, ProcessSpec):
        return ()
    program = shutil.which(server.spec.argv[0], path=server.spec.env.get("PATH"))
    around = ProgramFolders(trusted=(str(server.space.cache), sys.prefix, sys.base_prefix))
    return program_at(program, base_profile().covers, around).roots if program else ()


def _may_be_given(path: Path, server: ServerConfig) -> bool:
    """Whether a path is there, and is neither of every sandbox's own nor Kiwi's, nor as wide as a home."""
    space = server.space
    is_own = any(path.is_relative_to(own.resolve()) for own in (space.cache, space.user, space.memory))
    is_everywhere = f"{path}/".startswith(_OURS) or base_profile().covers(str(path))
    return path.exists() and not is_own and not is_everywhere and not is_too_wide(path)


def _hosts(server: ServerConfig, said: str, earlier: Sequence[str]) -> Iterator[str]:
    """Yield the hosts that a server names in its complaint; else those denied before, or that it is known to need."""
    named = [host.lower() for host in _HOST.findall(said)]
    known = known_package(server.package.kind, server.package.wanted[0]) if server.package else None
    needed = [host for host in (known.hosts if known else ()) if host not in server.profile.hosts]
    yield from named or earlier or needed


QUOTED = 4_000
"""The most of a server's last words that an error quotes, in characters."""
_LINE = 300


class UnsupportedVersion(Exception):
    """A server speaks no revision of the protocol that Kiwi speaks."""


def failure_of(
    server: ServerConfig, wire: ServerStreams | None, fault: BaseException | None, *, is_late: bool, was_greeted: bool
) -> KiwiError:
    """Return why there is no conversation with a server."""
    root = _root(fault)
    if isinstance(root, Denied | InvalidRequest):  # nothing was sent, so there is nothing else to tell
        return root
    if isinstance(root, LoginNeeded) or (isinstance(root, MCPError) and is_login_wanted(root.error.data)):
        return LoginRequired(server.name, server.identity)
    if isinstance(root, NoOAuthOffered):
        return no_login(server.name)
    complaints = strip_controls(wire.complaints())[-QUOTED:].strip() if wire else ""
    said = f" It said: {_last_line(complaints)}" if complaints else ""
    what = "ended" if was_greeted else "did not start"
    reason = _reason(server, wire, root, is_late=is_late)
    return Unavailable(
        f"The MCP server {server.name!r} {what}: {reason}.{said}",
        suggestion=_suggestion(server, wire, root, is_late=is_late),
        server=server.identity,
        **({"stderr": complaints} if complaints else {}),
        **(root.details if isinstance(root, KiwiError) else {}),
    )


def _reason(server: ServerConfig, wire: ServerStreams | None, root: BaseException | None, *, is_late: bool) -> str:
    if is_late:
        return f"it did not greet within {server.startup_timeout:g} seconds"
    match root:
        case KiwiError():
            return strip_controls(root.message).rstrip(".")
        case MCPError() if root.code != CONNECTION_CLOSED:
            return f"it refused the greeting ({root.code}: {strip_controls(str(root))[:_LINE]})"
        case ValidationError():
            return "its greeting is not one of this protocol"
        case UnsupportedVersion():
            return strip_controls(str(root))[:_LINE]
        case _:
            return (wire.ending() if wire else "") or "it ended the connection"


def _suggestion(server: ServerConfig, wire: ServerStreams | None, root: BaseException | None, *, is_late: bool) -> str:
    if wire is not None and (remedy := lacking(server, strip_controls(wire.complaints()), wire.refused())):
        return remedy
    if is_late:
        return "Give it a longer `startup_timeout`, or run its command by hand to see what it waits for."
    if isinstance(root, KiwiError) and root.suggestion:
        return root.suggestion
    if server.transport == "stdio":
        level = server.profile.level
        note = f" It runs in a sandbox ({level}): `kiwi help mcp`." if level != "trusted" else ""
        return f"Run its command by hand to see its output; it is started again at the next call.{note}"
    return "Check that the server is running and that its url is right; it is tried again at the next call."


def _root(fault: BaseException | None) -> BaseException | None:
    """Return the first fault within groups of them, those that say more before those that say less."""
    if not isinstance(fault, BaseExceptionGroup):
        return fault
    found = [_root(inner) for inner in fault.exceptions]
    return next((one for one in found if isinstance(one, KiwiError)), found[0])


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:_LINE] if lines else ""
