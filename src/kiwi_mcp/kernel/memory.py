"""The memory verb: what searches are remembered by, shown to whoever made them, and forgotten when they say so."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

from kiwi_mcp.domain.errors import InvalidRequest, PolicyDenied
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.trace import Trace
from kiwi_mcp.kernel.requests import MemoryRequest


class Listing(Protocol):
    """What is remembered, of each who searches apart."""

    def listed(self, actor: str) -> Sequence[Trace]:
        """Return what is remembered of somebody, the latest first."""

    def forget(self, actor: str, items: Sequence[str] | None = None) -> int:
        """Forget it, or what of it is about some items; return how many requests that was."""


def tell_memory(request: MemoryRequest, memories: Listing, actor: str, *, is_own: bool, is_wanted: bool) -> JsonObject:
    """Answer one request about what is remembered of an actor; the owner's is for their own hand alone."""
    if not is_own:
        message = "What is remembered of the owner's searches is theirs to see, and to forget."
        raise PolicyDenied(message, suggestion="Ask them to type `kiwi memory`.")
    traces = memories.listed(actor)
    meant = [trace for trace in traces if request.item is None or _is_called(trace, request.item)]
    if request.item is not None and not meant:
        raise InvalidRequest(
            f"Nothing is remembered of `{request.item}`.", suggestion="`kiwi memory` shows of which items something is."
        )
    if request.action == "list":
        rows = [_told(trace) for trace in meant[: request.limit]]
        return {"action": "list", "is_on": is_wanted, "total": len(meant), "remembered": rows}
    items = None if request.item is None else sorted({trace.item for trace in meant})
    count = memories.forget(actor, items)
    return {"action": "forget", "status": "forgotten", "forgotten": count, "message": _said(count)}


def _said(count: int) -> str:
    return f"{count} remembered request{'' if count == 1 else 's'} forgotten"


def _is_called(trace: Trace, name: str) -> bool:
    wanted = name.partition("@")[0]
    return trace.item == wanted or trace.item.endswith(f"/{wanted}")


def _told(trace: Trace) -> JsonObject:
    at = datetime.fromtimestamp(trace.at / 1_000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    told: JsonObject = {
        "request": trace.request,
        "item": trace.item,
        "used": "run" if trace.is_run else "load",
        "at": at,
    }
    return {**told, "project": trace.project} if trace.project else told
