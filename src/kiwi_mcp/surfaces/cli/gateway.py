"""`kiwi up`: the gateway."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kiwi_mcp.domain.errors import ProjectPathInvalid
from kiwi_mcp.domain.json import JsonObject, as_list, as_text
from kiwi_mcp.kernel.paths import project_around, user_space
from kiwi_mcp.kernel.settings import registry_settings
from kiwi_mcp.primitives.telemetry import start_tracing
from kiwi_mcp.surfaces.cli.help import UsageError
from kiwi_mcp.surfaces.cli.inputs import here
from kiwi_mcp.surfaces.cli.screen import Screen, talk
from kiwi_mcp.surfaces.gateway.oauth import oauth_settings
from kiwi_mcp.surfaces.start import load

if TYPE_CHECKING:
    from kiwi_mcp.surfaces.cli.rows import CommandRow
    from kiwi_mcp.surfaces.gateway.server import GatewayConfig

_LAST_PORT = 65_535


def serve(_: CommandRow, options: JsonObject) -> int:
    """Serve the registry, and tools to MCP clients, until SIGTERM or Ctrl-C."""
    user = user_space()
    port = options.get("port", 8765)
    if not isinstance(port, int) or not 0 <= port <= _LAST_PORT:
        raise UsageError(f"`--port` takes a number from 0 to {_LAST_PORT}.", "`kiwi up --help` shows how it is used.")
    folder = None
    if not options.get("no_project"):
        project = as_text(options.get("project"))
        folder = Path(project).expanduser().absolute() if project else project_around(here())
        if project and folder is not None and not folder.is_dir():
            raise ProjectPathInvalid(f"{folder} is not a folder.", suggestion="Create it, or name one that exists.")
    socket = Path(path).expanduser().absolute() if (path := as_text(options.get("socket"))) else None
    issuer, audience, scope = (as_text(options.get(word)) for word in ("issuer", "audience", "scope"))
    oauth = oauth_settings(user, issuer=issuer, audience=audience, scope=scope)
    # The server's libraries are loaded by this command alone.
    gateway = load("gateway.server")
    listening = gateway.GatewayConfig(
        as_text(options.get("host")) or "127.0.0.1",
        port,
        tuple(map(as_text, as_list(options.get("name")))),
        bool(options.get("read_only")),
        folder,
        oauth,
        bool(options.get("any_project")),
        socket=socket,
    )
    if missing := start_tracing():
        talk(f"warning: {missing}")
    gateway.serve(user, registry_settings(user), listening, partial(_announce, bool(options.get("json"))))
    talk("Nothing is served any more.")
    return 0


def _announce(is_json: bool, listening: GatewayConfig) -> None:
    if is_json:
        response: JsonObject = {"url": listening.url, "port": listening.port, "read_only": listening.is_read_only}
        if listening.socket is not None:
            response = {"url": listening.url, "socket": str(listening.socket), "read_only": listening.is_read_only}
        project = str(listening.project) if listening.project else None
        Screen().json({**response, "mcp": listening.mcp_url, "project": project, "always_sent": listening.always_sent})
    through = f" through the socket {listening.socket}" if listening.socket else ""
    talk(f"The registry is served at {listening.url}{through}{' (read-only)' if listening.is_read_only else ''}")
    if listening.mcp_url is not None:
        talk(f"MCP clients use tools at {listening.mcp_url} with `Authorization: Bearer TOKEN`")
        where = f"of {listening.project}" if listening.project else "without a project"
        talk(f"  tools {where}; {listening.always_sent} always sent")
        talk("hint: kiwi up token add NAME --tools makes such a token.")
