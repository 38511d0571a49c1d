"""Help: pages by topic, with examples that work as they stand, and what this installation holds."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import TopicNotFound
from kiwi_mcp.domain.json import Json, JsonObject

_EXAMPLE = re.compile(r"^```json\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ALIASES = {
    "tools": "tool",
    "run": "execute",
    "sign": "execute",
    **dict.fromkeys(("publish", "pull", "versions", "diff", "yank", "deprecate", "rollback", "verify"), "registry"),
    **dict.fromkeys(("list", "push", "remote", "remotes", "namespace", "namespaces", "visibility"), "registry"),
    **dict.fromkeys(("gateway", "token", "tokens"), "up"),
    "runtime": "runtimes",
    "error": "errors",
    "": "overview",
}


def explain(topic: str | None, catalog: Catalog | None, notices: Sequence[str] = ()) -> JsonObject:
    """Return one page of help; `notices` tell what the owner prefers and cannot be had here."""
    word = (topic or "").strip().lower()
    name = _ALIASES.get(word, word)
    if name not in topics():
        raise TopicNotFound(word[:100], topics=topics())
    text = page(name)
    told: dict[str, Json] = {"help": text, "topic": name, "examples": examples(text), "topics": list(topics())}
    if catalog is not None:
        told["installation"] = {**holdings(catalog), **({"notices": list(notices)} if notices else {})}
    return told


def topics() -> tuple[str, ...]:
    """Return the names of all pages, the overview first."""
    names = sorted(entry.name.removesuffix(".md") for entry in _folder().iterdir() if entry.name.endswith(".md"))
    return ("overview", *(name for name in names if name != "overview"))


def page(name: str) -> str:
    """Return the text of a page."""
    return (_folder() / f"{name}.md").read_text(encoding="utf-8")


def examples(text: str) -> list[Json]:
    """Return the JSON examples of a page, each a request as a client sends it."""
    return [json.loads(found) for found in _EXAMPLE.findall(text)]


def holdings(catalog: Catalog) -> JsonObject:
    """Return what is installed here: how many items of each type and source, and what is built in."""
    entries = catalog.all()
    return {
        "items_by_source": dict(Counter(entry.source for entry in entries)),
        "items_by_type": dict(Counter(entry.tool_type for entry in entries)),
        "built_in": sorted(entry.tool_id for entry in entries if entry.source == "builtin"),
        "broken": len(catalog.broken()),
    }


def _folder() -> Traversable:
    return files("kiwi_mcp.data") / "help"
