"""`kiwi prefer`: what clients see without searching."""

from __future__ import annotations

from typing import Annotated

import typer

from kiwi_mcp.surfaces.cli.shell import IsJson, Project, shell_for
from kiwi_mcp.surfaces.cli.show import payload

prefer = typer.Typer(help="Show or change what clients see without searching.", invoke_without_command=True)

Kind = Annotated[str, typer.Option("--kind", help="tool, prompt or resource.")]


@prefer.callback()
def list_(context: typer.Context, project: Project = None, is_json: IsJson = False) -> None:
    """Show the tools, prompts and resources that every client sees, and what the tools cost."""
    if not context.invoked_subcommand:
        shell_for(project, is_json=is_json).tell("prefer", payload(action="list"), view="prefer list")


@prefer.command("list")
def list_again(project: Project = None, is_json: IsJson = False) -> None:
    """Show what every client sees, as `kiwi prefer` does."""
    shell_for(project, is_json=is_json).tell("prefer", payload(action="list"), view="prefer list")


@prefer.command()
def suggest(project: Project = None, is_json: IsJson = False) -> None:
    """Show what to send always, and what to send no longer, from how it was used."""
    shell_for(project, is_json=is_json).tell("prefer", payload(action="suggest"), view="prefer suggest")


@prefer.command()
def add(
    name: Annotated[str, typer.Argument(help="A name, server/name, a full name, or a pattern such as 'github/*'.")],
    called: Annotated[str | None, typer.Option("--as", help="The name that clients call it by.")] = None,
    kind: Kind = "tool",
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Let every client see something without searching for it."""
    request = payload(action="add", name=name, kind=kind, **{"as": called})
    shell_for(project, is_json=is_json).tell("prefer", request, view="prefer change")


@prefer.command()
def remove(
    name: Annotated[str, typer.Argument(help="An entry, or an item as `kiwi prefer` shows it.")],
    kind: Kind = "tool",
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Leave something to be searched for."""
    request = payload(action="remove", name=name, kind=kind)
    shell_for(project, is_json=is_json).tell("prefer", request, view="prefer change")
