"""Marks: every result that a client may put before its model says if it is data or instructions, whose, and its cost.

What a tool printed or a page holds is data: words in it that look like orders are words. Only what the owner asks for
as instructions is marked so, a directive or a page of help. The mark is Kiwi's own: what a server puts in its place is
replaced. What stands in `_meta` is for clients: no model pays for being told what it pays.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, TypeVar

import mcp_types as types

from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.kernel import Answer
from kiwi_mcp.surfaces.mcp.costs import cost_of_result

CONTENT = "kiwi/content"
"""The key of the mark in the `_meta` of a result."""
COST = "kiwi/context"
"""The key beside it, of what the result costs: bytes, and about how many tokens."""
Kind: TypeAlias = Literal["data", "instructions"]

_INSTRUCTIONS = frozenset({("help", ""), ("execute", "directive"), ("load", "directive")})
"""Verbs, and the kinds of items, that are asked for what to do."""
_BUILTIN = "builtin/"
_KIWI = "kiwi"
ResultT = TypeVar("ResultT", bound=types.Result)


def kind_of(verb: str, arguments: JsonObject) -> Kind:
    """Return what the answer to a call of a verb is to a model."""
    return "instructions" if (verb, as_text(arguments.get("item_type"))) in _INSTRUCTIONS else "data"


def marked(result: ResultT, answer: Answer, kind: Kind = "data") -> ResultT:
    """Return a result with its mark; a refusal is Kiwi's own word, and no instructions of anybody's."""
    source = as_text(answer.content.get("identity")) or as_text(answer.content.get("full_name")) or _KIWI
    mark: dict[str, Json] = {
        "kind": "data" if answer.is_error else kind,
        "source": source,
        "trust": _trust(source, answer.content),
    }
    cost = dict(cost_of_result(result).to_json())
    return result.model_copy(update={"meta": {**(result.meta or {}), CONTENT: mark, COST: cost}})


def _trust(source: str, content: JsonObject) -> str:
    """Return how far it is known where a source comes from."""
    if source == _KIWI or source.startswith(_BUILTIN):
        return _KIWI
    held = as_object(content.get("isolation"))
    return as_text(held.get("provenance")) or as_text(content.get("integrity")) or "unknown"
