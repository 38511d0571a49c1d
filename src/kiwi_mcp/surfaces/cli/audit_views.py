"""How receipts look to a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.surfaces.cli.screen import Screen, issue_text, talk


def _list(content: JsonObject, screen: Screen) -> None:
    receipts = [as_object(one) for one in as_list(content.get("receipts"))]
    for one in receipts:
        at, who = as_text(one.get("at"))[:19], f"{as_text(one.get('actor'))}@{as_text(one.get('surface'))}"
        told = " ".join(filter(None, (as_text(one.get("status")), as_text(one.get("code")))))
        did = f"{as_text(one.get('action'))} {as_text(one.get('item'))}".rstrip()
        screen.line(f"{text_of(one.get('seq')):>6}  {at}  {who:<16}  {did:<32}  {told}")
    if not receipts:
        talk("No receipts to show.")
    if (following := content.get("next")) is not None:
        talk(f"hint: go on with `kiwi audit list --before {text_of(following)}`")


def _show(content: JsonObject, screen: Screen) -> None:
    for word, value in content.items():
        screen.data(f"{f'{word}:':<17} {text_of(value)}")


def _verify(content: JsonObject, screen: Screen) -> None:
    for issue in as_list(content.get("issues")):
        screen.data(issue_text(as_object(issue)))
    screen.data(as_text(content.get("message")))
    talk(f"  store: {as_text(content.get('store'))}")
    talk(f"  head:  {as_text(content.get('head'))}")


VIEWS: Mapping[str, Callable[[JsonObject, Screen], None]] = MappingProxyType(
    {"audit list": _list, "audit show": _show, "audit verify": _verify}
)
