"""`kiwi relax`: what the owner lets run less strictly than its origin says, and changing that."""

from __future__ import annotations

from typing import Annotated

import typer

from kiwi_mcp.surfaces.cli.shell import IsJson, Project, shell_for
from kiwi_mcp.surfaces.cli.show import payload

commands = typer.Typer()


@commands.command()
def relax(
    item: Annotated[str | None, typer.Argument(help="A tool, by any of its names.")] = None,
    level: Annotated[str, typer.Option("--to", help="trusted, standard or sandboxed.")] = "standard",
    reason: Annotated[str, typer.Option(help="Why, for the record.")] = "",
    is_list: Annotated[bool, typer.Option("--list", help="Show what is relaxed.")] = False,
    is_undo: Annotated[bool, typer.Option("--undo", help="Hold it as its origin says again.")] = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Let a tool, exactly as it is now, run less strictly than where it comes from says."""
    action = "undo" if is_undo else "apply" if item and not is_list else "list"
    words = payload(to=level, reason=reason) if action == "apply" else {}
    request = payload(action=action, item_id=None if action == "list" else item, **words)
    shell_for(project, is_json=is_json).tell("relax", request, view=f"relax {action}")
