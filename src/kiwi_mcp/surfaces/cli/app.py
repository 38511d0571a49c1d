"""The command `kiwi`: every verb as a command, and every request as JSON."""

from __future__ import annotations

import sys
from asyncio import CancelledError
from pathlib import Path
from typing import Annotated

import typer

from kiwi_mcp import __version__
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, NotFound
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.kernel import Answer
from kiwi_mcp.kernel.places import nearest_project
from kiwi_mcp.surfaces import start
from kiwi_mcp.surfaces.cli import searching
from kiwi_mcp.surfaces.cli.approvals import approvals
from kiwi_mcp.surfaces.cli.approving import owners_word
from kiwi_mcp.surfaces.cli.audit import audit
from kiwi_mcp.surfaces.cli.gateway import up
from kiwi_mcp.surfaces.cli.keys import keys
from kiwi_mcp.surfaces.cli.mcp import commands as mcp_commands
from kiwi_mcp.surfaces.cli.memory import memory
from kiwi_mcp.surfaces.cli.parameters import from_words, read_object
from kiwi_mcp.surfaces.cli.prefer import prefer
from kiwi_mcp.surfaces.cli.registry import commands as registry_commands
from kiwi_mcp.surfaces.cli.relax import commands as relax_commands
from kiwi_mcp.surfaces.cli.screen import Screen
from kiwi_mcp.surfaces.cli.secrets import secrets
from kiwi_mcp.surfaces.cli.shell import DryRun, IsJson, Item, Location, Project, Shell, here, shell_for
from kiwi_mcp.surfaces.cli.show import payload, show
from kiwi_mcp.surfaces.cli.tasks import commands as task_commands
from kiwi_mcp.surfaces.cli.undo import commands as undo_commands

app = typer.Typer(
    name="kiwi",
    help="Kiwi: one place where tools live, and through which every model and program uses them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(registry_commands)
app.add_typer(mcp_commands)
app.add_typer(up, name="up")
app.add_typer(prefer, name="prefer")
app.add_typer(memory, name="memory")
app.add_typer(secrets, name="secrets")
app.add_typer(keys, name="key")
app.add_typer(task_commands)
app.add_typer(undo_commands)
app.add_typer(relax_commands)
app.add_typer(audit, name="audit")
app.add_typer(approvals, name="approvals")

_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]  # its base, which has no public name
_ITEM_TYPES = ("tool", "directive", "knowledge")
_UNKNOWN_ALLOWED = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.callback(invoke_without_command=True)
def kiwi(
    is_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Kiwi: one place where tools live, and through which every model and program uses them."""
    if is_version:
        Screen().data(__version__)
        raise typer.Exit


@app.command()
def search(
    query: Annotated[
        list[str] | None, typer.Argument(help="What you need, in words; without any, all that passes the filters.")
    ] = None,
    source: Annotated[
        str, typer.Option(help="local (project, user, mcp), all, project, user, registry, mcp or builtin.")
    ] = "local",
    limit: Annotated[int, typer.Option(help="At most this many, up to 100.")] = 10,
    sort_by: Annotated[str, typer.Option("--sort", "--sort-by", help="score, date or name.")] = "score",
    item_type: Annotated[
        str, typer.Option("--type", help="tool, directive or knowledge; or a type of tools, such as api.")
    ] = "tool",
    tool_type: Annotated[list[str] | None, typer.Option(help="Only these types of tools; may be repeated.")] = None,
    category: Annotated[list[str] | None, typer.Option(help="Only these categories; may be repeated.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only with one of these tags; may be repeated.")] = None,
    server: Annotated[list[str] | None, typer.Option(help="Only of these MCP servers; may be repeated.")] = None,
    is_waiting: Annotated[
        bool, typer.Option("--wait", help="Wait until all is indexed, for five minutes at the most.")
    ] = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Find tools by what they do, and see why each was found."""
    types = tool_type or ([] if item_type in _ITEM_TYPES else [item_type])
    request = payload(
        query=" ".join(query or ()), source=source, limit=limit, sort_by=sort_by,
        item_type=item_type if item_type in _ITEM_TYPES else None,
        tool_type=types or None, category=category or None, tag=tag or None, server=server or None,
    )  # fmt: skip
    searching.search(shell_for(project, is_json=is_json), request, is_waiting=is_waiting)


@app.command()
def load(
    item: Item,
    source: Annotated[str | None, typer.Option(help="project, user, registry, mcp or builtin.")] = None,
    to: Annotated[str | None, typer.Option(help="Copy it to project or user.")] = None,
    destination: Annotated[str | None, typer.Option(help="The same as --to.")] = None,
    file: Annotated[str | None, typer.Option(help="One file of an item with several.")] = None,
    item_type: Annotated[str, typer.Option("--type", help="tool, directive, knowledge; output for a result.")] = "tool",
    offset: Annotated[int, typer.Option(help="Where to go on in an output.")] = 0,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Read one item, or copy it between project and user space."""
    request = payload(
        item_id=item, source=source, destination=to or destination, file=file, item_type=item_type, offset=offset
    )
    shell_for(project, is_json=is_json).tell("load", request)


@app.command(context_settings=_UNKNOWN_ALLOWED)
def run(
    context: typer.Context,
    item: Item,
    params: Annotated[str | None, typer.Option("--params", help="Parameters as JSON, @file, or - for stdin.")] = None,
    is_dry: DryRun = False,
    is_frozen: Annotated[bool, typer.Option("--frozen", help="Refuse what differs from the lockfile.")] = False,
    is_saved: Annotated[bool, typer.Option("--checkpoint", help="Save the files first, to undo it.")] = False,
    is_raw: Annotated[bool, typer.Option("--raw", help="Write the result to a terminal as it is.")] = False,
    is_yes: Annotated[bool, typer.Option("--yes", "-y", help="Yes, whatever you would be asked first.")] = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Run a tool: name=value, --name value, name:=json, or --params JSON."""
    shell = shell_for(project, is_json=is_json)
    parameters: dict[str, Json] = dict(read_object(params)) if params else {}
    if context.args:
        parameters |= from_words(context.args, shell.parameters_of(item))
    request = payload(
        action="run", item_id=item, parameters=parameters, dry_run=is_dry, frozen=is_frozen, checkpoint=is_saved
    )
    shell.tell("execute", request, view="run", is_raw=is_raw, questions=owners_word(is_yes=is_yes))


@app.command()
def create(
    item: Annotated[str | None, typer.Argument(help="The new item's name.")] = None,
    tool_type: Annotated[str | None, typer.Option("--type", help="script, api, runtime, …")] = None,
    executor: Annotated[str | None, typer.Option(help="What it runs on, such as python_runtime.")] = None,
    description: Annotated[str | None, typer.Option(help="One line on what it does.")] = None,
    manifest: Annotated[Path | None, typer.Option(help="A manifest file (YAML).")] = None,
    files: Annotated[
        list[Path] | None, typer.Option("--file", help="A file of the tool; the first is its entrypoint.")
    ] = None,
    content: Annotated[Path | None, typer.Option(help="A single file that is the whole item.")] = None,
    params: Annotated[
        str | None, typer.Option("--params", help="The request's parameters as JSON, @file or -.")
    ] = None,
    from_openapi: Annotated[Path | None, typer.Option(help="Make api tools from an OpenAPI 3 document.")] = None,
    prefix: Annotated[str | None, typer.Option(help="With --from-openapi: what every name begins with.")] = None,
    base_url: Annotated[str | None, typer.Option(help="With --from-openapi: where the service is.")] = None,
    bearer: Annotated[str | None, typer.Option(help="With --from-openapi: the variable that holds a token.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="With --from-openapi: only these operations.")] = None,
    category: Annotated[str | None, typer.Option(help="The folder it goes to.")] = None,
    location: Location = None,
    is_dry: DryRun = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Create a tool from a manifest, from files, or many from an OpenAPI document."""
    if not (tool_type or manifest or files or content or params or from_openapi):
        raise InvalidRequest(
            "There is nothing to create it from.",
            suggestion="Add `--content FILE` (one file that is the whole item), or `--manifest FILE` with `--file` for "
            "each of its files; `kiwi help create` shows both.",
        )
    words: dict[str, Json] = dict(read_object(params)) if params else {}
    words |= payload(
        tool_type=tool_type, executor=executor, description=description, category=category, location=location
    )
    if from_openapi:
        auth: JsonObject | None = {"type": "bearer", "token": f"${{{bearer}}}"} if bearer else None
        words |= payload(openapi=_text(from_openapi), prefix=prefix, base_url=base_url, only=only, auth=auth)
    whole = content or (manifest if not files else None)
    if whole:
        words |= {"content": _text(whole), "filename": whole.name}
    elif files:
        sent = {path.name: _text(path) for path in files}
        words["files"] = {**sent, "tool.yaml": _text(manifest)} if manifest else sent
        if not manifest:
            words = {"version": "1.0.0", "config": {"entrypoint": files[0].name}, **words}
    request = payload(action="create", item_id=item, parameters=words, dry_run=is_dry)
    shell_for(project, is_json=is_json).tell("execute", request, view="create")


@app.command()
def update(
    item: Item,
    params: Annotated[str | None, typer.Option("--params", help="Words to change, as JSON, @file or -.")] = None,
    files: Annotated[list[Path] | None, typer.Option("--file", help="A file to add or replace.")] = None,
    content: Annotated[Path | None, typer.Option(help="The whole new text.")] = None,
    location: Location = None,
    is_dry: DryRun = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Change a tool; the old one goes to the trash."""
    words: dict[str, Json] = dict(read_object(params)) if params else {}
    if files:
        words["files"] = {path.name: _text(path) for path in files}
    if content:
        words["content"] = _text(content)
    request = payload(action="update", item_id=item, parameters={**words, **payload(location=location)}, dry_run=is_dry)
    shell_for(project, is_json=is_json).tell("execute", request, view="update")


@app.command()
def delete(
    item: Item, location: Location = None, is_dry: DryRun = False, project: Project = None, is_json: IsJson = False
) -> None:
    """Move a tool to the trash."""
    request = payload(action="delete", item_id=item, parameters=payload(location=location), dry_run=is_dry)
    shell_for(project, is_json=is_json).tell("execute", request, view="delete")


@app.command()
def validate(
    what: Annotated[str, typer.Argument(help="A file, a tool's folder, or an item's name.")],
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """List every issue of an item, with its place, reason and fix."""
    path = Path(what)
    if path.exists():
        folder = project or nearest_project(path.absolute().parent)
        request = payload(action="validate", parameters={"path": str(path.absolute())})
        shell_for(folder, is_json=is_json).tell("execute", request, view="validate")
    elif "/" in what or path.suffix:
        raise NotFound(f"{what} does not exist.", suggestion="Check the path, or give an item's name.")
    else:
        shell_for(project, is_json=is_json).tell("execute", {"action": "validate", "item_id": what}, view="validate")


@app.command()
def sign(
    item: Item,
    location: Location = None,
    category: Annotated[str | None, typer.Option(help="The category it must be in.")] = None,
    is_dry: DryRun = False,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Validate a tool, then write its signature line and the lockfile."""
    words = payload(location=location, category=category)
    request = payload(action="sign", item_id=item, parameters=words, dry_run=is_dry)
    shell_for(project, is_json=is_json).tell("execute", request, view="sign")


@app.command(context_settings=_UNKNOWN_ALLOWED)
def why(context: typer.Context, item: Item, project: Project = None, is_json: IsJson = False) -> None:
    """Show what a tool stands on, where its variables come from, and whether it would run.

    Parameters are given as for `run`; without them, what depends on them is left out.
    """
    shell = shell_for(project, is_json=is_json)
    parameters: JsonObject = {}
    if context.args:
        parameters = from_words(context.args, shell.parameters_of(item))
    shell.tell("execute", {"action": "why", "item_id": item, "parameters": parameters}, view="why")


@app.command()
def doctor(project: Project = None, is_json: IsJson = False) -> None:
    """Check this installation: what works, what is missing, and how to get it."""
    shell_for(project, is_json=is_json).tell("doctor", {})


@app.command()
def init(
    folder: Annotated[Path | None, typer.Argument(help="The project's folder; this one otherwise.")] = None,
    is_json: IsJson = False,
) -> None:
    """Give a project its .ai folder."""
    Shell(here() / (folder or ""), is_json).tell("init", {})


@app.command("help")
def help_(
    topic: Annotated[
        str | None,
        typer.Argument(help="tool, create, execute, search, load, registry, runs, audit, mcp, secrets, up, errors, …"),
    ] = None,
    project: Project = None,
    is_json: IsJson = False,
) -> None:
    """Read how Kiwi is used."""
    shell_for(project, is_json=is_json).tell("help", payload(topic=topic))


@app.command()
def call(
    verb: Annotated[
        str,
        typer.Argument(
            help="search, load, execute, help, init, doctor, registry, runs, tasks, audit, mcp, prefer, secrets, key, …"
        ),
    ],
    request: Annotated[str, typer.Argument(help="The request as JSON, @file, or - for stdin.")] = "{}",
    project: Project = None,
) -> None:
    """Send any verb exactly the JSON that an MCP client would send; the answer is JSON."""
    shell_for(project, is_json=True).tell(verb, read_object(request))


@app.command()
def serve(
    project: Annotated[Path | None, typer.Option("--project", help="The project of requests that name none.")] = None,
) -> None:
    """Serve MCP over standard input and output."""
    start.serve(str(project or ""))


@app.command()
def version(is_json: IsJson = False) -> None:
    """Print the version."""
    screen = Screen()
    if is_json:
        screen.json({"version": __version__})
    else:
        screen.data(__version__)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}.", suggestion="Name a readable text file.") from error


def _misused(error: typer.BadParameter) -> InvalidRequest:
    """Return what is wrong with how a command was typed."""
    command = error.ctx.command_path if error.ctx else "kiwi"
    return InvalidRequest(error.format_message(), suggestion=f"`{command} --help` shows how it is used.")


def main() -> None:
    """Run the command line; a refusal is shown like any other answer."""
    is_json = "--json" in sys.argv or sys.argv[1:2] == ["call"]
    try:
        if is_json:
            sys.exit(app(standalone_mode=False))
        app()
    except _UsageError as error:
        show(Answer(_misused(error).to_response(), is_error=True), verb="", is_json=is_json)
        sys.exit(error.exit_code)
    except KiwiError as error:
        show(Answer(error.to_response(), is_error=True), verb="", is_json=is_json)
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except CancelledError:
        sys.exit(143)
