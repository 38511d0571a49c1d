"""The commands about published versions, runs, and registries elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from kiwi_mcp.kernel.places import user_space
from kiwi_mcp.kernel.settings import remove_remote
from kiwi_mcp.surfaces.cli.approving import owners_word
from kiwi_mcp.surfaces.cli.screen import Screen
from kiwi_mcp.surfaces.cli.shell import DryRun, IsJson, Item, Location, Project, shell_for
from kiwi_mcp.surfaces.cli.show import payload

commands = typer.Typer()
registry = typer.Typer(no_args_is_help=True, help="Exchange versions with registries elsewhere.")
commands.add_typer(registry, name="registry")

Reason = Annotated[str | None, typer.Option("--reason", "-m", help="Why, for all who look at the history.")]
Undo = Annotated[bool, typer.Option("--undo", help="Take it back.")]
Remote = Annotated[str, typer.Argument(help="A remote's name, a folder such as ./shelf, or an address.")]
Only = Annotated[str | None, typer.Option("--namespace", help="Only this namespace.")]
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
AcceptUnsigned = Annotated[
    bool | None, typer.Option("--accept-unsigned", help="Take what is not signed, on your own word.")
]
TrustKey = Annotated[
    str | None, typer.Option("--trust-key", metavar="FINGERPRINT", help="Trust the publisher's key that has it.")
]
Private = Annotated[bool, typer.Option("--with-private", help="Private items too.")]


@commands.command()
def publish(
    item: Item,
    namespace: Annotated[str | None, typer.Option(help="One of yours; the first of them otherwise.")] = None,
    visibility: Annotated[str | None, typer.Option(help="public, unlisted or private.")] = None,
    changelog: Annotated[str | None, typer.Option("--changelog", "-m", help="What changed, in a line or two.")] = None,
    to: Annotated[str | None, typer.Option(help="A remote that gets it as well: a name, a folder, an address.")] = None,
    location: Location = None,
    is_dry: DryRun = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Publish an item and what it stands on: a version that never changes."""
    words = payload(namespace=namespace, visibility=visibility, changelog=changelog, to=to, location=location)
    request = payload(action="publish", item_id=item, parameters=words, dry_run=is_dry)
    shell_for(project, is_json=is_json).tell("execute", request, view="publish")


@commands.command()
def pull(
    item: Annotated[str, typer.Argument(help="name, namespace/name, name@range, name@version or sha256:digest.")],
    remote: Annotated[
        str | None,
        typer.Option("--from", help="The remote to pull it from: a name, a folder such as ./shelf, an address."),
    ] = None,
    is_unsigned: AcceptUnsigned = None,
    key: TrustKey = None,
    is_back: Annotated[
        bool | None, typer.Option("--allow-rollback", help="An older version than was here is meant.")
    ] = None,
    is_dry: DryRun = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Get a published version with all it stands on, verified, ready to run."""
    words = payload(**{"from": remote}, accept_unsigned=is_unsigned, trust_key=key, allow_rollback=is_back)
    request = payload(action="pull", item_id=item, parameters=words, dry_run=is_dry)
    shell_for(project, is_json=is_json).tell("execute", request, view="pull", questions=owners_word(is_yes=False))


@commands.command()
def versions(item: Item, project: Project = None, is_json: IsJson = False) -> None:
    """List every published version of an item."""
    request = payload(action="versions", item_id=item)
    shell_for(project, is_json=is_json).tell("execute", request, view="versions")


@commands.command()
def diff(
    item: Item,
    first: Annotated[str | None, typer.Argument(metavar="FROM", help="A version, project or user.")] = None,
    second: Annotated[str | None, typer.Argument(metavar="TO", help="A version, project or user.")] = None,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Show what changed between two versions, or between the latest one and what is here."""
    words = payload(**{"from": first, "to": second})
    request = payload(action="diff", item_id=item, parameters=words)
    shell_for(project, is_json=is_json).tell("execute", request, view="diff")


@commands.command()
def deprecate(
    item: Item,
    reason: Reason = None,
    is_undone: Undo = False,
    is_dry: DryRun = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Warn whoever uses a version, or all that a range covers; name alone means every version. They still run."""
    words = payload(reason=reason, undo=is_undone)
    request = payload(action="deprecate", item_id=item, parameters=words, dry_run=is_dry)
    shell_for(project, is_json=is_json).tell("execute", request, view="mark")


@commands.command()
def yank(
    item: Annotated[str, typer.Argument(help="One exact version: name@1.2.3.")],
    reason: Reason = None,
    is_undone: Undo = False,
    is_dry: DryRun = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Take a version out of use: only whoever names it exactly still gets it."""
    words = payload(reason=reason, undo=is_undone)
    request = payload(action="yank", item_id=item, parameters=words, dry_run=is_dry)
    shell_for(project, is_json=is_json).tell("execute", request, view="mark")


@commands.command()
def rollback(
    item: Item,
    to: Annotated[str | None, typer.Option(help="The version to go back to; the one before otherwise.")] = None,
    reason: Reason = None,
    is_dry: DryRun = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Go back to an earlier version: newer ones are yanked."""
    words = payload(to=to, reason=reason)
    request = payload(action="rollback", item_id=item, parameters=words, dry_run=is_dry)
    shell_for(project, is_json=is_json).tell("execute", request, view="mark")


@commands.command()
def verify(
    item: Annotated[str | None, typer.Argument(help="One item; the whole registry otherwise.")] = None,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Check that everything published is still what was sealed."""
    request = payload(action="verify", item_id=item)
    shell_for(project, is_json=is_json).tell("execute", request, view="verify")


@commands.command("list")
def list_(
    namespace: Only = None,
    tool_type: Annotated[str | None, typer.Option("--type", help="Only this type of tool.")] = None,
    limit: Annotated[int, typer.Option(help="At most this many.")] = 100,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """List what the registry holds."""
    words = payload(namespace=namespace, tool_type=tool_type, limit=limit)
    request = payload(action="list", parameters=words)
    shell_for(project, is_json=is_json).tell("execute", request, view="list")


@commands.command()
def runs(
    run_id: Annotated[
        str | None, typer.Argument(metavar="RUN", help="One run, whole: its id, or the beginning of it.")
    ] = None,
    tool: Annotated[str | None, typer.Option(help="Only of this tool.")] = None,
    status: Annotated[str | None, typer.Option(help="success, error, timeout, refused, cancelled, …")] = None,
    since: Annotated[str | None, typer.Option(help="A time, or how long ago: 2h, 3d.")] = None,
    until: Annotated[str | None, typer.Option(help="A time, or how long ago: 2h, 3d.")] = None,
    before: Annotated[str | None, typer.Option(help="Go on after this run of the last page.")] = None,
    limit: Annotated[int, typer.Option(help="At most this many.")] = 20,
    actor: Annotated[str | None, typer.Option(help="Of somebody who uses the gateway: the name of a token.")] = None,
    is_pruned: Annotated[bool, typer.Option("--prune", help="Remove what is beyond the retention now.")] = False,
    project: Annotated[Path | None, typer.Option("--project", "-p", help="Only of this project.")] = None,
    is_json: IsJson = False,
) -> None:
    """List what was run, or show one run whole."""
    action = "prune" if is_pruned else "show" if run_id else "list"
    request = payload(
        action=action, run_id=run_id, tool=tool, status=status, since=since, until=until, before=before, limit=limit,
        actor=actor, project_path=str(project.absolute()) if project else None,
    )  # fmt: skip
    shell_for(project, is_json=is_json).tell("runs", request, view=f"runs {action}")


@commands.command()
def migrate(
    path: Annotated[Path | None, typer.Argument(help="An old project, .ai folder or folder of scripts.")] = None,
    is_applied: Annotated[bool, typer.Option("--apply", help="Do it; otherwise the plan is shown.")] = False,
    is_rewritten: Annotated[bool, typer.Option("--rewrite", help="Write a tool.yaml beside old Python tools.")] = False,
    is_signed: Annotated[bool, typer.Option("--sign", help="Sign what is sound.")] = False,
    location: Location = None,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Bring tools of an older folder along."""
    request = payload(
        path=str(path.absolute()) if path else None,
        apply=is_applied,
        rewrite=is_rewritten,
        sign=is_signed,
        location=location,
    )
    shell_for(project, is_json=is_json).tell("migrate", request)


@registry.command("show")
def show_(project: Project = None, is_json: IsJson = False) -> None:
    """Show which store is used, as whom, and the known remotes."""
    shell_for(project, is_json=is_json).tell("registry", {"action": "show"}, view="registry show")


@registry.command()
def push(
    remote: Remote,
    namespace: Only = None,
    is_private: Private = False,
    is_dry: DryRun = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Copy to a remote what it lacks; a folder gets an OCI image layout."""
    request = payload(action="push", remote=remote, only=namespace, with_private=is_private, dry_run=is_dry)
    shell_for(project, is_json=is_json).tell("registry", request, view="exchange")


@registry.command("pull")
def pull_all(
    remote: Remote,
    namespace: Only = None,
    is_private: Private = False,
    is_unsigned: AcceptUnsigned = None,
    key: TrustKey = None,
    is_dry: DryRun = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Copy from a remote what is lacking here."""
    request = payload(
        action="pull", remote=remote, only=namespace, with_private=is_private, accept_unsigned=is_unsigned,
        trust_key=key, dry_run=is_dry,
    )  # fmt: skip
    shell_for(project, is_json=is_json).tell("registry", request, view="exchange")


@registry.command()
def add(
    name: Annotated[str, typer.Argument(help="What to call it.")],
    url: Annotated[str, typer.Argument(help="Where it is.")],
    token: Annotated[str | None, typer.Option(help="The NAME of the variable that holds its token.")] = None,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Give a remote a name."""
    # Only what looks like a name is taken for one: a token given by mistake must not end up in the file.
    variable = f"${{{token}}}" if token and _VARIABLE.fullmatch(token) else token
    request = payload(action="add", remote=name, url=url, token=variable)
    shell_for(project, is_json=is_json).tell("registry", request, view="message")


@registry.command()
def remove(name: Annotated[str, typer.Argument(help="What it is called.")], is_json: IsJson = False) -> None:
    """Forget a remote; nothing there or here is deleted."""
    remove_remote(user_space(), name)
    screen = Screen()
    if is_json:
        screen.json({"action": "remove", "status": "removed", "remote": name})
    else:
        screen.data(f"{name} is forgotten")
