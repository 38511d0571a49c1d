"""How answers about what is relaxed look to a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.surfaces.cli.screen import Screen, talk


def _list(content: JsonObject, screen: Screen) -> None:
    rows = [as_object(one) for one in as_list(content.get("relaxed"))]
    for one in rows:
        state = "" if one.get("holds") else "  (not as it is here)"
        reason = f"  {as_text(one.get('reason'))}" if one.get("reason") else ""
        screen.line(
            f"{as_text(one.get('identity'))}  {as_text(one.get('level'))}  {as_text(one.get('at'))[:10]}{reason}{state}"
        )
    if not rows:
        talk("Nothing is relaxed: everything is held as strictly as where it comes from says.")


VIEWS: Mapping[str, Callable[[JsonObject, Screen], None]] = MappingProxyType({"relax list": _list})
