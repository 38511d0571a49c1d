"""What a step of a thread leads to: the next step, a wait or the end."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.threads import FinishReason, NewEvent, ThreadChanges, ThreadStatus, WaitReason
from kiwi_mcp.kernel.threads.work import ThreadWork
from kiwi_mcp.store.threads import JournalGrew


class Continue(Struct, frozen=True):
    """There is a next step."""

    is_next: bool = True


class Wait(Struct, frozen=True):
    """The thread waits; nothing of it runs until something happens."""

    reason: WaitReason
    is_next: bool = False


class End(Struct, frozen=True):
    """The thread has ended."""

    status: ThreadStatus
    is_next: bool = False


Step: TypeAlias = Continue | Wait | End
NEXT = Continue()
_NO_CHANGES = ThreadChanges()


async def end(
    work: ThreadWork,
    status: ThreadStatus,
    reason: FinishReason,
    *,
    result: Json = None,
    code: str = "",
    message: str = "",
    is_next: bool = False,
) -> End:
    """Append the end of a thread. One that stops early keeps the text of its last reply as a partial result."""
    given = result if result is not None else (work.state.text or None)
    body: JsonObject = {"status": status, "finish_reason": reason, "code": code, "message": message, "result": given}
    changes = ThreadChanges(status=status, result=given, finish_reason=reason, code=code, message=message)
    await work.append(NewEvent("ended", body), changes=changes, is_next=is_next)
    return End(status)


async def complete(work: ThreadWork, result: Json) -> Step:
    """End a thread with its result, unless a message came at the last moment: then there is a next step."""
    try:
        return await end(work, "completed", "stop", result=result, is_next=True)
    except JournalGrew:
        await work.sync()
        return NEXT


async def pause(work: ThreadWork) -> Wait:
    """Pause a thread until the owner resumes it."""
    await work.append(NewEvent("limit", {"paused": True}), changes=ThreadChanges(status="paused"))
    return Wait("")


async def wait_for(
    work: ThreadWork,
    reason: WaitReason,
    *events: NewEvent,
    made: ThreadChanges = _NO_CHANGES,
    is_next: bool = False,
) -> Wait:
    """Let a thread wait for something that was asked or started before, or for a message."""
    wake_at = work.state.wake_at if reason == "child" else 0
    changes = replace(made, status="waiting", waits_for=reason, wake_at=wake_at)
    await work.append(*events, NewEvent("asked", {"waits_for": reason}), changes=changes, is_next=is_next)
    return Wait(reason)


async def wait_for_message(work: ThreadWork) -> Step:
    """Let a conversation wait for its next message, unless one has come."""
    try:
        return await wait_for(work, "message", is_next=True)
    except JournalGrew:
        await work.sync()
        return NEXT


async def unless_continued(
    work: ThreadWork, key: str, kind: Literal["ask", "budget", "loop"], message: str, *, limit: str
) -> Wait | End | None:
    """Ask the owner whether to continue; return None if they said so, else the wait or the end of the thread."""
    match await work.confirm(key, kind, message):
        case "continue":
            return None
        case "asked":
            return Wait("budget" if kind == "budget" else "question")
        case "stop":
            return await stop_at(work, limit, "The owner did not let it continue.")


async def stop_at(work: ThreadWork, limit: str, message: str = "") -> End:
    """End a thread at a limit with what it has so far."""
    await work.append(NewEvent("limit", {"limit": limit}))
    text = message or f"The limit `{limit}` is reached."
    return await end(work, "exhausted", "limit", code=f"{limit}_exceeded", message=text)
