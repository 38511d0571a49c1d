"""`kiwi memory`: which items were used after which searches, and forgetting it."""

from __future__ import annotations

from typing import Annotated

import typer

from kiwi_mcp.domain.errors import Denied
from kiwi_mcp.surfaces.cli.approving import is_meant
from kiwi_mcp.surfaces.cli.screen import talk
from kiwi_mcp.surfaces.cli.shell import IsJson, shell_for
from kiwi_mcp.surfaces.cli.show import payload

memory = typer.Typer(help="Show or forget what searches are remembered by.", invoke_without_command=True)

Limit = Annotated[int, typer.Option(help="At most so many, the latest first.")]


@memory.callback()
def list_(context: typer.Context, limit: Limit = 50, is_json: IsJson = False) -> None:
    """Show the requests after which items were used: searches like them find these items sooner."""
    if not context.invoked_subcommand:
        shell_for(None, is_json=is_json).tell("memory", payload(action="list", limit=limit), view="memory list")


@memory.command()
def show(
    item: Annotated[str, typer.Argument(help="An item, by its name or its full name.")],
    limit: Limit = 50,
    is_json: IsJson = False,
) -> None:
    """Show the requests after which one item was used."""
    request = payload(action="list", item=item, limit=limit)
    shell_for(None, is_json=is_json).tell("memory", request, view="memory list")


@memory.command()
def forget(
    item: Annotated[str | None, typer.Argument(help="Only what is remembered of this item.")] = None,
    is_yes: Annotated[bool, typer.Option("--yes", "-y", help="All is meant: do not ask.")] = False,
    is_json: IsJson = False,
) -> None:
    """Forget all requests, or those of one item."""
    if item is None and not is_meant("Forget all that searches are remembered by, for good?", is_yes=is_yes):
        talk("Nothing was forgotten.")
        raise typer.Exit(Denied.exit_code)
    shell_for(None, is_json=is_json).tell("memory", payload(action="forget", item=item), view="memory forget")
