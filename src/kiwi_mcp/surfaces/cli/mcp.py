"""The commands about MCP servers: yours as Kiwi's, and Kiwi in your clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.surfaces.cli.browse import opened_address, shown_address
from kiwi_mcp.surfaces.cli.shell import DryRun, IsJson, Location, Project, here, shell_for
from kiwi_mcp.surfaces.cli.show import payload

commands = typer.Typer()
mcp = typer.Typer(no_args_is_help=True, help="Use the tools of MCP servers through Kiwi.")
commands.add_typer(mcp, name="mcp")

Server = Annotated[str, typer.Argument(help="The server's name.")]
MaybeServer = Annotated[str | None, typer.Argument(help="One server; all of them otherwise.")]
MaybeTool = Annotated[
    str | None, typer.Argument(metavar="TOOL", help="One item of it, or TOOL@DIGEST as shown; all of them otherwise.")
]
WithSecrets = Annotated[
    bool, typer.Option("--with-secrets", help="Write secrets among the words into your .env (mode 0600).")
]
NoAccept = Annotated[bool, typer.Option("--no-accept", help="Leave what it offers to be accepted one by one.")]
MayRead = Annotated[list[str] | None, typer.Option("--read", help="A file or folder that it may read.")]
MayWrite = Annotated[list[str] | None, typer.Option("--write", help="A file or folder that it may change.")]
MayReach = Annotated[list[str] | None, typer.Option("--host", help="A host that it may reach: NAME or NAME:PORT.")]
NoStart = Annotated[bool, typer.Option("--no-start", help="Do not ask the server what it offers yet.")]


@mcp.command()
def add(
    name: Annotated[str, typer.Argument(help="What to call it.")],
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND ARGS…", help="What starts it.")] = None,
    url: Annotated[str | None, typer.Option(help="Its address, where it is not started here.")] = None,
    headers: Annotated[list[str] | None, typer.Option("--header", help="NAME=VALUE; secrets as ${NAME}.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", help="NAME=VALUE; secrets as ${NAME}.")] = None,
    transport: Annotated[str | None, typer.Option(help="http (default), sse or websocket.")] = None,
    read: MayRead = None,
    write: MayWrite = None,
    hosts: MayReach = None,
    has_secrets: WithSecrets = False,
    is_unaccepted: NoAccept = False,
    is_unstarted: NoStart = False,
    location: Location = None,
    is_dry: DryRun = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Add a server: kiwi mcp add NAME -- COMMAND ARGS…, or kiwi mcp add NAME --url URL."""
    request = payload(
        action="add", server=name, command=command[0] if command else None, args=[*command[1:]] if command else None,
        url=url, headers=_pairs(headers, "--header"), env=_pairs(env, "--env"), transport=transport,
        read=_places(read), write=_places(write), hosts=hosts,
        with_secrets=has_secrets, accept=not is_unaccepted, start=not is_unstarted, location=location, dry_run=is_dry,
    )  # fmt: skip
    shell_for(project, is_json=is_json).tell("mcp", request, view="mcp offered")


@mcp.command("import")
def import_(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Configurations; otherwise your own of known clients.")
    ] = None,
    is_all: Annotated[bool, typer.Option("--all", help="Those of the project too.")] = False,
    has_secrets: WithSecrets = False,
    is_unaccepted: NoAccept = False,
    is_unstarted: NoStart = False,
    location: Location = None,
    is_dry: DryRun = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Take over the servers of other clients; secrets become references."""
    request = payload(
        action="import", paths=[str(here() / path) for path in paths or ()], all=is_all, with_secrets=has_secrets,
        accept=not is_unaccepted, start=not is_unstarted, location=location, dry_run=is_dry,
    )  # fmt: skip
    shell_for(project, is_json=is_json).tell("mcp", request, view="mcp import")


@mcp.command("list")
def list_(server: MaybeServer = None, project: Project = None, is_json: IsJson = False) -> None:
    """List the servers, or what one of them offers."""
    request = payload(action="list", server=server)
    shell_for(project, is_json=is_json).tell("mcp", request, view="mcp offered" if server else "mcp list")


@mcp.command()
def refresh(
    server: MaybeServer = None,
    is_sure: Annotated[bool, typer.Option("--yes", help="Start it although it was never accepted.")] = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Ask servers what they offer now."""
    request = payload(action="refresh", server=server, yes=is_sure or None)
    shell_for(project, is_json=is_json).tell("mcp", request, view="mcp offered" if server else "mcp list")


@mcp.command()
def accept(
    server: Server, tool: MaybeTool = None, is_dry: DryRun = False, project: Project = None, is_json: IsJson = False
) -> None:
    """Let what a server offers be used as it describes it now."""
    request = payload(action="accept", server=server, tool=tool, dry_run=is_dry)
    shell_for(project, is_json=is_json).tell("mcp", request, view="mcp accept")


@mcp.command()
def allow(
    server: Server,
    read: MayRead = None,
    write: MayWrite = None,
    hosts: MayReach = None,
    is_dry: DryRun = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Let the process of a server read, change or reach more."""
    request = payload(
        action="allow", server=server, read=_places(read), write=_places(write), hosts=hosts, dry_run=is_dry
    )
    shell_for(project, is_json=is_json).tell("mcp", request, view="message")


@mcp.command()
def diff(server: Server, tool: MaybeTool = None, project: Project = None, is_json: IsJson = False) -> None:
    """Show what a server describes otherwise than when it was accepted."""
    request = payload(action="diff", server=server, tool=tool)
    shell_for(project, is_json=is_json).tell("mcp", request, view="mcp diff")


@mcp.command()
def remove(server: Server, is_dry: DryRun = False, project: Project = None, is_json: IsJson = False) -> None:
    """Remove a server and all that it offers; its manifest goes to the trash."""
    request = payload(action="remove", server=server, dry_run=is_dry)
    shell_for(project, is_json=is_json).tell("mcp", request, view="message")


@mcp.command()
def login(
    server: Server,
    scopes: Annotated[
        list[str] | None, typer.Option("--scope", help="A right to ask for, in place of those the server wants.")
    ] = None,
    is_shown_only: Annotated[bool, typer.Option("--no-browser", help="Only show the address to open.")] = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Log in to a server that wants it, in your browser."""
    request = payload(action="login", server=server, scopes=scopes)
    questions = shown_address if is_shown_only else opened_address
    shell_for(project, is_json=is_json).tell("mcp", request, view="mcp offered", questions=questions)


@mcp.command()
def logout(server: Server, project: Project = None, is_json: IsJson = False) -> None:
    """Forget what you allowed when you logged in to a server."""
    shell_for(project, is_json=is_json).tell("mcp", payload(action="logout", server=server), view="message")


@commands.command()
def connect(
    client: Annotated[str, typer.Argument(help="claude-code, claude-desktop, cursor, vscode, windsurf.")],
    is_undone: Annotated[bool, typer.Option("--undo", help="Take Kiwi out again.")] = False,
    is_replacing: Annotated[
        bool, typer.Option("--replace", help="Take those servers out of the file that are in Kiwi.")
    ] = False,
    location: Annotated[str | None, typer.Option("--location", help="Whose file: project or user.")] = None,
    is_dry: DryRun = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Write Kiwi into a client's configuration, with a backup and a way back."""
    request = payload(
        action="connect", client=client, undo=is_undone, replace=is_replacing, location=location, dry_run=is_dry
    )
    shell_for(project, is_json=is_json).tell("mcp", request, view="mcp connect")


def _places(paths: Sequence[str] | None) -> list[Json] | None:
    """Return paths as they are meant where the command is typed."""
    return [str(here() / Path(path).expanduser()) for path in paths] if paths else None


def _pairs(words: Sequence[str] | None, option: str) -> JsonObject:
    """Return NAME=VALUE words, or `Name: value` as headers are written elsewhere, as an object."""
    found = {}
    for word in words or ():
        mark = "=" if "=" in word and (":" not in word or word.index("=") < word.index(":")) else ":"
        name, given, value = word.partition(mark)
        if not given or not name.strip():
            raise InvalidRequest(f"{option} takes NAME=VALUE.", suggestion=f"Write {option} NAME=VALUE.")
        found[name.strip()] = value.strip() if mark == ":" else value
    return found
