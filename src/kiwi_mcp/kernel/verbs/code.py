"""The verb behind the item `code`: it starts a program as a thread of its own and waits for it."""

from __future__ import annotations

from msgspec import field

from kiwi_mcp.domain.errors import InvalidProgram, PolicyDenied
from kiwi_mcp.domain.json import as_list, as_object, as_text
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.threads.code import read_program
from kiwi_mcp.kernel.threads.runner import ThreadRunner
from kiwi_mcp.kernel.threads.start import CODE, StartRequest
from kiwi_mcp.kernel.verb import ANYONE, AnyJson, Request, verb
from kiwi_mcp.kernel.verbs.thread import AwaitedThread, ThreadResponse, is_tainted, run_here, shown_thread, start_child


class ProgramRequest(Request, frozen=True, kw_only=True):
    """The arguments of the item `code`."""

    arguments: dict[str, AnyJson] = field(default_factory=dict)
    project_path: str | None = None


@verb("run", group="code", wire=("code_tools", "run"), access=ANYONE, records=False)
async def run_program(request: ProgramRequest, context: VerbContext) -> ThreadResponse:
    """Run a program until it ends or waits."""
    services, caller, given = context.services, context.caller, request.arguments
    if not caller.origin.run:
        raise PolicyDenied("Only the item `code` can call this.", suggestion="`kiwi run code`, or `help code`.")
    own = services.context(caller, services.catalogs.at(request.project_path))
    items = [as_text(one) for one in as_list(given.get("items"))]
    program = read_program(as_text(given.get("code")), items, caller.origin.run, own)
    wanted = StartRequest(CODE, as_object(given.get("inputs")), program=program)
    if caller.origin.thread:
        response = await start_child(wanted, context, is_waiting=True)
    else:
        made, _ = await services.one(ThreadRunner).create(wanted, own, is_tainted=is_tainted(context), is_own=True)
        await run_here(made.id, context)
        response = await shown_thread(made.id, context, AwaitedThread)
    if response.code == "invalid_program":
        raise InvalidProgram(str(response.message))
    return response
