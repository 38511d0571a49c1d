"""Why: what a call stands on, where each variable comes from, and whether it would run."""

from __future__ import annotations

from collections.abc import Callable

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.call import Call
from kiwi_mcp.domain.errors import InvalidArguments, KiwiError
from kiwi_mcp.domain.grants import Grant
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.kernel.pipeline import driver_of, lock_changes, prepare
from kiwi_mcp.manifest.render import defaulted, variables
from kiwi_mcp.primitives.secrets import Variables


def explain_call(call: Call, catalog: Catalog, grant: Grant) -> JsonObject:
    """Return the chain, its versions and digests, the origin of every variable, and each reason not to run."""
    told: dict[str, Json] = {"tool_id": call.tool_id, "action": "why"}
    try:
        chain = catalog.resolve(call.tool_id)
    except KiwiError as error:
        return {**told, "would_run": False, "reasons": [_reason(error)], **error.details}
    # What a tool says itself, and what the links below it put into a process.
    below = [link.manifest.config.get("env") for link in chain.links[1:]]
    templates: Json = [chain.tool.manifest.config, *below]
    names, spare = variables(templates), defaulted(templates)
    found = Variables().locate(names, project=call.space.project, user=call.space.user)
    reasons = [*_refusals(lambda: prepare(call, catalog, grant)), *_refusals(lambda: driver_of(chain))]
    reasons += [
        {
            "code": "variable_missing",
            "message": f"${{{name}}} is set nowhere.",
            "suggestion": f"Set {name}, or add it to .env.",
        }
        for name, place in found.items()
        if place is None and name not in spare
    ]
    # Without parameters the question is about the tool, and missing ones are no reason.
    if not call.parameters:
        reasons = [reason for reason in reasons if reason["code"] != InvalidArguments.code]
    return {
        **told,
        "tool_id": chain.tool.id,
        "identity": chain.tool.identity,
        "driver": chain.driver,
        "chain": chain.to_json(),
        "variables": {name: place or None for name, place in found.items()},
        "lockfile": list(lock_changes(chain, call)),
        "shadowed": list(chain.shadowed),
        "would_run": not reasons,
        "reasons": _distinct(reasons),
    }


def _refusals(gate: Callable[[], object]) -> list[JsonObject]:
    try:
        gate()
    except KiwiError as error:
        return [_reason(error)]
    return []


def _reason(error: KiwiError) -> JsonObject:
    return {"code": error.code, "message": error.message, "suggestion": error.suggestion}


def _distinct(reasons: list[JsonObject]) -> list[JsonObject]:
    return [reason for place, reason in enumerate(reasons) if reason not in reasons[:place]]
