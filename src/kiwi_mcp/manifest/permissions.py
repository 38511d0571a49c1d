"""Permissions of a directive, as a grant: what a model may use for it. Nothing else is granted.

`<read>`, `<write>` and `<execute>` name a `resource` and which of it; `<deny>` takes away; `<cap>` names a capability
in one word. An unknown element or attribute is an error: the author of a misspelt permission would rely on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from msgspec.structs import replace

from kiwi_mcp.domain.grants import Grant, Rules, empty_grant
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.manifest.names import did_you_mean

_Given = Mapping[str, Sequence[str]]
"""Patterns under the names of the fields of a grant."""
_ACTIONS = ("read", "write", "execute")
_TAGS = (*_ACTIONS, "deny", "cap", "orchestration", "knowledge", "directives", "shell", "env")
_ATTRIBUTES = (
    "resource", "path", "id", "tool_id", "tool_type", "action", "actions", "commands", "endpoint", "var", "vars",
    "module", "name", "allow_categories", "allow_directives", "deny_directives", "scope",
)  # fmt: skip
_IMPLIED = {
    "all": ("search", "load", "execute", "help"),
    "*": ("search", "load", "execute", "help"),
    "execute": ("execute", "search", "load", "help"),
    **{verb: (verb,) for verb in ("search", "load", "help")},
}
_CAPS = {"fs": "filesystem", "process": "shell", "net": "network"}


def permission_faults(written: Json) -> tuple[Issue, ...]:
    """Return the faults of the permissions of a directive."""
    return tuple(issue for number, one in enumerate(as_list(written)) for issue in _faults(as_object(one), number))


def grant_of(written: Json, name: str) -> Grant:
    """Return the grant that permissions give, with this name; an empty grant if there are none."""
    grant = empty_grant(name)
    for one in map(as_object, as_list(written)):
        tag, attributes, content = as_text(one.get("tag")), as_object(one.get("attrs")), as_text(one.get("content"))
        for word, patterns in _given(tag, attributes, content).items():
            grant = _with(grant, word, patterns, is_denied=tag == "deny")
        for word in _words(attributes.get("deny_directives")):
            grant = _with(grant, "spawn", _named(word), is_denied=True)
    return grant


def _faults(one: JsonObject, number: int) -> Iterator[Issue]:
    tag, attributes, place = as_text(one.get("tag")), as_object(one.get("attrs")), f"config.permissions[{number}]"
    if tag not in _TAGS:
        fix = f"{did_you_mean(tag, _TAGS)}Use one of: {', '.join(_TAGS)}."
        yield Issue(place, f"<{tag:.40}> is not a permission", fix)
    for word in attributes:
        if word not in _ATTRIBUTES:
            fix = f"{did_you_mean(word, _ATTRIBUTES)}Use one of: {', '.join(_ATTRIBUTES)}."
            yield Issue(place, f"`{word:.40}` says nothing about a permission", fix)
    resource = as_text(attributes.get("resource"))
    if tag in (*_ACTIONS, "deny") and _kind(resource) not in _RESOURCES:
        known = ", ".join(_RESOURCES)
        fix = f"{did_you_mean(resource, _RESOURCES)}Write `resource` as one of: {known}."
        yield Issue(place, f"{resource!r:.40} is not a resource", fix)
    if tag == "cap" and not _given(tag, attributes, as_text(one.get("content"))):
        yield Issue(place, "names no capability", "Write one such as `<cap>fs.read</cap>`.")


def _given(tag: str, attributes: JsonObject, content: str) -> _Given:
    match tag:
        case "read" | "write" | "execute" | "deny":
            gives = _RESOURCES.get(_kind(as_text(attributes.get("resource"))))
            return gives(tag, attributes) if gives else {}
        case "shell":
            return _commands(tag, attributes)
        case "env":
            return _variables(tag, attributes)
        case "cap":
            return _capability(as_text(attributes.get("name")) or content, attributes)
        case "orchestration":
            categories = [f"{word}/*" for word in _words(attributes.get("allow_categories"))]
            named = [name for word in _words(attributes.get("allow_directives")) for name in _named(word)]
            return {"spawn": [*categories, *named]}
        case "knowledge" | "directives":
            return {**_items("execute", attributes), "verbs": ("search", "load")}
        case _:
            return {}


def _capability(text: str, attributes: JsonObject) -> _Given:
    first, _, rest = text.strip().partition(".")
    match first:
        case "tool":
            return _items("execute", {"id": rest}) if rest else {}
        case "kiwi-mcp":
            return _verbs("execute", {"action": rest}) if rest else {}
        case "spawn":
            return _spawn("execute", attributes)
        case _:
            gives = _RESOURCES.get(_CAPS.get(first, first))
            tag = {"exec": "execute"}.get(rest, rest)
            return gives(tag, attributes) if gives and tag in _ACTIONS else {}


def _files(tag: str, attributes: JsonObject) -> _Given:
    paths = _words(attributes.get("path")) or ("**",)
    # What may be written is seen too.
    return {"read": paths, **({"write": paths} if tag in {"write", "deny"} else {})}


def _items(tag: str, attributes: JsonObject) -> _Given:
    names = _of(attributes, "id", "tool_id", "name", "action")
    if tag == "read":
        return {"verbs": ("search", "load")}
    if not names and "tool_type" in attributes:
        return {}  # rules are about names: what a type would give is not known by one
    verbs = {} if tag == "deny" else {"verbs": ("execute.run", "search", "load")}
    return {"items": [_identity(name) for name in names] or ("*",), **verbs}


def _verbs(tag: str, attributes: JsonObject) -> _Given:
    asked = _of(attributes, "action", "actions") or ("*",)
    if tag == "deny":
        return {"verbs": [word if word in _IMPLIED else f"execute.{word}" for word in asked]}
    return {"verbs": [verb for word in asked for verb in _IMPLIED.get(word, (f"execute.{word}",))]}


def _commands(_: str, attributes: JsonObject) -> _Given:
    return {"commands": _words(attributes.get("commands")) or ("*",)}


def _variables(_: str, attributes: JsonObject) -> _Given:
    return {"variables": _of(attributes, "var", "vars", "name") or ("*",)}


def _hosts(_: str, attributes: JsonObject) -> _Given:
    endpoints = _words(attributes.get("endpoint"))
    # One such as `POST /users` says what is called, and not where.
    return {"hosts": [host for text in endpoints if (host := _host(text))] if endpoints else ("*",)}


def _servers(tag: str, attributes: JsonObject) -> _Given:
    server = as_text(attributes.get("resource")).partition(":")[2] or as_text(attributes.get("name")) or "*"
    tools = _of(attributes, "id", "tool_id", "action", "actions") or ("*",)
    verbs = {} if tag == "deny" else {"verbs": ("execute.run", "search", "load")}
    return {"items": [f"mcp/{server}/{tool}@*" for tool in tools], **verbs}


def _spawn(_: str, attributes: JsonObject) -> _Given:
    return {"spawn": [name for word in _of(attributes, "id", "name") or ("*",) for name in _named(word)]}


def _registry(tag: str, _: JsonObject) -> _Given:
    reading = ("registry.show", "execute.versions", "execute.diff", "execute.verify", "execute.list")
    return {"verbs": reading if tag == "read" else (*reading, "registry", "execute.publish", "execute.pull")}


def _python(_: str, __: JsonObject) -> _Given:
    return {"commands": ("python", "python3")}


_RESOURCES: Mapping[str, Callable[[str, JsonObject], _Given]] = {
    "filesystem": _files,
    "files": _files,
    "tool": _items,
    "kiwi-mcp": _verbs,
    "shell": _commands,
    "mcp": _servers,
    "network": _hosts,
    "api": _hosts,
    "env": _variables,
    "python": _python,
    "spawn": _spawn,
    "registry": _registry,
}


def _kind(resource: str) -> str:
    return "mcp" if resource.startswith("mcp:") else resource


def _with(grant: Grant, word: str, patterns: Sequence[str], *, is_denied: bool) -> Grant:
    known: Rules = getattr(grant, word)
    side = "deny" if is_denied else "allow"
    rules = replace(known, **{side: tuple(dict.fromkeys((*getattr(known, side), *patterns)))})
    changed: Mapping[str, Rules] = {word: rules}
    return replace(grant, **changed)


def _of(attributes: JsonObject, *names: str) -> tuple[str, ...]:
    return tuple(word for name in names for word in _words(attributes.get(name)))


def _words(value: Json) -> tuple[str, ...]:
    return tuple(word.strip() for word in as_text(value).split(",") if word.strip())


def _identity(name: str) -> str:
    if name == "*":
        return name
    return f"{name if '/' in name else f'*/{name}'}{'' if '@' in name else '@*'}"


def _named(word: str) -> tuple[str, ...]:
    return (word,) if "/" in word or word == "*" else (word, f"*/{word}")


def _host(endpoint: str) -> str:
    text = endpoint.rsplit(maxsplit=1)[-1]
    try:
        return urlsplit(text if "//" in text else f"//{text}").netloc.rpartition("@")[2]
    except ValueError:
        return ""
