"""One item as clients see it: what kind of thing it is for them, the names it may have, and what it says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import get_args

from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.items import Manifest, Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text, compact
from kiwi_mcp.domain.mcp import OfferKind, variables_of
from kiwi_mcp.domain.offers import Hints, Offer, TaskUse
from kiwi_mcp.manifest.schema import schema_faults

OWN_SCHEME = "kiwi:"
"""How Kiwi's own addresses begin, which no server gives to anything."""

_TASK_USES: tuple[TaskUse, ...] = get_args(TaskUse)
_LONGEST_NAME = 64
_SUFFIX = 8
_LONGEST_TEXT = 4_000
_MARKDOWN = "text/markdown"
_REMOTE = "http_client"
"""The primitive below everything that calls somebody else."""


def kind_of(chain: Chain) -> OfferKind | None:
    """Return what an item is for a client, or None where other items run on it and clients do not."""
    manifest = chain.tool.manifest
    match chain.driver:
        case "":
            return None
        case "read":  # a program stands on something that could run it; knowledge on nothing
            return "prompt" if manifest.executor else "resource"
        case "mcp" if address := as_text(manifest.config.get("mcp_resource_uri")):
            return "resource" if variables_of(address) == () else "template"
        case "mcp" if manifest.config.get("mcp_prompt_name"):
            return "prompt"
        case _:
            return "tool"


def names_of(source: str, namespace: str, tool_id: str) -> Sequence[str]:
    """Return the names that a preference may call an item by, the fullest first."""
    return f"{source}/{namespace}/{tool_id}", f"{namespace}/{tool_id}", tool_id


def callable_names(tool: Tool) -> Sequence[str]:
    """Return names that clients can call an item by, the best first; the later ones are for when that is taken."""
    origin = tool.origin
    longest = f"{origin.source}_{origin.namespace}_{tool.id}"
    if origin.source == "mcp":  # two servers may well have a tool of one name
        return [_short(f"{origin.namespace}_{tool.id}"), _short(longest)]
    return [_short(tool.id), _short(f"{origin.source}_{tool.id}"), _short(longest)]


def _short(name: str) -> str:
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - _SUFFIX - 1]}_{sha256(name.encode()).hexdigest()[:_SUFFIX]}"


def own_address(tool: Tool) -> str:
    """Return an address of Kiwi's own for a text: that of knowledge, or that of a thing that a server offers."""
    if tool.origin.source != "mcp" and "mcp_resource_uri" not in tool.manifest.config:
        return f"{OWN_SCHEME}//knowledge/{tool.id}"
    return f"{OWN_SCHEME}//{tool.origin.source}/{tool.origin.namespace}/{tool.id}"


def address_of(tool: Tool) -> str:
    """Return the address that a server gave to a resource, or Kiwi's own for a text."""
    given = as_text(tool.manifest.config.get("mcp_resource_uri"))
    return given if given and not given.lower().startswith(OWN_SCHEME) else own_address(tool)


def offer_of(chain: Chain, name: str) -> Offer:
    """Return an item under the name that clients use."""
    tool, manifest = chain.tool, chain.tool.manifest
    title = manifest.name or as_text(manifest.config.get("title"))
    return Offer(
        name,
        tool.identity,
        title="" if title == name else title,
        description=_cut(manifest.description),
        parameters={"type": "object", **manifest.parameters},
        outputs=_schema(manifest.outputs),
        hints=_hints(chain),
        task=_task(manifest),
        mime_type=_MARKDOWN if chain.driver == "read" else as_text(manifest.extra.get("mime_type")),
        digest=tool.digest,
    )


def characters_of(offer: Offer) -> int:
    """Return how long the definition is that a client shows to its model, roughly."""
    said: list[Json] = [offer.name, offer.title, offer.description, offer.parameters, offer.outputs]
    return len(compact(said))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"


def _schema(outputs: JsonObject) -> JsonObject:
    """Return what is declared of a result where that is a schema; older manifests write `format` and `schema`."""
    declared = as_object(outputs.get("schema")) if "format" in outputs else outputs
    return declared if isinstance(declared.get("type"), str) and not schema_faults(declared, "outputs") else {}


def _task(manifest: Manifest) -> TaskUse:
    written = manifest.extra.get("task")
    return next((use for use in _TASK_USES if use == written), "auto")


def _hints(chain: Chain) -> Hints:
    tool, manifest = chain.tool, chain.tool.manifest
    said = as_object(manifest.extra.get("annotations"))
    if said or tool.origin.source == "mcp":  # what a server says is told as it says it, and no more
        return Hints(
            is_read_only=_said(said, "readOnlyHint"),
            is_destructive=_said(said, "destructiveHint"),
            is_idempotent=_said(said, "idempotentHint"),
            is_open_world=_said(said, "openWorldHint"),
        )
    # What an author left unsaid is not known to be harmless.
    is_pure = manifest.effect == "pure" or manifest.written.get("mutates_state") is False
    return Hints(
        is_read_only=is_pure,
        is_destructive=not is_pure,
        is_idempotent=True if is_pure or manifest.effect == "idempotent" else None,
        is_open_world=True if chain.primitive.id == _REMOTE else None,
    )


def _said(annotations: JsonObject, word: str) -> bool | None:
    value = annotations.get(word)
    return value if isinstance(value, bool) else None
