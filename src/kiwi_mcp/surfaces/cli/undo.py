"""`kiwi undo`: the runs that can be undone, and undoing one."""

from __future__ import annotations

from typing import Annotated

import typer

from kiwi_mcp.surfaces.cli.shell import DryRun, IsJson, Project, shell_for
from kiwi_mcp.surfaces.cli.show import payload

commands = typer.Typer()


@commands.command()
def undo(
    run_id: Annotated[
        str | None, typer.Argument(metavar="RUN", help="The run to undo: its id, or the beginning of it.")
    ] = None,
    is_dry: DryRun = False,
    is_forced: Annotated[bool, typer.Option("--force", help="Also what somebody else changed since.")] = False,
    limit: Annotated[int, typer.Option(help="At most this many.")] = 20,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """List the runs that can be undone, or put the files that one changed back as they were before it."""
    action = "apply" if run_id else "list"
    request = payload(action=action, run_id=run_id, dry_run=is_dry, force=is_forced, limit=limit)
    shell_for(project, is_json=is_json).tell("undo", request, view=f"undo {action}")
