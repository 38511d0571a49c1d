"""`kiwi up`: the gateway, and the tokens of those who may use it."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Protocol

import typer

from kiwi_mcp.domain.errors import ProjectPathInvalid
from kiwi_mcp.domain.json import JsonObject, as_list, as_text
from kiwi_mcp.kernel.places import project_around, user_space
from kiwi_mcp.kernel.settings import registry_settings
from kiwi_mcp.surfaces.cli.screen import Screen, talk
from kiwi_mcp.surfaces.cli.shell import here
from kiwi_mcp.surfaces.gateway.settings import oauth_settings
from kiwi_mcp.surfaces.gateway.tokens import Tokens

up = typer.Typer(help="Serve the registry and tools over HTTP, to those with a token.", invoke_without_command=True)
token = typer.Typer(help="Say who may use the gateway.", no_args_is_help=True)
up.add_typer(token, name="token")

IsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Name = Annotated[str, typer.Argument(help="Whose token it is; it stands in the record of what they publish.")]


class _Listening(Protocol):
    host: str
    port: int
    url: str
    mcp_url: str | None
    is_read_only: bool
    project: Path | None
    always_sent: int
    socket: Path | None


@up.callback()
def start(
    context: typer.Context,
    host: Annotated[str, typer.Option(help="The address to listen on; this machine alone otherwise.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 for one that is free.", min=0, max=65_535)] = 8765,
    socket: Annotated[
        Path | None, typer.Option(help="A socket to listen at instead of a port, which only you can reach.")
    ] = None,
    name: Annotated[list[str] | None, typer.Option(help="A further host name under which it is reached.")] = None,
    is_read_only: Annotated[bool, typer.Option("--read-only", help="Give, and take nothing; no tools.")] = False,
    project: Annotated[
        Path | None, typer.Option(help="The project of calls that name none; the nearest with an .ai folder otherwise.")
    ] = None,
    has_none: Annotated[bool, typer.Option("--no-project", help="Serve what is there in every project only.")] = False,
    is_wide: Annotated[bool, typer.Option("--any-project", help="Let calls name other projects as well.")] = False,
    issuer: Annotated[str, typer.Option(help="The identity provider whose access tokens may use tools.")] = "",
    audience: Annotated[str, typer.Option(help="The address of /mcp for which those tokens are made out.")] = "",
    scope: Annotated[str, typer.Option(help="The scope that allows tools; kiwi:tools otherwise.")] = "",
    is_json: IsJson = False,
) -> None:
    """Serve the registry, and tools to MCP clients, over HTTP until SIGTERM or Ctrl-C."""
    if context.invoked_subcommand:
        return
    user = user_space()
    folder = None if has_none else _folder(project)
    at = socket.expanduser().absolute() if socket else None
    oauth = oauth_settings(user, issuer=issuer, audience=audience, scope=scope)
    # The server's libraries are loaded by this command alone.
    gateway = import_module("kiwi_mcp.surfaces.gateway.serve")
    listening = gateway.Listening(host, port, tuple(name or ()), is_read_only, folder, oauth, is_wide, socket=at)
    gateway.serve(user, registry_settings(user), listening, partial(_announce, is_json))


def _announce(is_json: bool, listening: _Listening) -> None:
    if is_json:
        told: JsonObject = {"url": listening.url, "port": listening.port, "read_only": listening.is_read_only}
        if listening.socket is not None:
            told = {"url": listening.url, "socket": str(listening.socket), "read_only": listening.is_read_only}
        project = str(listening.project) if listening.project else None
        Screen().json({**told, "mcp": listening.mcp_url, "project": project, "always_sent": listening.always_sent})
    through = f" through the socket {listening.socket}" if listening.socket else ""
    talk(f"The registry is served at {listening.url}{through}{' (read-only)' if listening.is_read_only else ''}")
    if listening.mcp_url is not None:
        talk(f"MCP clients use tools at {listening.mcp_url} with `Authorization: Bearer TOKEN`")
        where = f"of {listening.project}" if listening.project else "without a project"
        talk(f"  tools {where}; {listening.always_sent} always sent")
        talk("hint: kiwi up token add NAME --tools makes such a token.")


def _folder(project: Path | None) -> Path | None:
    if project is None:
        return project_around(here())
    folder = project.expanduser().absolute()
    if not folder.is_dir():
        raise ProjectPathInvalid(f"{folder} is not a folder.", suggestion="Create it, or name one that exists.")
    return folder


@token.command("add")
def add(
    name: Name,
    namespaces: Annotated[str, typer.Option(help="Their namespaces, with commas: acme,public.")] = "",
    can_write: Annotated[bool, typer.Option("--write/--read", help="Whether they may publish, or only read.")] = False,
    can_use_tools: Annotated[bool, typer.Option("--tools", help="Let them use tools here, with your rights.")] = False,
    can_author: Annotated[bool, typer.Option("--author", help="Let them make and change items here as well.")] = False,
    kind: Annotated[str, typer.Option("--as", help="Who holds it: owner, agent or service.")] = "agent",
    is_json: IsJson = False,
) -> None:
    """Make a token; it is shown this once."""
    words = [word.strip() for word in namespaces.split(",") if word.strip()]
    secret = Tokens(user_space()).add(
        name, words, can_write=can_write, can_use_tools=can_use_tools, can_author=can_author, kind=kind
    )
    screen = Screen()
    if is_json:
        screen.json({"name": name, "as": kind, "token": secret})
    else:
        screen.data(secret)
    if can_use_tools:
        talk("warning: whoever has it can run what you can run here.")
    if not is_json and can_use_tools:
        talk("hint: it is shown this once. Paste into an MCP client the address that `kiwi up` prints, such as")
        talk("  http://127.0.0.1:8765/mcp, and the header `Authorization: Bearer TOKEN` with this token in it.")
    elif not is_json:
        talk("hint: it is shown this once; keep it in a variable such as TEAM_TOKEN, and name `${TEAM_TOKEN}`.")


@token.command("list")
def list_(is_json: IsJson = False) -> None:
    """List the tokens, without the tokens themselves."""
    rows = [one.to_json() for one in Tokens(user_space()).all()]
    screen = Screen()
    if is_json:
        screen.json({"tokens": rows})
        return
    for row in rows:
        namespaces = ",".join(as_text(word) for word in as_list(row["namespaces"])) or "-"
        rights = f"{row['right']}{' tools' * bool(row['tools'])}{' author' * bool(row['author'])}"
        screen.line(f"{row['name']}  {row['as']}  {rights}  {namespaces}  {row['created_at']}")
    if not rows:
        talk("There are no tokens. hint: kiwi up token add NAME --tools, or --namespaces public --write")


@token.command("remove")
def remove(name: Name, is_json: IsJson = False) -> None:
    """Remove a token, which is refused from then on."""
    Tokens(user_space()).remove(name)
    screen = Screen()
    if is_json:
        screen.json({"name": name, "removed": True})
    else:
        screen.data(f"The token of {name} is removed.")
