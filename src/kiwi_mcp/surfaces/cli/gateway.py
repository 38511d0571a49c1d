"""`kiwi up`: the gateway, and the tokens of those who may use it."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Protocol

import typer

from kiwi_mcp.domain.json import as_list, as_text
from kiwi_mcp.kernel.places import user_space
from kiwi_mcp.kernel.settings import registry_settings
from kiwi_mcp.surfaces.cli.screen import Screen, talk
from kiwi_mcp.surfaces.gateway.tokens import Tokens

up = typer.Typer(help="Serve the registry over HTTP, to those with a token.", invoke_without_command=True)
token = typer.Typer(help="Say who may use the gateway.", no_args_is_help=True)
up.add_typer(token, name="token")

IsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Name = Annotated[str, typer.Argument(help="Whose token it is; it stands in the record of what they publish.")]


class _Listening(Protocol):
    host: str
    port: int
    url: str
    is_read_only: bool


@up.callback()
def start(
    context: typer.Context,
    host: Annotated[str, typer.Option(help="The address to listen on; this machine alone otherwise.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 for one that is free.", min=0, max=65_535)] = 8765,
    name: Annotated[list[str] | None, typer.Option(help="A further host name under which it is reached.")] = None,
    is_read_only: Annotated[bool, typer.Option("--read-only", help="Give, and take nothing.")] = False,
    is_json: IsJson = False,
) -> None:
    """Serve the registry over HTTP until SIGTERM or Ctrl-C."""
    if context.invoked_subcommand:
        return

    def announce(listening: _Listening) -> None:
        if is_json:
            Screen().json({"url": listening.url, "port": listening.port, "read_only": listening.is_read_only})
        talk(f"The registry is served at {listening.url}{' (read-only)' if listening.is_read_only else ''}")

    user = user_space()
    # The server's libraries are loaded by this command alone.
    gateway = import_module("kiwi_mcp.surfaces.gateway.serve")
    listening = gateway.Listening(host, port, tuple(name or ()), is_read_only)
    gateway.serve(user, registry_settings(user), listening, announce)


@token.command("add")
def add(
    name: Name,
    namespaces: Annotated[str, typer.Option(help="Their namespaces, with commas: acme,public.")] = "",
    can_write: Annotated[bool, typer.Option("--write/--read", help="Whether they may publish, or only read.")] = False,
    is_json: IsJson = False,
) -> None:
    """Make a token; it is shown this once."""
    words = [word.strip() for word in namespaces.split(",") if word.strip()]
    secret = Tokens(user_space()).add(name, words, can_write=can_write)
    screen = Screen()
    if is_json:
        screen.json({"name": name, "token": secret})
    else:
        screen.data(secret)
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
        screen.line(f"{row['name']}  {row['right']}  {namespaces}  {row['created_at']}")
    if not rows:
        talk("There are no tokens. hint: kiwi up token add NAME --namespaces public --write")


@token.command("remove")
def remove(name: Name, is_json: IsJson = False) -> None:
    """Remove a token, which is refused from then on."""
    Tokens(user_space()).remove(name)
    screen = Screen()
    if is_json:
        screen.json({"name": name, "removed": True})
    else:
        screen.data(f"The token of {name} is removed.")
