"""Listing a registry: what people published first, what ships with Kiwi last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.release import vouched
from kiwi_mcp.domain.errors import KiwiError, NotFound
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE, VersionName
from kiwi_mcp.kernel.keys.lookalikes import alike
from kiwi_mcp.kernel.keys.store import TrustFile
from kiwi_mcp.kernel.registry.history import listing
from kiwi_mcp.kernel.registry.port import read_named
from kiwi_mcp.kernel.registry.words import ListWords
from kiwi_mcp.manifest.keys import fingerprint
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.store.registry import Registry

_LOOKED_AT = 10_000
_VOUCHED = 200
"""Of how many items is told who vouches for them: each of them is read for it."""


def list_items(words: ListWords, catalog: Catalog, registry: Registry) -> JsonObject:
    """Return the items of a registry, the latest version of each; a word that can mean nothing is refused."""
    # As many more as ship with Kiwi, so that none of those takes the place of somebody's own.
    spare = len(registry.find(namespace=BUILTIN_NAMESPACE, tool_type=words.tool_type))
    found = listing(words.model_copy(update={"limit": words.limit + spare}), registry)
    items = sorted(map(as_object, as_list(found["items"])), key=lambda one: one["namespace"] == BUILTIN_NAMESPACE)
    if not items:
        _refuse_unknown(words, catalog, registry)
    shown: list[Json] = [*_vouched(items[: words.limit], catalog, registry)]
    told: dict[str, Json] = {"action": "list", "registry": found["registry"], "items": shown}
    if len(items) > words.limit:
        told["suggestion"] = f"There are more than {words.limit}: raise `limit`, or search with `source: registry`."
    else:
        told["total"] = len(items)
    return told


def _vouched(items: Sequence[JsonObject], catalog: Catalog, registry: Registry) -> Iterator[JsonObject]:
    """Yield items with who vouches for each, and whether that publisher may be taken for another."""
    trusted = TrustFile(catalog.space.user).now()
    for number, item in enumerate(items):
        namespace = as_text(item["namespace"])
        if namespace == BUILTIN_NAMESPACE or number >= _VOUCHED:
            yield item
            continue
        try:
            name = VersionName(namespace, as_text(item["name"]), as_text(item["version"]))
            found = vouched(read_named(registry, [name])[0], trusted, catalog.sheets)
        except KiwiError:  # it is damaged, which `kiwi verify` tells
            yield item
            continue
        key = found.signature.key if found.signature else ""
        near = alike(namespace, trusted, registry.actor.namespaces)
        signer: JsonObject = {"signer": fingerprint(key)} if key else {}
        yield {**item, "trust": found.trust, **signer, **({"looks_like": [*near]} if near else {})}


def _refuse_unknown(words: ListWords, catalog: Catalog, registry: Registry) -> None:
    seen = registry.find(limit=_LOOKED_AT)
    namespaces = {*registry.actor.order, *(listed.name.namespace for listed in seen)}
    types = {*catalog.sheets.by_type, *(listed.tool_type for listed in seen)}
    for what, word, known in (("namespace", words.namespace, namespaces), ("type", words.tool_type, types)):
        if word is not None and word not in known:
            raise NotFound(
                f"Nothing is known of a {what} {word!r}.",
                suggestion=f"{did_you_mean(word, known)}Known: {', '.join(sorted(known))}.",
            )
