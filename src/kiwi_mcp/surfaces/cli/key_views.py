"""How answers about keys look to a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.surfaces.cli.screen import Screen, show_message, talk


def _line(row: JsonObject, whose: str) -> str:
    facts = [as_text(row.get(word)) for word in ("name", "how")]
    ends = [f"{word} {as_text(row[word])[:10]}" for word in ("expires", "revoked") if word in row]
    near = [f"looks like {text_of(one)}" for one in as_list(row.get("looks_like"))]
    told = ", ".join(filter(None, [*facts, f"since {as_text(row.get('since'))[:10]}", *ends, *near]))
    return f"{whose:<20} {as_text(row.get('fingerprint'))}  {as_text(row.get('state')):<8} {told}"


def _list(content: JsonObject, screen: Screen) -> None:
    own = [as_object(row) for row in as_list(content.get("own"))]
    publishers = [as_object(row) for row in as_list(content.get("publishers"))]
    for row in own:
        screen.line(_line(row, "you"))
    for row in publishers:
        screen.line(_line(row, as_text(row.get("publisher"))))
    if not own:
        talk("You have no key.\nhint: kiwi key new")


def _show(content: JsonObject, screen: Screen) -> None:
    key = as_object(content.get("key"))
    whose = "you" if content.get("is_own") else ", ".join(map(text_of, as_list(content.get("publishers"))))
    talk(_line(key, whose))
    screen.data(as_text(key.get("key")))
    if rotation := as_text(content.get("rotation")):
        screen.data(rotation)


def _change(content: JsonObject, screen: Screen) -> None:
    show_message(content, screen)
    talk(f"  key: {as_text(as_object(content.get('key')).get('key'))}")
    if rotation := as_text(content.get("rotation")):
        talk(f"  rotation: {rotation}")


VIEWS: Mapping[str, Callable[[JsonObject, Screen], None]] = MappingProxyType(
    {"key list": _list, "key show": _show, "key change": _change}
)
