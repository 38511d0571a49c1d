"""Request gates: who may ask what, before anything is done. `REQUEST_GATES` is the list, for every verb.

A1, that the verb exists and the request is valid, comes before them; A9, that a receipt can be written, after them.
A10, that the project folder is the owner's, is where a request
gets its folders.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import fields

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.references import Ref
from kiwi_mcp.domain.calls import OWNER
from kiwi_mcp.domain.errors import InvalidManifest, KiwiError, PolicyDenied, ToolNotFound
from kiwi_mcp.domain.grants import Deny, Grant
from kiwi_mcp.domain.items import ItemType, Source
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.verb import Access, Request, Verb
from kiwi_mcp.policy.policy_files import ask, refuse_unlisted

_LOOKING = frozenset({"search", "load", "help", "doctor"})
"""What the owner may ask while the policy cannot be read, so as to find out why nothing runs."""
_LONGEST_COMMAND = 200


class Asked(Struct, frozen=True):
    """A parsed request, with who makes it."""

    verb: str
    declared: Verb
    request: Request
    context: VerbContext
    access: Access


RequestGate: TypeAlias = Callable[[Asked], None]
"""Raises a KiwiError, or returns."""


def caller_is_owner(asked: Asked) -> None:
    """A2 What only the owner may do is refused to everyone else."""
    if asked.access == "owner" and not asked.context.is_owner:
        name, hint = asked.declared.path, asked.declared.hint
        required = [getattr(asked.request, field.name) for field in fields(asked.request) if field.required]
        texts = [shlex.quote(value) for value in required if isinstance(value, str)]
        typed = " ".join(["kiwi", name, *texts])[:_LONGEST_COMMAND]
        suggestion = hint or f"Ask the owner to type `{typed}`."
        if asked.context.caller.is_direct:
            suggestion += " A program of the owner needs a token made by `kiwi up token add NAME --manage`."
        raise PolicyDenied(f"Only the owner may call `{name}`.", suggestion=suggestion)


def remote_is_known(asked: Asked) -> None:
    """A4 Only the owner names a registry that is not in the settings yet."""
    remote = asked.request.remote_of()
    if not remote or asked.context.is_owner:
        return
    remotes = asked.context.services.store.settings.remotes
    if remote not in remotes:
        known = ", ".join(remotes) or "none yet"
        raise PolicyDenied(
            "Only registries that the owner named can be asked, or sent anything.",
            suggestion=f"Name one of these: {known}; or ask the owner to type `kiwi registry remote add NAME URL`.",
        )


def served_caller_may_ask(asked: Asked) -> None:
    """A3 A kernel that serves others is asked about its project alone, and changed by those who may change it."""
    services, caller = asked.context.services, asked.context.caller
    served = services.serving(caller)
    if served is None:
        return
    project, is_owner = served.project, services.is_owner(caller)
    if project is not None and any(path != project for path in _paths(asked)):
        raise PolicyDenied(
            "This server is for another project.",
            suggestion="Leave out `project_path`; the owner starts it with `kiwi up --any-project` for others.",
        )
    if asked.access != "anyone" and not (caller.can_author or (asked.access == "owner" and is_owner)):
        raise PolicyDenied(
            "This token may use items, and not change them.",
            suggestion="Ask the owner for one that may: `kiwi up token add NAME --tools --author`.",
        )
    if asked.declared.writes_registry and not (is_owner or caller.can_write):
        raise PolicyDenied(
            "This token may read the registry, and not write.",
            suggestion="Ask the owner for one that may: `kiwi up token add NAME --tools --author --write`.",
        )


def verb_is_permitted(asked: Asked) -> None:
    """A5 The rules let the caller ask this; while they cannot be read, the owner may look for the reason."""
    if asked.context.caller.origin.thread:
        asked.context.services.check_starter(asked.context.caller)
    identity, resource = asked.context.caller.identity, asked.declared.resource
    try:
        verdict = ask(asked.context.services.authority.authorize, identity, resource, "verb")
    except InvalidManifest:
        if identity == OWNER and asked.verb in _LOOKING:
            return
        raise
    for grant in asked.context.caller.grants:
        verdict = verdict if isinstance(verdict, Deny) else grant.verdict("verb", resource)
    if isinstance(verdict, Deny):
        raise PolicyDenied(
            f"This may not be asked: {verdict.reason}.",
            suggestion="Ask the owner: the rule stands in the policy.yaml of the user space.",
            rule=verdict.rule,
            grant=verdict.grant,
        )


def machine_lists_item(asked: Asked) -> None:
    """A6 Only items on the list of this machine are brought to it."""
    if identity := asked.request.brings():
        refuse_unlisted(identity)


def item_is_visible(asked: Asked) -> None:
    """A7 An item that is hidden from the caller does not exist for it."""
    request = asked.request
    if not (name := request.named_item()):
        return
    try:
        rights = asked.context.rights
    except InvalidManifest:  # the code that needs the rules reports that they cannot be read
        return
    for grant in rights.grants:
        if grant.is_secretive or (grant.is_whole and asked.verb == "load"):
            catalog = asked.context.services.catalogs.for_item(name, getattr(request, "project_path", None))
            _refuse_hidden(grant, catalog, name, *request.named_kind())


def rules_are_readable(asked: Asked) -> None:
    """A8 A named caller searches and loads nothing while the rules, which may hide things, cannot be read."""
    if asked.context.caller.name and asked.declared.needs_rules:
        asked.context.rights  # noqa: B018 - it raises where they cannot be read


REQUEST_GATES: tuple[RequestGate, ...] = (
    caller_is_owner,
    remote_is_known,
    served_caller_may_ask,
    verb_is_permitted,
    machine_lists_item,
    item_is_visible,
    rules_are_readable,
)


def _paths(asked: Asked) -> Iterator[Path]:
    """Yield the folders and files that a request names, as they really are."""
    named = [getattr(asked.request, name, None) for name in ("project_path", "path")]
    if asked.declared.wire == ("execute", "validate"):
        named.append(getattr(asked.request, "parameters", {}).get("path"))
    for text in named:
        if isinstance(text, str) and "\0" not in text:
            yield Path(text).resolve()


def _refuse_hidden(
    grant: Grant, catalog: Catalog, asked: str, item_type: ItemType | None, source: Source | None
) -> None:
    """Refuse an item that a grant hides from the caller, as if it did not exist.

    A request to read an item that is not on this machine's list is refused with that reason.
    """
    try:
        identity = catalog.find(asked, source=source, item_type=item_type).identity
    except ToolNotFound:
        # Without the names that are like it: they may be of items that are hidden as well.
        raise ToolNotFound(asked) from None
    except KiwiError:
        # The error may list versions of a private item.
        name = Ref.parse(asked).name
        if any(one.rpartition("/")[2] == name for one in grant.hidden):
            raise ToolNotFound(asked) from None
        return
    verdict = grant.verdict("item", identity)
    if isinstance(verdict, Deny) and grant.is_secretive and not verdict.rule:
        raise ToolNotFound(asked)
    if isinstance(verdict, Deny) and grant.is_whole:
        raise PolicyDenied(
            f"It is not loaded: {verdict.reason}.",
            suggestion="Ask the administrator of this machine to add it to the list.",
            tool_id=asked,
            rule=verdict.rule,
        )
