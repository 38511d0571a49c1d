"""How answers about preferences look to a person."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.surfaces.cli.screen import Screen, show_warnings, talk


def _list(content: JsonObject, screen: Screen) -> None:
    rows = [*_rows(content)]
    width = max(len(name) for _, name, _, _ in rows)
    for kind, name, cost, about in rows:
        screen.line(f"{kind:<9} {name.ljust(width)}  {cost:>6}  {about}".rstrip())
    for notice in as_list(content.get("notices")):
        talk(f"notice: {text_of(notice)}")
    talk(f"The tools of your choice cost about {text_of(content.get('tokens'))} tokens in every conversation.")
    talk("hint: `kiwi prefer add NAME` and `kiwi prefer remove NAME` change this.")


def _rows(content: JsonObject) -> Iterator[tuple[str, str, str, str]]:
    own = as_object(content.get("meta_tool_tokens"))
    for name in as_list(content.get("meta_tools")):
        yield "tool", text_of(name), text_of(own.get(text_of(name), "")), "Kiwi's own"
    for kind in ("tool", "prompt", "resource"):
        for row in map(as_object, as_list(content.get(f"{kind}s"))):
            name, item = as_text(row.get("name")), as_text(row.get("identity")).partition("@")[0]
            about = "  ".join(filter(None, (item, as_text(row.get("description")))))
            if item or "{" in name:  # the pages of help are one row together, that of their addresses
                yield kind, name, text_of(row.get("tokens")), about


def _change(content: JsonObject, screen: Screen) -> None:
    show_warnings(content)
    screen.data(as_text(content.get("message")))
    for mark, word in (("+", "came"), ("-", "went")):
        for name in as_list(content.get(word)):
            talk(f"  {mark} {text_of(name)}")
    talk(f"  path: {as_text(content.get('path'))}")


def _suggest(content: JsonObject, screen: Screen) -> None:
    for one in map(as_object, as_list(content.get("suggestions"))):
        screen.line(f"{as_text(one.get('command'))}  # {as_text(one.get('why'))}")
    talk(f"{as_text(content.get('message'))}.")


VIEWS: Mapping[str, Callable[[JsonObject, Screen], None]] = MappingProxyType(
    {"prefer list": _list, "prefer change": _change, "prefer suggest": _suggest}
)
