"""How answers tell of servers and of what they offer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_text, text_of
from kiwi_mcp.domain.mcp import Definition, ServerRecord, State, plain
from kiwi_mcp.drivers.packages import packaged

SHOWN = 1_000
"""How many of the things that a server offers are told at once."""
_LINE = 200


def server_told(server: Tool, record: ServerRecord | None, counts: Mapping[State, int]) -> JsonObject:
    """Return a server as answers tell of it, and how much of what it offers is in each state."""
    states: tuple[State, ...] = ("accepted", "changed", "new", "gone")
    told: dict[str, Json] = {
        "server": server.id,
        "identity": server.identity,
        "transport": as_text(server.manifest.config.get("transport")),
        "path": str(server.origin.path),
        **({"needs": needs} if (needs := server.manifest.needs.to_json()) else {}),
        "states": {state: counts[state] for state in states if counts.get(state)},
    }
    if record is not None and record.digest != server.digest:
        told["notice"] = unaccepted(server)
    if record is None or not (record.seen_at or record.fault):
        return {**told, "status": "never asked"}
    about: dict[str, Json] = {
        "status": "changed" if "notice" in told else "down" if record.fault else "known",
        "version": record.version,
        "protocol_version": record.protocol_version,
        "seen_at": record.seen_at,
    }
    return {**told, **about, **({"fault": record.fault, "fault_at": record.fault_at} if record.fault else {})}


def package_told(server: Tool, space: Space) -> JsonObject:
    """Return which version of a package a server is started from; nothing where it is from none, or not yet."""
    config = server.manifest.config
    words = [text_of(word) for word in as_list(config.get("args"))]
    found = packaged(as_text(config.get("command")), words, space.cache)
    pin = found[0].pin if found else {}
    return {"package": pin} if pin else {}


def unaccepted(server: Tool) -> str:
    """Return that a server's manifest is not the one that was accepted, and what follows from that."""
    return (
        f"the manifest of {server.id} changed since it was accepted: nothing of it runs before "
        f"`kiwi mcp accept {server.id}` (`kiwi mcp diff {server.id}` shows what changed)"
    )


def looking(server: str, known: Sequence[Definition]) -> JsonObject:
    """Return what to type next where things wait to be accepted."""
    return {"next": f"`kiwi mcp diff {server}` shows what they are."} if waiting(known) else {}


def items_told(known: Sequence[Definition]) -> list[Json]:
    """Return what a server offers as answers tell of it."""
    return [
        {
            "tool_id": one.tool_id,
            "kind": one.kind,
            "name": one.name,
            "state": one.state,
            "description": plain(as_text(one.shown.get("description"))).partition("\n")[0][:_LINE],
        }
        for one in known[:SHOWN]
    ]


def counted(known: Sequence[Definition]) -> str:
    """Return how many things of each kind are offered, in words."""
    counts = Counter(one.kind for one in known if one.state != "gone")
    return ", ".join(f"{count} {kind}{'s' * (count != 1)}" for kind, count in counts.items()) or "nothing is offered"


def waiting(known: Sequence[Definition]) -> str:
    """Return how many things wait to be accepted, in words; nothing where none do."""
    counts = Counter(one.state for one in known)
    waiting = [f"{counts[state]} {state}" for state in ("changed", "new") if counts[state]]
    return f"; not usable before they are accepted: {', '.join(waiting)}" if waiting else ""


def warned(warnings: Sequence[Json]) -> JsonObject:
    """Return the words of an answer that warn, where there is anything to warn of."""
    return {"warnings": list(warnings)} if warnings else {}
