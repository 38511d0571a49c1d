"""`kiwi tasks`: the calls that went on as tasks."""

from __future__ import annotations

from typing import Annotated

import typer

from kiwi_mcp.surfaces.cli.shell import IsJson, shell_for
from kiwi_mcp.surfaces.cli.show import payload

commands = typer.Typer()


@commands.command()
def tasks(
    task_id: Annotated[
        str | None, typer.Argument(metavar="TASK", help="One task, whole: its id, or the beginning of it.")
    ] = None,
    is_cancelled: Annotated[bool, typer.Option("--cancel", help="Stop it.")] = False,
    limit: Annotated[int, typer.Option(help="At most this many.")] = 20,
    is_json: IsJson = False,
) -> None:
    """List the calls that went on as tasks, show one whole, or stop it."""
    action = "cancel" if is_cancelled else "show" if task_id else "list"
    request = payload(action=action, task_id=task_id, limit=limit)
    shell_for(None, is_json=is_json).tell("tasks", request, view=f"tasks {action}")
