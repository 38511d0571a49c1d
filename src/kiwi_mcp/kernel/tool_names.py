"""Items as clients see them (name, kind, hints), and the names of servers and namespaces for `search`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import get_args

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.items import Chain, ItemType, Tool
from kiwi_mcp.domain.json import as_list, as_object, as_text, text_of
from kiwi_mcp.domain.mcp import Hints, Offer, OfferKind, TaskUse, variables_of
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE
from kiwi_mcp.domain.token_cost import cost_of
from kiwi_mcp.kernel.settings import registry_settings
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.kernel.verbs import VerbFamily
from kiwi_mcp.manifest.owner_file import put_file
from kiwi_mcp.manifest.parameters import output_schema
from kiwi_mcp.store.database import within

_MAX_CHARACTERS, _MAX_TOKENS = 300, 52
"""How many characters, and about how many tokens, the names may take in every conversation."""
_SHARE = 3
"""Namespaces get one part in `_SHARE` of the space, because they are used less often than servers."""
_MAX_SERVER_NAME = 40
_MAX_BYTES = 1_000_000
_TIMEOUT = 2.0
"""How many seconds a registry server may take to return its namespaces, because a caller may be waiting."""
_CHANGED = ("state", "servers")
"""The file that is written whenever names may have changed, so that stored descriptions are out of date."""
_NAMESPACES = ("state", "namespaces")
"""The file of the registry's namespaces, which is read without opening the registry."""


def description_of(verb: VerbFamily, servers: Sequence[str], namespaces: Sequence[str] = ()) -> str:
    """Return the description of a verb for a model, with the installed servers and the registry's namespaces."""
    if verb.name != "search":
        return verb.description
    most, share = (_MAX_CHARACTERS, _MAX_TOKENS), (_MAX_CHARACTERS // _SHARE, _MAX_TOKENS // _SHARE)
    published = _fitted(namespaces, "In source registry", "Source registry has {} namespaces", *share)
    left = most[1] - cost_of(published).tokens if published else most[1]
    installed = _fitted(servers, "Installed here", "{} MCP servers are installed here", most[0] - len(published), left)
    return f"{verb.description}{installed}{published}"


def _fitted(names: Sequence[str], some: str, none: str, characters: int, tokens: int) -> str:
    """Return a sentence with as many names as fit, after `some`; where no name fits, `none` with their number."""
    sentence = f" {none.format(len(names))}." if names else ""
    for count in range(1, len(names) + 1):
        listed = ", ".join(name[:_MAX_SERVER_NAME] for name in names[:count])
        others = len(names) - count
        longer = f" {some}: {listed}{f' and {others} more' if others else ''}."
        if len(longer) > characters or cost_of(longer).tokens > tokens:
            break
        sentence = longer
    return sentence


def touch_server_names(user: Path) -> None:
    """Mark stored descriptions as out of date, because names may have changed."""
    with suppress(OSError):  # if this cannot be written, no description is stored either
        _write(user.joinpath(*_CHANGED), "")


def namespaces_place(user: Path) -> Path:
    """Return the file that changes whenever the namespaces of a user's registry change."""
    return user.joinpath(*_NAMESPACES)


def known_namespaces(user: Path) -> Sequence[str]:
    """Return the namespaces of a user's registry as they were saved last, those with most items first."""
    try:
        with namespaces_place(user).open(encoding="utf-8") as file:
            kept = as_object(json.loads(file.read(_MAX_BYTES)))
        is_same = kept.get("registry") == _registry_of(user)
    except (OSError, ValueError, RecursionError, KiwiError):
        return ()
    return [text_of(name) for name in as_list(kept.get("namespaces"))] if is_same else ()


def write_namespaces(user: Path, store: Store) -> None:
    """Save the namespaces of a registry that has changed; if that fails, the saved ones stay."""
    with suppress(KiwiError, OSError), within(_TIMEOUT):
        found = [name for name in store.registry().namespaces() if name != BUILTIN_NAMESPACE]
        # A new order alone is not saved: every description would have to be made again for it.
        if {*found} != {*known_namespaces(user)}:
            _write(namespaces_place(user), json.dumps({"registry": _registry_of(user), "namespaces": found}))
            touch_server_names(user)


def _registry_of(user: Path) -> str:
    """Return a digest of a registry and its actor; the address may hold a password."""
    settings = registry_settings(user)
    seen = json.dumps([settings.url, settings.actor.name, settings.actor.namespaces])
    return sha256(seen.encode()).hexdigest()


def _write(place: Path, text: str) -> None:
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    put_file(place, text.encode(), 0o600)


OWN_SCHEME = "kiwi:"
"""The scheme of Kiwi's own addresses; addresses of servers with it are not used."""

_TASK_USES: tuple[TaskUse, ...] = get_args(TaskUse)
_LONGEST_NAME = 64
_SUFFIX = 8
_LONGEST_TEXT = 4_000
_MARKDOWN = "text/markdown"
ITEM_TYPES: Mapping[OfferKind, tuple[ItemType, ...]] = {
    "prompt": ("directive", "skill"), "resource": ("knowledge",), "template": ("knowledge",), "tool": ("tool",)
}  # fmt: skip
"""The types of items of a kind, in order; the item of an MCP server is always a tool."""


def kind_of(chain: Chain) -> OfferKind | None:
    """Return the kind of an item for a client; None if clients cannot call it."""
    traits, config = chain.traits[0], chain.tool.manifest.config
    if not traits.driver:
        return None
    if traits.result_kind != "data":
        return "prompt" if traits.result_kind == "instructions" else "resource"
    if chain.server and (address := as_text(config.get("mcp_resource_uri"))):
        return "resource" if variables_of(address) == () else "template"
    return "prompt" if chain.server and config.get("mcp_prompt_name") else "tool"


def names_of(source: str, namespace: str, tool_id: str) -> Sequence[str]:
    """Return the names that a preference may use for an item, the fullest first."""
    return f"{source}/{namespace}/{tool_id}", f"{namespace}/{tool_id}", tool_id


def callable_names(tool: Tool) -> Sequence[str]:
    """Return names for an item in a client's list, the best first; the others are used if it is taken."""
    origin = tool.origin
    longest = f"{origin.source}_{origin.namespace}_{tool.id}"
    if origin.server:  # two servers often have a tool with one name
        return [_short(f"{origin.namespace}_{tool.id}"), _short(longest)]
    return [_short(tool.id), _short(f"{origin.source}_{tool.id}"), _short(longest)]


def _short(name: str) -> str:
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - _SUFFIX - 1]}_{sha256(name.encode()).hexdigest()[:_SUFFIX]}"


def own_address(tool: Tool) -> str:
    """Return Kiwi's own address of knowledge, or of an item of a server."""
    if not tool.origin.server and "mcp_resource_uri" not in tool.manifest.config:
        return f"{OWN_SCHEME}//knowledge/{tool.id}"
    return f"{OWN_SCHEME}//{tool.origin.source}/{tool.origin.namespace}/{tool.id}"


def address_of(tool: Tool) -> str:
    """Return the address that a server gave to a resource, or Kiwi's own."""
    given = as_text(tool.manifest.config.get("mcp_resource_uri"))
    return given if given and not given.lower().startswith(OWN_SCHEME) else own_address(tool)


def offer_of(chain: Chain, name: str) -> Offer:
    """Return an item under the name that clients use."""
    tool, manifest = chain.tool, chain.tool.manifest
    title = manifest.name or as_text(manifest.config.get("title"))
    text = manifest.description
    return Offer(
        name,
        tool.identity,
        title="" if title == name else title,
        description=text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…",
        parameters={"type": "object", **manifest.parameters},
        outputs=output_schema(manifest.outputs),
        hints=_hints(chain),
        task=next((use for use in _TASK_USES if use == manifest.extra.get("task")), "auto"),
        mime_type=_MARKDOWN if chain.traits[0].result_kind != "data" else as_text(manifest.extra.get("mime_type")),
        digest=tool.digest,
        item_type=tool.item_type,
    )


def _hints(chain: Chain) -> Hints:
    tool, manifest = chain.tool, chain.tool.manifest
    said = as_object(manifest.extra.get("annotations"))
    if said or tool.origin.server:  # the annotations of a server are passed on unchanged
        words = ("readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")
        return Hints(*(value if isinstance(value := said.get(word), bool) else None for word in words))
    # Without a declaration, an item is not known to be harmless.
    is_pure = manifest.effect == "pure" or manifest.written.get("mutates_state") is False
    return Hints(
        is_read_only=is_pure,
        is_destructive=not is_pure,
        is_idempotent=True if is_pure or manifest.effect == "idempotent" else None,
        is_open_world=True if chain.primitive.id == "http_client" else None,
    )
