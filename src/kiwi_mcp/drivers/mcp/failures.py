"""Why a server cannot be spoken with, in words for whoever called it: the reason, and what the server said last."""

from __future__ import annotations

import re

from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED
from pydantic import ValidationError

from kiwi_mcp.domain.errors import Denied, InvalidRequest, KiwiError, LoginRequired, Unavailable
from kiwi_mcp.drivers.mcp.lacking import lacking
from kiwi_mcp.drivers.mcp.oauth.bearer import NoLogin
from kiwi_mcp.drivers.mcp.oauth.login import no_login
from kiwi_mcp.drivers.mcp.server import Server
from kiwi_mcp.drivers.mcp.transports import LoginWanted, Wire
from kiwi_mcp.primitives.http_channel import is_login_wanted

QUOTED = 4_000
"""The most of a server's last words that an error quotes, in characters."""
_LINE = 300
# Sequences that move a terminal's cursor or colour it, and every other character that is not to be seen.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """Return a text of a server without what could steer a terminal or hide from its reader."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def failure_of(
    server: Server, wire: Wire | None, fault: BaseException | None, *, is_late: bool, was_greeted: bool
) -> KiwiError:
    """Return why there is no conversation with a server."""
    root = _root(fault)
    if isinstance(root, Denied | InvalidRequest):  # nothing was sent, so there is nothing else to tell
        return root
    if isinstance(root, LoginWanted) or (isinstance(root, MCPError) and is_login_wanted(root.error.data)):
        return LoginRequired(server.name, server.identity)
    if isinstance(root, NoLogin):
        return no_login(server.name)
    complaints = harmless(wire.complaints())[-QUOTED:].strip() if wire else ""
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


def _reason(server: Server, wire: Wire | None, root: BaseException | None, *, is_late: bool) -> str:
    if is_late:
        return f"it did not greet within {server.startup_timeout:g} seconds"
    match root:
        case KiwiError():
            return harmless(root.message).rstrip(".")
        case MCPError() if root.code != CONNECTION_CLOSED:
            return f"it refused the greeting ({root.code}: {harmless(str(root))[:_LINE]})"
        case ValidationError():
            return "its greeting is not one of this protocol"
        case RuntimeError():
            return harmless(str(root))[:_LINE]
        case _:
            return (wire.ending() if wire else "") or "it ended the connection"


def _suggestion(server: Server, wire: Wire | None, root: BaseException | None, *, is_late: bool) -> str:
    if wire is not None and (remedy := lacking(server, harmless(wire.complaints()), wire.refused())):
        return remedy
    if is_late:
        return "Give it a longer `startup_timeout`, or run its command by hand to see what it waits for."
    if isinstance(root, KiwiError) and root.suggestion:
        return root.suggestion
    if server.transport == "stdio":
        held = f" It runs in a jail ({server.jail.level}): `kiwi help mcp`." if server.jail.level != "trusted" else ""
        return f"Run its command by hand to see what it says; it is started again at the next call.{held}"
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
