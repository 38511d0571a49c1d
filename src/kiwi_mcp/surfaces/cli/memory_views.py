"""How answers about what is remembered look to a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.surfaces.cli.screen import Screen, talk


def _list(content: JsonObject, screen: Screen) -> None:
    rows = [as_object(one) for one in as_list(content.get("remembered"))]
    for one in rows:
        used = as_text(one.get("used"))
        screen.line(f"{as_text(one.get('item'))}  {used}  {as_text(one.get('at'))[:10]}  {as_text(one.get('request'))}")
    if content.get("is_on") is False:
        talk("`remember: false` in registry.yaml: nothing more is remembered, and searches do not look at this.")
    if not rows:
        talk("No search is remembered: an item that is found by one and then used will be.")
    else:
        talk(f"{text_of(content.get('total'))} in all. hint: `kiwi memory forget` forgets them.")


def _forget(content: JsonObject, screen: Screen) -> None:
    screen.data(as_text(content.get("message")))


VIEWS: Mapping[str, Callable[[JsonObject, Screen], None]] = MappingProxyType(
    {"memory list": _list, "memory forget": _forget}
)
