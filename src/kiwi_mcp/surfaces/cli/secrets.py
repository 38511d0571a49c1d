"""`kiwi secrets`: the store of secrets, whose values are read from standard input or typed unseen."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.surfaces.cli.shell import IsJson, Project, shell_for
from kiwi_mcp.surfaces.cli.show import payload

secrets = typer.Typer(help="Keep secrets, and say which tools are given them.", no_args_is_help=True)

_MOST = 100_000
Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of its variable, such as CRM_KEY.")]
IsWeak = Annotated[bool, typer.Option("--weak", help="Keep a value that is too short or common to be hidden.")]


@secrets.command("set")
def set_(
    name: Name,
    hosts: Annotated[str | None, typer.Option(help="Hosts that requests may carry it to, with commas; * any.")] = None,
    form: Annotated[str | None, typer.Option(help="header (with hosts), env (without), or any.")] = None,
    is_weak: IsWeak = False,
    is_kept: Annotated[bool, typer.Option("--keep", help="Keep its value; change hosts or form.")] = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Put a secret into the store; its value comes from standard input, or is asked for."""
    words = None if hosts is None else [word.strip() for word in hosts.split(",") if word.strip()]
    value = None if is_kept else _value(name)
    request = payload(action="set", name=name, value=value, hosts=words, form=form, weak=is_weak)
    shell_for(project, is_json=is_json).tell("secrets", request, view="secrets change")


@secrets.command()
def rotate(name: Name, is_weak: IsWeak = False, project: Project = None, is_json: IsJson = False) -> None:
    """Give a secret another value; hosts, form and grants stay."""
    request = payload(action="rotate", name=name, value=_value(name), weak=is_weak)
    shell_for(project, is_json=is_json).tell("secrets", request, view="secrets change")


@secrets.command("list")
def list_(project: Project = None, is_json: IsJson = False) -> None:
    """List the secrets: names, hosts, forms, grants and ages, never values."""
    shell_for(project, is_json=is_json).tell("secrets", payload(action="list"), view="secrets list")


@secrets.command()
def grant(
    name: Name,
    tool: Annotated[str, typer.Argument(help="A tool, an MCP server, or a pattern such as 'user/local/*'.")],
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Let a tool be given a secret that it names."""
    request = payload(action="grant", name=name, tool=tool)
    shell_for(project, is_json=is_json).tell("secrets", request, view="secrets change")


@secrets.command()
def revoke(
    name: Name,
    tool: Annotated[str | None, typer.Argument(help="From which tool or pattern; from all otherwise.")] = None,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Take a secret back from a tool, or from all of them."""
    request = payload(action="revoke", name=name, tool=tool)
    shell_for(project, is_json=is_json).tell("secrets", request, view="secrets change")


@secrets.command()
def remove(name: Name, project: Project = None, is_json: IsJson = False) -> None:
    """Remove a secret and its value from the store."""
    shell_for(project, is_json=is_json).tell("secrets", payload(action="remove", name=name), view="secrets change")


@secrets.command()
def seal(
    key: Annotated[str, typer.Argument(metavar="WHERE", help="keyring, passphrase or file.")],
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Keep the key of the store in the system's keyring, behind a passphrase, or in a file."""
    shell_for(project, is_json=is_json).tell("secrets", payload(action="seal", key=key), view="secrets change")


def _value(name: str) -> str:
    """Return a value that no list of processes and no history of commands ever shows."""
    if sys.stdin.isatty():
        typed: str = typer.prompt(f"Value of {name}", hide_input=True, err=True)
        return typed
    try:
        return sys.stdin.read(_MOST).removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InvalidRequest("Standard input is not text.", suggestion="Encode bytes as base64.") from error
