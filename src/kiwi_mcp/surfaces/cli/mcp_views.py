"""How answers about MCP servers look to a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.surfaces.cli.screen import Screen, show_message, show_warnings, talk

_MARKS = {"accepted": "✓", "changed": "!", "new": "+", "gone": "-"}


def _offered(content: JsonObject, screen: Screen) -> None:
    show_warnings(content)
    items = [as_object(one) for one in as_list(content.get("items"))]
    width = max((len(as_text(one.get("tool_id"))) for one in items), default=0)
    for one in items:
        state = as_text(one.get("state"))
        name, kind = as_text(one.get("tool_id")).ljust(width), as_text(one.get("kind"))
        screen.line(f"{_MARKS[state]} {name}  {kind:<8} {state:<8}  {as_text(one.get('description'))}".rstrip())
    talk(as_text(content.get("message")) or _line(content))
    if path := as_text(content.get("path")):
        talk(f"  path: {path}")
    if package := as_object(content.get("package")):
        shown = " ".join(as_text(package.get(word)) for word in ("name", "version", "integrity"))
        talk(f"  package: {shown}")
    for word, asked in as_object(content.get("needs")).items():
        talk(f"  {word}: {', '.join(map(text_of, as_list(asked)))}")
    if notice := as_text(content.get("notice")):
        talk(f"  {notice}")
    _next(content)


def _next(content: JsonObject) -> None:
    if following := as_text(content.get("next")):
        talk(f"hint: {following}")


def _list(content: JsonObject, screen: Screen) -> None:
    show_warnings(content)
    for server in map(as_object, as_list(content.get("servers"))):
        screen.line(_line(server))
        if notice := as_text(server.get("notice")) or as_text(server.get("fault")):
            talk(f"  {notice.partition(chr(10))[0]}")
    if message := as_text(content.get("message")) or as_text(content.get("suggestion")):
        talk(message)
    _next(content)


def _line(server: JsonObject) -> str:
    states = ", ".join(f"{text_of(count)} {state}" for state, count in as_object(server.get("states")).items())
    name, status = as_text(server.get("server")), as_text(server.get("status"))
    return f"{name:<24} {status:<12} {as_text(server.get('transport')):<10} {states or 'nothing'}"


def _import(content: JsonObject, screen: Screen) -> None:
    show_warnings(content)
    for server in map(as_object, as_list(content.get("servers"))):
        screen.line(f"{as_text(server.get('status')):<9} {_entry(server)}")
    for name, about in as_object(content.get("variables")).items():
        talk(f"  ${{{name}}}: {text_of(about)}")
    talk(as_text(content.get("message")))


def _entry(server: JsonObject) -> str:
    """Return a server that is imported, where it comes from, where it goes and why not, as one line."""
    name, entry = as_text(server.get("server")), as_text(server.get("name"))
    renamed = f" ← {entry}" if entry and entry != name else ""
    place = ", ".join(filter(None, (as_text(server.get("client")), as_text(server.get("from")))))
    goes = f" → {location}" if (location := as_text(server.get("location"))) else ""
    reason = f"; {as_text(server['reason'])}" if "reason" in server else ""
    return f"{name}{renamed}{f' ({place})' if place else ''}{goes}{reason}"


def _accept(content: JsonObject, screen: Screen) -> None:
    screen.data(as_text(content.get("message")))
    for name in as_list(content.get("accepted")):
        talk(f"  {_MARKS['accepted']} {text_of(name)}")


def _diff(content: JsonObject, screen: Screen) -> None:
    show_warnings(content)
    for change in map(as_object, as_list(content.get("changes"))):
        screen.data(f"{as_text(change.get('tool_id'))} ({as_text(change.get('state'))})")
        screen.data(as_text(change.get("diff")))
    for name in as_list(content.get("gone")):
        screen.data(f"{text_of(name)} (gone)")
    if manifest := as_text(content.get("manifest")):
        screen.data(f"manifest of {as_text(content.get('server'))}")
        screen.data(manifest)
    if content.get("status") == "same":
        talk("Nothing differs.")
    _next(content)


def _connect(content: JsonObject, screen: Screen) -> None:
    if difference := as_text(content.get("diff")).rstrip("\n"):
        screen.data(difference)
    show_message({word: value for word, value in content.items() if word not in {"diff", "next"}}, Screen())
    for name in as_list(content.get("replaced")):
        talk(f"  - {text_of(name)}")
    for name in as_list(content.get("put_back")):
        talk(f"  + {text_of(name)}")
    for name, reason in as_object(content.get("kept")).items():
        talk(f"  {name} stays: {text_of(reason)}")
    if backup := as_text(content.get("backup")):
        talk(f"  backup: {backup}")
    _next(content)


VIEWS: Mapping[str, Callable[[JsonObject, Screen], None]] = MappingProxyType(
    {
        "mcp offered": _offered,
        "mcp list": _list,
        "mcp import": _import,
        "mcp accept": _accept,
        "mcp diff": _diff,
        "mcp connect": _connect,
    }
)
