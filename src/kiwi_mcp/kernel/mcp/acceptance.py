"""Acceptance: what waits to be accepted of a server, shown, and accepted as it was shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import InvalidRequest, NotFound
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_text
from kiwi_mcp.domain.mcp import MAX_DIFF, Definition, ServerRecord
from kiwi_mcp.domain.times import moment
from kiwi_mcp.kernel.mcp.pins import accepted
from kiwi_mcp.kernel.mcp.servers import fresh_record, key_of, server_named
from kiwi_mcp.kernel.mcp.told import unaccepted
from kiwi_mcp.kernel.mcp.words import difference, words_of
from kiwi_mcp.kernel.requests import McpRequest
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.manifest.nearby import nearby_host
from kiwi_mcp.store.definitions import Definitions, Known

_SHOWN = 1_000
_MAX_BYTES = 1_000_000
_SHORT = 12
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
"""What may follow a name, as NAME@DIGEST, to accept what was shown and nothing that came since."""


class Acceptance:
    """What is remembered of servers, held against what the owner says of it."""

    def __init__(self, remembered: Definitions) -> None:
        self._remembered = remembered

    def accept(self, request: McpRequest, catalog: Catalog) -> JsonObject:
        """Accept what a server offers anew or otherwise: all of it, or one item."""
        name, mark = _marked(request)
        server, before, known = self._meant(request.model_copy(update={"server": name}), catalog)
        if mark and not mark_of(server, known).startswith(mark):
            raise InvalidRequest(
                f"{server.id!r} offers something else than you looked at.",
                suggestion=f"Look at it again: `kiwi mcp diff {server.id}`.",
            )
        if request.tool and before is not None and before.digest != server.digest:
            raise InvalidRequest(
                f"The manifest of {server.id!r} changed, which concerns all that it offers.",
                suggestion=f"Look at it (`kiwi mcp diff {server.id}`). If it is right, `kiwi mcp accept {server.id}`.",
            )
        wanted = [one for one in known if one.state in {"new", "changed"}]
        names = frozenset(one.tool_id for one in wanted)

        def work(record: ServerRecord | None, current: Sequence[Definition]) -> Known:
            # What was offered anew since is not what the owner looked at.
            seen = {(one.kind, one.name): one.digest for one in wanted}
            same = {one.tool_id for one in current if seen.get((one.kind, one.name)) == one.digest}
            held = record or fresh_record(server, key_of(server, catalog.space))
            after = accepted(current, same, now=moment())
            if request.tool:  # whoever accepts one item has not looked at the manifest
                return held, after
            held = replace(held, digest=server.digest, accepts_first=False, words=words_of(server))
            return held, tuple(one for one in after if one.state != "gone" or (one.kind, one.name) not in gone)

        gone = {(one.kind, one.name) for one in known if one.state == "gone"}
        is_other = before is not None and before.digest != server.digest
        is_unsaid = not request.tool and (before is None or before.words != words_of(server))
        if (names or gone or is_other or is_unsaid) and not request.dry_run:
            self._remembered.change(key_of(server, catalog.space), work)
        done = "would be accepted" if request.dry_run else "accepted"
        count = len(wanted)
        also = f"the manifest of {server.id} and " if is_other else ""
        return {
            "action": "accept",
            "server": server.id,
            "status": "planned" if request.dry_run else "accepted",
            "message": f"{also}{count} item{'s' * (count != 1)} of {server.id} {done}{_reached(server, request)}",
            "accepted": sorted(names),
        }

    def diff(self, request: McpRequest, catalog: Catalog) -> JsonObject:
        """Show what differs between what a server offers and what was accepted of it."""
        server, record, known = self._meant(request, catalog)
        changes: list[Json] = [
            {
                "tool_id": one.tool_id,
                "kind": one.kind,
                "state": one.state,
                "digest": one.digest,
                "diff": one.difference_within(_MAX_BYTES if request.tool else MAX_DIFF, "name the item to see them"),
            }
            for one in known
            if one.state in {"new", "changed"}
        ]
        gone: list[Json] = [one.tool_id for one in known if one.state == "gone"]
        told: dict[str, Json] = {
            "action": "diff",
            "server": server.id,
            "changes": changes[:_SHOWN],
            "gone": gone[:_SHOWN],
        }
        if record is not None and record.digest != server.digest:
            told["warnings"] = [unaccepted(server)]
            told["manifest"] = difference(server, record)
        if changes or "warnings" in told:
            told["next"] = f"`kiwi mcp accept {_shown_as(server, known, request)}` accepts what is shown here."
        return {**told, "status": "differs" if changes or gone or "warnings" in told else "same"}

    def _meant(self, request: McpRequest, catalog: Catalog) -> tuple[Tool, ServerRecord | None, Sequence[Definition]]:
        """Return a server and what is known of it, or of the one item that is named."""
        server = server_named(named(request), catalog)
        key = key_of(server, catalog.space)
        known = self._remembered.of(key)
        if request.tool:
            wanted, _, mark = request.tool.rpartition("/")[2].partition("@")
            mine = [one for one in known if wanted == one.tool_id or request.tool == one.name]
            if mine and _DIGEST.fullmatch(mark) and not mine[0].digest.startswith(mark):
                raise InvalidRequest(
                    f"{server.id!r} offers {wanted!r} otherwise than you looked at.",
                    suggestion=f"Look at it again: `kiwi mcp diff {server.id} {wanted}`.",
                )
            if not mine:
                near = did_you_mean(wanted, [one.tool_id for one in known])
                raise NotFound(
                    f"{server.id!r} offers no {request.tool!r}.",
                    suggestion=f"{near}`kiwi mcp list {server.id}` shows what it offers.",
                )
            known = mine
        return server, self._remembered.find(key), known


def _reached(server: Tool, request: McpRequest) -> str:
    """Return at which address nearby a server may be reached by being accepted, in words."""
    host = "" if request.tool else nearby_host(as_text(server.manifest.config.get("url")))
    return f"; Kiwi may reach it at {host}" if host else ""


def named(request: McpRequest) -> str:
    """Return which server a request is about."""
    if not request.server:
        raise InvalidRequest("The request names no server.", suggestion="Send `server`; `kiwi mcp list` shows them.")
    return request.server


def _marked(request: McpRequest) -> tuple[str, str]:
    """Return which server is meant, and the mark of what its owner looked at, if one was given: NAME@MARK."""
    name, _, mark = named(request).rpartition("@")
    return (name, mark) if name and _DIGEST.fullmatch(mark) else (named(request), "")


def _shown_as(server: Tool, known: Sequence[Definition], request: McpRequest) -> str:
    """Return how what was shown is named, and nothing that came since."""
    if request.tool:
        return f"{server.id} {known[0].tool_id}@{known[0].digest[:_SHORT]}"
    return f"{server.id}@{mark_of(server, known)[:_SHORT]}"


def mark_of(server: Tool, known: Sequence[Definition]) -> str:
    """Return what stands for a server's manifest and all that waits to be accepted of it, as they are now."""
    waits = sorted(one.digest for one in known if one.state in {"new", "changed"})
    return sha256(" ".join((server.digest, *waits)).encode()).hexdigest()
