"""`kiwi approvals`: what waits for the owner, the answers, and the rules by which nothing has to wait."""

from __future__ import annotations

from typing import Annotated

import typer

from kiwi_mcp.domain.json import as_object, as_text
from kiwi_mcp.surfaces.cli.screen import talk
from kiwi_mcp.surfaces.cli.shell import IsJson, Project, shell_for
from kiwi_mcp.surfaces.cli.show import payload

approvals = typer.Typer(help="See what waits for your word, answer it, and keep rules.", no_args_is_help=True)
rules = typer.Typer(help="The rules by which you are not asked.", invoke_without_command=True)
approvals.add_typer(rules, name="rules")

Which = Annotated[str, typer.Argument(metavar="ID", help="The question: its id, or the beginning of it.")]


@approvals.command("list")
def list_(
    is_all: Annotated[bool, typer.Option("--all", help="Also what was answered, used or has expired.")] = False,
    limit: Annotated[int, typer.Option(help="At most this many.")] = 20,
    is_json: IsJson = False,
) -> None:
    """List what waits for your word."""
    request = payload(action="list", status="all" if is_all else "pending", limit=limit)
    shell_for(None, is_json=is_json).tell("approvals", request, view="approvals list")


@approvals.command()
def show(approval_id: Which, is_json: IsJson = False) -> None:
    """Show one question: what would be run, with what, what it touches, and until when it waits."""
    request = payload(action="show", approval_id=approval_id)
    shell_for(None, is_json=is_json).tell("approvals", request, view="approvals show")


@approvals.command()
def approve(
    approval_id: Which,
    is_always: Annotated[
        bool, typer.Option("--always", help="Do not ask about this tool again, as long as it stays as it is.")
    ] = False,
    is_run: Annotated[bool, typer.Option("--run", help="Run it at once.")] = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Say yes: exactly this may run, once; a no is taken back so."""
    always = "this tool" if is_always else "none"
    shell = shell_for(project, is_json=is_json)
    request = payload(action="approve", approval_id=approval_id, always=always)
    if not is_run:
        shell.tell("approvals", request, view="approvals change")
        return
    answer = shell.ask("approvals", request)
    again = as_object(answer.content.get("request"))
    if answer.is_error or not again:
        if not answer.is_error:  # its call is not the owner's to make, or its parameters are not kept
            talk("hint: It was not run: whoever asked calls it again, exactly as before.")
        shell.show(answer, view="approvals change")
        return
    talk(as_text(answer.content.get("preview")))
    shell.tell("execute", {"action": "run", **again}, view="run")


@approvals.command()
def deny(
    approval_id: Which,
    reason: Annotated[str | None, typer.Option(help="Why; whoever asked is told.")] = None,
    is_json: IsJson = False,
) -> None:
    """Say no; a yes that was not used yet is taken back."""
    request = payload(action="deny", approval_id=approval_id, reason=reason)
    shell_for(None, is_json=is_json).tell("approvals", request, view="approvals change")


@rules.callback()
def rules_(context: typer.Context, is_json: IsJson = False) -> None:
    """List the rules by which you are not asked."""
    if context.invoked_subcommand is None:
        shell_for(None, is_json=is_json).tell("approvals", payload(action="rules"), view="approvals rules")


@rules.command("add")
def add(
    item: Annotated[
        str, typer.Argument(help="One item, NAME@* for all its versions, or a pattern such as 'user/local/*'.")
    ],
    paths: Annotated[list[str] | None, typer.Option("--path", help="Only where it changes these real paths.")] = None,
    hosts: Annotated[list[str] | None, typer.Option("--host", help="Only where it sends to these hosts.")] = None,
    argv: Annotated[
        list[str] | None, typer.Option("--word", help="The command's first words, one each, exactly so.")
    ] = None,
    actor: Annotated[str | None, typer.Option(help="Only calls of this actor.")] = None,
    days: Annotated[int | None, typer.Option(help="For so many days.")] = None,
    is_json: IsJson = False,
) -> None:
    """Say yes beforehand."""
    request = payload(action="add_rule", item=item, paths=paths, hosts=hosts, argv=argv, actor=actor, days=days)
    shell_for(None, is_json=is_json).tell("approvals", request, view="approvals change")


@rules.command("remove")
def remove(
    rule_id: Annotated[str, typer.Argument(metavar="RULE", help="The rule: its id, or the beginning of it.")],
    is_json: IsJson = False,
) -> None:
    """Take a rule back."""
    request = payload(action="remove_rule", rule_id=rule_id)
    shell_for(None, is_json=is_json).tell("approvals", request, view="approvals change")
