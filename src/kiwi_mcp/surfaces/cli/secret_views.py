"""How answers about secrets look to a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.surfaces.cli.screen import Screen, show_message, talk


def _list(content: JsonObject, screen: Screen) -> None:
    rows = [as_object(row) for row in as_list(content.get("secrets"))]
    width = max((len(as_text(row.get("name"))) for row in rows), default=0)
    for row in rows:
        hosts = ",".join(map(text_of, as_list(row.get("hosts")))) or "-"
        age = f"{text_of(row.get('age_days'))} days"
        weak = "  weak" if row.get("weak") else ""
        screen.line(f"{as_text(row.get('name')).ljust(width)}  {as_text(row.get('form')):<6}  {hosts}  {age}{weak}")
        for grant in map(as_object, as_list(row.get("grants"))):
            place = as_text(grant.get("project"))
            screen.line(f"  → {as_text(grant.get('item'))}{f' in {place}' if place else ''}")
    if rows:
        talk(f"Sealed with a {as_text(content.get('sealed_by'))}.")
    else:
        talk("The store holds no secrets.\nhint: kiwi secrets set NAME --hosts api.example.com")


VIEWS: Mapping[str, Callable[[JsonObject, Screen], None]] = MappingProxyType(
    {"secrets list": _list, "secrets change": show_message}
)
