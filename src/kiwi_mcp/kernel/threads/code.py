"""Code mode: a thread that follows a program which a model wrote, and not the model itself.

A segment of the program ends where it waits for calls. They are stored as a reply of a model is, with a snapshot of
the program, and made as any call of a thread. So a program survives its process, and may wait for days.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib

from msgspec import to_builtins

from kiwi_mcp.domain.calls import Call
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, LeaseLost, NotFound, PolicyDenied, ToolNotFound
from kiwi_mcp.domain.grants import Deny
from kiwi_mcp.domain.json import Json, JsonObject, as_text, compact
from kiwi_mcp.domain.messages import TextPart, ToolCallPart
from kiwi_mcp.domain.threads import NewEvent, ThreadChanges
from kiwi_mcp.drivers.code.process import ProgramAnswer, open_program
from kiwi_mcp.kernel.context import Context
from kiwi_mcp.kernel.permission import ItemVisibility
from kiwi_mcp.kernel.pipeline import callable_chain
from kiwi_mcp.kernel.threads.hooks import at_limit
from kiwi_mcp.kernel.threads.results import value_of
from kiwi_mcp.kernel.threads.start import CODE, CodeProgram
from kiwi_mcp.kernel.threads.work import NEXT, Step, ThreadWork, end
from kiwi_mcp.manifest.stubs import identifier, prelude_of, stubs_of

_NAMED = re.compile(r"(?<![\w.])tools((?:\.[A-Za-z_]\w*){1,4})", re.ASCII)
_MOST_ITEMS = 50
_MOST_PRINTED = 20_000
_LARGEST_SNAPSHOT, _LARGEST_RESULT = 1_500_000, 1_000_000
_INVALID = "Nothing ran. The program does not fit its tools:\n"


def read_program(code: str, items: list[str], run: str, context: Context) -> CodeProgram:
    """Return a program with the items that it may call: those that are named beside it or in it, and permitted."""
    # In programs, `github/create-issue` is `github.create_issue`.
    found = {".".join(map(identifier, one.partition("@")[0].split("/"))): one for one in items}
    for named in dict.fromkeys(_NAMED.findall(code)):
        path = named[1:].split(".")
        prefixes = [".".join(path[:size]) for size in range(1, len(path) + 1)]
        if not any(prefix in found for prefix in prefixes):
            found |= _looked_up(prefixes, context)
    if len(found) > _MOST_ITEMS:
        raise InvalidRequest(f"The program names {len(found)} items.", suggestion=f"Use at most {_MOST_ITEMS}.")
    visible = ItemVisibility(context.catalog, lambda: context.rights)
    declared: dict[str, tuple[str, JsonObject, JsonObject]] = {}
    targets: dict[str, str] = {}
    for name, reference in found.items():
        chain = callable_chain(Call(reference, context.space), context)
        tool, manifest = chain.tool, chain.tool.manifest
        if visible.is_hidden(tool.identity):
            raise ToolNotFound(reference)
        is_for_models = as_text(manifest.config.get("verb")) in {"thread_tools", "code_tools"}
        if is_for_models or tool.identity.partition("@")[0] == CODE:
            raise PolicyDenied(f"A program cannot call {tool.id!r}.", suggestion="Call it outside of a program.")
        verdict = context.rights.item_verdict([link.identity for link in chain.links], chain.item_traits)
        if isinstance(verdict, Deny):
            raise PolicyDenied(
                f"{tool.id!r} is not permitted: {verdict.reason}.", suggestion="Leave it out.", tool_id=tool.id
            )
        declared[name] = (manifest.description, manifest.parameters, manifest.outputs)
        targets[name] = tool.identity
    return CodeProgram(code, targets, stubs_of(declared), run)


def _looked_up(prefixes: list[str], context: Context) -> dict[str, str]:
    """Return the item that a dotted name in a program means, the longest first; the type check names unknown ones."""
    for name in reversed(prefixes):
        path = name.replace(".", "/")
        for reference in dict.fromkeys((path, path.replace("_", "-"))):
            try:
                context.catalog.find(reference)
            except NotFound:
                continue
            return {name: reference}
    return {}


async def next_segment(work: ThreadWork) -> Step:
    """Run the program to its next calls or to its end."""
    if work.thread.usage.turns >= work.thread.limits.turns:
        return await at_limit(work, "turns")
    if work.seconds() >= work.thread.limits.seconds:
        return await at_limit(work, "duration")
    try:
        answer = await _run_segment(work)
    except LeaseLost:
        raise
    except KiwiError as error:
        return await end(work, "failed", "error", code=error.code, message=f"{error.message} {error.suggestion}")
    printed = f"{work.state.text}{answer.printed}"[:_MOST_PRINTED]
    if answer.calls:
        snapshot = _packed(answer.snapshot)
        if len(snapshot) <= _LARGEST_SNAPSHOT:
            calls = [ToolCallPart(str(number), name, compact(arguments)) for number, name, arguments in answer.calls]
            parts = to_builtins([*([TextPart(printed)] if printed else []), *calls])
            body: JsonObject = {"parts": parts, "stop": "calls", "model": "", "snapshot": snapshot}
            await work.append(NewEvent("model", body), changes=ThreadChanges(turns=1))
            return NEXT
        answer = ProgramAnswer(failed="MemoryError: the program holds too much to be stored. Keep only what you need.")
    result: dict[str, Json] = {"printed": printed} if printed else {}
    if answer.invalid:
        return await _fail(work, "invalid_program", f"{_INVALID}{answer.invalid}", result)
    if answer.failed:
        return await _fail(work, "program_failed", f"The program failed.\n{answer.failed}", result)
    if len(compact(answer.value)) > _LARGEST_RESULT:
        return await _fail(work, "too_large", "The result of the program is too large: return less.", result)
    return await end(work, "completed", "stop", result={"value": answer.value, **result})


async def _fail(work: ThreadWork, code: str, message: str, result: JsonObject) -> Step:
    return await end(work, "failed", "error", result=result or None, code=code, message=message)


async def _run_segment(work: ThreadWork) -> ProgramAnswer:
    """Start the program, or continue it with the results of its calls: from its snapshot in a new process."""
    state, start = work.state, work.start
    results: JsonObject = {call_id: value_of(part) for call_id, part in state.results.items()}
    if work.program is not None:
        return await work.program.ask({"results": results})
    request: JsonObject = {"stubs": start.system, "prelude": prelude_of(start.targets)}
    if state.model_seq:
        stores, thread = work.stores, work.thread
        if found := await stores.do(lambda: stores.threads.verify(thread.id)):
            raise PolicyDenied(
                f"The journal of the program was changed: {found[0].place}: {found[0].reason}.",
                suggestion="Start the program again.",
            )
        events = await stores.do(lambda: stores.threads.events(thread.id, state.model_seq - 1))
        packed = base64.b64decode(as_text(events[0].body.get("snapshot")))
        snapshot = zlib.decompressobj().decompress(packed, _LARGEST_SNAPSHOT * 20)
        request = {"snapshot": base64.b64encode(snapshot).decode(), "results": results}
    else:
        request = {**request, "code": start.first, "inputs": work.thread.inputs}
    process = work.program = await work.resources.enter_async_context(open_program(work.catalog.space))
    return await process.ask(request)


def _packed(snapshot: str) -> str:
    try:
        return base64.b64encode(zlib.compress(base64.b64decode(snapshot, validate=True), 1)).decode()
    except (binascii.Error, ValueError):  # the process of the program is not trusted
        return " " * (_LARGEST_SNAPSHOT + 1)
