"""Permitting: whether somebody may ask what they ask, before anything is looked up for them."""

from __future__ import annotations

from collections.abc import Callable

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.errors import InvalidManifest, KiwiError, PolicyDenied, ToolNotFound
from kiwi_mcp.domain.grants import Deny, Rights
from kiwi_mcp.domain.identity import OWNER, Identity
from kiwi_mcp.kernel.requests import ExecuteRequest, LoadRequest, McpRequest, RegistryRequest, Request
from kiwi_mcp.policy.authority import Authority, judge
from kiwi_mcp.policy.deployment import refuse_unlisted

_LOOKING = frozenset({"search", "load", "help", "doctor"})
"""What the owner may ask while the policy cannot be read, so as to find out why nothing runs."""


def permit_verb(authority: Authority, identity: Identity, verb: str, request: Request) -> None:
    """Refuse a verb that is not for whoever asks."""
    action = getattr(request, "action", "")
    try:
        verdict = judge(authority, identity, f"{verb}.{action}" if action else verb, "verb")
    except InvalidManifest:
        if identity == OWNER and verb in _LOOKING:
            return
        raise
    if isinstance(verdict, Deny):
        raise PolicyDenied(
            f"This may not be asked: {verdict.reason}.",
            suggestion="Ask the owner: the rule stands in the policy.yaml of the user space.",
            rule=verdict.rule,
            grant=verdict.grant,
        )


def demand_rules(caller: Caller, rights: Callable[[], Rights]) -> None:
    """Refuse whoever is not the owner where the rules, which may hide things from them, cannot be read."""
    if caller.name:
        rights()


def named_item(request: Request) -> str:
    """Return the item that a request is about; empty where it names none, or one that is still to be made."""
    match request:
        case LoadRequest(item_type="output") | ExecuteRequest(action="create" | "validate"):
            return ""
        case LoadRequest(item_id=name):
            return name
        case ExecuteRequest(item_id=name):
            return name or ""
        case _:
            return ""


def refuse_hidden(rights: Rights, request: LoadRequest | ExecuteRequest, asked: str, catalog: Catalog) -> None:
    """Refuse an item that whoever asks is not to know of, just as if it were not there.

    One that is to be read and that this machine does not have on its list is refused as such.
    """
    is_read = isinstance(request, LoadRequest)
    hiding = [grant for grant in rights.grants if grant.is_secretive or (grant.is_whole and is_read)]
    if not hiding:
        return
    try:
        identity = catalog.find(asked, source=request.source if isinstance(request, LoadRequest) else None).identity
    except ToolNotFound:
        # Without the names that are like it: they may be of items that are hidden as well.
        raise ToolNotFound(asked) from None
    except KiwiError:
        return
    for grant in hiding:
        verdict = grant.verdict("item", identity)
        if isinstance(verdict, Deny) and grant.is_secretive and not verdict.rule:
            raise ToolNotFound(asked)
        if isinstance(verdict, Deny) and grant.is_whole:
            raise PolicyDenied(
                f"It is not loaded: {verdict.reason}.",
                suggestion="Ask whoever runs this machine to add it to its list.",
                tool_id=asked,
                rule=verdict.rule,
            )


def refuse_bringing(request: Request) -> None:
    """Refuse to bring an item to a machine that does not have it on its list."""
    match request:
        case ExecuteRequest(action="create", item_id=name, parameters=words):
            manifest = words.get("manifest")
            inner = manifest if isinstance(manifest, dict) else {}
            tool_id = name or inner.get("tool_id") or words.get("tool_id") or words.get("prefix") or "*"
            version = words.get("version") or inner.get("version") or "*"
            refuse_unlisted(f"{words.get('location', 'project')}/local/{tool_id}@{version}")
        case ExecuteRequest(action="pull", item_id=str(name)):
            refuse_unlisted(f"registry/{name.removeprefix('registry/')}{'' if '@' in name else '@*'}")
        case LoadRequest(destination=str(place), item_id=name):
            refuse_unlisted(f"{place}/local/{name.partition('@')[0].rpartition('/')[2]}@*")
        case RegistryRequest(action="pull"):
            refuse_unlisted(f"registry/{request.only or '*'}/*@*")
        case McpRequest(action="add" | "import"):
            refuse_unlisted(f"{request.location or 'project'}/local/{request.server or '*'}@*")
