"""The functions of commands. Most commands send one request and show the answer."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kiwi_mcp import __version__
from kiwi_mcp.domain.calls import Caller, no_answers
from kiwi_mcp.domain.errors import Denied, InvalidRequest, NotFound
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.paths import nearest_project, user_space
from kiwi_mcp.kernel.settings import registry_settings
from kiwi_mcp.kernel.verbs import by_wire
from kiwi_mcp.surfaces import start
from kiwi_mcp.surfaces.cli import prompts, session
from kiwi_mcp.surfaces.cli.help import UsageError
from kiwi_mcp.surfaces.cli.inputs import from_words, here
from kiwi_mcp.surfaces.cli.screen import Screen, talk
from kiwi_mcp.surfaces.cli.session import CliSession, request_of

if TYPE_CHECKING:
    from kiwi_mcp.surfaces.cli.rows import CommandRow


_ITEM_TYPES = ("tool", "directive", "knowledge", "skill")
_AFTERWARDS, _LONGEST_WAIT = 60.0, 300.0
"""For how many seconds the index is completed after an answer, and before one that is waited for."""
OWNER = Caller(is_owner=True)
_LOOK = 0.5
"""How often questions are looked for, in seconds."""
_OWN = "Yes signs it and runs it. No runs it in the strictest sandbox, without network and without your files."
_PARTIAL = "`kiwi search … --wait` waits until all is indexed; `kiwi serve` and `kiwi up` do it in the background."


def send(row: CommandRow, options: JsonObject) -> int:
    """Send the request of a command, and show the answer."""
    return CliSession(options).tell(row, request_of(row, options))


def init(row: CommandRow, options: JsonObject) -> int:
    """Create the `.ai` folder of the folder that was named."""
    cli = CliSession(options, project=here() / as_text(options.get("folder")))
    return cli.tell(row, request_of(row, options))


def run(row: CommandRow, options: JsonObject) -> int:
    """Run a tool, with its parameters read by its own schema; on a terminal, offer to sign a new file first."""
    cli, is_yes = CliSession(options), bool(options.get("yes"))
    questions = prompts.owner_prompt(is_yes=is_yes)

    async def work() -> int:
        async with cli.opened() as kernel:
            request = {**request_of(row, options), **call_parameters(options, kernel)}
            if questions is not no_answers and not is_yes and not options.get("dry_run"):
                item = kernel.unsigned_item(as_text(request["item_id"]), as_text(request.get("item_type")) or None)
                question = f"{item.files} is new and unsigned: is it yours?\n{_OWN}" if item else ""
                if item and await prompts.is_confirmed(question, questions):
                    shown: JsonObject = {"digest": item.digest}
                    sign: JsonObject = {"action": "sign", "item_id": item.identity, "parameters": shown}
                    signed = await cli.send(kernel, "execute", sign)
                    if signed.is_error:
                        return cli.show(signed, by_wire(("execute", "sign")))
            answer = await cli.send(kernel, "execute", request, questions)
        return cli.show(answer, by_wire(row["wire"]), is_raw=bool(options.get("raw")))

    return session.run(work())


def setup(row: CommandRow, options: JsonObject) -> int:
    """Set up clients; without `--yes` a person has to be there to answer."""
    questions = prompts.owner_prompt(is_yes=False)
    if not (options.get("yes") or options.get("undo")) and questions is no_answers:
        raise UsageError(
            "`kiwi setup` asks you something, and there is no terminal.", "Add `--yes`, or use a terminal."
        )
    return CliSession(options).tell(row, request_of(row, options), questions=questions)


def why(row: CommandRow, options: JsonObject) -> int:
    """Explain a call, with its parameters read as those of a run."""
    cli = CliSession(options)

    async def work() -> Answer:
        async with cli.opened() as kernel:
            request = {**request_of(row, options), **call_parameters(options, kernel)}
            return await cli.send(kernel, "execute", request)

    return cli.show(session.run(work()), by_wire(row["wire"]))


def call_parameters(options: JsonObject, kernel: Kernel) -> JsonObject:
    """Return the parameters of a call, read by the schema of its item, as a part of its request."""
    given = as_object(options.get("params", {}))
    if words := [as_text(word) for word in as_list(options.get("parameters"))]:
        schema = kernel.parameters_of(as_text(options["item_id"]), as_text(options.get("item_type")) or None)
        given = {**given, **from_words(words, schema)}
    return {"parameters": given}


def search(row: CommandRow, options: JsonObject) -> int:
    """Search, show the results, and complete the index meanwhile if a person is there."""
    cli, request = CliSession(options), {**request_of(row, options)}
    is_waiting = bool(options.get("wait"))
    is_shown = False
    request["query"] = " ".join(map(as_text, as_list(options.get("query"))))
    if (kind := as_text(options.get("item_type"))) not in ("", *_ITEM_TYPES):  # a type of tools
        del request["item_type"]
        request.setdefault("tool_type", [kind])

    async def work() -> int:
        nonlocal is_shown
        async with cli.opened() as kernel:
            answer = await cli.send(kernel, "search", request)
            if is_waiting and "indexing" in answer.content:
                await _index(cli, kernel, _LONGEST_WAIT)
                answer = await cli.send(kernel, "search", request)
            code = cli.show(answer, by_wire(("search",)))
            is_shown = True
            if not cli.is_json and "indexing" in answer.content:
                if sys.stderr.isatty() and not is_waiting:
                    await _index(cli, kernel, _AFTERWARDS)
                else:
                    talk(f"hint: {_PARTIAL}")
            return code

    try:
        return session.run(work())
    except KeyboardInterrupt:
        if not is_shown:
            raise
        return 0  # the answer is there; only the rest of the index was stopped


async def _index(cli: CliSession, kernel: Kernel, seconds: float) -> None:
    with session.reporting("indexing", is_quiet=cli.is_json) as report:

        def count(step: Progress) -> None:
            report(Progress(f"indexing {step.done:,.0f} of {step.total:,.0f}; Ctrl-C stops, what is done is kept"))

        await kernel.index(count, seconds=seconds)


def create(row: CommandRow, options: JsonObject) -> int:
    """Create an item from one file, from a manifest with files, from parameters, or many from an OpenAPI document."""
    if not {"tool_type", "manifest", "files", "content", "params", "openapi"} & {*options}:
        raise InvalidRequest(
            "There is nothing to create it from.",
            suggestion="Add `--content FILE` (one file that is the whole item), or `--manifest FILE` with `--file` for "
            "each of its files; `kiwi help create` shows both.",
        )
    plain = _only(options, "tool_type", "executor", "description", "category", "location")
    parameters = {**as_object(options.get("params", {})), **plain}
    if "openapi" in options:
        parameters |= {"openapi": _text(options, "openapi"), **_only(options, "prefix", "base_url", "only")}
        if bearer := as_text(options.get("bearer")):
            parameters["auth"] = {"type": "bearer", "token": f"${{{bearer}}}"}
    files = as_object(options.get("files", {}))
    whole = "content" if "content" in options else "manifest" if "manifest" in options and not files else ""
    if whole:
        parameters |= {"content": _text(options, whole), "filename": as_object(options[whole])["name"]}
    elif files and "manifest" in options:
        parameters["files"] = {**files, "tool.yaml": _text(options, "manifest")}
    elif files:
        start_values: JsonObject = {"version": "1.0.0", "config": {"entrypoint": next(iter(files))}}
        parameters = {**start_values, **parameters, "files": files}
    return _author(row, options, parameters)


def update(row: CommandRow, options: JsonObject) -> int:
    """Change an item: keys of its manifest, files, or its whole text."""
    parameters = {**as_object(options.get("params", {})), **_only(options, "files", "location")}
    if "content" in options:
        parameters["content"] = _text(options, "content")
    return _author(row, options, parameters)


def _author(row: CommandRow, options: JsonObject, parameters: JsonObject) -> int:
    own = _only(options, "item_id", "item_type", "dry_run")
    return CliSession(options).tell(row, {"action": row["wire"][1], **own, "parameters": parameters})


def _only(options: JsonObject, *names: str) -> dict[str, Json]:
    return {name: options[name] for name in names if name in options}


def _text(options: JsonObject, name: str) -> str:
    return as_text(as_object(options[name]).get("text"))


def validate(row: CommandRow, options: JsonObject) -> int:
    """Validate a file, a folder or an item."""
    if "item_id" not in options:
        usage = f"`kiwi {row['path']} --help` shows how it is used."
        raise UsageError("The following arguments are required: FILE|ITEM.", usage)
    name = as_text(options["item_id"])
    path = Path(name)
    if path.exists():
        folder = None if "project" in options else nearest_project(path.absolute().parent)
        request: JsonObject = {"action": "validate", "parameters": {"path": str(path.absolute())}}
        return CliSession(options, project=folder).tell(row, request)
    if "/" in name or path.suffix:
        raise NotFound(f"{name} does not exist.", suggestion="Check the path, or give an item's name.")
    return send(row, options)


def pull(row: CommandRow, options: JsonObject) -> int:
    """Pull one version; a remote's name or place is answered with the command that pulls everything from it."""
    item = as_text(options["item_id"])
    if "://" in item or item.startswith(("./", "../", "/", "~")) or item in registry_settings(user_space()).remotes:
        suggestion = f"`kiwi registry remote pull {item}` copies from it what is missing here."
        raise InvalidRequest(f"`kiwi registry pull` takes an item, and {item!r} is a remote.", suggestion=suggestion)
    return CliSession(options).tell(row, request_of(row, options), questions=prompts.owner_prompt(is_yes=False))


def add_server(row: CommandRow, options: JsonObject) -> int:
    """Add an MCP server; the words after `--` are its command."""
    request = request_of(row, options)
    if words := as_list(options.get("command", [])):
        request |= {"command": words[0], "args": [*words[1:]]}
    return CliSession(options).tell(row, request)


def import_servers(row: CommandRow, options: JsonObject) -> int:
    """Import servers; on a terminal, ask once what those without a network may reach."""
    cli = CliSession(options)
    answer = cli.call("mcp", request_of(row, options))
    code = cli.show(answer, by_wire(row["wire"]))
    for server, hosts in prompts.ask_network(map(as_object, as_list(answer.content.get("servers")))).items():
        granted = cli.call("mcp", {"action": "allow", "server": server, "hosts": [*hosts]})
        code = cli.show(granted, by_wire(("mcp", "allow"))) or code
    return code


def login(row: CommandRow, options: JsonObject) -> int:
    """Log in to a server, in a browser if there is one."""
    questions = prompts.show_address if options.get("no_browser") else prompts.open_address
    return CliSession(options).tell(row, request_of(row, options), questions=questions)


def approve(row: CommandRow, options: JsonObject) -> int:
    """Approve a call, and make it at once if that was asked for; without a number, the newest after a confirmation."""
    cli, request = CliSession(options), request_of(row, options)
    if options.get("server"):
        request["always"] = "this server"
    if "approval_id" not in request:
        if prompts.owner_prompt(is_yes=False) is no_answers:
            raise UsageError(
                "`kiwi approvals approve` needs the number of a question where there is no terminal.",
                "`kiwi approvals list` shows what waits.",
            )
        newest = as_list(cli.call("approvals", {"action": "list", "limit": 1}).content.get("approvals"))
        if not newest:
            talk("Nothing waits for you.")
            return 0
        request["approval_id"] = as_text(as_object(newest[0])["approval_id"])
        shown = cli.call("approvals", {"action": "show", "approval_id": request["approval_id"]})
        if not prompts.confirm(as_text(shown.content.get("preview")), is_yes=False):
            talk("It was not approved, and still waits.")
            return Denied.exit_code
    if not options.get("run"):
        return cli.tell(row, request)
    answer = cli.call("approvals", request)
    again = as_object(answer.content.get("request"))
    if answer.is_error or not again:
        if not answer.is_error:  # only its caller can make it, or its parameters are not stored
            talk("hint: It was not run. The caller has to make the same call again.")
        return cli.show(answer, by_wire(row["wire"]))
    talk(as_text(answer.content.get("preview")))
    return cli.show(cli.call("execute", {"action": "run", **again}), by_wire(("execute", "run")))


def watch_approvals(_: CommandRow, options: JsonObject) -> int:
    """Show questions as they come, and answer them on a terminal, until Ctrl-C."""
    cli = CliSession(options)
    can_answer = prompts.owner_prompt(is_yes=False) is not no_answers

    async def work() -> int:
        seen: set[str] = set()
        async with cli.opened() as kernel:
            while not (listed := await kernel.call("approvals", {"action": "list"}, OWNER)).is_error:
                waiting = [as_text(as_object(one)["approval_id"]) for one in as_list(listed.content["approvals"])]
                for approval in reversed([one for one in waiting if one not in seen]):
                    seen.add(approval)
                    shown = (await kernel.call("approvals", {"action": "show", "approval_id": approval}, OWNER)).content
                    Screen().data(f"\nquestion {shown['number']}\n{as_text(shown.get('preview'))}")
                    answers = tuple(map(as_text, as_list(shown.get("answers"))))
                    if can_answer and (request := await prompts.approval_answer(answers)):
                        answered = await kernel.call("approvals", {**request, "approval_id": approval}, OWNER)
                        talk(as_text(answered.content.get("message")))
                await asyncio.sleep(_LOOK)
            return cli.show(listed, None)

    return session.run(work())


def set_secret(row: CommandRow, options: JsonObject) -> int:
    """Store a secret, or another value of it; the value is never an argument."""
    request = request_of(row, options)
    if not options.get("keep"):
        request["value"] = prompts.read_secret(as_text(options["name"]))
    return CliSession(options).tell(row, request)


def forget(row: CommandRow, options: JsonObject) -> int:
    """Forget past searches; all of them only after a confirmation."""
    question = "Delete everything that search learned from use?"
    if "item" not in options and not prompts.confirm(question, is_yes=bool(options.get("yes"))):
        talk("Nothing was forgotten.")
        return Denied.exit_code
    return send(row, options)


def export_receipts(row: CommandRow, options: JsonObject) -> int:
    """Write all receipts, one line of JSON each."""
    cli, screen = CliSession(options), Screen(is_raw=True)
    following: Json = options.get("after", 0)
    while following is not None:
        answer = cli.call("audit", {"action": "export", "after": following})
        if answer.is_error:
            return cli.show(answer, by_wire(row["wire"]))
        for receipt in as_list(answer.content["receipts"]):
            screen.data(compact(as_object(receipt)))
        following = answer.content["next"]
    return 0


def call(_: CommandRow, options: JsonObject) -> int:
    """Send a verb exactly the JSON that was given."""
    cli, verb = CliSession(options, is_json=True), as_text(options["verb"])
    return cli.show(cli.call(verb, as_object(options.get("request", {}))), None)


def serve(_: CommandRow, options: JsonObject) -> int:
    """Serve MCP over standard input and output."""
    start.serve(as_text(options.get("project")))
    return 0


def serve_memory(_: CommandRow, _options: JsonObject) -> int:
    """Serve the memory over standard input and output."""
    start.load("mcp.memory_server").run()
    return 0


def version(_: CommandRow, options: JsonObject) -> int:
    """Print the version."""
    if options.get("json"):
        Screen().json({"version": __version__})
    else:
        Screen().data(__version__)
    return 0
