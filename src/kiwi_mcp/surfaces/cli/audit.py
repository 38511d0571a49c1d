"""`kiwi audit`: the receipts of all calls."""

from __future__ import annotations

from typing import Annotated

import typer

from kiwi_mcp.domain.json import Json, as_list, as_object, compact
from kiwi_mcp.surfaces.cli.screen import Screen
from kiwi_mcp.surfaces.cli.shell import IsJson, shell_for
from kiwi_mcp.surfaces.cli.show import payload, show

audit = typer.Typer(
    help="Show the receipts of all calls, and check that none was changed.", invoke_without_command=True
)

Tool = Annotated[str | None, typer.Option(help="Only about this, by its short name.")]
Actor = Annotated[str | None, typer.Option(help="Only what this one did.")]
Did = Annotated[str | None, typer.Option("--action", help="Only this: run, create, 'mcp add', …")]
Status = Annotated[str | None, typer.Option(help="success, error, refused, timeout, cancelled, …")]
Since = Annotated[str | None, typer.Option(help="ISO 8601, or how long ago: 30m, 2h, 3d.")]
Limit = Annotated[int, typer.Option(help="At most this many.")]
Before = Annotated[int | None, typer.Option(help="Go on before this number.")]


@audit.callback()
def audit_(context: typer.Context, is_json: IsJson = False) -> None:
    """Show the newest receipts."""
    if not context.invoked_subcommand:
        shell_for(None, is_json=is_json).tell("audit", {}, view="audit list")


@audit.command("list")
def list_(
    tool: Tool = None,
    actor: Actor = None,
    did: Did = None,
    status: Status = None,
    since: Since = None,
    until: Since = None,
    limit: Limit = 20,
    before: Before = None,
    is_json: IsJson = False,
) -> None:
    """List receipts, the newest first."""
    request = payload(
        tool=tool, actor=actor, did=did, status=status, since=since, until=until, limit=limit, before=before
    )
    shell_for(None, is_json=is_json).tell("audit", request, view="audit list")


@audit.command("show")
def show_(
    receipt: Annotated[str, typer.Argument(help="Its number, its id, or the beginning of that.")],
    is_json: IsJson = False,
) -> None:
    """Show all that one receipt says."""
    shell_for(None, is_json=is_json).tell("audit", {"action": "show", "receipt": receipt}, view="audit show")


@audit.command()
def verify(is_json: IsJson = False) -> None:
    """Check that no receipt was changed, removed, moved or cut off."""
    shell_for(None, is_json=is_json).tell("audit", {"action": "verify"}, view="audit verify")


@audit.command()
def export(
    after: Annotated[int, typer.Option(help="Begin behind this number.")] = 0,
) -> None:
    """Write all receipts to standard output, one line of JSON each, to be checked anywhere."""
    shell, screen = shell_for(None, is_json=False), Screen(is_raw=True)
    following: Json = after
    while following is not None:
        answer = shell.ask("audit", {"action": "export", "after": following})
        if answer.is_error:
            show(answer, verb="audit export", is_json=False)
            raise typer.Exit(answer.exit_code)
        for receipt in as_list(answer.content["receipts"]):
            screen.data(compact(as_object(receipt)))
        following = answer.content["next"]
