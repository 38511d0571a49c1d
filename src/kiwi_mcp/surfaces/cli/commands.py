"""Groups of commands, commands that are no verbs, and what only the command line needs of a verb.

`make reference` writes `commands.json` from this module and from the verbs; no command imports it. The docstring of a
class is the help text of its command.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_origin

from msgspec import defstruct

from kiwi_mcp.kernel.verb import Argument, Item, Option, PlaceToWrite, Request

GROUPS = {
    "tool": "Change, validate, relax and migrate tools.",
    "registry": "Published versions: list, compare, deprecate, yank, verify.",
    "registry remote": "Exchange versions with registries elsewhere.",
    "mcp": "Use the tools of MCP servers through Kiwi, and Kiwi in MCP clients.",
    "approvals": "See what waits for your approval, answer it, and keep rules.",
    "approvals rules": "Rules that approve calls beforehand.",
    "thread": "Run directives with a model: start, watch, answer, cancel.",
    "secrets": "Store secrets, and grant them to tools.",
    "key": "Make your signing key; trust and revoke the keys of publishers.",
    "runs": "List past runs, show one, undo its changes.",
    "tasks": "Calls that continue in the background.",
    "audit": "Receipts of all calls, and a check that none was changed.",
    "prefer": "The tools, prompts and resources that clients see without searching.",
    "skill": "List, import and export skills.",
    "memory": "Move your memory to another machine, or serve it to other programs.",
    "recall": "What search learned from use.",
    "up": "Serve the registry and tools over HTTP.",
    "up token": "Tokens of those who may use the gateway.",
}


class Command(NamedTuple):
    """One command that is no verb, as declared."""

    path: str
    request: type[Request]
    run: str
    has_project: bool
    has_json: bool


COMMANDS: list[Command] = []
R = TypeVar("R", bound=type[Request])


def command(path: str, *, run: str, has_project: bool = True, has_json: bool = True) -> Callable[[R], R]:
    """Declare a command that is no verb; `run` is the function that carries it out."""

    def declare(request: R) -> R:
        COMMANDS.append(Command(path, request, run, has_project, has_json))
        return request

    return declare


@command("approvals watch", run="actions.watch_approvals", has_json=False)
class WatchApprovals(Request, frozen=True):
    """Show questions as they come, and answer them on a terminal, until Ctrl-C."""


@command("new", run="author.new")
class NewItem(Request, frozen=True):
    """Write a new tool, server, directive, knowledge entry, skill, thread or composite that works as it is."""

    name: Annotated[str, Argument("Its name.", "NAME")]
    python: Annotated[bool, Option("A Python function.")] = False
    bash: Annotated[bool, Option("A shell script.")] = False
    node: Annotated[bool, Option("A JavaScript function.")] = False
    api: Annotated[bool, Option("A request to an HTTP API.")] = False
    mcp: Annotated[bool, Option("An MCP server.")] = False
    directive: Annotated[bool, Option("A program for a model.")] = False
    knowledge: Annotated[bool, Option("Text to find and read.")] = False
    skill: Annotated[bool, Option("Instructions that a model loads when it needs them.")] = False
    thread: Annotated[bool, Option("A directive that a model executes apart.")] = False
    composite: Annotated[bool, Option("Steps that call other items.")] = False
    location: PlaceToWrite = None


@command("dev", run="author.dev")
class DevelopItem(Request, frozen=True):
    """Validate and run a file at every save, as an unsigned file; the key s signs it, q quits."""

    item_id: Item
    parameters: Annotated[tuple[str, ...], Argument("Parameters, as for `run`.", "NAME=VALUE", kind="parameters")] = ()
    params: Annotated[str | None, Option("Parameters as JSON, @file, or - for stdin.", metavar="JSON", kind="json")] = (
        None
    )


class SearchOptions(Request, frozen=True):
    """Options of `kiwi search`; names that are repeated here are lists."""

    query: Annotated[
        tuple[str, ...], Argument("What you need, in words; without any, all that passes the filters.", "WORD")
    ] = ()
    source: Annotated[
        str, Option("local (project, user, mcp), all, project, user, registry, mcp or builtin.", metavar="SOURCE")
    ] = "local"
    limit: Annotated[int, Option("At most this many, up to 100.")] = 10
    sort_by: Annotated[str, Option("score, date or name.", "--sort", "--sort-by", metavar="ORDER")] = "score"
    item_type: Annotated[
        str, Option("tool, directive, knowledge or skill; or a type of tools, such as api.", "--type", metavar="TYPE")
    ] = "tool"
    tool_type: Annotated[tuple[str, ...], Option("Only these types of tools; may be repeated.", metavar="TYPE")] = ()
    category: Annotated[tuple[str, ...], Option("Only these categories; may be repeated.")] = ()
    tag: Annotated[tuple[str, ...], Option("Only with one of these tags; may be repeated.")] = ()
    server: Annotated[tuple[str, ...], Option("Only of these MCP servers; may be repeated.")] = ()
    wait: Annotated[bool, Option("Wait until everything is indexed, at most five minutes.", is_sent=False)] = False


class CreateOptions(Request, frozen=True):
    """Options of `kiwi create`, which the command turns into the parameters of the request."""

    tool_type: Annotated[str | None, Option("script, api, runtime, …", "--type", metavar="TYPE")] = None
    executor: Annotated[str | None, Option("What it runs on, such as python_runtime.")] = None
    description: Annotated[str | None, Option("One line on what it does.", metavar="TEXT")] = None
    manifest: Annotated[str | None, Option("A manifest file (YAML).", metavar="FILE", kind="file")] = None
    files: Annotated[
        tuple[str, ...],
        Option("A file of the tool; the first is its entrypoint.", "--file", metavar="FILE", kind="files"),
    ] = ()
    content: Annotated[str | None, Option("A single file that is the whole item.", metavar="FILE", kind="file")] = None
    params: Annotated[
        str | None, Option("The request's parameters as JSON, @file or -.", metavar="JSON", kind="json")
    ] = None
    openapi: Annotated[
        str | None, Option("Make api tools from an OpenAPI 3 document.", "--from-openapi", metavar="FILE", kind="file")
    ] = None
    prefix: Annotated[str | None, Option("With --from-openapi: what every name begins with.")] = None
    base_url: Annotated[str | None, Option("With --from-openapi: the address of the service.", metavar="URL")] = None
    bearer: Annotated[str | None, Option("With --from-openapi: the variable that holds a token.", metavar="NAME")] = (
        None
    )
    only: Annotated[tuple[str, ...], Option("With --from-openapi: only these operations.")] = ()
    category: Annotated[str | None, Option("The folder for it.")] = None
    location: PlaceToWrite = None


class UpdateOptions(Request, frozen=True):
    """Options of `kiwi tool update`, which the command turns into the parameters of the request."""

    params: Annotated[str | None, Option("Keys to change, as JSON, @file or -.", metavar="JSON", kind="json")] = None
    files: Annotated[tuple[str, ...], Option("A file to add or replace.", "--file", metavar="FILE", kind="files")] = ()
    content: Annotated[str | None, Option("The whole new text.", metavar="FILE", kind="file")] = None
    location: PlaceToWrite = None


@command("up", run="gateway.serve", has_project=False)
class Up(Request, frozen=True):
    """Serve the registry, and tools to MCP clients, over HTTP until SIGTERM or Ctrl-C."""

    host: Annotated[str, Option("The address to listen on; this machine alone otherwise.")] = "127.0.0.1"
    port: Annotated[int, Option("The port; 0 for a free one.")] = 8765
    socket: Annotated[
        str | None, Option("A socket to listen at instead of a port, which only you can reach.", metavar="PATH")
    ] = None
    name: Annotated[tuple[str, ...], Option("A further host name of this server.")] = ()
    read_only: Annotated[bool, Option("Serve reads of the registry only; no tools.")] = False
    project: Annotated[
        str | None,
        Option("The project of calls that name none; the nearest with an .ai folder otherwise.", metavar="FOLDER"),
    ] = None
    no_project: Annotated[bool, Option("Serve only what is the same in every project.")] = False
    any_project: Annotated[bool, Option("Let calls name other projects as well.")] = False
    issuer: Annotated[str, Option("The identity provider; its access tokens may use tools.", metavar="URL")] = ""
    audience: Annotated[str, Option("The address of /mcp in those tokens.", metavar="URL")] = ""
    scope: Annotated[str, Option("The scope that allows tools; kiwi:tools otherwise.")] = ""


@command("chat", run="chat.converse")
class StartChat(Request, frozen=True):
    """Talk with a model that uses your tools; /help shows the commands inside."""

    thread_id: Annotated[str | None, Argument("With --continue: this conversation, not the newest one.", "THREAD")] = (
        None
    )
    is_continued: Annotated[bool, Option("Continue a conversation of this project.", "--continue", "-c")] = False
    directive: Annotated[str | None, Option("The directive that guides it; the built-in `chat` otherwise.")] = None
    model: Annotated[str | None, Option("The model, as provider/model; the directive's choice otherwise.")] = None


@command("serve", run="actions.serve", has_project=False, has_json=False)
class Serve(Request, frozen=True):
    """Serve MCP over standard input and output."""

    project: Annotated[str | None, Option("The project of requests that name none.", metavar="FOLDER")] = None


@command("memory serve", run="actions.serve_memory", has_project=False, has_json=False)
class ServeMemory(Request, frozen=True):
    """Serve your memory alone over MCP, for programs that are to see nothing else of Kiwi."""


@command("call", run="actions.call", has_json=False)
class CallVerb(Request, frozen=True):
    """Send any verb exactly the JSON that an MCP client would send; the answer is JSON."""

    verb: Annotated[
        str,
        Argument(
            "search, load, execute, help, init, doctor, registry, runs, tasks, audit, mcp, prefer, secrets, key, …",
            "VERB",
        ),
    ]
    request: Annotated[str, Argument("The request as JSON, @file, or - for stdin.", "JSON", kind="json")] = "{}"


@command("completion", run="completion.script", has_project=False, has_json=False)
class Completion(Request, frozen=True):
    """Print a completion script for your shell: bash, zsh or fish."""

    shell: Annotated[str, Argument("bash, zsh or fish.", "SHELL")]


@command("version", run="actions.version", has_project=False)
class PrintVersion(Request, frozen=True):
    """Print the version."""


class LocalPart(NamedTuple):
    """What only the command line needs of a verb's command: the function that carries it out, and further options."""

    run: str = "actions.send"
    options: type[Request] | None = None
    has_project: bool | None = None
    """Whether it takes `--project`; None if its request says so."""
    has_json: bool = True
    about: str = ""


def _options(**hints: Any) -> type[Request]:
    """Return options that are not sent; those that are not typed are false, empty or null."""
    fields: list[tuple[str, Any, Any]] = []
    for name, hint in hints.items():
        kind = get_args(hint)[0]
        if kind is bool:
            fields.append((name, hint, False))
        else:
            fields.append((name, hint, () if get_origin(kind) is tuple else None))
    return cast("type[Request]", defstruct("Options", fields, bases=(Request,), frozen=True))


_PARAMETERS = "Parameters: name=value, --name value, --name=value, name:=json, or --params JSON."
_ALL = "`kiwi sign .` lists all that is new or changed in the project, and asks once."
_FOLDER = Argument("The project's folder; this one otherwise.", "FOLDER", is_sent=False)
_YES = Option("Do not ask before everything is forgotten.", "--yes", "-y", is_sent=False)
_COMMAND = Argument("The command that starts it.", "-- COMMAND ARGS…", kind="command", is_sent=False)
_NO_BROWSER = Option("Only show the address to open.", is_sent=False)
_RUN_NOW = Option("Run it at once.", is_sent=False)
_SERVER = Option("Do not ask about this MCP server again, until it changes.", is_sent=False)
_KEEP = Option("Keep its value; change hosts or form.", is_sent=False)
_ANSWER = Argument("The answer, in one word or several.", "ANSWER", is_sent=False)
_JSON = Option("Parameters as JSON, @file, or - for stdin.", metavar="JSON", kind="json", is_sent=False)
_RAW = Option("Write the result to a terminal as it is.", is_sent=False)
_APPROVED = Option("Approve this call without a question.", "--yes", "-y", is_sent=False)
_MORE = Argument("Further items.", "ITEM…", is_sent=False)
_RUN = _options(params=Annotated[str | None, _JSON], raw=Annotated[bool, _RAW], yes=Annotated[bool, _APPROVED])
_APPROVE = _options(run=Annotated[bool, _RUN_NOW], server=Annotated[bool, _SERVER])

LOCAL_PARTS = {
    "setup": LocalPart("actions.setup"),
    "init": LocalPart("actions.init", _options(folder=Annotated[str | None, _FOLDER]), has_project=False),
    "run": LocalPart("actions.run", _RUN, about=_PARAMETERS),
    "why": LocalPart("actions.why", about=_PARAMETERS),
    "search": LocalPart("actions.search", SearchOptions),
    "create": LocalPart("actions.create", CreateOptions),
    "sign": LocalPart("author.sign", _options(more=Annotated[tuple[str, ...], _MORE]), about=_ALL),
    "tool update": LocalPart("actions.update", UpdateOptions),
    "tool validate": LocalPart("actions.validate"),
    "registry pull": LocalPart("actions.pull"),
    "recall forget": LocalPart("actions.forget", _options(yes=Annotated[bool, _YES])),
    "mcp add": LocalPart("actions.add_server", _options(command=Annotated[tuple[str, ...], _COMMAND])),
    "mcp import": LocalPart("actions.import_servers"),
    "mcp login": LocalPart("actions.login", _options(no_browser=Annotated[bool, _NO_BROWSER])),
    "approvals approve": LocalPart("actions.approve", _APPROVE, has_project=True),
    "secrets set": LocalPart("actions.set_secret", _options(keep=Annotated[bool, _KEEP])),
    "secrets rotate": LocalPart("actions.set_secret"),
    "audit export": LocalPart("actions.export_receipts", has_json=False),
    "thread watch": LocalPart("chat.watch"),
    "thread start": LocalPart("chat.start_thread"),
    "thread resume": LocalPart("chat.resume_thread"),
    "thread answer": LocalPart("chat.answer_thread", _options(answer=Annotated[tuple[str, ...], _ANSWER])),
}
